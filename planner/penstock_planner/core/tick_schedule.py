"""The times at which the planner's core scrapes metrics and decides. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.demand.observation import Pull, Window


@dataclass(frozen=True, slots=True)
class TickSchedule:
    """One adjustment interval: when metrics are scraped (at "ticks"), and when the decision is made.

    Scrapes are at start + k x pull for k = 1, 2, ..., the decision is at start + interval. Times are simulated seconds.

    Attributes:
        start_s: Time at which the interval started.
        pull_s: Seconds between two ticks, > 0.
        interval_s: Seconds between two decisions, >= ``pull_s``.
        waits: Whether the planner's mode neither scrapes nor decides while replicas start or drain (an adjustment).
        tick: Number of the latest tick in the interval; 0 before the first.
        pulls: Pulls (metrics scrapes) of the interval so far, in time order.
        blocked_s: Time since which replicas that start or drain have prevented scrapes and decisions; None if nothing
            prevents them.
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
        """Return the schedule of the adjustment interval (time between two decisions) that starts at ``start_s``.

        Args:
            config: Configuration with the length of the interval and the time between two metrics scrapes.
            start_s: Start of the interval, in simulated seconds.
        """
        return cls(
            start_s, config.metric_pulling_interval_s, config.interval_s, config.policy.waits_for_adjustments
        )

    @property
    def end_s(self) -> float:
        """Return the simulated time, in seconds, at which the interval ends and the decision is made."""
        return self.start_s + self.interval_s

    @property
    def is_decidable(self) -> bool:
        """Return whether the interval has a pull (metrics scrape) from its end or later, so that the decision can be made."""
        return bool(self.pulls) and self.pulls[-1].at_s >= self.end_s

    @property
    def window(self) -> Window:
        """Return the interval's pulls (metrics scrapes) as input of a decision. There must be at least one pull."""
        return Window(self.start_s, self.pulls[-1].at_s, self.pulls)

    @property
    def next_start_s(self) -> float:
        """Return the simulated time, in seconds, at which the next interval starts.

        The next interval starts at the end of this interval, or at the time of the last pull (metrics scrape) if that
        pull was a full interval or more after the end. This interval must have a pull.
        """
        last_s = self.pulls[-1].at_s
        return self.end_s if last_s < self.end_s + self.interval_s else last_s

    def at_s(self, tick: int) -> float:
        """Return the simulated time, in seconds, of a tick (metrics scrape) of the interval.

        The last tick before the decision is moved to the decision if the interval is not a multiple of the time between
        two ticks. Ticks after the decision exist too; they are used while the backend (Kubernetes or local processes)
        cannot be observed.

        Args:
            tick: Number of the tick, counted from 1.
        """
        due_s = self.start_s + tick * self.pull_s
        return self.end_s if due_s - self.pull_s < self.end_s < due_s else due_s

    def advanced(self, now_s: float) -> tuple[TickSchedule, float]:
        """Return the schedule at its next tick (metrics scrape), and the simulated time of that tick.

        The next tick is the first one that is after the latest tick and not before ``now_s``. Missed ticks are skipped
        and not made up for. While an adjustment (replicas that start or drain) blocks the interval, ticks are counted
        from the start of the adjustment.

        Args:
            now_s: Present time, in simulated seconds.

        Returns:
            (schedule, time of the tick in simulated seconds).
        """
        if self.blocked_s is not None:
            return self, self.blocked_s + self._tick_after(0, now_s, self.blocked_s) * self.pull_s
        tick = self._tick_after(self.tick, now_s, self.start_s)
        return replace(self, tick=tick), self.at_s(tick)

    def after(self, now_s: float) -> tuple[TickSchedule, float]:
        """Return the schedule at the first tick (metrics scrape) that is later than ``now_s``, and the time of that tick.

        Both times are simulated seconds.
        """
        schedule, due_s = self.advanced(now_s)
        if due_s > now_s:
            return schedule, due_s
        return (schedule, due_s + self.pull_s) if self.blocked_s is not None else schedule.advanced(now_s)

    def _tick_after(self, tick: int, now_s: float, start_s: float) -> int:
        return max(tick + 1, math.ceil((now_s - start_s) / self.pull_s - 1e-9))

    def next_interval(self, start_s: float, interval_s: float) -> TickSchedule:
        """Return the schedule of the next interval, which starts at ``start_s`` and whose decision is made ``interval_s`` later.

        Both are simulated seconds. If an adjustment (replicas that start or drain) prevents decisions now, it also
        prevents decisions in the next interval.
        """
        return replace(self, start_s=start_s, interval_s=interval_s, tick=0, pulls=())

    def blocked(self, at_s: float) -> TickSchedule:
        """Return the schedule, marked as blocked: no scrapes and decisions, because replicas have started or drained since ``at_s``.

        Returns it unchanged if it is already blocked, or if the planner's mode does not wait for starts and drains.

        Args:
            at_s: Time at which the change was decided, in simulated seconds.
        """
        if self.blocked_s is not None or not self.waits:
            return self
        return replace(self, blocked_s=at_s)

    def restarted(self, at_s: float, interval_s: float) -> TickSchedule:
        """Return the schedule of a new interval, in which scrapes and decisions are not blocked by starting or draining replicas.

        Used after the replicas have started or drained, or after an event that makes the metrics scrapes of the current
        interval useless.

        Args:
            at_s: Start of the interval, in simulated seconds.
            interval_s: Length of the interval, in simulated seconds.
        """
        return replace(self.next_interval(at_s, interval_s), blocked_s=None)

    def pulled(self, pull: Pull) -> TickSchedule:
        """Return the schedule with ``pull`` (a metrics scrape) appended to the pulls of the interval."""
        return replace(self, pulls=(*self.pulls, pull))
