"""The ledger's records: their shapes, the planner state that they hold, and the replicas that start. Pure.

Records are written by the planner's core and read by resume, replay and explain. Values may be dataclasses: the ledger
writes them as the objects that `codec` reads. An anchor (``header`` of a fresh run, ``decision``, ``settled``)
carries the state and the start of the interval that follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from penstock.api import Role
from penstock.planner.decide.codec import to_plain, to_short
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Decision, Reason
from penstock.planner.decide.observation import Pull, Window
from penstock.planner.decide.state import PlannerState

Starts = Mapping[Role, tuple[float, ...]]
"""By role: simulated seconds at which each starting replica was requested, oldest first."""


@dataclass(frozen=True, slots=True)
class ReadyReplica:
    """One replica that became ready.

    Attributes:
        role: prefill, decode or aggregated.
        asked_s: Time of the decision for it.
        ready_s: When it was first seen ready.
    """

    role: Role
    asked_s: float
    ready_s: float

    @property
    def took_s(self) -> float:
        """Return the simulated seconds from request to readiness."""
        return self.ready_s - self.asked_s


def added(starts: Starts, role: Role, count: int, asked_s: float) -> Starts:
    """Return the starts after ``count`` more replicas were requested; below 0: the newest are taken back."""
    begun = starts.get(role, ())
    return {**starts, role: begun[:count] if count < 0 else begun + (asked_s,) * count}


def without_oldest(starts: Starts, role: Role, count: int = 1) -> Starts:
    """Return the starts after the ``count`` oldest of a role became ready or failed."""
    return {**starts, role: starts.get(role, ())[count:]}


def finished(starts: Starts, role: Role, starting: int, now_s: float) -> tuple[ReadyReplica, ...]:
    """Return the replicas of a role that have become ready: the oldest, as many as start no longer.

    Args:
        starts: As followed so far; replicas that failed are taken out before.
        role: Whose.
        starting: Its replicas that are not ready now.
        now_s: Simulated seconds.
    """
    begun = starts.get(role, ())
    return tuple(ReadyReplica(role, asked_s, now_s) for asked_s in begun[: max(0, len(begun) - starting)])


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
        decision_id: The ledger's id.
        role: prefill, decode or aggregated.
        current: Replicas that it was decided on.
        desired: Replicas to ask for.
        decided_s: Simulated seconds of the decision.
        is_roll_back: It takes back a replica that never became ready.
    """

    decision_id: str
    role: Role
    current: int
    desired: int
    decided_s: float
    is_roll_back: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """Where the planner stood.

    Attributes:
        state: After the last decision.
        timeline: Which clock its times belong to.
        origin_s: Simulated seconds when the first run of this timeline began.
        newest_s: Time of the newest record.
        wall_s: The same in real seconds since 1970; None in a ledger of an older version.
        start_s: Start of the interval under way.
        tick: Number of the newest pull's tick, 0 before the first.
        pulls: Of that interval.
        blocked_s: Since when an adjustment has been under way; None when none is.
        starts: Replicas asked for and not ready yet.
        pending: Changes recorded but not known to be carried out.
    """

    state: PlannerState
    timeline: str
    origin_s: float
    newest_s: float
    wall_s: float | None
    start_s: float
    tick: int
    pulls: tuple[Pull, ...]
    blocked_s: float | None
    starts: Starts
    pending: tuple[Change, ...]


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
        )
        for each in decision["roles"]
        if each["action"] != Action.HOLD
    )


def without_asked(state: PlannerState, role: Role) -> PlannerState:
    """Return the state after a scale-up that the backend refused: nothing is outstanding."""
    return replace(state, roles={**state.roles, role: replace(state.of(role), asked=None)})


def after(starts: Starts, change: Change) -> Starts:
    """Return the replicas that start after the backend took a change.

    A roll-back goes below the number that was asked for: what it takes back is out of ``starts`` already.
    """
    count = change.desired - change.current
    return starts if change.is_roll_back else added(starts, change.role, count, change.decided_s)


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """Where an anchor stands in time.

    Attributes:
        timeline: Which clock the simulated seconds belong to.
        origin_s: When the first run of this timeline began.
        start_s: Start of the interval that follows the anchor.
        starts: Replicas asked for before it and not ready yet.
    """

    timeline: str
    origin_s: float
    start_s: float
    starts: Starts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """What begins a run or a file.

    Attributes:
        place: Of the interval that follows.
        at_s: Simulated seconds.
        state: After the last decision.
        is_resumed: The interval under way goes on: the header is no anchor.
    """

    place: LedgerPosition
    at_s: float
    state: PlannerState
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class Deciding:
    """One call of a decision function with its result; replay makes the same call again.

    Attributes:
        kind: An adjustment sets ``window``; a roll-back sets ``role``, ``why`` and ``pull``.
        config: As it was.
        before: State before.
        after: State after.
        decision: The result.
        window: Input of `decide`.
        role, why, pull: Input of `roll_back`.
    """

    kind: DecisionKind
    config: DecideConfig
    before: PlannerState
    after: PlannerState
    decision: Decision
    window: Window | None = None
    role: Role | None = None
    why: str | None = None
    pull: Pull | None = None


def header_record(header: Header, *, wall_s: float, config: DecideConfig, about: Mapping[str, Any]) -> Record:
    """Return the record of a header."""
    return {
        "type": "header",
        "schema": SCHEMA,
        "version": _version(),
        "at_s": header.at_s,
        "wall_s": wall_s,
        "resumed": header.is_resumed,
        **about,
        **_fields(header.place),
        "config": config,
        "state": header.state,
    }


def decision_record(deciding: Deciding, place: LedgerPosition, *, wall_s: float) -> Record:
    """Return the record of one decision; the header before it holds the performance profile, which is long."""
    parts = _fields(deciding)
    parts["config"] = replace(deciding.config, performance=None)
    parts["state"] = parts.pop("after")
    return {
        "type": "decision",
        "at_s": deciding.decision.at_s,
        "wall_s": wall_s,
        **_fields(place),
        **{key: value for key, value in parts.items() if value is not None},
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


def converged_record(
    place: LedgerPosition, *, at_s: float, took_s: float, state: PlannerState, is_overdue: bool
) -> Record:
    """Return the record of an adjustment's end."""
    return {
        "type": "settled",
        "at_s": at_s,
        "took_s": took_s,
        "overdue": is_overdue,
        **_fields(place),
        "state": state,
    }


def started_record(replica: ReadyReplica) -> Record:
    """Return the record of one replica that became ready, with how long it took."""
    return {
        "type": "started",
        "at_s": replica.ready_s,
        "role": replica.role.value,
        "asked_s": replica.asked_s,
        "took_s": replica.took_s,
    }


@cache
def _version() -> str:
    return version("penstock")


def _fields(value: LedgerPosition | Deciding) -> Record:
    return {field.name: getattr(value, field.name) for field in fields(value)}
