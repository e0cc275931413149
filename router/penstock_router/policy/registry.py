"""Policies by the name that a manifest gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock_core.errors import ConfigError
from penstock_graph.models import RouterPolicy
from penstock_router.policy.baselines import LeastLoaded, RoundRobin
from penstock_router.policy.candidate import Policy

POLICIES: Final[Mapping[RouterPolicy, Callable[[], Policy]]] = {
    RouterPolicy.LEAST_LOADED: LeastLoaded,
    RouterPolicy.ROUND_ROBIN: RoundRobin,
}


def make_policy(name: RouterPolicy) -> Policy:
    """Return the policy of that name.

    Raises:
        ConfigError: this version has no such policy; the message lists those it has.
    """
    factory = POLICIES.get(name)
    if factory is None:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"router.policy: {name} is not in this version; choose one of {known}")
    return factory()
