"""Runs the plan: observes the statefile and the processes, computes `plan`, and acts on it.

Lives in the arbiter process, in one asyncio task; nothing else changes what it remembers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.api import Role
from penstock.core import logs
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ClusterError, ConfigError, ConflictError, NotFoundError, PenstockError
from penstock.core.local_state import EntryState
from penstock.gpu_pool.reclaim import cut_drain_message
from penstock.local import liveness, process_log
from penstock.local.build import argv_of, environment_of, ports_for
from penstock.local.held_sockets import HeldSockets
from penstock.local.launcher import ExitedProcess, Launcher
from penstock.local.observer import ProcessObserver
from penstock.local.plan import (
    Drain,
    ObservedProcess,
    ProcessAction,
    ProcessExit,
    ProcessStep,
    plan,
    plan_stop,
)
from penstock.local.statefile import ProcessEntry, ProcessId, StateFile, retire, switched
from penstock.local.store import StateStore, UnwritableError, cache_folder, drop_cache
from penstock.runtimes import PORT

_Change = Callable[[StateFile], StateFile]
_log = logs.get_logger(__name__)


class StatefileRecord:
    """One statefile, as its arbiter edits it.

    Every method but `started` raises ConflictError when the file's lock is held for too long; the caller tries again
    at its next tick.
    """

    def __init__(self, store: StateStore, state: StateFile) -> None:
        """Begin with the state just written."""
        self.store = store
        self.state = state
        self._pending: tuple[_Change, ...] = ()
        """Edits that `state` holds and the file lacks."""

    def read(self) -> StateFile:
        """Return the file as it is now, with edits that could not be written yet."""
        if self._pending:
            self._edit()
            return self.state
        try:
            state = self.store.read()
            why = "it is gone"
        except ConfigError as exc:
            state, why = None, str(exc)
        if state is None:
            _log.error("statefile lost, written again from memory", path=str(self.store.path), why=why)
            self._edit()
        else:
            self.state = state
        return self.state

    def stopping(self) -> None:
        """Record that the graph is stopping: nothing may be added to it from now on."""
        self._edit(lambda state: replace(state, arbiter=replace(state.arbiter, stopping=True)))

    def claim_start(self, name: str) -> ProcessEntry | None:
        """Write ``starting`` with its ports and return the entry; None if it has been removed since."""
        entries = self.state.entries
        if name in entries:
            ports = ports_for(entries[name], entries.values())
            url = f"{entries[name].scheme}://127.0.0.1:{ports[PORT]}" if PORT in ports else None
            self.change(name, state=EntryState.STARTING, ports=ports, url=url, renew=False)
        entry = self.state.entries.get(name)
        return entry if entry is not None and entry.is_replica else None

    def started(self, name: str, process: ProcessId) -> None:
        """Write which process serves an entry, even one removed since; a file that is locked gets it at the next look.

        Until then a successor would end the process as an unrecorded one.
        """

        def edit(state: StateFile) -> StateFile:
            return state.change(name, pid=process.pid, started=process.started)

        try:
            self._edit(edit)
        except ConflictError as exc:
            self.state = edit(self.state)
            self._keep((*self._pending, edit), exc)

    def change(self, name: str, **fields: Any) -> None:
        """Write fields of an entry, unless it has been removed since."""

        def edit(state: StateFile) -> StateFile:
            entry = state.entries.get(name)
            return state.change(name, **fields) if entry is not None and entry.is_replica else state

        self._edit(edit)

    def restarting(self, name: str, reason: str | None) -> None:
        """Write that the process died and comes back."""
        entry = self.state.entries.get(name)
        restarts = 0 if entry is None else entry.restarts + 1
        self.change(name, state=EntryState.STARTING, pid=None, started=None, restarts=restarts, reason=reason)

    def switched(self, name: str) -> None:
        """Write the role that a worker has drained for, unless it has been removed since."""
        self._edit(lambda state: switched(state, name))

    def cut(self, name: str) -> str:
        """Write that a drain was cut, and return what is said of it."""
        arbiter = self.state.arbiter
        sentence = cut_drain_message(name, arbiter.reclaim_s or 0.0)
        at_s = SimulatedClock(arbiter.speed).now_s()

        def edit(state: StateFile) -> StateFile:
            count = state.arbiter.cut_drains + 1
            arbiter = replace(state.arbiter, cut_drains=count, last_cut=sentence, last_cut_s=at_s)
            return replace(state, arbiter=arbiter)

        self._edit(edit)
        return sentence

    def leaves(self, name: str, after: str) -> None:
        """Write that the process of a router finishes as ``after``, and that another one starts in its place."""

        def edit(state: StateFile) -> StateFile:
            entry = state.entries.get(name)
            if entry is None or not entry.is_replica:
                return state
            state = state.with_entry(after, replace(entry, state=EntryState.DRAINING, served=False, url=None))
            return state.change(
                name,
                state=EntryState.STARTING,
                pid=None,
                started=None,
                restarts=entry.restarts + (not entry.renew),
                renew=False,
            )

        self._edit(edit)

    def retired(self, name: str) -> None:
        """Take out an entry whose process has ended."""
        self._edit(lambda state: retire(state, name))

    def _edit(self, *changes: _Change) -> None:
        """Make changes on the file, after those that it still lacks; keep all in memory where it cannot be written."""
        every = (*self._pending, *changes)

        def apply(state: StateFile) -> tuple[StateFile, None]:
            for change in every:
                state = change(state)
            self.state = state
            return state, None

        try:
            self.store.update(apply)
        except UnwritableError as exc:
            self._keep(every, exc)
        except (NotFoundError, ConfigError):
            for change in changes:
                self.state = change(self.state)
            try:
                self.store.write(self.state)
            except ConfigError as exc:
                self._keep(every or (lambda state: state,), exc)
            else:
                self._pending = ()
        else:
            if self._pending:
                _log.info("statefile can be written again", path=str(self.store.path))
            self._pending = ()

    def _keep(self, changes: tuple[_Change, ...], why: PenstockError) -> None:
        if not self._pending:
            _log.error("statefile cannot be written; going on from memory", why=str(why))
        self._pending = changes


TICK_S = 0.1
"""Real seconds between two ticks. Chosen: small against a planner's interval at speed 20 (1.5 s)."""
_WORDLESS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT})
"""Ends that the process did not cause: its last log lines explain nothing."""
UNKILLABLE_S = 10.0
"""Real seconds after SIGKILL to the last process from which a stop no longer waits. Chosen: only a process that the
kernel holds, in a driver for example, takes longer."""
LOG_CHECK_S = 5.0
"""Real seconds between checks of the sizes of the logs. Chosen."""


class Supervisor:
    """Keeps the processes of one statefile as the file wants them."""

    def __init__(
        self, store: StateStore, launcher: Launcher, state: StateFile, held: HeldSockets | None = None
    ) -> None:
        """Take charge of a statefile that has just been written, and of the sockets that are held for its routers."""
        self._held = HeldSockets() if held is None else held
        self._record = StatefileRecord(store, state)
        self._launcher = launcher
        self._observed: dict[str, ObservedProcess] = {}
        self._observer = ProcessObserver(self._observed)
        self._log_starts: dict[str, int] = {}
        self._logs_due_s = 0.0
        self._is_stopping = False
        self._is_forced = False

    def adopt(self) -> None:
        """Take charge of the processes that a killed arbiter recorded; those that have ended since count as exits.

        A stop that had begun continues.
        """
        now_s = time.monotonic()
        for name, entry in self._record.state.entries.items():
            if (process := entry.process) is not None:
                self._launcher.adopt(name, process)
                healthy_s = now_s if entry.state is EntryState.READY else None
                # A second SIGTERM would cut the streams of a router that has got one.
                has_left = (
                    entry.role == Role.ROUTER
                    and entry.state is EntryState.DRAINING
                    and entry.port is not None
                    and liveness.holds_port(process, entry.port) is False
                )
                self._observed[name] = ObservedProcess(
                    pid=process.pid,
                    started_s=now_s,
                    healthy_s=healthy_s,
                    terminated_s=now_s if has_left else None,
                )
                log = process_log.log_path(self._record.state.arbiter.log_dir, name)
                self._log_starts[name] = process_log.size_of(log)
        _log.info("processes adopted", names=list(self._observed))
        if self._record.state.arbiter.stopping:
            self.request_stop()

    def request_stop(self, *, force: bool = False) -> None:
        """Begin to stop the graph; a second request, or ``force``, skips all waiting."""
        self._is_forced = self._is_forced or force or self._is_stopping
        self._is_stopping = True

    async def run(self) -> None:
        """Supervise until a stop was requested and every process has ended, or resists SIGKILL."""
        async with self._observer:
            while not self._is_stopping:
                await self._survive(self.tick())
                await asyncio.sleep(TICK_S)
            _log.info("stopping the graph", force=self._is_forced)
            last_kill_s = time.monotonic()
            while running := [known for known in self._observed.values() if known.pid is not None]:
                await self._survive(self.stop_tick())
                await asyncio.sleep(TICK_S)
                if any(known.verdict is None for known in running):
                    last_kill_s = time.monotonic()
                elif time.monotonic() - last_kill_s > UNKILLABLE_S:
                    _log.error("processes resist SIGKILL", pids=[known.pid for known in running])
                    return

    async def tick(self) -> None:
        """Observe once and carry out the plan."""
        now_s = time.monotonic()
        await self._collect_exits(now_s)
        state = self._record.read()
        self._observer.probe(state)
        for action in plan(state, self._observed, now_s):
            await self._survive(self._act(action, now_s))
        if now_s >= self._logs_due_s:
            self._logs_due_s = now_s + LOG_CHECK_S
            for name in (*state.entries, process_log.ARBITER):
                process_log.bound(process_log.log_path(state.arbiter.log_dir, name))

    async def stop_tick(self) -> None:
        """Take the next steps of stopping."""
        now_s = time.monotonic()
        await self._collect_exits(now_s)
        for action in plan_stop(self._record.state, self._observed, now_s, force=self._is_forced):
            await self._act(action, now_s)
            self._release(action.name)
        if not self._record.state.arbiter.stopping:
            self._record.stopping()

    async def _survive(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except (ClusterError, ConfigError) as exc:
            _log.warning("step postponed", why=str(exc))
        except Exception:  # noqa: BLE001 - task root: a fault of the supervisor must not end what it supervises
            _log.exception("step failed")

    async def _collect_exits(self, now_s: float) -> None:
        for ended in self._launcher.reap():
            known = self._observed.get(ended.name)
            await self._survive(self._launcher.forget(ended.name))
            if known is None or known.pid != ended.pid:
                continue
            reason = self._exit_reason(ended, known)
            _log.info("process ended", name=ended.name, pid=ended.pid, reason=reason)
            self._observed[ended.name] = replace(known, pid=None, exited=ProcessExit(now_s, reason))
            if ended.code != 0:
                await asyncio.to_thread(drop_cache, self._cache_of(ended.name))

    def _exit_reason(self, ended: ExitedProcess, known: ObservedProcess) -> str:
        if known.verdict is not None:
            how = known.verdict
        elif ended.code is None:
            how = "ended; its exit code is unknown"
        elif ended.code < 0:
            how = f"killed by {signal.Signals(-ended.code).name}"
        else:
            how = f"exit code {ended.code}"
        is_orderly = ended.code == 0 and known.terminated_s is not None
        if is_orderly or ended.code in _WORDLESS:
            return how
        path = process_log.log_path(self._record.state.arbiter.log_dir, ended.name)
        words = process_log.last_lines(
            path, self._log_starts.get(ended.name, 0), only_errors=ended.code is None
        )
        return f"{how}: {words}" if words else how

    async def _act(self, action: ProcessAction, now_s: float) -> None:
        name, reason = action.name, action.reason
        match action.step:
            case ProcessStep.START:
                await self._start(name, now_s)
            case ProcessStep.MARK:
                served = {"served": True} if action.state is EntryState.READY else {}
                self._record.change(name, state=action.state, reason=reason, **served)
                _log.info("marked", name=name, state=str(action.state), reason=reason)
            case ProcessStep.RESTART_LATER:
                self._record.restarting(name, reason)
                self._observed[name] = ObservedProcess(failures=action.failures, restart_at_s=action.at_s)
                _log.warning("restart scheduled", name=name, failures=action.failures, reason=reason)
            case ProcessStep.ABANDON:
                self._record.change(
                    name, state=EntryState.FAILED, gpus=(), pid=None, started=None, reason=reason
                )
                self._release(name)
                self._drop(name)
                _log.error("gave up", name=name, reason=reason)
            case ProcessStep.BEGIN_DRAIN:
                _log.info("draining", name=name)
                self._observed[name] = replace(self._observed[name], drain=Drain(now_s))
            case ProcessStep.TERMINATE | ProcessStep.CUT_DRAIN | ProcessStep.KILL:
                self._end(action, now_s)
            case ProcessStep.SWITCH:
                self._switch(name, now_s)
            case ProcessStep.SUCCEED:
                self._succeed(name, now_s)
            case ProcessStep.RETIRE | ProcessStep.FORGET:
                self._forget(action)

    def _forget(self, action: ProcessAction) -> None:
        if action.step is ProcessStep.RETIRE:
            self._record.retired(action.name)
            _log.info("replica removed", name=action.name)
        self._drop(action.name)

    async def _start(self, name: str, now_s: float) -> None:
        entry = self._record.claim_start(name)
        if entry is None:
            return
        log = process_log.log_path(self._record.state.arbiter.log_dir, name)
        self._log_starts[name] = process_log.size_of(log)
        self._observer.forget(name)
        fresh = ObservedProcess(
            started_s=now_s, failures=self._observed.get(name, ObservedProcess()).failures
        )
        environment = environment_of(entry, str(self._record.store.path), self._cache_of(name), os.environ)
        await self._launcher.forget(name)
        try:
            process = await self._launcher.start(
                name, argv_of(entry), environment, log, held=self._held.descriptor_for(entry)
            )
        except ConflictError:
            raise
        except ClusterError as exc:
            self._observed[name] = replace(fresh, exited=ProcessExit(now_s, str(exc)))
            return
        self._observed[name] = replace(fresh, pid=process.pid)
        _log.info("process started", name=name, pid=process.pid, gpus=list(entry.gpus), port=entry.port)
        self._record.started(name, process)

    def _end(self, action: ProcessAction, now_s: float) -> None:
        name, reason = action.name, action.reason
        if action.step is ProcessStep.CUT_DRAIN:
            self._observed[name] = replace(self._observed[name], is_cut=True)
            _log.warning("drain cut", name=name, reason=self._record.cut(name))
        if action.step is not ProcessStep.KILL:
            _log.info("terminating", name=name)
            if name in self._record.state.entries:
                self._observer.close_connections(self._record.state.entries[name])
            self._launcher.send(name, signal.SIGTERM)
            self._observed[name] = replace(self._observed[name], terminated_s=now_s)
        else:
            _log.warning("killing", name=name, reason=reason)
            self._launcher.send(name, signal.SIGKILL)
            self._observed[name] = replace(self._observed[name], verdict=reason)

    def _succeed(self, name: str, now_s: float) -> None:
        """Keep the process of a router that finishes under a name of its own, so that the next tick starts another."""
        known = self._observed[name]
        leaving = f"{name}-leaving-{known.pid}"
        self._record.leaves(name, leaving)
        self._launcher.rename(name, leaving)
        if not known.is_leaving:
            self._observer.close_connections(self._record.state.entries[name])
            self._launcher.send(leaving, signal.SIGTERM)
        self._observed[leaving] = replace(known, terminated_s=now_s, fault=None, is_leaving=False)
        self._observed[name] = ObservedProcess()
        self._observer.forget(name)
        _log.info("router leaves, its successor starts", name=name, pid=known.pid, leaves_as=leaving)

    def _switch(self, name: str, now_s: float) -> None:
        """Give a drained worker its new role; one whose process has ended meanwhile starts in it."""
        self._record.switched(name)
        running = self._observed.get(name, ObservedProcess()).pid
        self._observed[name] = ObservedProcess(pid=running, started_s=None if running is None else now_s)
        self._observer.forget(name)
        role = self._record.state.entries[name].role if name in self._record.state.entries else ""
        _log.info("role switched", name=name, role=role, pid=running)

    def _cache_of(self, name: str) -> Path:
        return cache_folder(self._record.state.arbiter.namespace) / name

    def _release(self, name: str) -> None:
        """Let the clients of an entry that nothing will serve be refused, in place of waiting."""
        if name in self._record.state.entries:
            self._held.release(self._record.state.entries[name])

    def _drop(self, name: str) -> None:
        self._observed.pop(name, None)
        self._log_starts.pop(name, None)
        self._observer.forget(name)
