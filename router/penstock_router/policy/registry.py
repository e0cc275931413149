"""Policies by the name that a manifest gives them.

Policies that choose when a worker has room (`POLICIES`) leave requests in one queue; placing policies
(`PLACERS`) give each request an instance when it arrives, because they look at prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock_core.errors import ConfigError
from penstock_graph.models import RouterPolicy
from penstock_router.policy.baselines import LeastLoaded, RoundRobin
from penstock_router.policy.candidate import Policy
from penstock_router.policy.dualmap import DualMap, DualMapSettings
from penstock_router.policy.placer import Placer
from penstock_router.policy.prefix_cost import PrefixCost
from penstock_router.policy.rivals import CacheAffinity, KvCost, LeastPending, MinTtft, Preble

POLICIES: Final[Mapping[RouterPolicy, Callable[[], Policy]]] = {
    RouterPolicy.LEAST_LOADED: LeastLoaded,
    RouterPolicy.ROUND_ROBIN: RoundRobin,
}

LEAST_PENDING = "least-pending"
"""The DualMap paper's Least Loaded, placed at arrival; for comparisons in the simulator, not in manifests."""

PLACERS: Final[Mapping[str, Callable[[DualMapSettings], Placer]]] = {
    RouterPolicy.PREFIX_COST.value: lambda _: PrefixCost(),
    RouterPolicy.DUALMAP.value: DualMap,
    RouterPolicy.CACHE_AFFINITY.value: lambda _: CacheAffinity(),
    RouterPolicy.MIN_TTFT.value: lambda _: MinTtft(),
    RouterPolicy.PREBLE.value: lambda _: Preble(),
    RouterPolicy.KV_COST.value: lambda _: KvCost(),
    LEAST_PENDING: lambda _: LeastPending(),
}


def make_policy(name: RouterPolicy) -> Policy:
    """Return the choosing policy of that name.

    Raises:
        ConfigError: it is a placing policy; the message lists those that choose.
    """
    factory = POLICIES.get(name)
    if factory is None:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"router.policy: {name} places requests when they arrive; choose one of {known}")
    return factory()


def second_stage_policy(name: RouterPolicy) -> Policy:
    """Return the policy that chooses decode workers: placing policies know prompts, decode has free KV and load."""
    return make_policy(name) if name in POLICIES else LeastLoaded()
