from __future__ import annotations

import pytest

from penstock.api import Role
from penstock_planner.decide.demand.observation import PoolCounts, summarise
from penstock_planner.decide.policies.load import kv_signal, queue_signal, queue_trend

ONE, THREE, FOUR = (PoolCounts(ready, gpus=1) for ready in (1, 3, 4))


@pytest.mark.parametrize(
    ("pulls", "mean", "low", "is_complete"),
    [
        ([{"kv": [0.9, 0.7]}, {"kv": [1.0, 0.8]}], 0.85, 0.85, True),
        ([{"kv": [0.98, None]}], 0.98, 0.49, False),
        ([{"kv": [0.6, 0.6], "decode": THREE}], 0.6, 0.4, False),
        ([{"kv": [None, None]}], None, None, False),
        ([], None, None, False),
    ],
    ids=["the mean of pulls' means", "an unknown worker", "one without a reading", "none known", "no pulls"],
)
def test_kv_is_a_mean_with_a_lower_bound_that_takes_unknown_workers_for_empty(
    make, pulls, mean, low, is_complete
):
    """A ready worker without a reading is unknown, not left out."""
    signal = kv_signal([make.pull(at_s, **pull) for at_s, pull in enumerate(pulls)])
    assert (signal.mean, signal.low) == (pytest.approx(mean), pytest.approx(low))
    assert signal.is_complete is is_complete


@pytest.mark.parametrize(
    ("pool", "queues", "whole", "per_worker", "low", "why"),
    [
        (PoolCounts(4, starting=2, gpus=1), [6, 2], 4.0, 1.0, 1.0, ""),
        (FOUR, [6], 6.0, 1.5, 1.5, ""),
        (ONE, [4, None], 4.0, 4.0, 2.0, "not reported"),
        (PoolCounts(0, starting=1), [9], None, None, None, "no ready worker"),
        (ONE, [], None, None, None, ""),
    ],
    ids=["by ready workers", "whole or divided", "unknown counts as 0", "nothing to divide by", "no pulls"],
)
def test_the_queue_is_compared_whole_or_per_ready_worker(make, pool, queues, whole, per_worker, low, why):  # noqa: PLR0917 - one table
    """The lower bound takes an unknown pull for an empty queue."""
    pulls = [make.pull(at_s, queue=queue, prefill=pool) for at_s, queue in enumerate(queues)]
    assert queue_signal(pulls, per_worker=False).mean == whole
    signal = queue_signal(pulls, per_worker=True)
    assert (signal.mean, signal.low, signal.why) == (per_worker, low, why)


@pytest.mark.parametrize("pulls", [[(5, 3)], [(5, 3), (5, 2)], [(4, 3), (5, None)]])
def test_no_trend_from_one_known_pull_or_one_instant(make, pulls):
    """A line needs two points at different times."""
    window = make.window(*(make.pull(at_s, queue=queue) for at_s, queue in pulls))
    assert queue_trend(window, 90.0, per_worker=True) is None


def test_a_queue_that_fell_and_rises_again_is_rising(make):
    """A V over the interval: the line through all of it is flat, the newest third rises by 0.2/s."""
    queues = [abs(15 - t) / 5 for t in range(1, 31)]
    window = make.window(*(make.pull(t + 1.0, queue=q) for t, q in enumerate(queues)))
    slope, predicted = queue_trend(window, 90.0, per_worker=False)
    assert slope == pytest.approx(0.2)
    assert predicted == pytest.approx(3 + 0.2 * 90)


def test_a_prefill_pool_without_a_queue_reading_has_a_missing_one():
    """An observation that forgot the queue is unknown, never zero."""
    pull = summarise(1.0, {Role.PREFILL: PoolCounts(1), Role.DECODE: PoolCounts(0)}, kv={}, queue=None)
    assert pull.queue is not None
    assert not pull.queue.is_known
