"""Work that is done again and again beside requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from penstock.core.clock import SimulatedClock
from penstock.core.logs import get_logger

log = get_logger(__name__)

FLOOR_REAL_S: Final = 0.1
"""Shortest pause between checks in real time: at high speeds a simulated second would be too many calls."""


def period_real_s(clock: SimulatedClock, interval_s: float) -> float:
    """Return the real seconds between two checks that should be ``interval_s`` simulated seconds apart."""
    return max(FLOOR_REAL_S, clock.to_real_s(interval_s))


class PeriodicTask:
    """Calls a coroutine function until it is closed; a call that fails is logged, and the next one comes."""

    def __init__(
        self, work: Callable[[], Awaitable[object]], *, name: str, pause_real_s: float, failure: str
    ) -> None:
        """Prepare; nothing is called before `start`.

        Args:
            work: What is done.
            name: Of the task.
            pause_real_s: Between the end of a call and the next, real seconds.
            failure: What the log says of a call that fails.
        """
        self._work = work
        self._name = name
        self._pause_real_s = pause_real_s
        self._failure = failure
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call from now on, the first time at once."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def close(self) -> None:
        """Stop; does nothing where nothing was started."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:  # root of the task: one failure must not end the calls that follow
                log.exception(self._failure)
            await asyncio.sleep(self._pause_real_s)
