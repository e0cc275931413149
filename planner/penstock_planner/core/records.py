"""The ledger's records, as the planner's core writes them; resume, replay and explain read them. Pure.

Values may be dataclasses: the ledger writes them as the objects that `codec` reads. An anchor (``header`` of a fresh run,
``decision``, ``settled``) carries the state and the start of the interval that follows it.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from penstock_planner.core.changes import ChangeOutcome, ReplicaChange
from penstock_planner.core.starts import Starts
from penstock_planner.decide.codec import to_short
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision, PlannerState
from penstock_planner.decide.observation import Pull

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


def anchor_position(timeline: str, origin_s: float, start_s: float, starts: Starts) -> Record:
    """Return where an anchor is in time.

    ``timeline`` names the clock of the simulated seconds, ``origin_s`` is when its first run began, ``start_s``
    when the interval after the anchor begins; ``starts`` are requested before it and not ready yet.
    """
    return {"timeline": timeline, "origin_s": origin_s, "start_s": start_s, "starts": starts}


def header_record(
    position: Record, *, at_s: float, state: PlannerState, config: DecideConfig, is_resumed: bool
) -> Record:
    """Return what begins a run or a file; of a resumed run, whose interval continues, it is not an anchor."""
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


def actuation_record(
    change: ReplicaChange, *, at_s: float, outcome: ChangeOutcome, error: str = ""
) -> Record:
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
