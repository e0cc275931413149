"""What a planner policy is: a pure function, and what those who drive it have to know of it.

A distribution registers one under `penstock.planner_policies`; the entry point's name is what ``planner.mode`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.planner.decide.observation import Window
from penstock.planner.decide.proposal import Proposal
from penstock.planner.decide.state import PlannerState

Propose = Callable[[Window, PlannerState, Any], Proposal]
"""Takes the interval's pulls (one at least; replica counts are taken from the newest), what the last decision left, and the
`DecideConfig`; returns what to change. It passes through the same bounds, budget and rebalancing whatever the policy."""


@dataclass(frozen=True, slots=True)
class PlannerPolicy:
    """One policy.

    Attributes:
        propose: Decides; pure: no clock, randomness or I/O.
        waits_for_adjustments: Pulls and decisions stop while replicas start or drain, as the planner's document has it.
        follows_demand: It counts replicas that start as supply, so that it may decide as often as it pulls.
        needs_profile: It must be told beforehand what the engines do: `DecideConfig.performance`.
        is_oracle: It knows the future, which only a simulation can tell it.
        has_ledger: It is recorded, so that a restart forgets nothing and failed scale-ups are rolled back.
        interval_s: Simulated seconds between its decisions, > 0; None: as configured.
        max_step: Most replicas of a role that one decision moves where ``interval_s`` is given; None: any.
    """

    propose: Propose
    waits_for_adjustments: bool = False
    follows_demand: bool = False
    needs_profile: bool = False
    is_oracle: bool = False
    has_ledger: bool = True
    interval_s: float | None = None
    max_step: int | None = 1
