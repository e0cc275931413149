"""When the planner's core pulls and decides, what it resumes from, and what it asks of its driver (effects). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock.planner.core.records import Change, DecisionKind, Record, Starts
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import Pull, Window
from penstock.planner.decide.state import Memory, PlannerState


@dataclass(frozen=True, slots=True)
class Schedule:
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
    def of(cls, config: DecideConfig, start_s: float) -> Schedule:
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

    def advanced(self, now_s: float) -> tuple[Schedule, float]:
        """Return the schedule at its next tick, and when that is due: the first that is not past at ``now_s``.

        Missed ticks are skipped, never made up for in a burst.
        """
        if self.blocked_s is not None:
            return self, self.blocked_s + self._tick_after(0, now_s, self.blocked_s) * self.pull_s
        tick = self._tick_after(self.tick, now_s, self.start_s)
        return replace(self, tick=tick), self.at_s(tick)

    def after(self, now_s: float) -> tuple[Schedule, float]:
        """Return the schedule at the tick after one at ``now_s``, and when that is due: later than ``now_s``."""
        schedule, due_s = self.advanced(now_s)
        if due_s > now_s:
            return schedule, due_s
        return (schedule, due_s + self.pull_s) if self.blocked_s is not None else schedule.advanced(now_s)

    def _tick_after(self, tick: int, now_s: float, start_s: float) -> int:
        return max(tick + 1, math.ceil((now_s - start_s) / self.pull_s - 1e-9))

    def begun(self, start_s: float, interval_s: float) -> Schedule:
        """Return the schedule of the next interval, which is decided after ``interval_s``; a block stays."""
        return replace(self, start_s=start_s, interval_s=interval_s, tick=0, pulls=())

    def blocked(self, at_s: float) -> Schedule:
        """Return the schedule stopped for an adjustment, in a mode that waits for it; the first block counts."""
        if self.blocked_s is not None or not self.waits:
            return self
        return replace(self, blocked_s=at_s)

    def converged(self, at_s: float, interval_s: float) -> Schedule:
        """Return the schedule of an interval that begins after an adjustment, or after what made this one worthless."""
        return replace(self.begun(at_s, interval_s), blocked_s=None)

    def pulled(self, pull: Pull) -> Schedule:
        """Return the schedule with one more pull."""
        return replace(self, pulls=(*self.pulls, pull))


@dataclass(frozen=True, slots=True)
class History:
    """Where the planner stood.

    Attributes:
        origin_s: Simulated seconds when the first run of this timeline began.
        newest_s: Time of the newest record.
        wall_s: The same in real seconds since 1970; None in a ledger of an older version.
        blocked_s: Since when an adjustment has been under way; None when none is.
        starts: Replicas asked for and not ready yet.
        pending: Changes recorded but not known to be carried out.
    """

    state: PlannerState
    timeline: str
    origin_s: float
    newest_s: float
    wall_s: float | None
    schedule: Schedule
    blocked_s: float | None
    starts: Starts
    pending: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Write a decision to the disk before it is carried out; one that is not there is not taken."""

    kind: DecisionKind
    decision: Decision
    record: Record


@dataclass(frozen=True, slots=True)
class ObserveAt:
    """End the tick; observe the backend at ``at_s``, or now if that is past."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Read the metrics of the pools just observed."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Ask the backend for a change."""

    change: Change


@dataclass(frozen=True, slots=True)
class Notify:
    """Show observers a recorded decision."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record that may be lost."""

    record: Record


@dataclass(frozen=True, slots=True)
class BeginLedger:
    """Write the header of this run."""

    header: Record


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Here the header alone holds the state of the planner: a long ledger may begin a new file with it."""

    header: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Log a constant text with its keys."""

    text: str
    keys: Mapping[str, object] = field(default_factory=dict)
    is_warning: bool = False


Effect = ObserveAt | ReadMetrics | RecordDecision | Scale | Notify | Append | BeginLedger | Checkpoint | Log


class PlannerPhase(StrEnum):
    """What the planner is doing."""

    OBSERVING = "observing"
    ADJUSTING = "adjusting"
    TARGET_UNAVAILABLE = "target_unavailable"


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What one planner is set to; what the core does not read is for its driver.

    Attributes:
        adjustment_deadline_s: Longest wait for an adjustment before it is rolled back or ignored; simulated seconds.
        timeline: Names the clock: times of another timeline cannot be compared.
        rolls_back: Take back scale-ups that never become ready.
        memory: Of another graph's planner, to start from where the ledger has none.
        max_age_s: Oldest fresh metric; simulated seconds.
        about: For the ledger's header.
        first_sequence: Decisions known to have been made, even if the ledger is lost; ids continue after them.
    """

    config: DecideConfig
    adjustment_deadline_s: float
    timeline: str
    rolls_back: bool = True
    memory: Memory = field(default_factory=dict)
    max_age_s: float = 10.0
    about: Mapping[str, str | float | None] = field(default_factory=dict)
    first_sequence: int = 0
