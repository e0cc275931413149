"""What a planner knows again after a kill: state, the interval under way, and what it had not carried out.

Built from the ledger's records since the last anchor. An anchor (``header`` of a fresh run, ``decision``,
``settled``) carries the state and the start of the interval that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock_graph.models import Role
from penstock_planner.decide.codec import pull_from, state_from
from penstock_planner.decide.observation import Pull
from penstock_planner.decide.state import PlannerState
from penstock_planner.ledger import Record

ANCHORS = frozenset({"header", "decision", "settled"})


@dataclass(frozen=True, slots=True)
class Change:
    """One role's part of a recorded decision.

    Attributes:
        decision_id: The ledger's id.
        role: prefill, decode or aggregated.
        current: Replicas that it was decided on.
        desired: Replicas to ask for.
        decided_s: Modelled seconds of the decision.
    """

    decision_id: str
    role: Role
    current: int
    desired: int
    decided_s: float


@dataclass(frozen=True, slots=True)
class History:
    """Where the planner stood.

    Attributes:
        state: After the last decision.
        timeline: Which clock its times belong to.
        origin_s: Modelled seconds when the first run of this timeline began.
        newest_s: Time of the newest record.
        start_s: Start of the interval under way.
        slot: Newest pull's slot, 0 before the first.
        pulls: Of that interval.
        blocked_s: Since when an adjustment has been under way; None when none is.
        pending: Changes recorded but not known to be carried out.
    """

    state: PlannerState
    timeline: str
    origin_s: float
    newest_s: float
    start_s: float
    slot: int
    pulls: tuple[Pull, ...]
    blocked_s: float | None
    pending: tuple[Change, ...]


def changes_of(decision: dict[str, Any]) -> tuple[Change, ...]:
    """Return what a recorded decision wants changed; nothing in no-operation mode."""
    if decision["no_operation"]:
        return ()
    return tuple(
        Change(decision["id"], Role(each["role"]), each["current"], each["desired"], decision["at_s"])
        for each in decision["roles"]
        if each["action"] != "hold"
    )


def without_asked(state: PlannerState, role: Role) -> PlannerState:
    """Return the state after a scale-up that the backend refused: nothing is outstanding."""
    return PlannerState(state.sequence, {**state.roles, role: replace(state.of(role), asked=None)})


def restore(records: Sequence[Record]) -> History | None:
    """Return where the planner stood, or None without an anchor.

    Args:
        records: `Ledger.tail(ANCHORS)`; the first is the anchor.

    Raises:
        KeyError, TypeError, ValueError: a record lacks what its type promises.
    """
    if not records:
        return None
    anchor = records[0]
    state = state_from(anchor["state"])
    waiting = {c.role: c for c in changes_of(anchor["decision"])} if anchor["type"] == "decision" else {}
    applied = False
    pulls: list[Pull] = []
    slot = 0
    for record in records[1:]:
        if record["type"] == "pull":
            pulls.append(pull_from(record["pull"]))
            slot = record["slot"]
        elif record["type"] == "actuation":
            change = waiting.pop(Role(record["role"]), None)
            applied = applied or record["outcome"] == "applied"
            if record["outcome"] != "applied" and change is not None:
                state = without_asked(state, change.role)
    return History(
        state=state,
        timeline=anchor["timeline"],
        origin_s=anchor["origin_s"],
        newest_s=records[-1]["at_s"],
        start_s=anchor["start_s"],
        slot=slot,
        pulls=tuple(pulls),
        blocked_s=anchor["at_s"] if applied else None,
        pending=tuple(waiting.values()),
    )
