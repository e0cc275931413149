"""A policy that knows the future: it follows replica counts that were chosen with every arrival known.

Minimum, GPU budget, rebalancing and the maximum step bind it like every other policy. The counts are chosen by the
simulator (`penstock.simulator.oracle`), which alone knows the future.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock_planner.decide.config import ADAPTIVE_INTERVAL_S, DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Window
from penstock_planner.decide.policies.drafting import drafted, proposed
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState

Sizes = tuple[tuple[float, int], ...]
"""Replica counts over time as (start in simulated seconds, replicas), at strictly increasing times; at least one."""


@dataclass(frozen=True, slots=True)
class OracleParameters:
    """Parameters of the policy ``oracle``, which knows all future arrivals and so can run only in a simulation.

    Attributes:
        schedule: By role, the replica counts to follow, as (start in simulated seconds, replicas) in time order. If it
            is empty, the policy cannot run.
    """

    schedule: Mapping[Role, Sizes] = field(default_factory=dict)


def oracle(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return the number of replicas of each role that was chosen for this time with all arrivals, also future ones, known.

    Args:
        window: Pulls (metrics scrapes) of the interval, at least one.
        state: State left by the last decision.
        config: Configuration with the chosen numbers over time, in `OracleParameters`.

    Raises:
        ConfigError: The configuration has no schedule.
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
    return proposed(proposals, state)


def size_at(sizes: Sizes, at_s: float) -> int:
    """Return the replica count of a schedule at a time; before the first time, the first count.

    Args:
        sizes: Pairs (start in simulated seconds, replicas) in time order, at least one.
        at_s: The time, in simulated seconds.

    Example: ((0.0, 2), (60.0, 5)) gives 2 at 59.9 s and 5 at 60 s.
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
"""Oracle that decides every second and can add or remove any number of replicas."""
ONE_STEP = replace(ANY_STEP, interval_s=ADAPTIVE_INTERVAL_S, max_step=1)
"""Oracle that decides as often as the planner's default mode, and changes as many replicas per decision."""
