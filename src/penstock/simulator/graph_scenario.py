"""What a manifest says about a scenario: its pools and its SLO; its router section stands for itself."""

from __future__ import annotations

from typing import Final

from penstock.api import GraphDeployment, LeaseConfig, PlannerMode, RouterConfig
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.profiles.performance import BATCH_TOKENS, BLOCK_TOKENS, RUNNING_REQUESTS
from penstock.engine.serve.preemption_config import PreemptionFlag
from penstock.runtimes.engine_flags import preemption_config
from penstock.simulator.scenario import PoolSpec, ProfiledModel

NOT_SIMULATED: Final = (
    "sessionHeader",
    "tokenizer",
    "auth",
    "corsAllowedOrigins",
    "limits",
    "health",
    "admission.retryAfterSeconds",
    "tiers.header",
    "tiers.models",
    "tiers.keysSecret",
    "tiers.keysFile",
    "tiers.maxTenantShare",
)
"""Keys of a router section that change nothing in a simulation: requests of a trace have no session, tenant, text, key or
connection, rejected ones do not come back, and workers' metrics are read each second."""


def unsimulated(config: RouterConfig) -> list[str]:
    """Return the keys that a router section sets and a simulation does not honour."""
    given = config.to_manifest()
    found = []
    for key in NOT_SIMULATED:
        section, _, name = key.partition(".")
        if section in given and (not name or name in given[section]):
            found.append(f"router.{key}")
    return found


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
                preemption=None if preemption is None else PreemptionFlag.model_validate(preemption),
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
