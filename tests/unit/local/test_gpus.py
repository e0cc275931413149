"""The allocator of exclusive GPU ids."""

import pytest

from penstock.local.replicas import Grant, allocate


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
