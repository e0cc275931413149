"""What a decision changes, role by role, and what became of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from penstock.api import Role
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.decision import Action, Decision, PlannerState, Reason


class ChangeOutcome(StrEnum):
    """What became of a recorded change."""

    APPLIED = "applied"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class ReplicaChange:
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


def changes_of(decision: Decision) -> tuple[ReplicaChange, ...]:
    """Return what a decision changes; nothing in no-operation mode."""
    # Most decisions change nothing, and making one plain takes longer than all else here.
    return recorded_changes(to_plain(decision)) if decision.changes else ()


def recorded_changes(decision: Mapping[str, Any]) -> tuple[ReplicaChange, ...]:
    """Return what a decision as the ledger has it changes; nothing in no-operation mode."""
    if decision["no_operation"]:
        return ()
    return tuple(
        ReplicaChange(
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
