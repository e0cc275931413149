"""The ledger's records: their shapes, the changes that they hold, and the replicas that start. Pure.

Records are written by the planner's core and read by resume, replay and explain. Values may be dataclasses: the ledger
writes them as the objects that `codec` reads. An anchor (``header`` of a fresh run, ``decision``, ``settled``)
carries the state and the start of the interval that follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from penstock.api import Role
from penstock.planner.decide.codec import to_plain, to_short
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Decision, Reason
from penstock.planner.decide.observation import Pull
from penstock.planner.decide.state import PlannerState

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
    """

    decision_id: str
    role: Role
    current: int
    desired: int
    decided_s: float
    is_roll_back: bool = False


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


def position(timeline: str, origin_s: float, start_s: float, starts: Starts) -> Record:
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
