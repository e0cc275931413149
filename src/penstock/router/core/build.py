"""Builds the `RouterCore` of a graph from its router section, for the live router, the simulator and benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TypeVar

from penstock.api import Role, RouterConfig, SloConfig, TiersConfig
from penstock.router.core.deflection import PrefillDeflection
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.limits import LEASE_WAIT, MAX_WORKER_WAIT_S
from penstock.router.core.retries import TRUSTED_FRACTION
from penstock.router.core.router import RouterCore
from penstock.router.core.tiers import TierControl
from penstock.router.core.waiting import QueueSettings
from penstock.router.core.worker import Recorder, WorkerPool, WorkerSize, ignore
from penstock.router.policy.busy import BusyWorkers, busy_thresholds
from penstock.router.policy.registry import DEFAULT_SLO, decode_policy, entry_policy
from penstock.router.policy.routing_policy import AssignTime, RoutingPolicy

T = TypeVar("T")

SPLIT: Mapping[Role, WorkerSize] = {Role.PREFILL: WorkerSize(), Role.DECODE: WorkerSize()}
"""Disaggregated serving (prefill and decode workers); the sizes of the workers are unknown."""
TOGETHER: Mapping[Role, WorkerSize] = {Role.AGGREGATED: WorkerSize()}
"""Aggregated serving (workers that do prefill and decode); the sizes of the workers are unknown."""


def build_router(
    config: RouterConfig,
    sizes: Mapping[Role, WorkerSize],
    *,
    slo: SloConfig = DEFAULT_SLO,
    lease_s: float = inf,
    worker_wait_s: float = MAX_WORKER_WAIT_S,
    is_supervised: bool = False,
    record: Recorder = ignore,
) -> RouterCore[T]:
    """Return the router core that a graph's router section configures, without any workers yet.

    Args:
        config: Router section of the graph.
        sizes: Size of the workers by role, the first stage's role first: prefill and decode, or aggregated alone.
        slo: SLO section of the graph.
        lease_s: Length of the first lease of a prefilled prompt's KV blocks, in simulated seconds; inf does not limit the
            wait for a decode worker.
        worker_wait_s: Maximum wait of an interrupted stream for a worker that resumes it, in simulated seconds;
            `limits.worker_wait_s` calculates it from a graph.
        is_supervised: Whether something outside the router (such as Kubernetes) starts and restarts workers, so that
            requests can wait for one even while none is known.
        record: Called with each change of a worker (for example joined or ejected), for the log; by default nothing is
            logged.

    Raises:
        ConfigError: the routing policy that ``config`` names is not installed, or does not accept its parameters.
    """
    thresholds = busy_thresholds(config.admission)
    busy = {role: BusyWorkers(thresholds, batch_tokens=each.batch_tokens) for role, each in sizes.items()}
    policy = entry_policy(config, slo)
    entry = next(iter(sizes))
    tiers = config.tiers.under(slo) if config.tiers.enabled else None
    settings = _entry_settings(config, policy, sizes[entry], tiers, is_disaggregated=Role.DECODE in sizes)
    settings = replace(settings, slo_s=slo.ttft_seconds, resume_wait_s=worker_wait_s)
    queues: dict[Role, DispatchQueue[T]] = {entry: DispatchQueue(policy, settings)}
    if Role.DECODE in sizes:
        bounds = _decode_settings(config, sizes[Role.DECODE], tiers, lease_s)
        queues[Role.DECODE] = DispatchQueue(decode_policy(config, slo), bounds)
    pool = WorkerPool(config.breaker, is_supervised=is_supervised, record=record)
    control = None if tiers is None else TierControl(tiers, queues)
    deflection = None
    if config.prefill_deflection.enabled and Role.DECODE in sizes:
        deflection = PrefillDeflection(config.prefill_deflection, sizes[Role.DECODE].batch_tokens)
    return RouterCore(pool, queues, busy, control, deflection)


def _entry_settings(
    config: RouterConfig,
    policy: RoutingPolicy,
    size: WorkerSize,
    tiers: TiersConfig | None,
    *,
    is_disaggregated: bool,
) -> QueueSettings:
    """Return the settings of the first stage's queue.

    Under a policy that assigns when a worker is free, aggregated workers get every request at once, unless there are tiers.
    With tiers, no more requests are sent to a worker than it has capacity for, so that the others wait in the queue in their
    tier's order.
    """
    queue = config.prefill_queue
    has_slots = is_disaggregated or tiers is not None or policy.assigns is AssignTime.ON_ARRIVAL
    return QueueSettings(
        slot_tokens=queue.worker_tokens if has_slots and size.slot_requests is None else None,
        slot_requests=size.slot_requests,
        worker_requests=None if tiers is None else size.requests,
        max_requests=queue.max_requests,
        max_wait_s=queue.max_wait_seconds,
        max_wake_s=queue.max_wake_seconds,
        order=queue.order,
        tiers=tiers,
    )


def _decode_settings(
    config: RouterConfig, size: WorkerSize, tiers: TiersConfig | None, lease_s: float
) -> QueueSettings:
    """Return the settings of the decode workers' queue, in which requests wait only while no decode worker can be routed to.

    The lease of a prefilled prompt is not renewed during this wait, which therefore ends before the lease does.
    """
    own_s = config.decode_queue.max_wait_seconds
    leased_s = min(config.prefill_queue.max_wait_seconds, TRUSTED_FRACTION * lease_s)
    return QueueSettings(
        worker_requests=None if tiers is None else size.requests,
        max_requests=config.prefill_queue.max_requests,
        max_wait_s=leased_s if own_s is None else own_s,
        wait_limit=LEASE_WAIT,
        tiers=tiers,
    )
