"""Mode ``load``: the planner document's rule. Thresholds on the prefill queue and on KV usage, one step at a time."""

from __future__ import annotations

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.observation import Window
from penstock.planner.decide.policy import PlannerPolicy
from penstock.planner.decide.proposal import Proposal
from penstock.planner.decide.propose import kv_signal, propose, queue_signal
from penstock.planner.decide.stabilise import remember, stabilise
from penstock.planner.decide.state import PlannerState


def load(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what thresholds (`propose`), grace, backoff and trend (`stabilise`) ask for; one pull at least."""
    pools = window.pulls[-1].pools
    seen = {role: remember(role, pool, state.of(role), config) for role, pool in pools.items()}
    proposals = []
    for role in pools:
        is_prefill = role is Role.PREFILL
        signal = (
            queue_signal(window.pulls, per_worker=config.queue_per_worker)
            if is_prefill
            else kv_signal(window.pulls)
        )
        proposals.append(stabilise(propose(role, window.pulls, signal, config), seen[role], window, config))
    return Proposal(proposals, seen)


POLICY = PlannerPolicy(load, waits_for_adjustments=True)
