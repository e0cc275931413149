"""Puts a router's state machine together as its graph's router section asks for it; the simulator's is made here too."""

from __future__ import annotations

from typing import TypeVar

from penstock.api import Role, RouterConfig
from penstock.router.core.busy_workers import BusyWorkers
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.queue_settings import QueueSettings
from penstock.router.core.router import RouterCore
from penstock.router.core.tier_control import TierControl
from penstock.router.core.transfers import TRUSTED_FRACTION
from penstock.router.core.worker_pool import WorkerPool
from penstock.router.policy.busy import busy_thresholds
from penstock.router.policy.dualmap import DualMapSettings
from penstock.router.policy.registry import PAIRED, decode_policy, make_policy
from penstock.router.policy.routing_policy import AssignTime, RoutingPolicy
from penstock.router.policy.sticky import StickySessions
from penstock.router.tier_config import shedding_settings, tier_settings

T = TypeVar("T")


def make_core(
    config: RouterConfig,
    pool: WorkerPool,
    *,
    is_disaggregated: bool,
    batch_tokens: int | None = None,
    worker_requests: int | None = None,
    lease_s: float | None = None,
) -> RouterCore[T]:
    """Return the core that a graph's router section asks for.

    Args:
        config: The section.
        pool: The workers.
        is_disaggregated: Prefill and decode are apart.
        batch_tokens: Most tokens of one step of a worker; None: unknown.
        worker_requests: Requests that a worker has room for; None: no such bound. With tiers no more are sent there, so
            that what is beyond waits in its tier's turn and not in the worker's queue.
        lease_s: First lease of a prefilled prompt, simulated seconds; None: it bounds no wait.
    """
    thresholds = busy_thresholds(config.admission)
    roles = (Role.PREFILL, Role.DECODE) if is_disaggregated else (Role.AGGREGATED,)
    busy = {role: BusyWorkers(thresholds, batch_tokens=batch_tokens) for role in roles}
    policy = _entry_policy(config)
    settings = queue_settings(config, is_disaggregated=is_disaggregated, worker_requests=worker_requests)
    entry: DispatchQueue[T] = DispatchQueue(policy, settings)
    queues = {roles[0]: entry}
    if is_disaggregated:
        # Requests wait for decode only while no circuit lets them pass.
        bounds = QueueSettings(
            worker_requests=settings.worker_requests,
            max_requests=settings.max_requests,
            max_wait_s=longest_decode_wait_s(config, lease_s),
            tiers=settings.tiers,
        )
        queues[Role.DECODE] = DispatchQueue(decode_policy(config.policy.value), bounds)
    core = RouterCore(pool, queues, busy)
    if settings.tiers is not None:
        core.tiers = TierControl(settings.tiers, shedding_settings(config.tiers))
    return core


def longest_decode_wait_s(config: RouterConfig, lease_s: float | None) -> float:
    """Return how long a prefilled request may wait for decode: nobody renews its prompt's lease meanwhile.

    Args:
        config: The router section.
        lease_s: First lease of a prefilled prompt, simulated seconds; None: it bounds no wait.
    """
    own_s = config.decode_queue.max_wait_seconds
    if own_s is not None:
        return own_s
    longest_s = config.prefill_queue.max_wait_seconds
    return longest_s if lease_s is None else min(longest_s, TRUSTED_FRACTION * lease_s)


def _entry_policy(config: RouterConfig) -> RoutingPolicy:
    policy = make_policy(config.policy.value, dualmap_settings(config))
    if config.session_header is None or policy.assigns is AssignTime.WHEN_FREE:
        return policy
    return StickySessions(policy)


def dualmap_settings(config: RouterConfig) -> DualMapSettings:
    """Return what a graph's router section says about dualmap."""
    dualmap = config.dualmap
    return DualMapSettings(
        slo_s=config.ttft_slo_seconds,
        rebalance=dualmap.rebalance,
        hot_window=dualmap.hot_window,
        bottleneck_s=dualmap.decode_bottleneck_seconds,
    )


def queue_settings(
    config: RouterConfig, *, is_disaggregated: bool, worker_requests: int | None = None
) -> QueueSettings:
    """Return how the first stage's queue behaves."""
    queue, name = config.prefill_queue, config.policy
    return QueueSettings(
        slot_tokens=slot_tokens(config, name.value, is_disaggregated=is_disaggregated),
        worker_requests=worker_requests if config.tiers.enabled else None,
        max_requests=queue.max_requests,
        max_wait_s=queue.max_wait_seconds,
        max_wake_s=queue.max_wake_seconds,
        order=queue.order,
        slo_s=config.ttft_slo_seconds,
        bottleneck_s=config.dualmap.decode_bottleneck_seconds,
        rebalances=name.value in PAIRED and config.dualmap.rebalance,
        tiers=tier_settings(config.tiers) if config.tiers.enabled else None,
    )


def slot_tokens(config: RouterConfig, policy: str, *, is_disaggregated: bool) -> int | None:
    """Return the prompt tokens that are given to one worker of the first stage at a time; None: no bound.

    Aggregated workers under a policy that assigns when a worker is free take everything at once, unless there are tiers:
    then what waits is to wait here, in its tier's turn. Of routers that pass nothing on none knows the others' part.
    """
    has_turns = config.tiers.enabled and config.peers.forward
    has_queue = is_disaggregated or has_turns or make_policy(policy).assigns is AssignTime.ON_ARRIVAL
    return config.prefill_queue.worker_tokens if has_queue else None
