"""What the supervisor sees between two plans: health of the processes, progress of the drains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from penstock_core.local_state import EntryState
from penstock_local.plan import Limits, Seen
from penstock_local.probes import NoAnswer, Probes, RouterView
from penstock_local.statefile import Entry, StateFile

FIRST_PROBE_S = 0.1
"""Real seconds between health checks of a process that starts. Chosen."""
READY_PROBE_S = 2.0
"""Real seconds between health checks of a process that serves. Chosen."""


class Sight:
    """Asks the processes over HTTP and writes the answers into the supervisor's memory.

    Each question runs in a task of its own, at most one per process, so that one process that hangs delays
    nothing else. Used as an async context manager; leaving it cancels what is still being asked. A name
    that leaves the memory while its answer is on the way is left out.
    """

    __slots__ = ("_asking", "_due_s", "_group", "_limits", "_probes", "_seen")

    def __init__(self, seen: dict[str, Seen], limits: Limits) -> None:
        self._seen = seen
        self._limits = limits
        self._probes = Probes()
        self._due_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._asking.values():
            task.cancel()
        await self._group.__aexit__(kind, error, trace)
        await self._probes.close()

    def forget(self, name: str) -> None:
        """Ask ``name`` at the next look, as if for the first time."""
        self._due_s.pop(name, None)
        pending = self._asking.pop(name, None)
        if pending is not None:
            pending.cancel()

    def look(self, state: StateFile) -> None:
        """Begin to ask every process that is due."""
        now_s = time.monotonic()
        for name, known in self._seen.items():
            entry = state.entries.get(name)
            pending = self._asking.get(name)
            if entry is None or known.pid is None or (pending is not None and not pending.done()):
                continue
            if entry.state in {EntryState.STARTING, EntryState.READY}:
                if self._due_s.get(name, 0.0) <= now_s:
                    self._asking[name] = self._group.create_task(self._health(name, entry))
            elif known.drain is not None and known.terminated_s is None:
                self._asking[name] = self._group.create_task(
                    self._drain(state.arbiter.router_url, name, entry)
                )

    async def _health(self, name: str, entry: Entry) -> None:
        if entry.url is None or entry.health_path is None:
            started_s = self._seen[name].started_s
            ran_s = 0.0 if started_s is None else time.monotonic() - started_s
            healthy = ran_s >= self._limits.quiet_start_s
        else:
            healthy = await self._probes.is_healthy(entry.url + entry.health_path)
        now_s = time.monotonic()
        if healthy:
            self._note(name, healthy_s=now_s)
        self._due_s[name] = now_s + (READY_PROBE_S if healthy else FIRST_PROBE_S)

    async def _drain(self, router_url: str, name: str, entry: Entry) -> None:
        """Make sure that the router sends nothing new, then see what is still in flight."""
        before = self._seen[name].drain
        confirmed: bool | NoAnswer = before is not None and before.acknowledged
        if confirmed is not True:
            confirmed = await self._probes.drain(router_url, name)
        view = await self._probes.router(router_url)
        idle = await self._is_idle(name, entry, view)
        known = self._seen.get(name)
        if known is not None and known.drain is not None:
            away = view is NoAnswer.AWAY
            progress = replace(
                known.drain,
                acknowledged=confirmed is True or _says_draining(view, name),
                router_away=away and confirmed is not True,
                idle=idle,
            )
            self._note(name, drain=progress)

    async def _is_idle(self, name: str, entry: Entry, view: RouterView | NoAnswer) -> bool | None:
        """Return whether nothing is in flight: by the router's count, then by the worker's own.

        A router that does not answer may have a request on its way to the worker, so nothing is known.
        """
        if view is NoAnswer.SILENT:
            return None
        if isinstance(view, RouterView) and name in view.workers and view.workers[name].inflight_requests > 0:
            return False
        own = await self._probes.inflight(entry.url) if entry.url else None
        if own is None:
            return True if isinstance(view, RouterView) else None
        return own == 0

    def _note(self, name: str, **fields: object) -> None:
        known = self._seen.get(name)
        if known is not None:
            self._seen[name] = replace(known, **fields)  # type: ignore[arg-type]  # names are Seen's own


def _says_draining(view: RouterView | NoAnswer, name: str) -> bool:
    """Return whether the router, which reads the statefile too, has stopped sending there by itself.

    It settles the drain where the router asks for an API key that the supervisor does not hold.
    """
    return isinstance(view, RouterView) and name in view.workers and view.workers[name].state == "draining"
