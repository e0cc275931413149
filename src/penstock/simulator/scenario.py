"""What is simulated: workers, router, planner, joins, leaves and failures; checked when it is built.

All times are virtual seconds from the workload's zero. The world reads this and nothing else, so a scenario
and its requests are the whole input of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import GraphDeployment, LeaseConfig, PlannerMode, Role, RouterConfig
from penstock.core.errors import ConfigError
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.profiles import performance
from penstock.engine.serve.preemption_config import PreemptionFlag
from penstock.planner.decide.config import DecideConfig
from penstock.router.core.worker_spec import WorkerSize
from penstock.runtimes.engine_flags import preemption_config
from penstock.simulator.faults import Faults
from penstock.workload.traces import BLOCK_TOKENS

MAX_WAITING: Final = 1_000_000
"""Most that a router section allows."""
MAX_WAIT_S: Final = 86_400.0
"""Likewise; longer than a simulation goes on after its last arrival."""


def _require(key: str, value: object, *, is_fine: bool, bound: str) -> None:
    if not is_fine:
        raise ConfigError(f"{key}: {value!r} must be {bound}")


@dataclass(frozen=True, slots=True)
class SimpleModel:
    """A server that only prefills: uncached tokens times a constant, one request after the other.

    Attributes:
        name: For the results.
        prefill_s_per_token: Seconds, > 0.
        cache_tokens: Tokens whose KV it keeps, least recently used out first, >= 512.
        slot_requests: Requests that a router hands to it at a time, >= 1. It computes one, and takes no time to begin
            the next, so that a second one would only lose its place in the router's order.
    """

    name: str
    prefill_s_per_token: float
    cache_tokens: int
    slot_requests: int = 1

    def __post_init__(self) -> None:
        """Check the bounds."""
        _require(
            "prefill_s_per_token",
            self.prefill_s_per_token,
            is_fine=0 < self.prefill_s_per_token < math.inf,
            bound="a finite number above 0",
        )
        _require(
            "cache_tokens",
            self.cache_tokens,
            is_fine=self.cache_tokens >= BLOCK_TOKENS,
            bound=f"at least {BLOCK_TOKENS}",
        )
        _require("slot_requests", self.slot_requests, is_fine=self.slot_requests >= 1, bound="at least 1")


DUALMAP_7B = SimpleModel("dualmap-7b", 0.16e-3, 1_000_000)
"""Qwen2.5-7B on an Ascend 910B4; source: the DualMap artefact's constants and the paper's cache size."""
DUALMAP_14B = SimpleModel("dualmap-14b", 0.127e-3, 500_000)
"""Qwen2.5-14B on an Ascend 910B3; source: as above."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """The engine core with a latency profile: what the live worker runs.

    Attributes:
        profile: Name or path of a profile.
        kv_tokens: KV capacity in tokens; None takes the profile's.
        block_size: Tokens per KV block, a divisor of 512. The live worker has 16; a trace shares prefixes by
            512, so that only partial last blocks differ, and a coarse block costs a third of the time.
        max_num_batched_tokens: Tokens per step.
        max_num_seqs: Requests in a batch.
        link: Incoming KV link.
        lease: Terms that a prefill worker grants.
        preemption: How tiers preempt; None: requests have none.
        request_limit: Most requests in the engine; further ones wait, or are turned away. None: no bound.
        request_queue: Most requests that wait beyond the limit, >= 1.
    """

    profile: str
    kv_tokens: int | None = None
    block_size: int = 128
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    link: LinkTerms = field(default_factory=LinkTerms)
    lease: LeaseTerms = field(default_factory=LeaseTerms)
    preemption: PreemptionFlag | None = None
    request_limit: int | None = None
    request_queue: int = 16

    def __post_init__(self) -> None:
        """Check the bounds."""
        divides = self.block_size >= 1 and BLOCK_TOKENS % self.block_size == 0
        _require("block_size", self.block_size, is_fine=divides, bound=f"a divisor of {BLOCK_TOKENS}")
        _require("max_num_seqs", self.max_num_seqs, is_fine=self.max_num_seqs >= 1, bound="at least 1")
        _require(
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            is_fine=self.max_num_batched_tokens >= self.max_num_seqs,
            bound=f"at least max_num_seqs ({self.max_num_seqs})",
        )
        limit, queue = self.request_limit, self.request_queue
        _require("request_limit", limit, is_fine=limit is None or limit >= 1, bound="at least 1, or none")
        _require("request_queue", queue, is_fine=queue >= 1, bound="at least 1")
        if self.kv_tokens is not None:
            _require("kv_tokens", self.kv_tokens, is_fine=self.kv_tokens >= 1, bound="at least 1")


Model = SimpleModel | ProfiledModel


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The workers of one role.

    Attributes:
        role: prefill, decode or aggregated.
        replicas: Ready at time 0, >= 1.
        model: How long they take.
        gpus: Of one replica, >= 0.
    """

    role: Role
    replicas: int
    model: Model
    gpus: int = 1

    def __post_init__(self) -> None:
        """Check the bounds."""
        _require(f"{self.role}.replicas", self.replicas, is_fine=self.replicas >= 1, bound="at least 1")
        _require(f"{self.role}.gpus", self.gpus, is_fine=self.gpus >= 0, bound="at least 0")
        is_alone = isinstance(self.model, ProfiledModel) or self.role is Role.AGGREGATED
        _require("model", self.model, is_fine=is_alone, bound="a profile: the simple server only prefills")

    def worker_size(self, kv_tokens: int) -> WorkerSize:
        """Return what a router knows of each of the workers, which caches ``kv_tokens``."""
        model = self.model
        if isinstance(model, SimpleModel):
            return WorkerSize(kv_tokens, slot_requests=model.slot_requests)
        return WorkerSize(kv_tokens, model.max_num_batched_tokens, model.request_limit)


@dataclass(frozen=True, slots=True)
class Resize:
    """Somebody other than the planner sets a pool's size.

    Attributes:
        at_s: When.
        role: Which pool.
        replicas: Wanted ready + starting replicas, >= 0; joins start cold, leaves drain.
    """

    at_s: float
    role: Role
    replicas: int

    def __post_init__(self) -> None:
        """Check the bounds."""
        _require("resize.at_s", self.at_s, is_fine=0 <= self.at_s < math.inf, bound="finite, at least 0")
        _require("resize.replicas", self.replicas, is_fine=self.replicas >= 0, bound="at least 0")


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker dies with everything on it; nothing happens to one that is down, gone, or without a node.

    Attributes:
        at_s: When.
        worker: Its name, such as ``prefill-0``.
        back_s: When it serves again, with an empty cache; None: never. It holds its GPUs until then.
    """

    at_s: float
    worker: str
    back_s: float | None = None

    def __post_init__(self) -> None:
        """Check the bounds."""
        _require("failure.at_s", self.at_s, is_fine=0 <= self.at_s < math.inf, bound="finite, at least 0")
        is_later = self.back_s is None or self.at_s < self.back_s < math.inf
        _require("failure.back_s", self.back_s, is_fine=is_later, bound=f"after at_s ({self.at_s:g})")


@dataclass(frozen=True, slots=True)
class RouterGroup:
    """Routers side by side, which share one router section.

    Attributes:
        count: Requests come to them in turn, and one picks the workers for all, >= 1.
        propagation_delay_s: Age of what the picker knows of caches and loads beyond what it sent itself, >= 0.
        pick_delay_s: Time that a request of another router takes to the picker and back, >= 0.
        picker_deaths_s: When the picker of that time dies; needs two routers.
    """

    count: int = 1
    propagation_delay_s: float = 0.0
    pick_delay_s: float = 0.0
    picker_deaths_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the bounds."""
        _require("routers", self.count, is_fine=self.count >= 1, bound="at least 1")
        for name in ("propagation_delay_s", "pick_delay_s"):
            value = getattr(self, name)
            _require(name, value, is_fine=0 <= value < math.inf, bound="finite, at least 0")
        for at_s in self.picker_deaths_s:
            _require("picker_deaths_s", at_s, is_fine=0 <= at_s < math.inf, bound="finite, at least 0")
        has_heir = not self.picker_deaths_s or self.count > 1
        _require("routers", self.count, is_fine=has_heir, bound="at least 2 where the picker dies")


def unbounded_router(policy: str, **section: Any) -> RouterConfig:
    """Return a router section with a queue that refuses nothing within a simulation's time.

    Args:
        policy: An installed policy's name.
        section: Further keys, as in a manifest.

    Raises:
        ValidationError: a value is wrong.
    """
    queue = {"maxRequests": MAX_WAITING, "maxWaitSeconds": MAX_WAIT_S, **section.pop("prefillQueue", {})}
    return RouterConfig.model_validate({"policy": policy, **section, "prefillQueue": queue})


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world.

    Attributes:
        pools: Either prefill and decode, or aggregated.
        router: The graph's router section.
        routers: How many there are, and what they know of each other.
        planner: Its rules; None: no planner.
        resizes: Joins and leaves at given times.
        failures: Deaths and returns.
        faults: What else goes wrong.
        cold_start_s: From asking for a replica until it serves, the mean, >= 0.
        cold_start_cv: Coefficient of variation of those times, log-normal, >= 0; 0 makes them equal.
        max_gpus: Never exceeded by the GPUs of existing workers, draining ones included; None: no ceiling.
        slo_s: TTFT that counts as in time, > 0.
        itl_slo_s: Mean time between a request's tokens that counts as in time, > 0; None: any.
        sample_s: Between two samples of loads and replicas, > 0.
        seed: Of everything random: ring positions, and what the caller drew arrivals from.
    """

    pools: Sequence[PoolSpec]
    router: RouterConfig = field(default_factory=RouterConfig)
    routers: RouterGroup = field(default_factory=RouterGroup)
    planner: DecideConfig | None = None
    resizes: Sequence[Resize] = ()
    failures: Sequence[WorkerFailure] = ()
    faults: Faults = field(default_factory=Faults)
    cold_start_s: float = 30.0
    cold_start_cv: float = 0.0
    max_gpus: int | None = None
    slo_s: float = 5.0
    itl_slo_s: float | None = None
    sample_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the rules across fields.

        Raises:
            ConfigError: the message names the field, its value and its bound.
        """
        roles = {pool.role for pool in self.pools}
        is_complete = len(roles) == len(self.pools) and roles in (
            {Role.PREFILL, Role.DECODE},
            {Role.AGGREGATED},
        )
        _require(
            "pools", sorted(roles), is_fine=is_complete, bound="prefill and decode, or aggregated, once each"
        )
        for name in ("slo_s", "sample_s"):
            value = getattr(self, name)
            _require(name, value, is_fine=0 < value < math.inf, bound="a finite number above 0")
        itl_slo_s = self.itl_slo_s
        _require("itl_slo_s", itl_slo_s, is_fine=itl_slo_s is None or itl_slo_s > 0, bound="above 0, or none")
        is_time = 0 <= self.cold_start_s < math.inf
        _require("cold_start_s", self.cold_start_s, is_fine=is_time, bound="finite, at least 0")
        is_spread = 0 <= self.cold_start_cv < math.inf
        _require("cold_start_cv", self.cold_start_cv, is_fine=is_spread, bound="finite, at least 0")
        for change in self.resizes:
            _require(
                "resize.role", change.role, is_fine=change.role in roles, bound="one of the pools' roles"
            )
        if self.max_gpus is not None:
            held = sum(pool.replicas * pool.gpus for pool in self.pools)
            _require(
                "max_gpus",
                self.max_gpus,
                is_fine=held <= self.max_gpus,
                bound=f"at least the {held} at time 0",
            )
        if self.planner is not None and self.planner.max_gpu_budget != self.max_gpus:
            raise ConfigError(
                f"max_gpus: {self.max_gpus} differs from the planner's budget of {self.planner.max_gpu_budget}"
            )

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode are apart."""
        return len(self.pools) == 2

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the workers that a request passes, in this order."""
        return (Role.PREFILL, Role.DECODE) if self.is_disaggregated else (Role.AGGREGATED,)

    @property
    def entry_role(self) -> Role:
        """Role of the workers that the router's policy chooses among."""
        return self.roles[0]

    @property
    def lease_s(self) -> float:
        """First lease of a prefilled prompt, seconds; inf: there is none."""
        model = self.pool(self.entry_role).model
        return (
            model.lease.duration_s if isinstance(model, ProfiledModel) and self.is_disaggregated else math.inf
        )

    def pool(self, role: Role) -> PoolSpec:
        """Return the pool of ``role``."""
        return next(pool for pool in self.pools if pool.role is role)


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
    block_tokens = engine.block_tokens or performance.BLOCK_TOKENS
    preemption = preemption_config(graph.spec)
    running = engine.max_running_requests or performance.RUNNING_REQUESTS
    return tuple(
        PoolSpec(
            service.role,
            service.replicas,
            ProfiledModel(
                service.profile or engine.profile,
                kv_tokens=None if engine.kv_blocks is None else engine.kv_blocks * block_tokens,
                block_size=block_tokens,
                max_num_batched_tokens=engine.max_batch_tokens or max(performance.BATCH_TOKENS, running),
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
