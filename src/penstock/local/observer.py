"""What the supervisor observes between two plans: health of the processes, progress of the drains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from penstock.api import Role
from penstock.core.local_state import EntryState
from penstock.core.worker_metrics import NO_PROGRESS_KNOWN, EngineProgress, running, says_hangs
from penstock.local.liveness import (
    ProcessorTime,
    computed_by_children,
    holds_port,
    identify,
    stopped_in_group,
)
from penstock.local.plan import QUIET_START_S, ObservedProcess, ProcessFault, startup_s
from penstock.local.probes import Frontend, NoAnswer, Probes, RouterView, frontend_of
from penstock.local.statefile import ProcessEntry, StateFile
from penstock.local.status import read_planner
from penstock.runtimes import LIVENESS_S, PLANNER_ROLE

FIRST_PROBE_S = 0.1
"""Real seconds between health checks of a process that starts. Chosen."""
READY_PROBE_S = 2.0
"""Real seconds between health checks of a process that serves. Chosen."""


class ProcessObserver:
    """Asks the processes over HTTP and writes the answers into the supervisor's memory.

    Each probe runs in a task of its own, at most one per process, so that one process that hangs delays
    nothing else. Used as an async context manager; leaving it cancels what is still being probed. A name
    that leaves the memory while its answer is on the way is left out.
    """

    def __init__(self, observed: dict[str, ObservedProcess]) -> None:
        self._observed = observed
        self._probes = Probes()
        self._due_s: dict[str, float] = {}
        self._progress: dict[str, EngineProgress] = {}
        self._computed: dict[str, ProcessorTime] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._probing.values():
            task.cancel()
        await self._group.__aexit__(kind, error, trace)
        await self._probes.close()

    def forget(self, name: str) -> None:
        """Probe ``name`` at the next call of `probe`, as if for the first time."""
        self._due_s.pop(name, None)
        self._progress.pop(name, None)
        self._computed.pop(name, None)
        pending = self._probing.pop(name, None)
        if pending is not None:
            pending.cancel()

    def close_connections(self, entry: ProcessEntry) -> None:
        """Keep no connection to a process that is to end: it waits for its clients."""
        if entry.url is not None:
            self._probes.close_connections(entry.url)

    def probe(self, state: StateFile) -> None:
        """Begin to probe every process that is due."""
        now_s = time.monotonic()
        for name, known in self._observed.items():
            entry = state.entries.get(name)
            pending = self._probing.get(name)
            if entry is None or known.pid is None or (pending is not None and not pending.done()):
                continue
            if entry.state in {EntryState.STARTING, EntryState.READY}:
                if self._due_s.get(name, 0.0) <= now_s:
                    self._probing[name] = self._group.create_task(self._health(name, entry, state))
            elif known.drain is not None and known.terminated_s is None:
                frontend = frontend_of(state, self._probes)
                self._probing[name] = self._group.create_task(self._drain(frontend, name, entry))

    async def _health(self, name: str, entry: ProcessEntry, state: StateFile) -> None:
        known, planner_dir = self._observed[name], state.arbiter.planner_log_dir
        fault = _stopped(known, entry)
        if fault is None and _has_left(known, entry):
            self._note(name, is_leaving=True)
            return
        if fault is not None:  # a partly stopped group may still answer
            healthy = False
        elif entry.url is not None and entry.health_path is not None:
            healthy = await self._answers(name, known, entry, entry.url + entry.health_path)
        elif entry.role == PLANNER_ROLE and planner_dir is not None:
            healthy = read_planner(planner_dir, known.pid) is not None
        else:
            uptime_s = 0.0 if known.started_s is None else time.monotonic() - known.started_s
            healthy = uptime_s >= QUIET_START_S
        if healthy and entry.is_worker and entry.url is not None:
            fault = await self._stall(name, entry, entry.url, state)
        now_s = time.monotonic()
        self._note(name, fault=fault)
        if healthy and fault is None:
            self._note(name, healthy_s=now_s)
        self._due_s[name] = now_s + (READY_PROBE_S if healthy or fault is not None else FIRST_PROBE_S)

    async def _answers(self, name: str, known: ObservedProcess, entry: ProcessEntry, url: str) -> bool:
        """Return whether the process itself answers its health check; note another one that does."""
        is_healthy = await self._probes.health(url) is None
        if is_healthy and known.healthy_s is None and not _is_own(known, entry):
            self._note(name, port_taken=True)
            return False
        return is_healthy

    async def _stall(self, name: str, entry: ProcessEntry, url: str, state: StateFile) -> ProcessFault | None:
        """Return the fault of a worker whose engine makes no token of the requests that it has.

        What the frontend has sent there counts, too: a core that hung before it saw a request reports none. So does its
        finding that the engine hangs, because it has taken the requests away then. Children that compute, as one that
        compiles, count as progress for as long as a start may take.
        """
        reading = await self._probes.engine(url + entry.metrics_path)
        if reading is None:
            return None
        sent = 0
        if not running(reading):
            view = await frontend_of(state, self._probes).view({name: entry})
            seen = view.workers.get(name) if isinstance(view, RouterView) else None
            sent = 0 if seen is None else seen.inflight_requests + says_hangs(seen.reason)
        before, now_s = self._progress.get(name, NO_PROGRESS_KNOWN), time.monotonic()
        progress = self._progress[name] = before.after(
            reading,
            now_s,
            inflight_requests=sent,
            limit_s=entry.stall_s,
            compile_s=startup_s(entry, state.arbiter.speed),
            is_working=self._computes(name, is_doubted=before.stalled_for_s(now_s) >= entry.stall_s / 2),
        )
        problem = progress.problem(entry.stall_s)
        return None if problem is None else ProcessFault(problem, 0.0)

    def _computes(self, name: str, *, is_doubted: bool) -> bool:
        """Return whether the children of a process have computed since the last call.

        Read only in doubt: it costs a look at every process of the machine.
        """
        known, before = self._observed.get(name), self._computed.pop(name, None)
        leader = None if known is None or known.pid is None or not is_doubted else identify(known.pid)
        if leader is None:
            return False
        now = self._computed[name] = computed_by_children(leader)
        return before is not None and now.has_run_since(before)

    async def _drain(self, frontend: Frontend, name: str, entry: ProcessEntry) -> None:
        """Make sure that the frontend sends nothing new, then record what is still in flight."""
        before = self._observed[name].drain
        confirmed: bool | NoAnswer = before is not None and before.acknowledged
        if confirmed is not True:
            confirmed = await frontend.drain(name, entry)
        view = await frontend.view({name: entry})
        idle = await self._is_idle(name, entry, view)
        known = self._observed.get(name)
        if known is not None and known.drain is not None:
            away = view is NoAnswer.NOT_LISTENING
            settled = time.monotonic() - known.drain.since_s >= frontend.settle_s
            progress = replace(
                known.drain,
                acknowledged=(confirmed is True and settled) or _says_draining(view, name),
                router_away=away and confirmed is not True,
                idle=idle,
            )
            self._note(name, drain=progress)

    async def _is_idle(self, name: str, entry: ProcessEntry, view: RouterView | NoAnswer) -> bool | None:
        """Return whether nothing is in flight or kept for decode: by the router's count, then by the worker's own page.

        A router that does not answer may have a request on its way to the worker, so nothing is known.
        """
        if view is NoAnswer.SILENT:
            return None
        if isinstance(view, RouterView) and name in view.workers and view.workers[name].inflight_requests > 0:
            return False
        own = (
            await self._probes.is_busy(
                entry.url + entry.metrics_path, keeps_leases=entry.role == Role.PREFILL
            )
            if entry.url
            else None
        )
        if own is None:
            return True if isinstance(view, RouterView) else None
        return not own

    def _note(self, name: str, **fields: object) -> None:
        known = self._observed.get(name)
        if known is not None:
            self._observed[name] = replace(known, **fields)  # type: ignore[arg-type]  # names are ObservedProcess's own


def _stopped(known: ObservedProcess, entry: ProcessEntry) -> ProcessFault | None:
    """Return the fault of a process that has served and is stopped, itself or one of its group.

    It does not continue by itself, so it gets no longer than Penstock's own processes, however patient an engine's limit.
    """
    leader = None if known.pid is None or known.healthy_s is None else identify(known.pid)
    problem = None if leader is None else stopped_in_group(leader)
    return None if problem is None else ProcessFault(problem, min(entry.liveness_s, LIVENESS_S))


def _has_left(known: ObservedProcess, entry: ProcessEntry) -> bool:
    """Return whether a router that served has stopped accepting: somebody told it to end, and it finishes its streams."""
    if entry.role != Role.ROUTER or known.healthy_s is None or known.pid is None or entry.port is None:
        return False
    process = identify(known.pid)
    return process is not None and holds_port(process, entry.port) is False


def _is_own(known: ObservedProcess, entry: ProcessEntry) -> bool:
    """Return whether the process itself listens on its port: another program there may answer in its place.

    Asked before its first healthy answer only, for as long as it listens no other process can.
    """
    process = None if known.pid is None else identify(known.pid)
    if process is None or entry.port is None:
        return False
    return holds_port(process, entry.port) is not False


def _says_draining(view: RouterView | NoAnswer, name: str) -> bool:
    """Return whether the router, which reads the statefile too, has stopped sending there by itself.

    It settles the drain where the router asks for an API key that the supervisor does not hold.
    """
    return isinstance(view, RouterView) and name in view.workers and view.workers[name].state == "draining"
