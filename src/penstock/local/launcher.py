"""Thin adapter over circus, which it alone imports: starts, signals and reaps one process per watcher; adopts others.

circus owns the fork, the session of each child, the reaping and the control endpoint (`circusctl` shows the watchers). Of
circus itself ``respawn`` is off, because it starts again at once, at the same port; so are its own stop, which holds its
one command lock for the grace, its periodic check, which competes for that lock, and its streams, which are pipes that
break with the arbiter under processes that live on.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from circus.arbiter import Arbiter
from circus.exc import ConflictError as CircusConflictError
from circus.watcher import Watcher
from tornado.ioloop import IOLoop

from penstock.core import logs
from penstock.core.errors import ClusterError, ConflictError
from penstock.local import exec_child, liveness
from penstock.local.liveness import identify
from penstock.local.statefile import ProcessId

_log = logs.get_logger(__name__)
_NO_PERIODIC_CHECK = -1.0


@dataclass(frozen=True, slots=True)
class ExitedProcess:
    """One process that has ended with its entire group: name, pid and exit code (negative: signal; None: unknown)."""

    name: str
    pid: int
    code: int | None


class _Arbiter(Arbiter):  # type: ignore[misc]  # circus ships no types
    """Hands circus' `quit` command to the supervisor, so that it drains like any other stop."""

    on_exit_request: Callable[[], None] | None = None

    def stop(self) -> Any:
        if self.on_exit_request is not None:
            self.on_exit_request()
            return None
        return super().stop()


class Launcher:
    """Processes of one arbiter, by name."""

    def __init__(self, *, endpoint: str, pubsub_endpoint: str) -> None:
        """Prepare circus inside the running asyncio loop."""
        self._ended: list[ExitedProcess] = []
        self._processes: dict[str, ProcessId] = {}
        self._adopted: dict[str, ProcessId] = {}
        self._entries: dict[str, str] = {}
        """Which entry the process of a watcher serves; circus renames none."""
        self._orphaned: dict[str, float] = {}
        """When a group was found whose leader has ended, real monotonic seconds."""
        kept = {number: signal.getsignal(number) for number in _CIRCUS_SIGNALS}
        self._context = zmq.Context()
        self._arbiter = _Arbiter(
            [],
            endpoint,
            pubsub_endpoint,
            check_delay=_NO_PERIODIC_CHECK,
            context=self._context,
            loop=IOLoop.current(),
            proc_name="penstock-arbiter",
        )
        for number, handler in kept.items():
            signal.signal(number, handler)

    async def open(self, on_exit_request: Callable[[], None]) -> None:
        """Bind the endpoints; ``on_exit_request`` is called when `circusctl quit` asks the arbiter to end."""
        try:
            await self._arbiter.start()
        except zmq.ZMQError as exc:
            raise ClusterError(f"circus cannot bind its endpoints: {exc}") from exc
        self._arbiter.on_exit_request = on_exit_request

    async def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, *, held: int | None = None
    ) -> ProcessId:
        """Start one process that writes to ``log``; it is given the listening socket ``held``, a file descriptor."""
        socket = "-" if held is None else str(held)
        child = ["-I", "-S", exec_child.__file__, str(log), socket, *argv]
        if held is not None:
            os.set_inheritable(held, True)
        watcher_name = name if name not in self._entries else f"{name}-{time.monotonic_ns()}"
        self._entries[watcher_name] = name
        try:
            watcher = self._arbiter.add_watcher(
                watcher_name,
                shlex.quote(sys.executable),
                args=child,
                numprocesses=1,
                singleton=True,
                respawn=False,
                max_retry=1,
                copy_env=True,
                env=dict(env),
                hooks={"after_reap": (self._note_exit, True)},
                use_sockets=held is not None,
            )
            await watcher.start()
        except CircusConflictError as exc:
            raise ConflictError(f"{name}: circus is busy: {exc}") from exc
        finally:
            if held is not None:
                os.set_inheritable(held, False)
        pids = watcher.get_active_pids()
        found = identify(pids[0]) if pids else None
        if found is None:
            await self.forget(name)
            raise ClusterError(f"{name}: the process ended at once or could not be forked; see {log}")
        self._processes[name] = found
        return found

    def adopt(self, name: str, process: ProcessId) -> None:
        """Take charge of a process that a killed arbiter started and recorded; it may have ended since."""
        self._processes[name] = process
        self._adopted[name] = process

    def rename(self, name: str, after: str) -> None:
        """Know a process by another name, so that its successor can have its own."""
        for processes in (self._processes, self._adopted):
            if name in processes:
                processes[after] = processes.pop(name)
        for watcher_name, entry in self._entries.items():
            if entry == name:
                self._entries[watcher_name] = after

    def send(self, name: str, number: signal.Signals) -> None:
        """Signal a process; SIGKILL reaches its entire group. Does nothing once it has ended."""
        process = self._processes.get(name)
        if process is not None:
            liveness.send(process, number)

    def reap(self) -> list[ExitedProcess]:
        """Return the processes that have ended since the last call, each with its entire group.

        Children that a leader leaves serve nothing and may hold GPU memory, so they are killed, resource trackers
        once they had time to clear up; the leader is returned once the last of them is gone.
        """
        self._arbiter.reap_processes()
        for name, process in list(self._adopted.items()):
            if not liveness.is_alive(process):
                del self._adopted[name]
                self._ended.append(ExitedProcess(name, process.pid, None))
        ends, self._ended = self._ended, []
        gone = []
        for ended in ends:
            if self._kill_orphans(ended):
                self._ended.append(ended)
            else:
                gone.append(ended)
                self._orphaned.pop(ended.name, None)
                self._processes.pop(ended.name, None)
        return gone

    def _kill_orphans(self, ended: ExitedProcess) -> bool:
        """Kill the rest of the group of an ended leader; return whether any was left."""
        process = self._processes.get(ended.name)
        if process is None or process.pid != ended.pid:
            return False
        orphans = liveness.group_of(process)
        if not orphans:
            return False
        now_s = time.monotonic()
        if ended.name not in self._orphaned:
            pids = [each.pid for each in orphans]
            _log.warning("killing the children of a process that is gone", name=ended.name, pids=pids)
        liveness.send(process, signal.SIGKILL)
        if now_s - self._orphaned.setdefault(ended.name, now_s) > liveness.CLEANING_S:
            liveness.kill_trackers(process)
        return True

    async def forget(self, name: str) -> None:
        """Remove the watcher of a process that has ended."""
        for watcher_name in [each for each, entry in self._entries.items() if entry == name]:
            with contextlib.suppress(KeyError):
                self._arbiter.get_watcher(watcher_name)
                try:
                    await self._arbiter.rm_watcher(watcher_name)
                except CircusConflictError as exc:
                    raise ConflictError(f"{name}: circus is busy: {exc}") from exc
            del self._entries[watcher_name]

    async def close(self) -> None:
        """Kill what still runs, release the endpoints. Never fails."""
        for name in self._processes:
            self.send(name, signal.SIGKILL)
        self._arbiter.on_exit_request = None
        with contextlib.suppress(Exception):
            self._arbiter.stop_controller_and_close_sockets()
        self._context.destroy(linger=0)

    def _note_exit(self, *, watcher: Watcher, process_pid: int, exit_code: int | None, **_: object) -> bool:
        self._ended.append(
            ExitedProcess(self._entries.get(watcher.name, watcher.name), process_pid, exit_code)
        )
        return True


_CIRCUS_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)
"""circus installs handlers for these in its constructor; the arbiter process has its own."""
