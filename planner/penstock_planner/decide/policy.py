"""Planner policies: how one is declared, registered and looked up.

A policy is a pure function from observations to a proposal, plus a few declared properties. A distribution registers
one as an entry point in the group `penstock.planner_policies`. The name of the entry point is the value of
``planner.mode``.
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
from penstock_planner.decide.decision import Proposal
from penstock_planner.decide.demand.observation import Window
from penstock_planner.decide.state import PlannerState, PolicyState

Propose = Callable[[Window, PlannerState, Any], Proposal]
"""Type of a policy's function.

Its arguments are the pulls (metrics scrapes) of the interval (at least one; the newest one has the replica counts), the
state left by the last decision, and the `DecideConfig`. It returns the proposed replica changes. The same bounds,
budget and rebalancing are then applied to every policy's proposal."""


@dataclass(frozen=True, slots=True)
class PlannerPolicy:
    """Declaration of one planner policy: the function that decides how many replicas to propose, and its properties.

    Attributes:
        propose: Function that returns the proposal for the metrics of one interval, the planner's state and its
            configuration.
        waits_for_adjustments: Whether the planner neither scrapes nor decides while replicas start or drain.
        follows_demand: Whether the policy counts starting replicas as supply, like modes adaptive and sla. Such a
            policy can decide as often as metrics are scraped.
        needs_profile: Whether it needs a performance profile of the engines, `DecideConfig.performance`.
        is_oracle: Whether it knows future arrivals, which only a simulation can provide.
        has_ledger: Whether its decisions are recorded in a ledger (decision log), so that a restart loses no state and
            failed scale-ups are rolled back.
        interval_s: Simulated seconds between its decisions, > 0. None means the configured interval.
        parameters: Dataclass of the policy's own parameters, in which every field has a default.
            ``planner.policyParameters`` is parsed into it, and ``config.parameters_as(…)`` returns it. None if the
            policy has no parameters.
        max_step: Maximum number of replicas of a role that one decision adds or removes. Used only if ``interval_s`` is
            set; None means no limit.
        states: Dataclasses of what the policy learns and keeps between decisions; empty if it keeps nothing. They are
            kept over a restart, and exported for other graphs, as `PolicyState` describes.
    """

    propose: Propose
    waits_for_adjustments: bool = False
    follows_demand: bool = False
    needs_profile: bool = False
    is_oracle: bool = False
    has_ledger: bool = True
    interval_s: float | None = None
    max_step: int | None = 1
    states: tuple[type[PolicyState], ...] = ()
    parameters: type[Any] | None = None


BASELINES = "penstock.planner_baselines"
"""Entry point group of the autoscalers that simulations compare the planner with. A manifest cannot select them."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all installed planner policies.

    The policies that a manifest can select come first, then those that are only for comparison.
    """
    return (*registered(POLICIES), *registered(BASELINES))


@cache
def policy_of(name: str) -> PlannerPolicy:
    """Return the installed planner policy with this name: its function and properties.

    Raises:
        ConfigError: No installed distribution registers the name, the registered object cannot be imported, or it is
            not a `PlannerPolicy`.
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
    """Return ``planner.policyParameters`` parsed into the policy's parameter dataclass; None if there are no parameters.

    Args:
        mode: Name of the policy.
        given: Parameters as in the manifest, by name; None if the manifest has none.

    Raises:
        ConfigError: The policy has no such parameter, or a value is invalid.
    """
    if not given:
        return None
    policy = policy_of(mode)
    if policy.parameters is None:
        raise ConfigError(
            f"planner.policyParameters: {', '.join(given)}: policy {mode} has no parameters; remove them"
        )
    return read_parameters(policy.parameters, given, key="planner.policyParameters", policy=mode)
