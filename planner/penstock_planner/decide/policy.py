"""What a planner policy is: a pure function, and what those who drive it have to know of it.

A distribution registers one under `penstock.planner_policies`; the entry point's name is what ``planner.mode`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.api.planner import POLICIES
from penstock.core.closest import did_you_mean
from penstock.core.errors import ConfigError
from penstock.core.plugins import plugin, registered
from penstock.core.validation import read_parameters
from penstock_planner.decide.decision import PlannerState, Proposal
from penstock_planner.decide.observation import Window

Propose = Callable[[Window, PlannerState, Any], Proposal]
"""Takes the interval's pulls (one at least; replica counts are taken from the newest), what the last decision left, and the
`DecideConfig`; returns what to change. Every policy has the same bounds, budget and rebalancing."""


@dataclass(frozen=True, slots=True)
class PlannerPolicy:
    """Declares one policy: what it needs, remembers and decides.

    Attributes:
        waits_for_adjustments: Pulls and decisions stop while replicas start or drain, as the planner's document has it.
        follows_demand: It counts replicas that start as supply, so that it may decide as often as it pulls.
        needs_profile: It needs a profile of the engines: `DecideConfig.performance`.
        is_oracle: It knows the future, which only a simulation can provide.
        has_ledger: It is recorded, so that a restart forgets nothing and failed scale-ups are rolled back.
        interval_s: Simulated seconds between its decisions, > 0; None: as configured.
        parameters: Dataclass of the policy's own parameters, each with a default; ``planner.policyParameters`` is read into it, and
            ``config.parameters_as(…)`` gives it. None: it has none.
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
    parameters: type[Any] | None = None


BASELINES = "penstock.planner_baselines"
"""Entry points of autoscalers that a simulation compares them with, and that no manifest can name."""


def policy_names() -> tuple[str, ...]:
    """Return every policy's name, those that a manifest can have first."""
    return (*registered(POLICIES), *registered(BASELINES))


@cache
def policy_of(name: str) -> PlannerPolicy:
    """Return the policy of a name.

    Raises:
        ConfigError: no installed distribution registers it, or what it registers cannot be imported or is not a policy.
    """
    policy = plugin(POLICIES, name) or plugin(BASELINES, name)
    if policy is None:
        raise ConfigError(
            f"mode {name}: not registered as {POLICIES}; choose from {', '.join(policy_names()) or 'none'}, or install"
            f" the distribution that has it{did_you_mean(name, policy_names())}"
        )
    if not isinstance(policy, PlannerPolicy):
        raise ConfigError(
            f"mode {name}: the registered object must be a PlannerPolicy, not "
            f"{type(policy).__name__}; register one"
        )
    return policy


def parameters_of(mode: str, given: Mapping[str, Any] | None) -> Any:
    """Return what ``planner.policyParameters`` makes of a policy's own model; None without any.

    Raises:
        ConfigError: the policy has no such parameter, or its value does not fit.
    """
    if not given:
        return None
    policy = policy_of(mode)
    if policy.parameters is None:
        raise ConfigError(
            f"planner.policyParameters: {', '.join(given)}: policy {mode} has no parameters; remove them"
        )
    return read_parameters(policy.parameters, given, key="planner.policyParameters", policy=mode)
