"""The ledger's records, when the planner's core pulls and decides, what it resumes from, and what it asks of its driver. Pure.

Records are written by the planner's core and read by resume, replay and explain. Values may be dataclasses: the ledger
writes them as the objects that `codec` reads. An anchor (``header`` of a fresh run, ``decision``, ``settled``)
carries the state and the start of the interval that follows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from penstock.api import Role
from penstock_planner.decide.codec import to_plain, to_short
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Decision, Memory, PlannerState, Reason
from penstock_planner.decide.observation import Pull, Window

Starts = Mapping[Role, tuple[float, ...]]
"""By role: simulated seconds at which each starting replica was requested, oldest first."""


def added(starts: Starts, role: Role, count: int, asked_s: float) -> Starts:
    """Return the starts after ``count`` more replicas were requested; below 0: the newest are taken back."""
    begun = starts.get(role, ())
    return {**starts, role: begun[:count] if count < 0 else begun + (asked_s,) * count}


def without_oldest(starts: Starts, role: Role, count: int = 1) -> Starts:
    """Return the starts after the ``count`` oldest of a role became ready or failed."""
    return {**starts, role: starts.get(role, ())[count:]}


def finished(starts: Starts, role: Role, starting: int) -> tuple[float, ...]:
    """Return when the replicas of a role were requested that are ready now: the oldest beyond ``starting``."""
    begun = starts.get(role, ())
    return begun[: max(0, len(begun) - starting)]


Record = dict[str, Any]

SCHEMA: Final = 1
"""Raised when a reader of the old schema would misunderstand a record."""

MALFORMED: Final = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading a record raises when a value is missing or of another type."""

ANCHORS: Final = frozenset({"header", "decision", "settled"})


class DecisionKind(StrEnum):
    """Which function made a decision: `decide` or `roll_back`."""

    ADJUSTMENT = "adjustment"
    ROLL_BACK = "withdrawal"


class Outcome(StrEnum):
    """What became of a recorded change."""

    APPLIED = "applied"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Change:
    """One role's part of a recorded decision.

    Attributes:
        current: Replicas that it was decided on.
        desired: Replicas to ask for.
        decided_s: Simulated seconds.
        is_roll_back: It takes back a replica that never became ready.
        is_switch: It is one side of workers that go from one role to the other.
    """

    decision_id: str
    role: Role
    current: int
    desired: int
    decided_s: float
    is_roll_back: bool = False
    is_switch: bool = False


def changes_of(decision: Decision) -> tuple[Change, ...]:
    """Return what a decision changes; nothing in no-operation mode."""
    return recorded_changes(to_plain(decision))


def recorded_changes(decision: Record) -> tuple[Change, ...]:
    """Return what a decision as the ledger has it changes; nothing in no-operation mode."""
    if decision["no_operation"]:
        return ()
    return tuple(
        Change(
            decision["id"],
            Role(each["role"]),
            each["current"],
            each["desired"],
            decision["at_s"],
            is_roll_back=each["reason"] == Reason.NEVER_READY,
            is_switch=decision.get("switched", 0) > 0,
        )
        for each in decision["roles"]
        if each["action"] != Action.HOLD
    )


def without_asked(state: PlannerState, role: Role) -> PlannerState:
    """Return the state after a scale-up that the backend refused: nothing is outstanding."""
    return replace(state, roles={**state.roles, role: replace(state.of(role), asked=None)})


def starts_after(starts: Starts, change: Change) -> Starts:
    """Return the replicas that start after the backend took a change.

    A roll-back goes below the number that was asked for: what it takes back is out of ``starts`` already. A worker that
    switches does not start.
    """
    count = change.desired - change.current
    return (
        starts
        if change.is_roll_back or change.is_switch
        else added(starts, change.role, count, change.decided_s)
    )


def anchor_position(timeline: str, origin_s: float, start_s: float, starts: Starts) -> Record:
    """Return where an anchor stands in time.

    ``timeline`` names the clock of the simulated seconds, ``origin_s`` is when its first run began, ``start_s``
    when the interval after the anchor begins; ``starts`` are requested before it and not ready yet.
    """
    return {"timeline": timeline, "origin_s": origin_s, "start_s": start_s, "starts": starts}


def header_record(
    position: Record, *, at_s: float, state: PlannerState, config: DecideConfig, is_resumed: bool
) -> Record:
    """Return what begins a run or a file; of a resumed run, whose interval goes on, it is no anchor."""
    return {
        "type": "header",
        "schema": SCHEMA,
        "version": _version(),
        "at_s": at_s,
        "resumed": is_resumed,
        **position,
        "config": config,
        "state": state,
    }


def decision_record(
    kind: DecisionKind,
    position: Record,
    *,
    config: DecideConfig,
    before: PlannerState,
    made: tuple[Decision, PlannerState],
    **inputs: Any,
) -> Record:
    """Return the record of one decision; the header before it holds the performance profile, which is long.

    ``made`` is the decision and the state after; ``inputs`` are ``window`` of `decide`, or ``role``, ``why`` and
    ``pull`` of `roll_back`.
    """
    decision, after = made
    return {
        "type": "decision",
        "at_s": decision.at_s,
        **position,
        "kind": kind,
        "config": replace(config, performance=None),
        "before": before,
        "decision": decision,
        **inputs,
        "state": after,
    }


def pull_record(pull: Pull, tick: int) -> Record:
    """Return the record of one pull."""
    return {"type": "pull", "at_s": pull.at_s, "slot": tick, "pull": to_short(pull)}


def actuation_record(change: Change, *, at_s: float, outcome: Outcome, error: str = "") -> Record:
    """Return the record of what became of one change."""
    return {
        "type": "actuation",
        "at_s": at_s,
        "id": change.decision_id,
        "role": change.role.value,
        "replicas": change.desired,
        "outcome": outcome,
        "error": error,
    }


@cache
def _version() -> str:
    return version("penstock")


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
class Remembered:
    """What a former run left in the ledger.

    Attributes:
        until_wall_s: When it was last written, real seconds since 1970; None in a ledger of an older version.
        learnt_from: Model, engine, profile and time scale; empty: unknown.
        seen_s: Simulated seconds of demand that it has seen.
        is_taken: It is of what runs now, and the planner goes on with it.
    """

    until_wall_s: float | None
    learnt_from: str
    seen_s: float
    is_taken: bool


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

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return what it is made of."""
        return (self.change,)


@dataclass(frozen=True, slots=True)
class Switch:
    """Ask the backend to turn workers of the role that shrinks into workers of the one that grows, as one change."""

    giver: Change
    taker: Change

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return what it is made of."""
        return (self.giver, self.taker)


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


Effect = (
    ObserveAt
    | ReadMetrics
    | RecordDecision
    | Scale
    | Switch
    | Notify
    | Append
    | BeginLedger
    | Checkpoint
    | Log
)


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
