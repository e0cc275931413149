"""The policies by name: one registry for the planner, replay and the simulator."""

from __future__ import annotations

from functools import cache

from penstock.api.planner import POLICIES
from penstock.core.errors import ConfigError
from penstock.core.plugins import plugin, registered
from penstock.planner.decide.policy import PlannerPolicy

BASELINES = "penstock.planner_baselines"
"""Entry points of autoscalers that a simulation compares them with, and that no manifest can name."""


def policy_names() -> tuple[str, ...]:
    """Return every policy's name, those that a manifest can have first."""
    return (*registered(POLICIES), *registered(BASELINES))


@cache
def policy_of(name: str) -> PlannerPolicy:
    """Return the policy of a name.

    Raises:
        ConfigError: no installed distribution registers it, or what it registers cannot be imported or is no policy.
    """
    policy = plugin(POLICIES, name) or plugin(BASELINES, name)
    if policy is None:
        raise ConfigError(
            f"mode {name}: not registered as {POLICIES}; choose from {', '.join(policy_names()) or 'none'}, or install"
            " the distribution that has it"
        )
    if not isinstance(policy, PlannerPolicy):
        raise ConfigError(
            f"mode {name}: what is registered is no PlannerPolicy but {type(policy).__name__}; register one"
        )
    return policy
