"""State that a planner reads from its ledger after a restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.starts import Starts
from penstock_planner.core.tick_schedule import TickSchedule
from penstock_planner.decide.state import PlannerState


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """State of the planner when it wrote the newest record of its ledger (the decision log).

    Times are simulated seconds on the clock that ``timeline`` names, unless stated otherwise.

    Attributes:
        state: State left by the last decision.
        timeline: Name of the clock, such as that of one boot of a host with one time factor (simulated seconds per real
            second). Times of different clocks cannot be compared.
        origin_s: Time at which the planner first started on this clock, so that a time minus ``origin_s`` is the time
            since that start, which people are shown.
        newest_s: Time of the newest record.
        wall_s: Unix time of the newest record, in real seconds; None in a ledger of an older version.
        schedule: Adjustment interval in progress, with its pulls (metrics scrapes).
        blocked_s: Time at which the replica change was decided whose starts and drains the planner waits for; None if
            it waits for none.
        starts: Times at which the replicas that are not ready yet were requested, by role.
        pending: Replica changes that were recorded but are not known to be carried out.
    """

    state: PlannerState
    timeline: str
    origin_s: float
    newest_s: float
    wall_s: float | None
    schedule: TickSchedule
    blocked_s: float | None
    starts: Starts
    pending: tuple[ReplicaChange, ...]


@dataclass(frozen=True, slots=True)
class LearnedStateInfo:
    """Description of the learned state that an earlier run left in the ledger (the decision log).

    Attributes:
        until_wall_s: Unix time of the last record of that run, in real seconds; None in a ledger of an older version.
        learnt_from: Identity of the model, engine, profile and time scale from which the state was learned; empty if
            unknown.
        seen_s: Simulated seconds of demand from which the state was learned.
        is_taken: Whether this run continues with the state, because ``learnt_from`` and ``learning_identity`` are equal
            or one is unknown.
        learning_identity: Identity of this run's model, engine, profile and time scale; empty if unknown.
    """

    until_wall_s: float | None
    learnt_from: str
    seen_s: float
    is_taken: bool
    learning_identity: str = ""
