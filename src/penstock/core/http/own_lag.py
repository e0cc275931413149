"""Limits of others that do not count the time in which this process's own event loop stood.

A loop that stood, because its process had no CPU or much to do, runs its timers before it reads its sockets. A limit in
plain seconds then ends with the answer in the kernel, and blames the other side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

TURNS: Final = 8
"""Parts of a limit. Chosen: an eighth is as exact as limits are kept; the loop reads its sockets in each of them."""
LATE_S: Final = 0.02
"""Real seconds by which a timer may come late without a sign that the loop stood. Chosen: above any scheduler's slice."""


class OwnLag:
    """Measures by how much a timer comes late, which is for how long the loop stood."""

    __slots__ = ("_due_s",)

    def __init__(self) -> None:
        self._due_s = float("inf")

    def armed(self, delay_s: float) -> None:
        """Record that the timer is due in this many real seconds."""
        self._due_s = time.monotonic() + delay_s

    def late_s(self) -> float:
        """Return by how many real seconds the timer is overdue, and measure from now; 0 before it is due."""
        now_s = time.monotonic()
        late_s = max(0.0, now_s - self._due_s)
        self._due_s = max(self._due_s, now_s)
        return late_s


class PatientTimer:
    """A timer of `TURNS` parts, one after the other: a pause of this process counts as one of them at most.

    So it lasts ``limit_s`` real seconds where the loop runs, longer where it stands, and never ends before the loop has
    read its sockets.
    """

    __slots__ = ("_lag", "_left", "_on_over", "_timer")

    def __init__(self, limit_s: float, on_over: Callable[[], object]) -> None:
        """Begin, on the running loop; ``on_over`` is called at the end."""
        self._left = TURNS
        self._lag = OwnLag()
        self._on_over = on_over
        self._wait(limit_s / TURNS)

    def cancel(self) -> None:
        """End it without the call."""
        self._timer.cancel()

    def _wait(self, delay_s: float) -> None:
        self._lag.armed(delay_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._turn, delay_s)

    def _turn(self, delay_s: float) -> None:
        self._left -= 1
        if self._left > 0:
            self._wait(delay_s)
        elif self._left == 0 and self._lag.late_s() > LATE_S:
            self._wait(LATE_S)  # what came meanwhile is read first
        else:
            self._on_over()


class PatientTimeout:
    """``asyncio.timeout`` by a `PatientTimer`."""

    __slots__ = ("_limit_s", "_timeout", "_timer")

    def __init__(self, limit_s: float | None) -> None:
        """Prepare; None is unbounded."""
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
