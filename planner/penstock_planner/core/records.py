"""The records that the planner's core writes to the ledger (the decision log). Resume, replay and explain read them. Pure.

Values can be dataclasses, which the ledger writes as the JSON objects that `codec` reads. An anchor is a record from
which the planner's state can be restored: it contains the state and the start of the interval that follows it.
Anchors are the ``header`` of a new run, ``decision`` and ``settled``.
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
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.decide.state import PlannerState

Record = dict[str, Any]
"""One record of the ledger: values by key."""

SCHEMA: Final = 2
"""Version of the records. It is raised if a reader of the old version would misunderstand a record."""

READABLE_SCHEMAS: Final = frozenset({1, SCHEMA})
"""Versions of the records that can be read. Schema 1 has other names for some fields, see `older_names`."""

MALFORMED: Final = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Exceptions that reading a record can raise if a value is missing or has another type."""

ANCHORS: Final = frozenset({"header", "decision", "settled"})
"""Types of records that are anchors. The ``header`` of a resumed run is an exception."""


class DecisionKind(StrEnum):
    """Kind of a decision record in the ledger (the planner's decision log).

    Attributes:
        ADJUSTMENT: Regular decision at the end of an interval, made by `pipeline.decide`.
        ROLL_BACK: Roll-back of a failed scale-up, made by `pipeline.roll_back`. Its value in the ledger is
            "withdrawal".
    """

    ADJUSTMENT = "adjustment"
    ROLL_BACK = "withdrawal"


def anchor_position(timeline: str, origin_s: float, start_s: float, starts: Starts) -> Record:
    """Return the part of an anchor that gives its position in time, as values by field name.

    An anchor is a record of the ledger (the planner's decision log) that contains the planner's whole state.

    Args:
        timeline: Name of the clock of the times.
        origin_s: Time at which the planner first started on this clock, in simulated seconds. Readers subtract it to
            get times since that start.
        start_s: Time at which the interval after the anchor starts, in simulated seconds.
        starts: Times at which the replicas that are not ready at the anchor were requested, by role.
    """
    return {"timeline": timeline, "origin_s": origin_s, "start_s": start_s, "starts": starts}


def header_record(
    position: Record, *, at_s: float, state: PlannerState, config: DecideConfig, is_resumed: bool
) -> Record:
    """Return the header, the first record of a run or of a file of the ledger (the decision log), as values by field name.

    Args:
        position: Position in time, as returned by `anchor_position`.
        at_s: Present time, in simulated seconds.
        state: State left by the last decision.
        config: Configuration of the decisions.
        is_resumed: Whether the run continues the interval of the previous records. Then the state cannot be restored
            from the header alone.
    """
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
    """Return the record of one decision for the ledger (the decision log), as values by field name.

    It omits the performance profile, which is long and is in the header before it.

    Args:
        kind: Whether the decision is a regular one or rolls back a scale-up.
        position: Position in time, as returned by `anchor_position`.
        config: Configuration of the decision.
        before: State of the planner before the decision.
        made: The decision, and the state of the planner after it.
        inputs: Remaining arguments of the function that made the decision: ``window`` for `decide`; ``role``, ``why``
            and ``pull`` for `roll_back`.
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
    """Return the record of one pull (metrics scrape) for the ledger (the decision log), as values by field name.

    Args:
        pull: The pull.
        tick: Number of the scrape within the interval between two decisions, from 1.
    """
    return {"type": "pull", "at_s": pull.at_s, "slot": tick, "pull": to_short(pull)}


def actuation_record(
    change: ReplicaChange, *, at_s: float, outcome: ChangeOutcome, error: str = ""
) -> Record:
    """Return the record of the outcome of one replica change for the ledger (the decision log), as values by field name.

    Args:
        change: Change that was requested from the backend (Kubernetes or local processes), or that was dropped.
        at_s: Present time, in simulated seconds.
        outcome: Outcome of the change.
        error: Reason why the change was not applied; empty if it was.
    """
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
