from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.planner.decide.observation import Observation, PoolCounts, WorkerSummary, summarise
from penstock.planner.decide.window import kv_signal, queue_signal, queue_trend


def test_kv_is_the_mean_over_pulls_of_the_mean_over_workers(make):
    """Two pulls of two workers: ((0.9 + 0.7) / 2 + (1.0 + 0.8) / 2) / 2 = 0.85."""
    signal = kv_signal([make.pull(1, kv=[0.9, 0.7]), make.pull(2, kv=[1.0, 0.8])])
    assert signal.mean == pytest.approx(0.85)
    assert signal.low == pytest.approx(0.85)
    assert signal.is_complete
    assert (signal.pulls, signal.unknown) == (2, 0)


def test_an_unknown_worker_counts_as_empty_in_the_lower_bound(make):
    """0.98 and unknown: the mean of the known is 0.98, the load is at least 0.49."""
    signal = kv_signal([make.pull(kv=[0.98, None])])
    assert (signal.mean, signal.low) == (0.98, 0.49)
    assert not signal.is_complete
    assert signal.why == "w1: not reported"


def test_a_ready_worker_that_nobody_read_is_unknown(make):
    """Three ready workers, two readings: the third is unknown, not left out."""
    pull = make.pull(kv=[0.6, 0.6], decode=PoolCounts(3, gpus=1))
    assert pull.kv.unknown == 1
    assert kv_signal([pull]).low == pytest.approx(0.4)


def test_no_known_worker_gives_no_signal(make):
    """Without any value there is neither mean nor bound."""
    signal = kv_signal([make.pull(kv=[None, None])])
    assert (signal.mean, signal.low, signal.is_complete) == (None, None, False)


def test_no_pulls_give_no_signal():
    """An empty interval says nothing."""
    assert kv_signal([]).mean is None
    assert queue_signal([], per_worker=True).mean is None


def test_queue_is_per_ready_prefill_worker(make):
    """6 requests on 4 workers and 2 on 4: (1.5 + 0.5) / 2 = 1.0."""
    pool = PoolCounts(4, starting=2, gpus=1)
    signal = queue_signal(
        [make.pull(1, queue=6, prefill=pool), make.pull(2, queue=2, prefill=pool)], per_worker=True
    )
    assert signal.mean == 1.0


def test_queue_without_a_ready_worker_is_unknown(make):
    """Nothing to divide by: unknown, not infinite and not zero."""
    signal = queue_signal([make.pull(queue=9, prefill=PoolCounts(0, starting=1))], per_worker=True)
    assert (signal.mean, signal.why) == (None, "no ready worker")


def test_an_unknown_queue_counts_as_zero_in_the_lower_bound(make):
    """4 known and one unknown pull: mean 4, at least 2."""
    signal = queue_signal([make.pull(1, queue=4), make.pull(2, queue=None)], per_worker=True)
    assert (signal.mean, signal.low, signal.is_complete) == (4.0, 2.0, False)


@pytest.mark.parametrize(
    ("slope", "predicted"),
    [(-0.05, 2.5 - 4.5), (-0.01, 3.7 - 0.9), (0.02, 4.6 + 1.8)],
)
def test_the_trend_is_a_least_squares_line_three_intervals_on(make, slope, predicted):
    """Q = 4 + b t over 30 s, read 90 s after the interval's end."""
    window = make.window(*(make.pull(t, queue=4 + slope * t) for t in range(1, 31)))
    found, value = queue_trend(window, 90.0, per_worker=True)
    assert found == pytest.approx(slope)
    assert value == pytest.approx(predicted)


def test_a_queue_that_fell_and_rises_again_is_rising(make):
    """A V over the interval: the line through all of it is flat, the newest third rises by 0.2/s."""
    queues = [abs(15 - t) / 5 for t in range(1, 31)]
    window = make.window(*(make.pull(t + 1.0, queue=q) for t, q in enumerate(queues)))
    slope, predicted = queue_trend(window, 90.0, per_worker=False)
    assert slope == pytest.approx(0.2)
    assert predicted == pytest.approx(3 + 0.2 * 90)


def test_a_burst_that_is_over_is_predicted_to_stay_over(make):
    """Thirty requests for ten seconds, then none: nothing is left and nothing is to come."""
    window = make.window(*(make.pull(float(t), queue=30.0 if t <= 10 else 0.0) for t in range(1, 31)))
    assert queue_trend(window, 90.0, per_worker=False) == (0.0, 0.0)


def test_the_whole_queue_is_compared_unless_it_is_divided(make):
    """Six requests before four workers: 6 in all, 1.5 each."""
    pulls = [make.pull(1, queue=6, prefill=PoolCounts(4))]
    assert queue_signal(pulls, per_worker=False).mean == 6
    assert queue_signal(pulls, per_worker=True).mean == 1.5


def test_requests_that_wait_inside_weigh_on_kv(make):
    """Two workers at 0.3, ten requests waiting in them: 0.3 + 0.02 x 10 / 2 = 0.4."""
    pull = make.pull(1, kv=[0.3, 0.3])
    waiting = WorkerSummary(10.0, 2, 0, 0.0, "test")
    assert kv_signal([replace(pull, worker_waiting=waiting)]).mean == pytest.approx(0.4)


def test_no_trend_from_one_pull_or_one_instant(make):
    """A line needs two points at different times."""
    assert queue_trend(make.window(make.pull(5, queue=3)), 90.0, per_worker=True) is None
    assert (
        queue_trend(make.window(make.pull(5, queue=3), make.pull(5, queue=2)), 90.0, per_worker=True) is None
    )
    assert (
        queue_trend(make.window(make.pull(4, queue=3), make.pull(5, queue=None)), 90.0, per_worker=True)
        is None
    )


def test_only_the_first_reasons_are_named(make):
    """A thousand missing workers make one short reason and a count."""
    readings = {f"w{i}": make.reading(None) for i in range(1000)}
    pull = summarise(Observation(1.0, {Role.DECODE: PoolCounts(1000)}, readings, None))
    assert pull.kv.unknown == 1000
    assert pull.kv.why.count(";") == 2


def test_a_prefill_pool_without_a_queue_reading_has_a_missing_one():
    """An observation that forgot the queue is unknown, never zero."""
    pull = summarise(Observation(1.0, {Role.PREFILL: PoolCounts(1), Role.DECODE: PoolCounts(0)}, {}, None))
    assert pull.queue is not None
    assert not pull.queue.is_known
