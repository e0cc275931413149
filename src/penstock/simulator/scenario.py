"""What is simulated: workers, router, planner, joins, leaves and faults; with its requests the complete input of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from penstock.api import GraphDeployment, Role, RouterConfig, SloConfig
from penstock.core.errors import ConfigError
from penstock.core.flags import check_bounds, flag
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.profiles import performance
from penstock.engine.serve.settings import PreemptionFlag
from penstock.router.core.worker import WorkerSize
from penstock.runtimes.engine_flags import preemption_config
from penstock.workload.traces import BLOCK_TOKENS
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Memory

MAX_WAITING: Final = 1_000_000
"""Maximum that a router section allows."""
MAX_WAIT_S: Final = 86_400.0
"""Likewise; longer than a simulation continues after its last arrival."""


MONDAY_S: Final = 1_704_067_200.0
"""Chosen: Monday, 1 January 2024, 00:00 UTC; the calendar at second 0 where none is given."""


def _require(key: str, value: object, is_fine: bool, bound: str) -> None:  # noqa: FBT001 - the check's outcome
    if not is_fine:
        raise ConfigError(f"{key}: {value!r} must be {bound}")


class Fault(StrEnum):
    """What is wrong for a while.

    NEVER_READY: replicas asked for meanwhile never serve, and the backend does not say why.
    METRICS_MISSING: no source answers. METRICS_STALE: every source repeats what it last knew.
    METRICS_ZERO: every gauge reads 0, as after an exporter's restart. METRICS_NAN: every gauge reads NaN.
    ROUTER_DOWN: arrivals fail, what waits stays where it is, and only the workers' own gauges can be read.
    PLANNER_DOWN: the planner's process is away.
    """

    NEVER_READY = "never-ready"
    METRICS_MISSING = "metrics-missing"
    METRICS_STALE = "metrics-stale"
    METRICS_ZERO = "metrics-zero"
    METRICS_NAN = "metrics-nan"
    ROUTER_DOWN = "router-down"
    PLANNER_DOWN = "planner-down"


@dataclass(frozen=True, slots=True)
class FaultPeriod:
    """One fault from a time to a time."""

    kind: Fault
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        times = f"{self.from_s:g}-{self.to_s:g}"
        is_fine = 0 <= self.from_s < self.to_s < math.inf
        _require(f"--fault {self.kind.value}", times, is_fine, "finite, from 0 on, and not empty")


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The GPU budget from a time on; existing workers may stay, none may join above it."""

    at_s: float
    gpus: int

    def __post_init__(self) -> None:
        is_fine = 0 <= self.at_s < math.inf and self.gpus >= 0
        _require("--budget-change", f"{self.at_s}={self.gpus}", is_fine, "a time and GPUs of at least 0")


def _period(text: str) -> FaultPeriod:
    kind, _, times = text.partition(":")
    from_s, _, to_s = times.partition("-")
    return FaultPeriod(Fault(kind), float(from_s), float(to_s))


def _budget(text: str) -> BudgetChange:
    at_s, _, gpus = text.partition("=")
    return BudgetChange(float(at_s), int(gpus))


_KINDS = ", ".join(kind.value for kind in Fault)


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that goes wrong in one run; the help of its fields is the command line's."""

    periods: Sequence[FaultPeriod] = flag(
        f"Let something go wrong for a while: {_KINDS}; repeatable.",
        name="--fault",
        default=(),
        metavar="KIND:FROM-TO",
        convert=_period,
        form=f"KIND:FROM-TO, as metrics-missing:150-450; kinds are {_KINDS}",
    )
    restarts: Sequence[float] = flag(
        "Replace the planner's process at this time, seconds; repeatable.",
        name="--restart",
        default=(),
        metavar="S",
        unset="never",
    )
    budget: Sequence[BudgetChange] = flag(
        "Change the GPU budget, or the pool's GPUs, at a time; repeatable.",
        name="--budget-change",
        default=(),
        metavar="S=N",
        convert=_budget,
        form="SECONDS=GPUS, as 200=4",
    )
    failing_starts: float = flag(
        "Fraction of requested replicas that never become ready.", default=0.0, ge=0, le=1
    )
    node_gpus: int | None = flag(
        "GPUs of all nodes; replicas beyond them cannot be placed.", ge=1, unset="enough"
    )

    def is_on(self, kind: Fault, now_s: float) -> bool:
        """Return whether a fault is on at a time."""
        return self.since_s(kind, now_s) is not None

    def since_s(self, kind: Fault, now_s: float) -> float | None:
        """Return when the fault that is on began, or None."""
        for each in self.periods:
            if each.kind is kind and each.from_s <= now_s < each.to_s:
                return each.from_s
        return None


@dataclass(frozen=True, slots=True)
class SimpleModel:
    """A server that only prefills: uncached tokens times a constant, one request after the other.

    It computes one request, and takes no time to begin the next, so that a router hands it one at a time.
    """

    name: str
    prefill_s_per_token: float = flag("Seconds.", gt=0)
    cache_tokens: int = flag("Tokens whose KV it keeps, least recently used out first.", ge=BLOCK_TOKENS)
    slot_requests: int = flag("Requests that a router hands to it at a time.", default=1, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)


DUALMAP_7B = SimpleModel("dualmap-7b", 0.16e-3, 1_000_000)
"""Qwen2.5-7B on an Ascend 910B4; source: the DualMap artefact's constants and the paper's cache size."""
DUALMAP_14B = SimpleModel("dualmap-14b", 0.127e-3, 500_000)
"""Qwen2.5-14B on an Ascend 910B3; source: as above."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """The engine core with a latency profile, as in the live worker.

    The live worker's blocks have 16 tokens; a trace shares prefixes by 512, so that only partial last blocks differ, and
    a coarse block costs a third of the time.
    """

    profile: str
    kv_tokens: int | None = flag("KV capacity.", ge=1, unset="the profile's")
    block_size: int = flag("Tokens per KV block, a divisor of 512.", default=128, ge=1)
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = flag("Requests in a batch.", default=256, ge=1)
    link: LinkTerms = field(default_factory=LinkTerms)
    lease: LeaseTerms = field(default_factory=LeaseTerms)
    preemption: PreemptionFlag | None = None
    request_limit: int | None = flag("Maximum number of requests in the engine.", ge=1, unset="no bound")
    request_queue: int = flag("Maximum number of requests that wait beyond it.", default=16, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        _require(
            "block_size", self.block_size, BLOCK_TOKENS % self.block_size == 0, f"a divisor of {BLOCK_TOKENS}"
        )
        is_enough = self.max_num_batched_tokens >= self.max_num_seqs
        bound = f"at least max_num_seqs ({self.max_num_seqs})"
        _require("max_num_batched_tokens", self.max_num_batched_tokens, is_enough, bound)


Model = SimpleModel | ProfiledModel


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The workers of one role."""

    role: Role
    replicas: int
    model: Model
    gpus: int = flag("GPUs of one replica.", default=1, ge=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        _require(f"{self.role}.replicas", self.replicas, self.replicas >= 1, "at least 1")
        is_alone = isinstance(self.model, ProfiledModel) or self.role is Role.AGGREGATED
        _require("model", self.model, is_alone, "a profile: the simple server only prefills")

    def worker_size(self, kv_tokens: int) -> WorkerSize:
        """Return each worker's size as a router sees it; a worker caches ``kv_tokens``."""
        model = self.model
        if isinstance(model, SimpleModel):
            return WorkerSize(kv_tokens, slot_requests=model.slot_requests)
        return WorkerSize(kv_tokens, model.max_num_batched_tokens, model.request_limit)


@dataclass(frozen=True, slots=True)
class Resize:
    """Somebody other than the planner sets a pool's ready and starting replicas; joins start cold, leaves drain."""

    at_s: float
    role: Role
    replicas: int

    def __post_init__(self) -> None:
        _require("--resize, its time", self.at_s, 0 <= self.at_s < math.inf, "finite, at least 0")
        _require("--resize, its replicas", self.replicas, self.replicas >= 0, "at least 0")


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker dies with everything on it, and serves again, empty, at ``back_s``; it holds its GPUs until then. None: never."""

    at_s: float
    worker: str
    back_s: float | None = None

    def __post_init__(self) -> None:
        _require("--fail, its time", self.at_s, 0 <= self.at_s < math.inf, "finite, at least 0")
        is_later = self.back_s is None or self.at_s < self.back_s < math.inf
        _require("--fail, its return", self.back_s, is_later, f"after at_s ({self.at_s:g})")


@dataclass(frozen=True, slots=True)
class SimulatedRouters:
    """Routers side by side, which share one router section: requests come to them in turn, and one picks for all."""

    count: int = flag("Number of routers.", name="--routers", default=1, ge=1)
    propagation_delay_s: float = flag(
        "Age of what the picker knows of caches and loads beyond what it sent itself.", default=0.0, ge=0
    )
    pick_delay_s: float = flag(
        "Delay of a request from another router to the picker and back, seconds.", default=0.0, ge=0
    )
    picker_deaths_s: tuple[float, ...] = flag(
        "When the picker of that time dies.", name="--picker-death", default=(), ge=0
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        has_heir = not self.picker_deaths_s or self.count > 1
        _require("--routers", self.count, has_heir, "at least 2 where the picker dies")


@dataclass(frozen=True, slots=True)
class PlannerPatience:
    """How long a planner waits.

    Attributes:
        deadline_s: For a replica before it is rolled back, > 0; None: 600 s, or twice the cold start where that is longer,
            as a user would set it.
        max_age_s: Age above which a reading is stale, > 0.
    """

    deadline_s: float | None = None
    max_age_s: float = 10.0


def unbounded_router(policy: str, **section: Any) -> RouterConfig:
    """Return a router section with a queue that refuses nothing within a simulation's time."""
    queue = {"maxRequests": MAX_WAITING, "maxWaitSeconds": MAX_WAIT_S, **section.pop("prefillQueue", {})}
    return RouterConfig.model_validate({"policy": policy, **section, "prefillQueue": queue})


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation.

    Attributes:
        pools: Either prefill and decode, or aggregated.
        slo: What counts as on time: the TTFT, and of a request's tokens the mean time between them.
        patience: Of the planner, as the graph has it.
        memory: What the planner starts from, learnt by another one.
        calendar_s: Real seconds since 1970 at second 0, for the planner's schedule.
        seed: Of everything random: ring positions, and what the caller drew arrivals from.
    """

    pools: Sequence[PoolSpec]
    router: RouterConfig = field(default_factory=RouterConfig)
    routers: SimulatedRouters = field(default_factory=SimulatedRouters)
    planner: DecideConfig | None = None
    patience: PlannerPatience = field(default_factory=PlannerPatience)
    memory: Memory = field(default_factory=dict)
    resizes: Sequence[Resize] = ()
    failures: Sequence[WorkerFailure] = ()
    faults: Faults = field(default_factory=Faults)
    cold_start_s: float = flag("From asking for a replica until it serves, the mean.", default=30.0, ge=0)
    cold_start_cv: float = flag(
        "Coefficient of variation of those times, log-normal; 0 makes them equal.", default=0.0, ge=0
    )
    max_gpus: int | None = flag(
        "Never exceeded by the GPUs of existing workers, draining ones included.", ge=0, unset="no ceiling"
    )
    slo: SloConfig = field(default_factory=SloConfig)
    sample_s: float = flag("Between two samples of loads and replicas.", default=1.0, gt=0)
    calendar_s: float = MONDAY_S
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        roles = {pool.role for pool in self.pools}
        is_complete = len(roles) == len(self.pools) and roles in (
            {Role.PREFILL, Role.DECODE},
            {Role.AGGREGATED},
        )
        bound = "prefill and decode, or aggregated, once each"
        _require("pools", sorted(roles), is_complete, bound)
        for change in self.resizes:
            _require("--resize, its role", change.role, change.role in roles, "one of the pools' roles")
        if self.max_gpus is not None:
            held = sum(pool.replicas * pool.gpus for pool in self.pools)
            _require("--max-gpus", self.max_gpus, held <= self.max_gpus, f"at least the {held} at time 0")
        if self.planner is not None and self.planner.max_gpu_budget != self.max_gpus:
            raise ConfigError(
                f"--max-gpus: {self.max_gpus} differs from the planner's budget of {self.planner.max_gpu_budget}"
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
        """First lease of a prefilled prompt, seconds; inf: no lease."""
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
    "drain",
    "gateway",
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
            service.first_replicas,
            ProfiledModel(
                service.profile or engine.profile,
                kv_tokens=None if engine.kv_blocks is None else engine.kv_blocks * block_tokens,
                block_size=block_tokens,
                max_num_batched_tokens=engine.max_batch_tokens or max(performance.BATCH_TOKENS, running),
                max_num_seqs=running,
                lease=LeaseTerms(lease.duration_seconds, lease.decoder_blocks_ttl_seconds),
                request_limit=engine.request_limit,
                request_queue=engine.request_queue,
                preemption=None if preemption is None else PreemptionFlag.model_validate(preemption),
            ),
            service.gpus,
        )
        for service in graph.spec.workers.values()
        for lease in (graph.spec.lease_of(service),)
    )
