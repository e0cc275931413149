"""A fleet that nothing scales, except for its floors."""

from __future__ import annotations

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Window
from penstock_planner.decide.policies.drafting import drafted, proposed
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState


def static(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what is there."""
    pull = window.pulls[-1]
    step = Step("static", {}, None, "fixed")
    proposals = [drafted(role, pull, pool.replicas, step, config) for role, pool in pull.pools.items()]
    return proposed(proposals, state)


POLICY = PlannerPolicy(static, has_ledger=False)
