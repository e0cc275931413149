"""Policies by the names under which distributions register them in the group `penstock.routing_policies`. Pure.

An entry names a class that is made without arguments, or one whose ``from_config`` makes it from the graph's router
section, which holds ``policyParameters`` for it.
"""

from __future__ import annotations

from penstock.api import RouterConfig
from penstock.api.router import ROUTING_POLICIES
from penstock.core.errors import ConfigError
from penstock.core.plugins import load, registered
from penstock.router.policy.baselines import LeastLoaded
from penstock.router.policy.routing_policy import AssignTime, RoutingPolicy


def policy_names() -> tuple[str, ...]:
    """Return the names of all installed policies, sorted."""
    return tuple(registered(ROUTING_POLICIES))


def make_policy(config: RouterConfig) -> RoutingPolicy:
    """Return a new policy as a graph's router section asks for it.

    Raises:
        ConfigError: no such policy is installed, or it does not take its parameters.
    """
    kind = load(ROUTING_POLICIES, config.policy, kind="policy")
    policy: RoutingPolicy
    if hasattr(kind, "from_config"):
        policy = kind.from_config(config)
    elif config.policy_parameters:
        raise ConfigError(
            f"router.policyParameters: {', '.join(config.policy_parameters)}: policy {config.policy} has none; remove them"
        )
    else:
        policy = kind()
    return policy


def decode_policy(config: RouterConfig) -> RoutingPolicy:
    """Return the policy for decode workers: the named one if it compares loads, else least-loaded.

    A policy that reads prompts knows prefixes; what matters for decode is free KV and load.

    Raises:
        ConfigError: as `make_policy`.
    """
    policy = make_policy(config)
    return policy if policy.assigns is AssignTime.WHEN_FREE else LeastLoaded()
