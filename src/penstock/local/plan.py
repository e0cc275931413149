"""What the supervisor does next: a pure function of the statefile, the processes observed and the time.

Level-triggered: a lost event costs one tick. Times are real seconds of a monotonic clock; the manifest's simulated
durations are divided by the speed and have a real floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from penstock.api import Role
from penstock.core.backoff import Backoff
from penstock.core.local_state import EntryState
from penstock.gpu_pool.reclaim import drain_grace_s
from penstock.local.statefile import ProcessEntry, StateFile
from penstock.runtimes import PLANNER_ROLE


class ProcessStep(Enum):
    """What may be done for an entry or with its process."""

    START = "start a process"
    MARK = "write the state, with the reason why a process that runs cannot serve, so that it gets no request"
    RESTART_LATER = "write the reason, and start again at a time, after this many failures in a row"
    ABANDON = "write failed, and free the GPUs"
    BEGIN_DRAIN = "ask the router to send nothing new, and watch what is in flight"
    TERMINATE = "send SIGTERM"
    CUT_DRAIN = "send SIGTERM to a worker that drains for longer than its pool lets it, and record that"
    KILL = "send SIGKILL to the process and its group; the reason becomes the cause of its exit"
    SWITCH = "write the role that a drained worker takes; it is ready again once it answers its health check"
    SUCCEED = (
        "let a router that is to end, or was told to, finish under another name, and start its successor"
    )
    RETIRE = "take out the entry, whose process has ended for good; the base entry becomes stopped"
    FORGET = "drop what is remembered about a name that is no longer in the file"


@dataclass(frozen=True, slots=True)
class ProcessAction:
    """One step for the entry or process ``name``; ``state`` is MARK's, ``at_s`` and ``failures`` RESTART_LATER's."""

    step: ProcessStep
    name: str
    reason: str | None = None
    state: EntryState | None = None
    at_s: float = 0.0
    failures: int = 0


GRACE_FLOOR_S = 5.0
"""A process gets at least this long between SIGTERM and SIGKILL, at any speed: Python needs a moment to finish a
response. As all that follow: real seconds, chosen."""
STARTUP_FLOOR_S = 60.0
"""A process gets at least this long to answer its first health check: imports take real time at any speed."""
SETTLE_S = 1.0
"""How long after a worker is marked ``draining`` a router that is away is given to come back and read that from the file."""
QUIET_START_S = 0.5
"""A process without a health check counts as ready after running this long."""
RESTARTS = Backoff(first_s=0.25, limit_s=30.0)
"""Pause after the first failure in a row, which each further one doubles, and the longest."""
GIVE_UP_AFTER = 5
"""Failures in a row after which a process is left alone: its GPUs are free after 3.75 s of pauses."""
STABLE_AFTER_S = 10.0
"""A process that was ready and ran this long starts a new count."""


def grace_s(entry: ProcessEntry, speed: float) -> float:
    """Return how long ``entry`` may take to stop."""
    return max(entry.grace_s / speed, GRACE_FLOOR_S)


def startup_s(entry: ProcessEntry, speed: float) -> float:
    """Return how long ``entry`` may take to become healthy."""
    return max(entry.startup_s / speed, STARTUP_FLOOR_S)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """How far a drain has come.

    Attributes:
        acknowledged: The router confirmed that it sends nothing new.
        router_away: Nothing listens at the router's address, so nothing can confirm, and nothing is sent.
        idle: The newest answer on whether anything is in flight; None before the first.
    """

    since_s: float
    acknowledged: bool = False
    router_away: bool = False
    idle: bool | None = None


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """Why a process that may well answer its health check does not serve.

    Attributes:
        allowed_s: How long after it last served it may have the fault before it is killed.
    """

    reason: str
    allowed_s: float


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """What the supervisor remembers about one name.

    Attributes:
        failures: Unwanted exits in a row.
        healthy_s: When its newest process last answered its health check and had no fault, or None.
        is_cut: Its drain was cut: it gets no more than the floor to end.
        is_leaving: It served, and accepts no more connections: it finishes those that it has.
        port_taken: Another process answered on the port of its newest process, which does not listen there.
    """

    pid: int | None = None
    started_s: float | None = None
    exited: ProcessExit | None = None
    failures: int = 0
    restart_at_s: float | None = None
    healthy_s: float | None = None
    fault: ProcessFault | None = None
    port_taken: bool = False
    is_leaving: bool = False
    drain: Drain | None = None
    terminated_s: float | None = None
    is_cut: bool = False
    verdict: str | None = None


def plan(
    state: StateFile, observed: Mapping[str, ObservedProcess], now_s: float
) -> tuple[ProcessAction, ...]:
    """Return at most one action per name, in the file's order, strangers last."""
    bounds = _bounds(state)
    actions = [
        _next(name, entry, observed.get(name, ObservedProcess()), now_s, bounds)
        for name, entry in state.entries.items()
    ]
    actions += [
        ProcessAction(ProcessStep.FORGET, name)
        if known.pid is None
        else _wind_up(name, known, now_s, GRACE_FLOOR_S)
        for name, known in observed.items()
        if name not in state.entries
    ]
    return tuple(action for action in actions if action is not None)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What bounds the waits of a graph: its time scale, and its pool's bound of drains, real seconds; None: none."""

    speed: float
    reclaim_s: float | None
    is_above: bool


def _bounds(state: StateFile) -> _Bounds:
    arbiter = state.arbiter
    reclaim_s = None if arbiter.reclaim_s is None else arbiter.reclaim_s / arbiter.speed
    return _Bounds(arbiter.speed, reclaim_s, len(state.gpus_in_use()) > arbiter.budget)


def _next(
    name: str, entry: ProcessEntry, known: ObservedProcess, now_s: float, bounds: _Bounds
) -> ProcessAction | None:
    speed = bounds.speed
    match entry.state:
        case EntryState.REQUESTED if known.pid is None:
            return ProcessAction(ProcessStep.START, name)
        case EntryState.STARTING | EntryState.READY if known.pid is None:
            return _bring_back(name, known, now_s)
        case EntryState.STARTING | EntryState.READY:
            return _watch(name, entry, known, now_s, speed)
        case EntryState.DRAINING:
            return _drain(name, entry, known, now_s, bounds)
        case _:
            return _wind_up(name, known, now_s, grace_s(entry, speed))


def _bring_back(name: str, known: ObservedProcess, now_s: float) -> ProcessAction | None:
    if known.exited is not None:
        return _after_exit(name, known, known.exited)
    if known.restart_at_s is not None and now_s < known.restart_at_s:
        return None
    return ProcessAction(ProcessStep.START, name)


def _watch(
    name: str, entry: ProcessEntry, known: ObservedProcess, now_s: float, speed: float
) -> ProcessAction | None:
    if known.verdict is not None:
        return None
    if known.is_leaving or (entry.renew and known.healthy_s is not None):
        return ProcessAction(ProcessStep.SUCCEED, name)
    if known.healthy_s is not None:
        return _watch_served(name, entry, known, now_s - known.healthy_s)
    if known.port_taken:
        return ProcessAction(
            ProcessStep.KILL,
            name,
            f"its port {entry.port} is in use: another process answers there; stop that one",
        )
    started_s = now_s if known.started_s is None else known.started_s
    allowed_s = startup_s(entry, speed)
    if now_s - started_s > allowed_s:
        return ProcessAction(
            ProcessStep.KILL,
            name,
            f"did not answer its health check within {allowed_s:g} s (real) of its start; startupTimeoutSeconds gives it longer",
        )
    return None


def _watch_served(
    name: str, entry: ProcessEntry, known: ObservedProcess, unhealthy_s: float
) -> ProcessAction | None:
    """Return what follows for a process that has served, by how long ago that was."""
    fault = known.fault
    if fault is not None and unhealthy_s > fault.allowed_s:
        return ProcessAction(ProcessStep.KILL, name, fault.reason)
    if unhealthy_s > entry.liveness_s:
        return ProcessAction(
            ProcessStep.KILL, name, f"answered no health check for {entry.liveness_s:g} s (real)"
        )
    if fault is not None:
        return (
            ProcessAction(ProcessStep.MARK, name, fault.reason, EntryState.STARTING)
            if entry.state is EntryState.READY
            else None
        )
    return (
        ProcessAction(ProcessStep.MARK, name, state=EntryState.READY)
        if entry.state is EntryState.STARTING
        else None
    )


def _after_exit(name: str, known: ObservedProcess, exited: ProcessExit) -> ProcessAction:
    uptime_s = exited.at_s - (exited.at_s if known.started_s is None else known.started_s)
    is_stable = known.healthy_s is not None and uptime_s >= STABLE_AFTER_S
    failures = 1 if is_stable else known.failures + 1
    if failures >= GIVE_UP_AFTER:
        return ProcessAction(
            ProcessStep.ABANDON,
            name,
            f"gave up after {failures} failures in a row; the last: {exited.reason}",
        )
    delay_s = RESTARTS.pause_s(failures)
    return ProcessAction(
        ProcessStep.RESTART_LATER, name, exited.reason, at_s=exited.at_s + delay_s, failures=failures
    )


def _drain(
    name: str, entry: ProcessEntry, known: ObservedProcess, now_s: float, bounds: _Bounds
) -> ProcessAction | None:
    if known.pid is None:
        return ProcessAction(ProcessStep.RETIRE if entry.takes is None else ProcessStep.SWITCH, name)
    allowed_s = GRACE_FLOOR_S if known.is_cut else grace_s(entry, bounds.speed)
    if not entry.served or known.terminated_s is not None:
        return _wind_up(name, known, now_s, allowed_s)
    if known.drain is None:
        return ProcessAction(ProcessStep.BEGIN_DRAIN, name)
    waited_s = now_s - known.drain.since_s
    is_idle = known.drain.acknowledged and known.drain.idle is True
    is_router_away = known.drain.router_away and waited_s >= SETTLE_S
    if entry.takes is not None and (is_idle or waited_s < allowed_s):
        return ProcessAction(ProcessStep.SWITCH, name) if is_idle else None
    max_s = drain_grace_s(allowed_s, reclaim_s=bounds.reclaim_s, is_above=bounds.is_above)
    is_known = known.drain.idle is not None or waited_s >= SETTLE_S
    if max_s <= waited_s < allowed_s and is_known and not is_idle and not is_router_away:
        return ProcessAction(ProcessStep.CUT_DRAIN, name)
    return (
        ProcessAction(ProcessStep.TERMINATE, name)
        if is_idle or is_router_away or waited_s >= allowed_s
        else None
    )


def _wind_up(name: str, known: ObservedProcess, now_s: float, allowed_s: float) -> ProcessAction | None:
    """Return the next step to end a process that is no longer desired: SIGTERM, then SIGKILL, then nothing."""
    if known.pid is None or known.verdict is not None:
        return None
    if known.terminated_s is None:
        return ProcessAction(ProcessStep.TERMINATE, name)
    if now_s - known.terminated_s >= allowed_s:
        return ProcessAction(ProcessStep.KILL, name, f"did not end within {allowed_s:g} s (real) of SIGTERM")
    return None


def plan_stop(
    state: StateFile, observed: Mapping[str, ObservedProcess], now_s: float, *, force: bool
) -> tuple[ProcessAction, ...]:
    """Return the next steps of stopping the graph; empty while waiting, or when nothing runs.

    The planner goes first, so that nothing is scaled any more; then the router, which takes no new request
    and finishes its streams; the workers only when the router is gone, because its streams come from them.
    """
    running = {name: known for name, known in observed.items() if known.pid is not None}

    def role(name: str) -> str:
        return state.entries[name].role if name in state.entries else ""

    front = {name for name in running if role(name) in {PLANNER_ROLE, Role.ROUTER}}
    actions = []
    for name, known in running.items():
        if front and name not in front and not force:
            continue
        entry = state.entries.get(name)
        allowed_s = GRACE_FLOOR_S if entry is None or force else grace_s(entry, state.arbiter.speed)
        action = _wind_up(name, known, now_s, allowed_s)
        if action is not None:
            actions.append(action)
    return tuple(actions)
