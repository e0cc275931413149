"""Timeouts for peers that do not count the time in which this process's own event loop was blocked.

After a blockage, for example because the process had no CPU, the event loop runs its timers before it reads its
sockets. A plain timeout would then expire although the peer's answer is already in the kernel, and would blame the
peer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

TURNS: Final = 8
"""Number of parts into which a timeout is divided. Chosen: an eighth is precise enough for timeouts, and the loop
reads its sockets in each part."""
LATE_S: Final = 0.02
"""Wall-clock seconds by which a timer can be late without indicating a blocked loop. Chosen: above any scheduler's
time slice."""


class OwnLag:
    """Measures how late a timer runs, which is how long the event loop was blocked."""

    __slots__ = ("_due_s",)

    def __init__(self) -> None:
        self._due_s = float("inf")

    def armed(self, delay_s: float) -> None:
        """Record that the measured timer should run in ``delay_s`` wall-clock seconds."""
        self._due_s = time.monotonic() + delay_s

    def late_s(self) -> float:
        """Return how many wall-clock seconds the timer is late, 0 if it is not; the next call returns only the lateness since this one."""
        now_s = time.monotonic()
        late_s = max(0.0, now_s - self._due_s)
        self._due_s = max(self._due_s, now_s)
        return late_s


class PatientTimer:
    """A timer of eight consecutive parts (`TURNS`), so that a blockage of this process counts as at most one part.

    It takes ``limit_s`` wall-clock seconds if the event loop is not blocked, longer if it is, and never ends before the
    event loop has read its sockets.
    """

    __slots__ = ("_lag", "_left", "_on_over", "_timer")

    def __init__(self, limit_s: float, on_over: Callable[[], object]) -> None:
        """Start the timer on the running event loop.

        Args:
            limit_s: Duration in wall-clock seconds.
            on_over: Called when the timer ends.
        """
        self._left = TURNS
        self._lag = OwnLag()
        self._on_over = on_over
        self._wait(limit_s / TURNS)

    def cancel(self) -> None:
        """Stop the timer without calling ``on_over``, the function that is called when the time is over."""
        self._timer.cancel()

    def _wait(self, delay_s: float) -> None:
        self._lag.armed(delay_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._turn, delay_s)

    def _turn(self, delay_s: float) -> None:
        self._left -= 1
        if self._left > 0:
            self._wait(delay_s)
        elif self._left == 0 and self._lag.late_s() > LATE_S:
            self._wait(LATE_S)  # let the loop read pending data first
        else:
            self._on_over()


class PatientTimeout:
    """Async context manager like ``asyncio.timeout``, based on a `PatientTimer`."""

    __slots__ = ("_limit_s", "_timeout", "_timer")

    def __init__(self, limit_s: float | None) -> None:
        """Prepare; ``limit_s`` is in wall-clock seconds, None means no limit."""
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._timer: PatientTimer | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        if self._limit_s is not None:
            self._timer = PatientTimer(self._limit_s, self._over)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(exc_type, exc, tb)

    def _over(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time())
