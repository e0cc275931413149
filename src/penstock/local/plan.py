"""What the supervisor does next: a pure function of the statefile, the processes observed and the time.

Level-triggered: every tick decides from the complete state, so a lost event costs one tick.
All times here are real seconds of a monotonic clock, because processes live in real time; the
manifest's simulated durations are divided by the speed and have a real floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api import Role
from penstock.core.local_state import EntryState
from penstock.local.statefile import ProcessEntry, StateFile
from penstock.runtimes import PLANNER_ROLE


@dataclass(frozen=True)
class Action:
    """One step for the entry or process ``name``."""

    name: str


class Start(Action):
    """Start a process for the entry."""


class BeginDrain(Action):
    """Ask the router to send nothing new, and begin to watch what is in flight."""


class Terminate(Action):
    """Send SIGTERM."""


class Retire(Action):
    """The process is gone for good: take the entry out (the base entry becomes ``stopped``)."""


class Forget(Action):
    """Drop what is remembered about a name that is in the file no more."""


@dataclass(frozen=True)
class ReasonedAction(Action):
    """A step with its reason, for people."""

    reason: str


@dataclass(frozen=True)
class Mark(Action):
    """Write ``ready``, or ``starting`` with the reason for a process that runs and cannot serve, so that it gets no request."""

    state: EntryState
    reason: str | None = None


class Abandon(ReasonedAction):
    """Write ``failed`` and free the GPUs."""


class Kill(ReasonedAction):
    """Send SIGKILL to the process and its group; the reason becomes the cause of its exit."""


@dataclass(frozen=True)
class RestartLater(ReasonedAction):
    """Write the reason and start again at ``at_s``, after so many failures in a row."""

    at_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of waiting, all in real seconds, all chosen.

    Attributes:
        grace_floor_s: A process gets at least this long between SIGTERM and SIGKILL, whatever the speed:
            Python needs a moment to finish a response.
        startup_floor_s: A process gets at least this long to answer its first health check: imports
            take real time at any speed.
        settle_s: How long after marking a worker ``draining`` a router that is away is given to come back
            and read that from the file; a worker that is idle or finishing by itself need not wait longer.
        quiet_start_s: A process without a health check counts as ready after running this long.
        first_delay_s: Pause after the first failure in a row; each further one doubles it, up to ``max_delay_s``.
        give_up_after: Failures in a row after which a process is left alone: its GPUs are free after 3.75 s of pauses.
        stable_after_s: A process that was ready and ran this long starts a new count.
    """

    grace_floor_s: float = 5.0
    startup_floor_s: float = 60.0
    settle_s: float = 1.0
    quiet_start_s: float = 0.5
    first_delay_s: float = 0.25
    max_delay_s: float = 30.0
    give_up_after: int = 5
    stable_after_s: float = 10.0

    def grace_s(self, entry: ProcessEntry, speed: float) -> float:
        """Return how long ``entry`` may take to stop."""
        return max(entry.grace_s / speed, self.grace_floor_s)

    def startup_s(self, entry: ProcessEntry, speed: float) -> float:
        """Return how long ``entry`` may take to become healthy."""
        return max(entry.startup_s / speed, self.startup_floor_s)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended.

    Attributes:
        reason: Exit code or signal, with the last lines of its log.
    """

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """How far a drain has come.

    Attributes:
        since_s: When the supervisor first saw the entry ``draining``.
        acknowledged: The router confirmed that it sends nothing new.
        router_away: Nothing listens at the router's address, so nothing can confirm, and nothing is sent.
        idle: The newest answer on whether anything is in flight; None before the first.
    """

    since_s: float
    acknowledged: bool = False
    router_away: bool = False
    idle: bool | None = None


@dataclass(frozen=True, slots=True)
class Fault:
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
        fault: What the newest look found besides the health check, or None.
        port_taken: Another process answered on the port of its newest process, which does not listen there.
        verdict: Why the supervisor itself killed it, or None.
    """

    pid: int | None = None
    started_s: float | None = None
    exited: ProcessExit | None = None
    failures: int = 0
    restart_at_s: float | None = None
    healthy_s: float | None = None
    fault: Fault | None = None
    port_taken: bool = False
    drain: Drain | None = None
    terminated_s: float | None = None
    verdict: str | None = None


def plan(
    state: StateFile, observed: Mapping[str, ObservedProcess], now_s: float, limits: Limits
) -> tuple[Action, ...]:
    """Return at most one action per name, in the file's order, strangers last.

    Args:
        state: The desired state, as just read.
        observed: What is known of each name's process; a name never started may be absent.
        now_s: Real monotonic seconds.
        limits: Bounds of waiting.
    """
    view = _View(now_s, state.arbiter.speed, limits)
    actions: list[Action] = []
    for name, entry in state.entries.items():
        action: Action | None = _next(name, entry, observed.get(name, ObservedProcess()), view)
        if action is not None:
            actions.append(action)
    for name, known in observed.items():
        if name in state.entries:
            continue
        gone = known.pid is None
        action = Forget(name) if gone else _wind_up(name, known, now_s, limits.grace_floor_s)
        if action is not None:
            actions.append(action)
    return tuple(actions)


@dataclass(frozen=True, slots=True)
class _View:
    now_s: float
    speed: float
    limits: Limits

    def grace_s(self, entry: ProcessEntry) -> float:
        return self.limits.grace_s(entry, self.speed)


def _next(name: str, entry: ProcessEntry, known: ObservedProcess, view: _View) -> Action | None:
    match entry.state:
        case EntryState.REQUESTED if known.pid is None:
            return Start(name)
        case EntryState.STARTING | EntryState.READY if known.pid is None:
            return _bring_back(name, known, view)
        case EntryState.STARTING | EntryState.READY:
            return _watch(name, entry, known, view)
        case EntryState.DRAINING:
            return _drain(name, entry, known, view)
        case _:
            return _wind_up(name, known, view.now_s, view.grace_s(entry))


def _bring_back(name: str, known: ObservedProcess, view: _View) -> Action | None:
    if known.exited is not None:
        return _after_exit(name, known, known.exited, view.limits)
    if known.restart_at_s is not None and view.now_s < known.restart_at_s:
        return None
    return Start(name)


def _watch(name: str, entry: ProcessEntry, known: ObservedProcess, view: _View) -> Action | None:
    if known.verdict is not None:
        return None
    limits = view.limits
    if known.healthy_s is not None:
        return _watch_served(name, entry, known, view.now_s - known.healthy_s)
    if known.port_taken:
        return Kill(name, f"its port {entry.port} is in use: another process answers there; stop that one")
    started_s = view.now_s if known.started_s is None else known.started_s
    allowed_s = limits.startup_s(entry, view.speed)
    if view.now_s - started_s > allowed_s:
        return Kill(name, f"did not answer its health check within {allowed_s:g} s (real) of its start")
    return None


def _watch_served(
    name: str, entry: ProcessEntry, known: ObservedProcess, unhealthy_s: float
) -> Action | None:
    """Return what follows for a process that has served, by how long ago that was."""
    fault = known.fault
    if fault is not None and unhealthy_s > fault.allowed_s:
        return Kill(name, fault.reason)
    if unhealthy_s > entry.liveness_s:
        return Kill(name, f"answered no health check for {entry.liveness_s:g} s (real)")
    if fault is not None:
        return Mark(name, EntryState.STARTING, fault.reason) if entry.state is EntryState.READY else None
    return Mark(name, EntryState.READY) if entry.state is EntryState.STARTING else None


def _after_exit(name: str, known: ObservedProcess, exited: ProcessExit, limits: Limits) -> Action:
    ran_s = exited.at_s - (exited.at_s if known.started_s is None else known.started_s)
    is_stable = known.healthy_s is not None and ran_s >= limits.stable_after_s
    failures = 1 if is_stable else known.failures + 1
    if failures >= limits.give_up_after:
        return Abandon(name, f"gave up after {failures} failures in a row; the last: {exited.reason}")
    delay_s = min(limits.first_delay_s * 2 ** (failures - 1), limits.max_delay_s)
    return RestartLater(name, exited.reason, exited.at_s + delay_s, failures)


def _drain(name: str, entry: ProcessEntry, known: ObservedProcess, view: _View) -> Action | None:
    if known.pid is None:
        return Retire(name)
    grace_s = view.grace_s(entry)
    if not entry.served or known.terminated_s is not None:
        return _wind_up(name, known, view.now_s, grace_s)
    if known.drain is None:
        return BeginDrain(name)
    waited_s = view.now_s - known.drain.since_s
    is_idle = known.drain.acknowledged and known.drain.idle is True
    unwatched = known.drain.router_away and waited_s >= view.limits.settle_s
    return Terminate(name) if is_idle or unwatched or waited_s >= grace_s else None


def _wind_up(name: str, known: ObservedProcess, now_s: float, grace_s: float) -> Action | None:
    """Return the next step to end a process that is no longer desired: SIGTERM, then SIGKILL, then nothing."""
    if known.pid is None or known.verdict is not None:
        return None
    if known.terminated_s is None:
        return Terminate(name)
    if now_s - known.terminated_s >= grace_s:
        return Kill(name, f"did not end within {grace_s:g} s (real) of SIGTERM")
    return None


def plan_stop(
    state: StateFile, observed: Mapping[str, ObservedProcess], now_s: float, limits: Limits, *, force: bool
) -> tuple[Action, ...]:
    """Return the next steps of stopping the whole graph; empty while waiting, or when nothing runs.

    The planner goes first, so that nothing is scaled any more; then the router, which takes no new request
    and finishes its streams; the workers only when the router is gone, because its streams come from them.

    Args:
        state: For roles and grace periods; processes that are in `observed` only are stopped with the workers.
        observed: What is known of each process.
        now_s: Real monotonic seconds.
        limits: Floors.
        force: SIGTERM to all at once, and SIGKILL after the floor.
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
        patient = entry is not None and not force
        grace_s = limits.grace_s(entry, state.arbiter.speed) if entry and patient else limits.grace_floor_s
        action = _wind_up(name, known, now_s, grace_s)
        if action is not None:
            actions.append(action)
    return tuple(actions)
