"""Policies by the names under which distributions register them in the group `penstock.routing_policies`. Pure.

An entry names a class that is made without arguments, or one whose ``from_config`` makes it from the graph's router
section; `parameters` reads ``policyParameters`` into the policy's own model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.api import RouterConfig
from penstock.api.router import ROUTING_POLICIES
from penstock.core.errors import ConfigError
from penstock.core.plugins import load, registered
from penstock.router.policy.baselines import LeastLoaded
from penstock.router.policy.routing_policy import AssignTime, RoutingPolicy

P = TypeVar("P")


def parameters(model: type[P], config: RouterConfig, own: Mapping[str, Any] | None = None) -> P:
    """Return a policy's parameters as its model reads them.

    Args:
        model: A dataclass or pydantic model; its fields turn the texts of ``policyParameters`` into values.
        config: The router section.
        own: Fields that the section sets by other keys, and ``policyParameters`` may not.

    Raises:
        ConfigError: there is no such parameter, or its value does not fit.
    """
    given, own = config.policy_parameters or {}, own or {}
    adapter = TypeAdapter(model)
    known = sorted(adapter.json_schema()["properties"].keys() - own.keys())
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(
            f"router.policyParameters: {', '.join(unknown)}: policy {config.policy} has {', '.join(known) or 'none'}"
        )
    try:
        return adapter.validate_python({**given, **own})
    except ValidationError as exc:
        wrong = "; ".join(f"{each['loc'][0]} {each['input']!r}: {each['msg']}" for each in exc.errors())
        raise ConfigError(f"router.policyParameters: {wrong}") from exc


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
