import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import BreakerConfig
from penstock.api.router_workers import RetriesConfig
from penstock.router.core.breaker import Circuit, CircuitBreaker, may_eject
from penstock.router.core.retries import RetryBudget


def breaker_of(*, consecutive_failures=3, max_open_seconds=10, **more):
    """Return a closed breaker that stays open for 10 s at first."""
    config = BreakerConfig(
        consecutive_failures=consecutive_failures, open_seconds=10, max_open_seconds=max_open_seconds
    )
    return CircuitBreaker(config, **more)


def budget_of(fraction, min_per_s):
    """Return a budget that begins at 0."""
    return RetryBudget(RetriesConfig(budget_fraction=fraction, min_per_second=min_per_s), 0)


def _after(*outcomes, **settings):
    """Return a breaker after requests of which each ended as it was sent: fail, ok or abandoned, and when."""
    breaker = breaker_of(**settings)
    for outcome, now_s in outcomes:
        probe = breaker.sent(now_s)
        if outcome == "fail":
            breaker.failed(now_s, probe=probe)
        elif outcome == "ok":
            breaker.succeeded(probe=probe)
        else:
            breaker.abandoned(probe=probe)
    return breaker


def _opened():
    return _after(*OPENED)


FAIL, OK = ("fail", 0), ("ok", 0)
OPENED = [FAIL] * 3


@pytest.mark.parametrize(
    ("outcomes", "at_s", "state", "allows"),
    [
        ([FAIL, FAIL, OK, FAIL, FAIL], 0, Circuit.CLOSED, True),
        (OPENED, 0, Circuit.OPEN, False),
        (OPENED, 9.99, Circuit.OPEN, False),
        (OPENED, 10, Circuit.HALF_OPEN, True),
        ([*OPENED, ("ok", 10)], 10, Circuit.CLOSED, True),
        ([*OPENED, ("fail", 12)], 21.9, Circuit.OPEN, False),
        ([*OPENED, ("fail", 12)], 22, Circuit.HALF_OPEN, True),
        ([*OPENED, ("abandoned", 10)], 10, Circuit.HALF_OPEN, True),
    ],
)
def test_failures_in_a_row_open_the_circuit_and_one_probe_decides(outcomes, at_s, state, allows):
    """A success between failures starts over; a probe whose client left says nothing about the worker."""
    breaker = _after(*outcomes)

    assert (breaker.state(at_s), breaker.allows(at_s)) == (state, allows)


def test_only_one_probe_is_let_through():
    """Its answer lets all others in."""
    breaker = _opened()

    assert breaker.sent(10)
    assert not breaker.allows(10)


@pytest.mark.parametrize("late", ["succeeded", "failed"])
def test_requests_sent_before_the_opening_change_nothing(late):
    """Only the probe's result counts once the circuit is open."""
    breaker = _opened()
    breaker.succeeded(probe=False) if late == "succeeded" else breaker.failed(5, probe=False)

    assert breaker.state(9) is Circuit.OPEN
    assert breaker.state(10) is Circuit.HALF_OPEN


def _fail_probes(breaker, count):
    """Fail this many probes, each as soon as it is allowed; return the times that the circuit stayed open."""
    now_s, lengths_s = 0.0, []
    for _ in range(count):
        lengths_s.append(breaker.probe_in_s(now_s))
        now_s += lengths_s[-1]
        breaker.failed(now_s, probe=breaker.sent(now_s))
    return lengths_s


def test_each_opening_lasts_longer_up_to_a_bound():
    """Envoy's base time times the number of ejections: 10, 20, 30, then the maximum of 35."""
    breaker = _after(FAIL, consecutive_failures=1, max_open_seconds=35)

    assert _fail_probes(breaker, 5) == [10, 20, 30, 35, 35]
    assert breaker.openings == 6


@pytest.mark.parametrize(("healthy_s", "next_s"), [(0, 30), (10, 20), (20, 10), (1000, 10)])
def test_openings_are_forgotten_with_time(healthy_s, next_s):
    """One for each base time that the circuit has been closed since."""
    breaker = _after(FAIL, ("fail", 10), ("ok", 30), consecutive_failures=1, max_open_seconds=100)

    breaker.failed(30 + healthy_s, probe=False)

    assert breaker.probe_in_s(30 + healthy_s) == next_s


def test_a_forbidden_opening_is_asked_for_again():
    """The worker is kept and counts as failing; its next failure opens the circuit if the pool has recovered."""
    allowed = False
    breaker = breaker_of(consecutive_failures=2, may_open=lambda: allowed)
    for _ in range(3):
        breaker.failed(0, probe=False)
    assert (breaker.is_closed, breaker.is_failing) == (True, True)

    allowed = True
    breaker.failed(0, probe=False)

    assert breaker.state(0) is Circuit.OPEN


@pytest.mark.parametrize(
    ("pool", "max_fraction", "most"),
    [(1, 0.5, 1), (2, 0.5, 1), (4, 0.5, 2), (4, 0.0, 1), (10, 0.25, 2), (3, 1.0, 3)],
)
def test_a_share_of_the_pool_may_be_ejected(pool, max_fraction, most):
    """Rounded down, and always one."""
    ejected = 0
    while may_eject(ejected=ejected, pool=pool, max_fraction=max_fraction):
        ejected += 1

    assert ejected == most


def test_unproven_failures_open_nothing_until_one_is_proven():
    """Three of them leave the circuit closed; the proof of one opens it."""
    breaker = breaker_of()
    for _ in range(3):
        breaker.failed(0, probe=False, proven=False)
    assert (breaker.is_closed, breaker.is_failing) == (True, True)

    breaker.failure_confirmed(1)

    assert breaker.state(1) is Circuit.OPEN


def test_pardoned_failures_are_not_counted():
    """Neither in the row of failures, nor in the openings that lengthen the next one."""
    breaker = breaker_of(consecutive_failures=2, max_open_seconds=100)
    breaker.failed(0, probe=False, proven=False)
    breaker.failure_retracted(0, probe=False)
    breaker.failed(0, probe=False)
    assert breaker.is_closed

    breaker.failed(0, probe=False)
    breaker.failure_retracted(1, probe=False)

    assert (breaker.is_closed, breaker.failures) == (True, 1)
    breaker.failed(2, probe=False)
    assert breaker.probe_in_s(2) == 10


def test_a_pardoned_probe_makes_room_for_another():
    """The circuit is half-open again, as if the probe had not been sent."""
    breaker = _opened()
    breaker.failed(10, probe=breaker.sent(10), proven=False)
    assert not breaker.allows(11)

    breaker.failure_retracted(11, probe=True)

    assert breaker.state(11) is Circuit.HALF_OPEN
    assert breaker.sent(11)


@given(st.lists(st.sampled_from(["ok", "fail", "abandon", "wait"]), max_size=80))
def test_an_open_circuit_always_comes_to_a_probe(outcomes):
    """No order of events leaves a worker shut out for longer than the open time."""
    breaker, now_s = breaker_of(consecutive_failures=2), 0.0
    for outcome in outcomes:
        now_s += 1
        if outcome == "wait" or not breaker.allows(now_s):
            continue
        probe = breaker.sent(now_s)
        if outcome == "ok":
            breaker.succeeded(probe=probe)
        elif outcome == "fail":
            breaker.failed(now_s, probe=probe)
        else:
            breaker.abandoned(probe=probe)
    assert breaker.allows(now_s + 10)


def test_retries_are_a_fraction_of_requests():
    """Twenty requests at a tenth pay for two retries, and no more."""
    budget = budget_of(0.1, 0)
    for _ in range(21):
        budget.request_arrived()

    assert [budget.take(0) for _ in range(3)] == [True, True, False]


def test_the_floor_allows_retries_without_traffic():
    """One a second, saved up for ten seconds."""
    budget = budget_of(0, 1)

    assert sum(budget.take(0) for _ in range(20)) == 10
    assert sum(budget.take(3) for _ in range(20)) == 3
    assert sum(budget.take(1000) for _ in range(20)) == 10


@given(st.floats(0, 1), st.floats(0, 10), st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=100))
def test_retries_never_exceed_what_was_paid_in(fraction, min_per_s, steps):
    """Over any history: fraction of the requests plus the floor, including the ten seconds at start."""
    budget, now_s, requests, retries = budget_of(fraction, min_per_s), 0.0, 0, 0
    for is_request, pause_s in steps:
        now_s += pause_s
        if is_request:
            budget.request_arrived()
            requests += 1
        else:
            retries += budget.take(now_s)
    assert retries <= requests * fraction + (now_s + 10) * min_per_s + 1e-6
