from dataclasses import replace

import pytest

from penstock.api import BreakerConfig, Role
from penstock.core.errors import NotFoundError
from penstock.router.core.retries import Assignment
from penstock.router.core.worker import WorkerPool, WorkerSpec, WorkerState

SPEC = WorkerSpec("w", Role.DECODE, "http://127.0.0.1:9", supervised=True)


def _fleet(*specs):
    fleet = WorkerPool(BreakerConfig(consecutive_failures=2, open_seconds=10))
    fleet.apply(specs or [SPEC])
    return fleet


def _routable(fleet, now_s=0.0):
    return [worker.name for worker in fleet.routable(Role.DECODE, now_s)]


def fail(worker, now_s, cause="answered 302", *, times=1):
    """Let requests fail at a worker, one after the other."""
    for _ in range(times):
        assignment = Assignment(None, worker, 1, now_s=now_s)
        assignment.failed(now_s, cause)
        assignment.end()


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


@pytest.mark.parametrize(
    "verdicts", [[], ["succeeded"], ["failed"], ["failed", "succeeded"], ["succeeded"] * 2]
)
def test_counters_return_to_zero_exactly_once(verdicts):
    """However often and in whatever way a request is ended."""
    worker = _fleet().get("w")
    assignment = Assignment(None, worker, 10, now_s=0)
    assignment.grow(3)
    assert (worker.inflight_requests, worker.inflight_tokens) == (1, 13)

    for verdict in verdicts:
        assignment.failed(0, "answered 500") if verdict == "failed" else assignment.succeeded()
    for _ in range(2):
        assignment.end()

    assert (worker.inflight_requests, worker.inflight_tokens) == (0, 0)
    assert worker.failures == (verdicts[:1] == ["failed"])


def test_a_drained_worker_takes_nothing_new_and_comes_back():
    """Requests under way are told; undrain restores it, and so does the next worker of that name."""
    fleet = _fleet()
    assignment = Assignment(None, fleet.get("w"), 1, now_s=0)
    fleet.set_drained("w", drained=True)

    assert (_routable(fleet), fleet.inflight_requests("w")) == ([], 1)
    assignment.end()
    fleet.set_drained("w", drained=False)
    assert (_routable(fleet), fleet.inflight_requests("w")) == (["w"], 0)
    fleet.set_drained("w", drained=True)
    fleet.apply([])
    fleet.apply([SPEC])
    assert _routable(fleet) == ["w"]


def test_a_worker_that_left_is_counted_until_its_requests_end():
    """The supervisor waits for this number, also when the entry has been replaced under the same name."""
    fleet = _fleet()
    assignment = Assignment(None, fleet.get("w"), 1, now_s=0)
    fleet.apply([replace(SPEC, url="http://127.0.0.1:10")])
    Assignment(None, fleet.get("w"), 1, now_s=0)

    assert fleet.inflight_requests("w") == 2
    assignment.end()
    assert fleet.inflight_requests("w") == 1
    fleet.apply([])
    assert fleet.inflight_requests("w") == 1


def test_a_restarted_process_is_trusted_anew():
    """Its predecessor's failures, KV and health say nothing about it."""
    fleet = _fleet(replace(SPEC, incarnation="1"))
    worker = fleet.get("w")
    fail(worker, 0, "answered 500", times=2)
    worker.suspect("refused a connection")
    worker.kv_usage_fraction = 0.5
    fleet.apply([replace(SPEC, ready=False, reason="starting")])
    assert _routable(fleet) == []

    fleet.apply([replace(SPEC, incarnation="2")])

    assert fleet.get("w") is worker
    assert _routable(fleet) == ["w"]
    assert worker.kv_usage_fraction is None


def test_an_only_worker_with_an_open_circuit_is_waited_for():
    """In a fixed fleet too: time brings it back. One that fails its health check is not."""
    fleet = _fleet(replace(SPEC, supervised=False))
    worker = fleet.get("w")
    worker.health_problem = None
    fail(worker, 0, times=2)

    assert _routable(fleet) == []
    assert fleet.expects(Role.DECODE)
    worker.health_problem = "health check failed"
    assert not fleet.expects(Role.DECODE)


def test_an_ejected_worker_is_named_with_its_cause():
    """And with the time of the next try; a pool of two keeps its second worker, with the cause as well."""
    fleet = _fleet(replace(SPEC, name="a"), replace(SPEC, name="b"))
    for name in ("a", "b"):
        fail(fleet.get(name), 0, f"{name} answered 302", times=2)

    assert fleet.get("a").state(4) == (
        WorkerState.CIRCUIT_OPEN,
        "a answered 302 (2 failed requests in a row); next try in 6 s",
    )
    assert fleet.get("b").state(4) == (WorkerState.READY, "b answered 302 (2 failed requests in a row)")
    assert _routable(fleet, 4) == ["b"]


def test_while_all_are_ejected_each_is_probed_after_the_base_time():
    """The other worker of the role is ill, so the growth of the first one's ejection does not count."""
    fleet = _fleet(replace(SPEC, name="a"), replace(SPEC, name="b"))
    worker = fleet.get("a")
    fail(worker, 0, times=2)
    fail(worker, 10)
    assert _routable(fleet, 20) == ["b"]

    fleet.get("b").health_problem = "health check failed"

    assert (_routable(fleet, 19), _routable(fleet, 20)) == ([], ["a"])


def test_a_probe_is_decided_by_the_beginning_of_its_answer():
    """Others need not wait for the end of its stream."""
    fleet = _fleet()
    worker = fleet.get("w")
    fail(worker, 0, times=2)
    probe = Assignment(None, worker, 1, now_s=10)
    assert _routable(fleet, 10) == []
    probe.first_part_ok()

    assert _routable(fleet, 10) == ["w"]
    assert worker.inflight_requests == 1


def _ejected_twice_and_back(fleet):
    """Return the worker, 20 s after its second ejection, with its probe's stream begun."""
    worker = fleet.get("w")
    fail(worker, 0, times=2)
    fail(worker, 10)
    probe = Assignment(None, worker, 1, now_s=30)
    probe.first_part_ok()
    return worker, probe


def test_half_a_stream_after_an_ejection_proves_nothing_and_a_complete_answer_all():
    """The first that breaks ejects again and for longer; after a complete one it takes as many failures as before."""
    worker, probe = _ejected_twice_and_back(_fleet())
    other = Assignment(None, worker, 1, now_s=30)
    probe.failed(65, "closed the connection")
    other.failed(66, "closed the connection")
    assert (worker.breaker.probe_in_s(65), worker.breaker.openings) == (30, 3)

    fleet = _fleet()
    worker, probe = _ejected_twice_and_back(fleet)
    probe.succeeded()
    fail(worker, 50)
    assert _routable(fleet, 50) == ["w"]
    fail(worker, 50)
    assert worker.breaker.probe_in_s(50) == 10


def test_streams_from_before_an_ejection_say_nothing_about_the_worker_after_it():
    """They hang since the fault that it was ejected for, and run into their time-outs one by one."""
    fleet = _fleet()
    worker = fleet.get("w")
    hanging = [Assignment(None, worker, 1, now_s=0) for _ in range(5)]
    for each in hanging[:2]:
        each.failed(1, "sent nothing for 60 s")
    Assignment(None, worker, 1, now_s=11).first_part_ok()
    for each in hanging[2:]:
        each.failed(12, "sent nothing for 60 s")

    assert _routable(fleet, 12) == ["w"]
    assert worker.failures == 5


@pytest.mark.parametrize(
    "ask", [lambda fleet: fleet.set_drained("x", drained=True), lambda fleet: fleet.inflight_requests("x")]
)
def test_unknown_names_are_not_found(ask):
    """Both for the drain and for its count."""
    with pytest.raises(NotFoundError, match="'x'"):
        ask(_fleet())


@pytest.mark.parametrize(
    ("supervised", "drained", "expected"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_requests_wait_only_for_workers_that_somebody_restarts(supervised, drained, expected):
    """A fixed fleet's dead worker, or one drained on request, is not worth waiting for."""
    fleet = _fleet(replace(SPEC, ready=False, supervised=supervised))
    fleet.set_drained("w", drained=drained)

    assert fleet.expects(Role.DECODE) is expected
    assert not fleet.expects(Role.PREFILL)
