"""Policies by the name that a manifest gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock.api import RouterPolicy
from penstock.core.errors import ConfigError
from penstock.router.policy.baselines import (
    CacheAffinity,
    KvCost,
    LeastLoaded,
    LeastPending,
    MinTtft,
    Preble,
    RoundRobin,
)
from penstock.router.policy.dualmap import DualMap, DualMapSettings, pair_cost
from penstock.router.policy.preble import PrebleE2
from penstock.router.policy.prefix_cost import PrefixCost
from penstock.router.policy.routing_policy import AssignTime, RoutingPolicy

LEAST_PENDING: Final = "least-pending"
"""The DualMap paper's Least Loaded, which assigns on arrival; for comparisons in the simulator, not in manifests."""
PREBLE_E2: Final = "preble-e2"
"""Preble with its own window and cost; for comparisons likewise."""

POLICIES: Final[Mapping[str, Callable[[DualMapSettings], RoutingPolicy]]] = {
    RouterPolicy.PREFIX_COST.value: lambda settings: PrefixCost(pair_cost(settings)),
    RouterPolicy.DUALMAP.value: DualMap,
    RouterPolicy.PAIR_COST.value: pair_cost,
    RouterPolicy.CACHE_AFFINITY.value: lambda _: CacheAffinity(),
    RouterPolicy.MIN_TTFT.value: lambda _: MinTtft(),
    RouterPolicy.PREBLE.value: lambda _: Preble(),
    PREBLE_E2: lambda _: PrebleE2(),
    RouterPolicy.KV_COST.value: lambda _: KvCost(),
    LEAST_PENDING: lambda _: LeastPending(),
    RouterPolicy.LEAST_LOADED.value: lambda _: LeastLoaded(),
    RouterPolicy.ROUND_ROBIN.value: lambda _: RoundRobin(),
}

PAIRED: Final = frozenset({RouterPolicy.DUALMAP.value, RouterPolicy.PAIR_COST.value})
"""Policies of two candidates, which read `DualMapSettings` and may move what waits."""


def make_policy(name: str, settings: DualMapSettings | None = None) -> RoutingPolicy:
    """Return a new policy.

    Args:
        name: One of `POLICIES`.
        settings: Read by `PAIRED` policies only; None: its defaults.

    Raises:
        ConfigError: there is no such policy; the message lists them.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError(f"policy {name!r}: choose from {', '.join(POLICIES)}")
    return factory(settings or DualMapSettings())


def decode_policy(name: str) -> RoutingPolicy:
    """Return the policy for decode workers: the named one if it compares loads, else least-loaded.

    A policy that reads prompts knows prefixes; what matters for decode is free KV and load.

    Raises:
        ConfigError: there is no such policy.
    """
    policy = make_policy(name)
    return policy if policy.assigns is AssignTime.WHEN_FREE else LeastLoaded()
