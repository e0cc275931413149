from dataclasses import replace

import pytest

from penstock_core.errors import NotFoundError
from penstock_graph.models import BreakerConfig, Role
from penstock_router.discovery.spec import WorkerSpec
from penstock_router.fleet import KV_MAX_AGE_S, Fleet, InFlight, WorkerState

SPEC = WorkerSpec("w", Role.DECODE, "http://127.0.0.1:9", supervised=True)


def _fleet(*specs):
    fleet = Fleet(BreakerConfig(consecutive_failures=2, open_seconds=10))
    fleet.apply(specs or [SPEC])
    return fleet


def _routable(fleet, now_s=0.0):
    return [worker.name for worker in fleet.routable(Role.DECODE, now_s)]


@pytest.mark.parametrize(
    ("spec", "state", "routable"),
    [
        (SPEC, WorkerState.READY, True),
        (replace(SPEC, ready=False, reason="starting"), WorkerState.UNHEALTHY, False),
        (replace(SPEC, ready=False, draining=True), WorkerState.DRAINING, False),
        # A fixed fleet is trusted only after its first health check.
        (replace(SPEC, supervised=False), WorkerState.UNHEALTHY, False),
    ],
)
def test_states_follow_discovery(spec, state, routable):
    """One word and a reason for each, and a reason for everything but ready."""
    fleet = _fleet(spec)

    seen, reason = fleet.get("w").state(0)
    assert seen is state
    assert bool(reason) is not routable
    assert _routable(fleet) == (["w"] if routable else [])


def test_failures_open_the_circuit_and_time_lets_one_probe_through():
    """Open shows as circuit_open; half-open is routable for one request at a time."""
    fleet = _fleet()
    worker = fleet.get("w")
    for _ in range(2):
        InFlight(worker, 1, now_s=0).failed(0)

    assert worker.state(0)[0] is WorkerState.CIRCUIT_OPEN
    assert (_routable(fleet, 9), _routable(fleet, 10)) == ([], ["w"])
    probe = InFlight(worker, 1, now_s=10)
    assert _routable(fleet, 10) == []
    probe.succeeded()
    assert worker.state(10)[0] is WorkerState.READY


@pytest.mark.parametrize(
    "ends", [["abandon"], ["succeeded"], ["failed"], ["failed", "abandon"], ["succeeded"] * 2]
)
def test_counters_return_to_zero_exactly_once(ends):
    """However often and in whatever way a request is ended."""
    worker = _fleet().get("w")
    calls = []
    inflight = InFlight(worker, 10, now_s=0, on_end=lambda: calls.append(1))
    inflight.grow(3)
    assert (worker.inflight_requests, worker.inflight_tokens) == (1, 13)

    for end in ends:
        inflight.failed(0) if end == "failed" else getattr(inflight, end)()

    assert (worker.inflight_requests, worker.inflight_tokens, calls) == (0, 0, [1])


def test_a_drained_worker_takes_nothing_new_and_comes_back():
    """Requests under way are told; undrain restores it."""
    fleet = _fleet()
    inflight = InFlight(fleet.get("w"), 1, now_s=0)
    fleet.set_drained("w", drained=True)

    assert (_routable(fleet), fleet.inflight_requests("w")) == ([], 1)
    inflight.abandon()
    fleet.set_drained("w", drained=False)
    assert (_routable(fleet), fleet.inflight_requests("w")) == (["w"], 0)


def test_a_worker_that_left_is_counted_until_its_requests_end():
    """The supervisor waits for this number, also when the entry has been replaced under the same name."""
    fleet = _fleet()
    inflight = InFlight(fleet.get("w"), 1, now_s=0)
    fleet.apply([replace(SPEC, url="http://127.0.0.1:10")])
    InFlight(fleet.get("w"), 1, now_s=0)

    assert fleet.inflight_requests("w") == 2
    inflight.abandon()
    assert fleet.inflight_requests("w") == 1
    fleet.apply([])
    assert fleet.inflight_requests("w") == 1


def test_a_name_that_comes_back_is_not_drained_any_more():
    """The base entry's name is used again for the next replica."""
    fleet = _fleet()
    fleet.set_drained("w", drained=True)
    fleet.apply([])
    fleet.apply([SPEC])

    assert _routable(fleet) == ["w"]


def test_a_restarted_process_is_trusted_anew():
    """Its predecessor's failures, KV and health say nothing about it."""
    fleet = _fleet(replace(SPEC, incarnation="1"))
    worker = fleet.get("w")
    for _ in range(2):
        InFlight(worker, 1, now_s=0).failed(0)
    worker.suspect("refused a connection")
    worker.kv_usage_fraction = 0.5
    fleet.apply([replace(SPEC, ready=False, reason="starting")])
    assert _routable(fleet) == []

    fleet.apply([replace(SPEC, incarnation="2")])

    assert fleet.get("w") is worker
    assert _routable(fleet) == ["w"]
    assert worker.kv_usage_fraction is None


def test_unknown_names_are_not_found():
    """Both for the drain and for its count."""
    fleet = _fleet()
    with pytest.raises(NotFoundError, match="'x'"):
        fleet.set_drained("x", drained=True)
    with pytest.raises(NotFoundError, match="'x'"):
        fleet.inflight_requests("x")


def test_old_kv_readings_are_unknown_to_policies():
    """After ten missed scrapes tokens decide; the export keeps value and age."""
    worker = _fleet().get("w")
    worker.kv_usage_fraction, worker.metrics_at_s = 0.4, 100.0

    assert worker.candidate(100 + KV_MAX_AGE_S).kv_usage_fraction == 0.4
    assert worker.candidate(100.1 + KV_MAX_AGE_S).kv_usage_fraction is None
    assert worker.metrics_age_s(150) == 50


@pytest.mark.parametrize(
    ("supervised", "drained", "expected"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_requests_wait_only_for_workers_that_somebody_restarts(supervised, drained, expected):
    """A fixed fleet's dead worker, or one drained on request, is not worth waiting for."""
    fleet = _fleet(replace(SPEC, ready=False, supervised=supervised))
    fleet.set_drained("w", drained=drained)

    assert fleet.expects(Role.DECODE) is expected
    assert not fleet.expects(Role.PREFILL)
