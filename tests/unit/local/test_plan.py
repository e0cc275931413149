"""The supervisor's plan: one table per state, then the order of stopping."""

from dataclasses import replace

import pytest

from penstock.core.local_state import EntryState
from penstock.local.plan import (
    Drain,
    ObservedProcess,
    ProcessAction,
    ProcessExit,
    ProcessFault,
    ProcessStep,
    plan,
    plan_stop,
)

NOW = 1000.0
NAME = "n_decode"


@pytest.fixture
def next_action(state_of, entry_of):
    """Return a function: entry state, memory -> the one action planned for it, or None."""

    def act(entry_state, observed=None, *, speed=20.0, **fields):
        state = state_of("n", speed=speed).with_entry(
            NAME, entry_of("decode", state=EntryState(entry_state), **fields)
        )
        actions = plan(state, {} if observed is None else {NAME: observed}, NOW)
        assert len(actions) <= 1
        return actions[0] if actions else None

    return act


@pytest.mark.parametrize(
    ("entry_state", "observed", "expected"),
    [
        ("requested", None, ProcessAction(ProcessStep.START, NAME)),
        ("starting", ObservedProcess(pid=1, started_s=NOW - 1), None),
        (
            "starting",
            ObservedProcess(pid=1, started_s=NOW - 1, healthy_s=NOW),
            ProcessAction(ProcessStep.MARK, NAME, state=EntryState.READY),
        ),
        ("ready", ObservedProcess(pid=1, started_s=NOW - 100, healthy_s=NOW - 2), None),
        ("starting", ObservedProcess(failures=1, restart_at_s=NOW + 0.1), None),
        ("starting", ObservedProcess(failures=1, restart_at_s=NOW), ProcessAction(ProcessStep.START, NAME)),
        ("ready", ObservedProcess(), ProcessAction(ProcessStep.START, NAME)),
        (
            "ready",
            ObservedProcess(pid=1, started_s=NOW - 100, healthy_s=NOW - 90, is_leaving=True),
            ProcessAction(ProcessStep.SUCCEED, NAME),
        ),
        ("stopped", None, None),
        ("failed", None, None),
        ("stopped", ObservedProcess(pid=1), ProcessAction(ProcessStep.TERMINATE, NAME)),
        ("requested", ObservedProcess(pid=1), ProcessAction(ProcessStep.TERMINATE, NAME)),
    ],
)
def test_what_is_wanted_is_started_and_marked(next_action, entry_state, observed, expected):
    """Requested gets a process, a healthy one becomes ready, unwanted processes are ended."""
    assert next_action(entry_state, observed) == expected


@pytest.mark.parametrize("healthy_s", [None, NOW])
def test_a_router_that_is_to_be_renewed_leaves_once_it_serves(next_action, healthy_s):
    """One that has not served yet has just been started with the new settings, or cannot hold anything."""
    observed = ObservedProcess(pid=1, started_s=NOW - 1, healthy_s=healthy_s)
    expected = None if healthy_s is None else ProcessAction(ProcessStep.SUCCEED, NAME)
    assert next_action("ready", observed, renew=True) == expected


@pytest.mark.parametrize(
    ("failures", "ran_s", "was_ready", "expected"),
    [
        (0, 0.1, False, ProcessAction(ProcessStep.RESTART_LATER, NAME, "boom", at_s=NOW + 0.25, failures=1)),
        (1, 0.1, False, ProcessAction(ProcessStep.RESTART_LATER, NAME, "boom", at_s=NOW + 0.5, failures=2)),
        (3, 9.9, True, ProcessAction(ProcessStep.RESTART_LATER, NAME, "boom", at_s=NOW + 2.0, failures=4)),
        (
            4,
            0.1,
            False,
            ProcessAction(ProcessStep.ABANDON, NAME, "gave up after 5 failures in a row; the last: boom"),
        ),
        (
            4,
            60.0,
            False,
            ProcessAction(ProcessStep.ABANDON, NAME, "gave up after 5 failures in a row; the last: boom"),
        ),
        (4, 10.0, True, ProcessAction(ProcessStep.RESTART_LATER, NAME, "boom", at_s=NOW + 0.25, failures=1)),
    ],
)
def test_a_crash_is_restarted_after_pauses_that_double_and_end(
    next_action, failures, ran_s, was_ready, expected
):
    """Five failures in a row end it; only a run that was ready and lasted starts a new count."""
    exited = ProcessExit(NOW, "boom")
    healthy_s = NOW - 1 if was_ready else None
    observed = ObservedProcess(started_s=NOW - ran_s, healthy_s=healthy_s, exited=exited, failures=failures)
    assert next_action("starting", observed) == expected


@pytest.mark.parametrize(
    ("limits", "within_s", "beyond_s"),
    [
        ({"speed": 20.0, "startup_s": 600.0}, 60.0, 60.1),
        ({"speed": 1.0, "startup_s": 600.0}, 599.0, 600.1),
        ({"liveness_s": 60.0}, 60.0, 60.1),
        ({"liveness_s": 600.0}, 599.0, 600.1),
    ],
)
def test_a_process_is_killed_beyond_its_time_to_start_or_to_answer(next_action, limits, within_s, beyond_s):
    """600 simulated seconds to start are 30 real ones at speed 20, but never less than the floor of 60; the reason names the key.

    Each service says how many real seconds it may be silent: a real engine may stall for minutes and live.
    """

    def action(after_s):
        if "liveness_s" in limits:
            return next_action("ready", ObservedProcess(pid=1, healthy_s=NOW - after_s), **limits)
        return next_action("starting", ObservedProcess(pid=1, started_s=NOW - after_s), **limits)

    assert action(within_s) is None
    beyond = action(beyond_s)
    assert beyond.step is ProcessStep.KILL
    assert ("startupTimeoutSeconds" in beyond.reason) == ("startup_s" in limits)


def test_a_process_that_hangs_is_killed_once(next_action):
    """No health check for a minute is the reason; while SIGKILL works nothing more is planned."""
    hung = ObservedProcess(pid=1, started_s=NOW - 200, healthy_s=NOW - 61)
    action = next_action("ready", hung)
    assert action == ProcessAction(ProcessStep.KILL, NAME, "answered no health check for 60 s (real)")
    assert next_action("ready", ObservedProcess(pid=1, healthy_s=NOW - 61, verdict=action.reason)) is None


STOPPED = ProcessFault("it is stopped", 60.0)


@pytest.mark.parametrize(
    ("entry_state", "fault", "unhealthy_s", "expected"),
    [
        ("ready", STOPPED, 2, ProcessAction(ProcessStep.MARK, NAME, "it is stopped", EntryState.STARTING)),
        ("starting", STOPPED, 60, None),
        ("starting", STOPPED, 60.1, ProcessAction(ProcessStep.KILL, NAME, "it is stopped")),
        ("ready", ProcessFault("it hangs", 0.0), 2, ProcessAction(ProcessStep.KILL, NAME, "it hangs")),
        ("starting", None, 2, ProcessAction(ProcessStep.MARK, NAME, state=EntryState.READY)),
    ],
)
def test_a_process_with_a_fault_gets_no_request_and_is_killed_in_time(
    next_action, entry_state, fault, unhealthy_s, expected
):
    """Although it answers; the reason of the kill is the fault. Well again, it is ready again."""
    observed = ObservedProcess(pid=1, started_s=0.0, healthy_s=NOW - unhealthy_s, fault=fault)
    assert next_action(entry_state, observed, liveness_s=600.0) == expected


def test_a_process_whose_port_another_one_holds_is_killed_and_says_so(next_action):
    """It could not serve there; as any other failure it is tried again, a worker at another port."""
    observed = ObservedProcess(pid=1, started_s=NOW - 1, port_taken=True)
    action = next_action("starting", observed, ports={"port": 8000})
    assert action == ProcessAction(
        ProcessStep.KILL, NAME, "its port 8000 is in use: another process answers there; stop that one"
    )


@pytest.mark.parametrize(
    ("served", "observed", "expected"),
    [
        (True, ObservedProcess(pid=1), ProcessAction(ProcessStep.BEGIN_DRAIN, NAME)),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 0.5)), None),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 0.5, acknowledged=True)), None),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 20, acknowledged=True, idle=False)), None),
        (
            True,
            ObservedProcess(pid=1, drain=Drain(NOW - 0.5, acknowledged=True, idle=True)),
            ProcessAction(ProcessStep.TERMINATE, NAME),
        ),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 0.5, acknowledged=False, idle=True)), None),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 20, acknowledged=False, idle=None)), None),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 0.9, router_away=True)), None),
        (
            True,
            ObservedProcess(pid=1, drain=Drain(NOW - 1.0, router_away=True)),
            ProcessAction(ProcessStep.TERMINATE, NAME),
        ),
        (
            True,
            ObservedProcess(pid=1, drain=Drain(NOW - 45.0, acknowledged=True, idle=False)),
            ProcessAction(ProcessStep.TERMINATE, NAME),
        ),
        (True, ObservedProcess(pid=1, drain=Drain(NOW - 9), terminated_s=NOW - 44.9), None),
        (True, None, ProcessAction(ProcessStep.RETIRE, NAME)),
        (
            True,
            ObservedProcess(exited=ProcessExit(NOW, "exit code 0")),
            ProcessAction(ProcessStep.RETIRE, NAME),
        ),
        (False, ObservedProcess(pid=1), ProcessAction(ProcessStep.TERMINATE, NAME)),
        (False, ObservedProcess(pid=1, terminated_s=NOW - 1), None),
    ],
)
def test_a_drain_is_acknowledged_then_idle_then_ended(next_action, served, observed, expected):
    """Router first, then nothing in flight, then SIGTERM; grace 900 simulated seconds = 45 real at speed 20."""
    assert next_action("draining", observed, served=served, grace_s=900.0) == expected


def test_what_ignores_sigterm_is_killed_after_its_grace_or_the_floor(next_action):
    """100 simulated seconds at speed 20 are 5 real ones, the floor."""
    observed = ObservedProcess(pid=1, drain=Drain(NOW - 9), terminated_s=NOW - 5)
    assert next_action("draining", observed, served=True, grace_s=20.0).step is ProcessStep.KILL


def test_processes_that_the_file_does_not_name_are_ended_and_forgotten(state_of):
    """Deleting an entry by hand ends its process."""
    state = state_of("n")
    assert plan(state, {"x": ObservedProcess(pid=1)}, NOW) == (ProcessAction(ProcessStep.TERMINATE, "x"),)
    assert plan(state, {"x": ObservedProcess(pid=1, terminated_s=NOW - 1)}, NOW) == ()
    assert plan(state, {"x": ObservedProcess()}, NOW) == (ProcessAction(ProcessStep.FORGET, "x"),)


@pytest.fixture
def whole(state_of, entry_of):
    """Return a graph of router, planner and one worker, all running."""
    state = state_of("n", speed=20.0)
    for service, role in (("frontend", "router"), ("planner", "planner"), ("decode", "decode")):
        state = state.with_entry(
            f"n_{service}", entry_of(service, role, state=EntryState.READY, grace_s=200.0)
        )
    return state


def test_stopping_ends_planner_and_router_before_the_workers(whole):
    """Workers get SIGTERM only when router and planner are gone, for the router's streams come from them."""
    observed = {name: ObservedProcess(pid=1) for name in whole.entries}
    first = plan_stop(whole, observed, NOW, force=False)
    assert first == (
        ProcessAction(ProcessStep.TERMINATE, "n_frontend"),
        ProcessAction(ProcessStep.TERMINATE, "n_planner"),
    )
    observed["n_planner"] = ObservedProcess()
    observed["n_frontend"] = ObservedProcess(pid=1, terminated_s=NOW - 1)
    assert plan_stop(whole, observed, NOW, force=False) == ()
    observed["n_frontend"] = ObservedProcess()
    assert plan_stop(whole, observed, NOW, force=False) == (ProcessAction(ProcessStep.TERMINATE, "n_decode"),)


def test_a_forced_stop_ends_all_at_once_and_kills_after_the_floor(whole):
    """No process waits for another, and none longer than the floor."""
    observed = {name: ObservedProcess(pid=1, terminated_s=NOW - 5) for name in whole.entries}
    observed["stranger"] = ObservedProcess(pid=1)
    actions = plan_stop(whole, observed, NOW, force=True)
    assert [action.step for action in actions] == [ProcessStep.KILL] * 3 + [ProcessStep.TERMINATE]
    patient = plan_stop(whole, observed, NOW, force=False)
    assert patient == ()


@pytest.fixture
def draining(state_of, entry_of):
    """Return a function: pool's bound, grant, and memory of a worker of two that drains -> its action."""

    def act(reclaim_s, grant, observed):
        state = state_of("n", speed=10.0, budget=grant, pool="p", reclaim_s=reclaim_s)
        state = state.with_entry("n_prefill", entry_of("prefill", state=EntryState.READY, gpus=(1,)))
        entry = entry_of("decode", state=EntryState.DRAINING, gpus=(0,), served=True, grace_s=900.0)
        serving = ObservedProcess(pid=2, started_s=NOW - 100, healthy_s=NOW)
        actions = plan(state.with_entry(NAME, entry), {NAME: observed, "n_prefill": serving}, NOW)
        return actions[0] if actions else None

    return act


BUSY = ObservedProcess(pid=1, drain=Drain(NOW - 20, acknowledged=True, idle=False))


@pytest.mark.parametrize(
    ("reclaim_s", "grant", "observed", "step"),
    [
        (200.0, 1, BUSY, ProcessStep.CUT_DRAIN),
        (201.0, 1, BUSY, None),
        (200.0, 2, BUSY, None),
        (None, 1, BUSY, None),
        (0.0, 1, replace(BUSY, drain=Drain(NOW, acknowledged=True)), None),
        (200.0, 1, replace(BUSY, drain=Drain(NOW - 20)), ProcessStep.CUT_DRAIN),
        (200.0, 1, replace(BUSY, drain=Drain(NOW - 20, acknowledged=True, idle=True)), ProcessStep.TERMINATE),
        (
            200.0,
            1,
            replace(BUSY, drain=Drain(NOW - 90, acknowledged=True, idle=False)),
            ProcessStep.TERMINATE,
        ),
        (200.0, 1, replace(BUSY, terminated_s=NOW - 5, is_cut=True), ProcessStep.KILL),
        (200.0, 1, replace(BUSY, terminated_s=NOW - 5), None),
    ],
)
def test_a_pool_cuts_the_drains_of_a_graph_above_its_grant(draining, reclaim_s, grant, observed, step):
    """After reclaim.graceSeconds by the time scale; what is cut gets the floor to end, what is idle ends as ever."""
    action = draining(reclaim_s, grant, observed)
    assert (None if action is None else action.step) is step
