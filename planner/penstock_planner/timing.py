"""Modelled time for the loop, and the grid of pulls and decisions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import Protocol

from penstock_core.clock import ModelClock


class Time(Protocol):
    """What the loop knows of time."""

    def now_s(self) -> float:
        """Return modelled seconds."""
        ...

    def wall_s(self) -> float:
        """Return real seconds since 1970, for people only."""
        ...

    async def sleep_until(self, at_s: float, stop: asyncio.Event) -> None:
        """Return at ``at_s`` modelled seconds, or as soon as ``stop`` is set."""
        ...


class ModelTime:
    """The host's clock times the speed."""

    __slots__ = ("_clock",)

    def __init__(self, clock: ModelClock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        """Return modelled seconds."""
        return self._clock.now_s()

    def wall_s(self) -> float:
        """Return real seconds since 1970."""
        return time.time()

    async def sleep_until(self, at_s: float, stop: asyncio.Event) -> None:
        """Return at ``at_s`` modelled seconds, or as soon as ``stop`` is set."""
        real_s = self._clock.to_real_s(at_s - self._clock.now_s())
        if real_s <= 0:
            # A loop behind its schedule must not keep the event loop from its other work.
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), real_s)


@dataclass(frozen=True, slots=True)
class Grid:
    """One adjustment interval's pull times: start + k x pull for k = 1, 2, ...; decided at start + adjust.

    Attributes:
        start_s: Modelled seconds.
        pull_s: Pull interval.
        adjust_s: Adjustment interval.
    """

    start_s: float
    pull_s: float
    adjust_s: float

    def at_s(self, slot: int) -> float:
        """Return when pull number ``slot`` (from 1) is due.

        The last one falls on the decision even if the intervals do not divide. Slots behind the decision
        exist too: they are used while the backend cannot be observed.
        """
        due_s, end_s = self.start_s + slot * self.pull_s, self.start_s + self.adjust_s
        return end_s if due_s - self.pull_s < end_s < due_s else due_s

    def slot_after(self, slot: int, now_s: float) -> int:
        """Return the next slot not yet past; those missed are skipped, never made up for in a burst."""
        return max(slot + 1, math.ceil((now_s - self.start_s) / self.pull_s - 1e-9))

    def is_over(self, now_s: float) -> bool:
        """Tell whether the interval is to be decided."""
        return now_s >= self.start_s + self.adjust_s

    def next_start_s(self, now_s: float) -> float:
        """Return where the next interval starts: right after this one, or now if that is past as well."""
        following = self.start_s + self.adjust_s
        return following if now_s < following + self.adjust_s else now_s
