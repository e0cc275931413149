"""The shapes of the ledger's records, in one place for the loop that writes them and replay that reads them.

Values may be dataclasses: the ledger writes them as the objects that `codec` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from typing import Any

from penstock_graph.models import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Pull, Window
from penstock_planner.decide.state import PlannerState
from penstock_planner.history import Change
from penstock_planner.ledger import SCHEMA, Record


@dataclass(frozen=True, slots=True)
class Place:
    """Where an anchor stands in time.

    Attributes:
        timeline: Which clock the modelled seconds belong to.
        origin_s: When the first run of this timeline began.
        start_s: Start of the interval that follows the anchor.
    """

    timeline: str
    origin_s: float
    start_s: float


def header(
    place: Place,
    *,
    at_s: float,
    wall_s: float,
    resumed: bool,
    config: DecideConfig,
    state: PlannerState,
    **about: Any,
) -> Record:
    """Return the record that begins a run; ``about`` is for people: namespace, environment, speed."""
    return {
        "type": "header",
        "schema": SCHEMA,
        "version": _version(),
        "at_s": at_s,
        "wall_s": wall_s,
        "resumed": resumed,
        **about,
        **_fields(place),
        "config": config,
        "state": state,
    }


def pull(observed: Pull, slot: int) -> Record:
    """Return the record of one pull."""
    return {"type": "pull", "at_s": observed.at_s, "slot": slot, "pull": observed}


@dataclass(frozen=True, slots=True)
class Deciding:
    """One call of a decision function with its result; replay makes the same call again.

    Attributes:
        kind: ``adjustment`` (``window`` is set) or ``withdrawal`` (``role``, ``why`` and ``pull`` are).
        config: As it was.
        before: State before.
        after: State after.
        decision: The result.
        window: Input of `decide`.
        role: Input of `withdraw`.
        why: Input of `withdraw`.
        pull: Input of `withdraw`.
    """

    kind: str
    config: DecideConfig
    before: PlannerState
    after: PlannerState
    decision: Decision
    window: Window | None = None
    role: Role | None = None
    why: str | None = None
    pull: Pull | None = None


def decision(deciding: Deciding, place: Place, *, wall_s: float) -> Record:
    """Return the record of one decision."""
    parts = _fields(deciding)
    parts["state"] = parts.pop("after")
    return {
        "type": "decision",
        "at_s": deciding.decision.at_s,
        "wall_s": wall_s,
        **_fields(place),
        **{key: value for key, value in parts.items() if value is not None},
    }


def actuation(change: Change, *, at_s: float, outcome: str, error: str = "") -> Record:
    """Return what became of one change: ``applied``, ``failed`` or ``abandoned``."""
    return {
        "type": "actuation",
        "at_s": at_s,
        "id": change.decision_id,
        "role": change.role.value,
        "replicas": change.desired,
        "outcome": outcome,
        "error": error,
    }


def settled(place: Place, *, at_s: float, took_s: float, state: PlannerState, overdue: bool) -> Record:
    """Return the record of an adjustment's end."""
    return {
        "type": "settled",
        "at_s": at_s,
        "took_s": took_s,
        "overdue": overdue,
        **_fields(place),
        "state": state,
    }


@cache
def _version() -> str:
    return version("penstock")


def _fields(value: Place | Deciding) -> Record:
    return {field.name: getattr(value, field.name) for field in fields(value)}
