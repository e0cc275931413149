"""A planner that knows the future: it follows sizes chosen with every arrival known.

Floors, budget, rebalance and the most replicas per decision bind it as they bind every policy. Who chooses the sizes is
the simulator (`penstock.simulator.oracle`); nothing else knows the future.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock_planner.decide.config import ADAPTIVE_INTERVAL_S, DecideConfig
from penstock_planner.decide.decision import PlannerState, Proposal, Step
from penstock_planner.decide.drafting import drafted, proposed
from penstock_planner.decide.observation import Window
from penstock_planner.decide.policy import PlannerPolicy

Sizes = tuple[tuple[float, int], ...]
"""(from second, replicas), by strictly increasing time, one at least."""


@dataclass(frozen=True, slots=True)
class OracleParameters:
    """What an oracle knows: by role the sizes that it follows; empty: it cannot run."""

    schedule: Mapping[Role, Sizes] = field(default_factory=dict)


def oracle(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what the schedule has for the decision's time.

    Raises:
        ConfigError: no schedule is given.
    """
    schedule = config.parameters_as(OracleParameters).schedule
    if not schedule:
        raise ConfigError(
            f"mode {config.mode}: needs to know every arrival in advance, so only `penstock simulate` "
            "can run it; choose another mode"
        )
    pull = window.pulls[-1]
    proposals = []
    for role in pull.pools:
        wanted = size_at(schedule[role], window.end_s)
        step = Step("oracle", {"scheduled": wanted}, None, f"{wanted} scheduled")
        proposals.append(drafted(role, pull, wanted, step, config))
    return proposed(proposals, state, {})


def size_at(sizes: Sizes, at_s: float) -> int:
    """Return the size that holds at a time.

    Example: ((0.0, 2), (60.0, 5)) at 59.9 s: 2; at 60 s: 5.
    """
    place = bisect_right(sizes, at_s, key=lambda size: size[0])
    return sizes[max(0, place - 1)][1]


ANY_STEP = PlannerPolicy(
    oracle,
    needs_profile=True,
    is_oracle=True,
    has_ledger=False,
    interval_s=1.0,
    max_step=None,
    parameters=OracleParameters,
)
ONE_STEP = replace(ANY_STEP, interval_s=ADAPTIVE_INTERVAL_S, max_step=1)
"""As often, and by as much, as the planner's own default."""
