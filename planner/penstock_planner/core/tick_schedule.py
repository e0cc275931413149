"""When the planner's core pulls and decides. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.observation import Pull, Window


@dataclass(frozen=True, slots=True)
class TickSchedule:
    """One adjustment interval: ticks at start + k x pull for k = 1, 2, ...; decided at start + interval.

    Times are simulated seconds.

    Attributes:
        start_s: When the interval began.
        pull_s: Between two ticks, > 0.
        interval_s: Between two decisions, >= ``pull_s``.
        waits: The mode neither pulls nor decides while an adjustment is under way.
        blocked_s: Since when an adjustment has stopped pulls and decisions; None when none does.
    """

    start_s: float
    pull_s: float
    interval_s: float
    waits: bool
    tick: int = 0
    pulls: tuple[Pull, ...] = ()
    blocked_s: float | None = None

    @classmethod
    def of(cls, config: DecideConfig, start_s: float) -> TickSchedule:
        """Return the schedule of an interval that begins at ``start_s``."""
        return cls(
            start_s, config.metric_pulling_interval_s, config.interval_s, config.policy.waits_for_adjustments
        )

    @property
    def end_s(self) -> float:
        """Return when the interval is decided."""
        return self.start_s + self.interval_s

    @property
    def is_decidable(self) -> bool:
        """Return whether the interval is over and has something to decide on."""
        return bool(self.pulls) and self.pulls[-1].at_s >= self.end_s

    @property
    def window(self) -> Window:
        """Return the input of the decision; it has at least one pull."""
        return Window(self.start_s, self.pulls[-1].at_s, self.pulls)

    @property
    def next_start_s(self) -> float:
        """Return where the interval after a decidable one starts: right after it, or at its last pull if that is late."""
        last_s = self.pulls[-1].at_s
        return self.end_s if last_s < self.end_s + self.interval_s else last_s

    def at_s(self, tick: int) -> float:
        """Return when tick number ``tick`` (from 1) is due.

        The last one falls on the decision even if the intervals do not divide. Ticks behind the decision exist too:
        they are used while the backend cannot be observed.
        """
        due_s = self.start_s + tick * self.pull_s
        return self.end_s if due_s - self.pull_s < self.end_s < due_s else due_s

    def advanced(self, now_s: float) -> tuple[TickSchedule, float]:
        """Return the schedule at its next tick, and when that is due: the first that is not past at ``now_s``.

        Missed ticks are skipped, never made up for in a burst.
        """
        if self.blocked_s is not None:
            return self, self.blocked_s + self._tick_after(0, now_s, self.blocked_s) * self.pull_s
        tick = self._tick_after(self.tick, now_s, self.start_s)
        return replace(self, tick=tick), self.at_s(tick)

    def after(self, now_s: float) -> tuple[TickSchedule, float]:
        """Return the schedule at the tick after one at ``now_s``, and when that is due: later than ``now_s``."""
        schedule, due_s = self.advanced(now_s)
        if due_s > now_s:
            return schedule, due_s
        return (schedule, due_s + self.pull_s) if self.blocked_s is not None else schedule.advanced(now_s)

    def _tick_after(self, tick: int, now_s: float, start_s: float) -> int:
        return max(tick + 1, math.ceil((now_s - start_s) / self.pull_s - 1e-9))

    def begun(self, start_s: float, interval_s: float) -> TickSchedule:
        """Return the schedule of the next interval, which is decided after ``interval_s``; a block stays."""
        return replace(self, start_s=start_s, interval_s=interval_s, tick=0, pulls=())

    def blocked(self, at_s: float) -> TickSchedule:
        """Return the schedule stopped for an adjustment, in a mode that waits for it; the first block counts."""
        if self.blocked_s is not None or not self.waits:
            return self
        return replace(self, blocked_s=at_s)

    def converged(self, at_s: float, interval_s: float) -> TickSchedule:
        """Return the schedule of an interval that begins after an adjustment, or after what made this one worthless."""
        return replace(self.begun(at_s, interval_s), blocked_s=None)

    def pulled(self, pull: Pull) -> TickSchedule:
        """Return the schedule with one more pull."""
        return replace(self, pulls=(*self.pulls, pull))
