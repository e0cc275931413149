"""What a manifest says about a scenario: its pools, and its router as the live one would be set up."""

from __future__ import annotations

from dataclasses import replace

from penstock.api import GraphDeployment, LeaseConfig, PlannerMode, RouterConfig, TiersConfig
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.profiles.performance import BATCH_TOKENS, BLOCK_TOKENS, RUNNING_REQUESTS
from penstock.engine.serve.preemption_config import PreemptionConfig
from penstock.router.make_core import longest_decode_wait_s, slot_tokens
from penstock.router.policy.busy import busy_thresholds
from penstock.router.policy.registry import PAIRED
from penstock.router.tier_config import shedding_settings, tier_settings
from penstock.runtimes.engine_flags import preemption_config
from penstock.simulator.scenario import PoolSpec, ProfiledModel, RouterSpec, RouterTiers


def graph_pools(graph: GraphDeployment) -> tuple[PoolSpec, ...]:
    """Return the pools of a graph's workers, with the engine that the live ones run."""
    engine = graph.spec.engine
    block_tokens = engine.block_tokens or BLOCK_TOKENS
    preemption = preemption_config(graph.spec)
    running = engine.max_running_requests or RUNNING_REQUESTS
    return tuple(
        PoolSpec(
            service.role,
            service.replicas,
            ProfiledModel(
                service.profile or engine.profile,
                kv_tokens=None if engine.kv_blocks is None else engine.kv_blocks * block_tokens,
                block_size=block_tokens,
                max_num_batched_tokens=engine.max_batch_tokens or max(BATCH_TOKENS, running),
                max_num_seqs=running,
                lease=_lease_terms(graph.spec.lease_of(service)),
                request_limit=engine.request_limit,
                request_queue=engine.request_queue,
                preemption=None if preemption is None else PreemptionConfig.model_validate(preemption),
            ),
            service.gpus,
        )
        for service in graph.spec.workers.values()
    )


def graph_slo_s(graph: GraphDeployment) -> float:
    """Return the TTFT that counts as in time: the planner's target in mode sla, else the router's."""
    spec = graph.spec
    is_target = spec.planner.mode == PlannerMode.SLA
    return spec.planner.sla.ttft_seconds if is_target else spec.router.ttft_slo_seconds


def _lease_terms(lease: LeaseConfig) -> LeaseTerms:
    return LeaseTerms(lease.duration_seconds, lease.decoder_blocks_ttl_seconds)


def graph_router(graph: GraphDeployment, policy: str | None = None) -> RouterSpec:
    """Return the router of a graph, under another policy if one is named."""
    config = graph.spec.router
    name = policy or config.policy.value
    slots = slot_tokens(config, name, is_disaggregated=graph.spec.is_disaggregated)
    decode_wait_s = longest_decode_wait_s(config, graph.spec.lease_seconds)
    return replace(_configured(config, name), slot_tokens=slots, max_decode_wait_s=decode_wait_s)


def default_router(policy: str) -> RouterSpec:
    """Return a router as a graph without settings has it, which holds requests back from every worker alike."""
    config = RouterConfig()
    return replace(_configured(config, policy), max_waiting=None, max_wait_s=None)


def _configured(config: RouterConfig, name: str) -> RouterSpec:
    dualmap = config.dualmap
    settings = {
        "rebalance": dualmap.rebalance,
        "hot_window": dualmap.hot_window,
        "bottleneck_s": dualmap.decode_bottleneck_seconds,
    }
    return RouterSpec(
        policy=name,
        settings=settings if name in PAIRED else {},
        queue_order=config.prefill_queue.order,
        slot_tokens=config.prefill_queue.worker_tokens,
        peer_interval_s=config.peers.interval_real_seconds,
        max_waiting=config.prefill_queue.max_requests,
        max_wait_s=config.prefill_queue.max_wait_seconds,
        max_wake_s=config.prefill_queue.max_wake_seconds,
        max_retries=config.retries.max_per_request,
        retry_budget_fraction=config.retries.budget_fraction,
        min_retries_per_s=config.retries.min_per_second,
        thresholds=busy_thresholds(config.admission),
        tiers=_tiers(config.tiers),
    )


def _tiers(config: TiersConfig) -> RouterTiers:
    return RouterTiers(tier_settings(config), shedding_settings(config), config.default, config.enabled)
