"""The replica changes of a decision, and their outcome. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from penstock.api import Role
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.decision import Action, Decision, Reason
from penstock_planner.decide.state import PlannerState


class ChangeOutcome(StrEnum):
    """Outcome of a recorded replica change.

    Attributes:
        APPLIED: The backend (Kubernetes or local processes) accepted the change.
        FAILED: The backend refused the change or did not answer.
        ABANDONED: An earlier process recorded the change without carrying it out, and it was dropped, because it is too
            old or the replicas have changed since.
    """

    APPLIED = "applied"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """Change of one role's replicas in a recorded decision.

    Attributes:
        decision_id: Id of the decision.
        role: Role to scale.
        current: Number of replicas on which the decision was based.
        desired: Number of replicas to scale to.
        decided_s: Time of the decision, in simulated seconds.
        is_roll_back: Whether the change rolls back a scale-up whose replica never became ready.
        is_switch: Whether the change is one side of a role switch, in which workers change role without a restart.
    """

    decision_id: str
    role: Role
    current: int
    desired: int
    decided_s: float
    is_roll_back: bool = False
    is_switch: bool = False


def changes_of(decision: Decision) -> tuple[ReplicaChange, ...]:
    """Return the replica changes of a decision, to be carried out in this order; empty in no-operation mode."""
    # Most decisions change nothing, and converting one to plain data is the most expensive part of this function.
    return recorded_changes(to_plain(decision)) if decision.changes else ()


def recorded_changes(decision: Mapping[str, Any]) -> tuple[ReplicaChange, ...]:
    """Return the replica changes of a decision as a ledger (decision log) records it, in plain data; empty in no-operation mode."""
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


def without_pending_scale_up(state: PlannerState, role: Role) -> PlannerState:
    """Return the planner's state without the role's pending scale-up, one whose replicas are not all ready yet.

    Used if the backend (Kubernetes or local processes) refused the scale-up, or if the scale-up was dropped.

    Args:
        state: State of the planner before.
        role: Role whose scale-up is not waited for any more.
    """
    return replace(state, roles={**state.roles, role: replace(state.of(role), pending_replicas=None)})
