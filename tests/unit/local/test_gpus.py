"""The allocator of exclusive GPU ids."""

import pytest

from penstock.local.gpus import GpuRefusal, Grant, allocate


@pytest.mark.parametrize(
    ("wanted", "in_use", "expected"),
    [
        (0, [], ()),
        (1, [], (0,)),
        (1, [0, 1], (2,)),
        (2, [], (0, 1)),
        (2, [1], (2, 3)),
        (2, [1, 3, 5, 7], (0, 2)),
        (2, [2, 3, 4], (0, 1)),
        (1, [0, 1, 3, 4], (2,)),
        (4, [0], (1, 2, 3, 4)),
        (8, [], tuple(range(8))),
    ],
)
def test_ids_are_neighbours_where_possible_and_small_gaps_fill_first(wanted, in_use, expected):
    """Neighbours are preferred, the smallest run that fits is used, else the lowest ids."""
    assert allocate(wanted, in_use, gpus=8, budget=8) == Grant(expected)


@pytest.mark.parametrize(
    ("wanted", "in_use", "gpus", "budget", "words"),
    [
        (1, range(8), 8, 8, "8 of maxGpuBudget 8"),
        (2, range(3), 8, 4, "needs 2 GPUs, but 3 of maxGpuBudget 4"),
        (1, range(2), 2, 8, "2 of the host's 2 GPUs"),
        (1, [], 0, 8, "0 of the host's 0 GPUs"),
        (1, [9, 10], 2, 2, "needs 1 GPU, but 2 of maxGpuBudget 2"),
    ],
)
def test_a_refusal_says_what_is_held_and_the_bound(wanted, in_use, gpus, budget, words):
    """No ids beyond host or budget are ever given."""
    answer = allocate(wanted, list(in_use), gpus=gpus, budget=budget)
    assert isinstance(answer, GpuRefusal)
    assert words in answer.reason
