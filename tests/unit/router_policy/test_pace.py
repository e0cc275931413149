"""The pace that TTFT estimates rest on: learnt from what was computed, whatever was expected."""

import pytest

from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.queue_state import QueueSettings
from penstock.router.policy.baselines import MinTtft
from penstock.router.policy.routing_policy import Arrival
from penstock.router.policy.worker_queue import PrefillThroughput, WorkerLoad


def test_the_pace_is_tokens_over_seconds_of_many_prefills():
    """A prompt of one token that takes 20 ms of overhead hardly moves it; the mean of ratios would halve."""
    pace = PrefillThroughput()
    for _ in range(50):
        pace.learn(10_000, 1.0)
        pace.learn(1, 0.02)

    assert pace.tokens_per_s == pytest.approx(10_000 / 1.02, rel=0.02)


def test_a_slower_worker_shows_within_tens_of_prefills():
    """From 10,000 to 5,000 tokens/s: most of the way after twenty."""
    pace = PrefillThroughput()
    for _ in range(50):
        pace.learn(1000, 0.1)
    for _ in range(20):
        pace.learn(1000, 0.2)

    assert 5_000 < pace.tokens_per_s < 6_500


def test_hits_that_were_not_expected_make_no_worker_look_fast():
    """The router expects 1,000 tokens, the worker had 900 of them: 100 tokens in 0.1 s are 1,000 a second."""
    placement = DispatchQueue(MinTtft(), QueueSettings())
    placement.set_workers(map(WorkerLoad, ["a"]), 0.0)
    placement.submit("r", Arrival((1, 2), 1000), 0.0)
    list(placement.dispatch(0.0))

    placement.prefilled("r", 0.1, cached_tokens=900)

    assert placement._workers["a"].throughput.tokens_per_s == pytest.approx(1000.0)
