"""The scenario of a simulation: workers, router, planner, scripted changes and faults. With its requests it is a run's complete input."""

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
from penstock_planner.decide.state import Learned

MAX_WAITING: Final = 1_000_000
"""Maximum queue length that a router section allows."""
MAX_WAIT_S: Final = 86_400.0
"""Maximum queue timeout, in seconds, that a router section allows. A simulation ends sooner than this after its last arrival."""


MONDAY_S: Final = 1_704_067_200.0
"""Wall-clock time of second 0 if none is set: Monday, 1 January 2024, 00:00 UTC, in seconds since 1970. Chosen."""


def _require(key: str, value: object, is_fine: bool, bound: str) -> None:  # noqa: FBT001 - the check's outcome
    if not is_fine:
        raise ConfigError(f"{key}: {value!r} must be {bound}")


class Fault(StrEnum):
    """Kind of a temporary fault.

    NEVER_READY: replicas requested during the fault never become ready, and the backend reports no reason.
    METRICS_MISSING: no metrics source answers. METRICS_STALE: every source repeats its last values.
    METRICS_ZERO: every gauge reads 0, as after an exporter's restart. METRICS_NAN: every gauge reads NaN.
    ROUTER_DOWN: arrivals fail, queued requests stay queued, and only the workers' own gauges can be read.
    PLANNER_DOWN: the planner's process is down.
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
    """A temporary fault of a simulation.

    Attributes:
        kind: What goes wrong, such as that no metrics source answers.
        from_s: Time at which the fault begins, simulated seconds.
        to_s: Time at which it ends, simulated seconds.
    """

    kind: Fault
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        times = f"{self.from_s:g}-{self.to_s:g}"
        is_fine = 0 <= self.from_s < self.to_s < math.inf
        _require(f"--fault {self.kind.value}", times, is_fine, "finite, from 0 on, and not empty")


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """A change of the GPU budget during a simulation.

    Existing workers above the new budget are not removed, but no worker may join above it.

    Attributes:
        at_s: Time of the change, simulated seconds.
        gpus: GPU budget from then on.
    """

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
    """Everything that goes wrong in one run. Times are simulated seconds.

    Attributes:
        periods: Temporary faults.
        restarts: Times at which the planner's process is restarted.
        budget: Changes of the GPU budget or, if several graphs share a pool of GPUs, of the pool's number of GPUs.
        failing_starts: Fraction of the requested replicas that never become ready, 0-1.
        node_gpus: GPUs of all nodes together; replicas beyond them stay unscheduled. None for no limit.
    """

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
        """Return whether a fault of this kind is active at the simulated time ``now_s``, in seconds."""
        return self.since_s(kind, now_s) is not None

    def since_s(self, kind: Fault, now_s: float) -> float | None:
        """Return the simulated time, in seconds, at which the fault of this kind began that is active at ``now_s``; None if none is active."""
        for each in self.periods:
            if each.kind is kind and each.from_s <= now_s < each.to_s:
                return each.from_s
        return None


@dataclass(frozen=True, slots=True)
class SimpleModel:
    """A server that only prefills, one request at a time, in a constant time per uncached token.

    Attributes:
        name: Display name of the model.
        prefill_s_per_token: Seconds to compute one uncached token.
        cache_tokens: Capacity of its prefix cache in tokens; the least recently used blocks are evicted.
        slot_requests: Maximum number of requests that a router dispatches to the server at a time.
    """

    name: str
    prefill_s_per_token: float = flag("Seconds.", gt=0)
    cache_tokens: int = flag("Tokens whose KV it keeps, least recently used out first.", ge=BLOCK_TOKENS)
    slot_requests: int = flag(
        "Maximum number of requests that a router dispatches to it at a time.", default=1, ge=1
    )

    def __post_init__(self) -> None:
        check_bounds(self)


DUALMAP_7B = SimpleModel("dualmap-7b", 0.16e-3, 1_000_000)
"""A server that only prefills: Qwen2.5-7B on an Ascend 910B4. Source: the DualMap artefact's constants and the paper's cache size."""
DUALMAP_14B = SimpleModel("dualmap-14b", 0.127e-3, 500_000)
"""A server that only prefills: Qwen2.5-14B on an Ascend 910B3. Source: the DualMap artefact's constants and the paper's cache size."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A simulated inference engine whose step times come from a latency profile; `penstock` can also run it as a server process.

    That server process has KV blocks of 16 tokens. Traces share prefixes in units of 512 tokens, so the larger blocks used here change only
    partial last blocks, and a run takes a third of the time.

    Attributes:
        profile: Name or path of the latency profile.
        kv_tokens: KV cache capacity of one worker, in tokens; None uses the profile's.
        block_size: Tokens per KV block, a divisor of 512.
        max_num_batched_tokens: Maximum number of prompt tokens per engine step.
        max_num_seqs: Maximum number of requests in a batch.
        link: Bandwidth and latency of KV transfers.
        lease: Durations of the leases, the times for which a worker keeps a prompt's KV for another worker.
        preemption: Settings of preemption by priority; None disables it.
        request_limit: Maximum number of requests in the engine; None for no limit.
        request_queue: Maximum number of requests that wait beyond ``request_limit``; further ones are rejected.
    """

    profile: str
    kv_tokens: int | None = flag("KV capacity.", ge=1, unset="the profile's")
    block_size: int = flag("Tokens per KV block, a divisor of 512.", default=128, ge=1)
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = flag("Maximum number of requests in a batch.", default=256, ge=1)
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
    """The workers of one role at time 0.

    Attributes:
        role: Role of the workers.
        replicas: Number of replicas at time 0.
        model: Engine of each worker.
        gpus: GPUs per replica.
    """

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
        """Return the capacity of one worker of the pool, as a router assumes it: concurrent requests and KV cache.

        ``kv_tokens`` is the capacity of the worker's KV cache in tokens.
        """
        model = self.model
        if isinstance(model, SimpleModel):
            return WorkerSize(kv_tokens, slot_requests=model.slot_requests)
        return WorkerSize(kv_tokens, model.max_num_batched_tokens, model.request_limit)


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of a pool's size by someone other than the planner.

    Added replicas take the cold start to become ready, removed replicas drain.

    Attributes:
        at_s: Time of the change, simulated seconds.
        role: Role of the pool's workers.
        replicas: Number of ready and starting replicas to which the pool is set; a planner can change it later.
    """

    at_s: float
    role: Role
    replicas: int

    def __post_init__(self) -> None:
        _require("--resize, its time", self.at_s, 0 <= self.at_s < math.inf, "finite, at least 0")
        _require("--resize, its replicas", self.replicas, self.replicas >= 0, "at least 0")


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The death of a worker, with all requests on it and its cache.

    Attributes:
        at_s: Time of the death, simulated seconds.
        worker: Name of the worker.
        back_s: Time at which the worker restarts, without requests or cache; it holds its GPUs until then. None removes the worker.
    """

    at_s: float
    worker: str
    back_s: float | None = None

    def __post_init__(self) -> None:
        _require("--fail, its time", self.at_s, 0 <= self.at_s < math.inf, "finite, at least 0")
        is_later = self.back_s is None or self.at_s < self.back_s < math.inf
        _require("--fail, its return", self.back_s, is_later, f"after at_s ({self.at_s:g})")


@dataclass(frozen=True, slots=True)
class SimulatedRouters:
    """Routers of a simulation, all with the same router section.

    They receive requests in turn. One of them, the picker, chooses the workers for all. Times are simulated seconds.

    Attributes:
        count: Number of routers.
        propagation_delay_s: Seconds until the picker learns of changes of the workers' loads and caches, except for changes by its own
            dispatches, which it knows at once.
        pick_delay_s: Seconds that a request to another router takes to the picker and back.
        picker_deaths_s: Times at which the router that is then the picker dies.
    """

    count: int = flag("Number of routers.", name="--routers", default=1, ge=1)
    propagation_delay_s: float = flag(
        "Age of what the picker knows of caches and loads, apart from its own dispatches, seconds.",
        default=0.0,
        ge=0,
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
class PlannerTimeouts:
    """Timeouts of the planner; in a simulation, their seconds are simulated seconds.

    Attributes:
        deadline_s: Seconds that a replica may take to become ready before its scale-up is rolled back, > 0. None means 600 s, or twice the
            cold start if that is longer, since a user would set a longer deadline then.
        max_age_s: Age in seconds above which the planner treats a metric as stale, > 0.
    """

    deadline_s: float | None = None
    max_age_s: float = 10.0


def unbounded_router(policy: str, **section: Any) -> RouterConfig:
    """Return a router configuration with a queue of one million requests and a queue timeout of one day, which no simulation reaches.

    Args:
        policy: Name of the routing policy.
        section: Further keys of the router section, as in a manifest.
    """
    queue = {"maxRequests": MAX_WAITING, "maxWaitSeconds": MAX_WAIT_S, **section.pop("prefillQueue", {})}
    return RouterConfig.model_validate({"policy": policy, **section, "prefillQueue": queue})


@dataclass(frozen=True, slots=True)
class Scenario:
    """Configuration of one simulation. Times are simulated seconds.

    Attributes:
        pools: Worker pools, either prefill and decode, or aggregated.
        router: Router section of the manifest.
        routers: Number of routers and their delays.
        planner: Configuration of the planner; None if nothing scales.
        patience: Timeouts of the planner.
        memory: Learned state of an earlier planner that the planner starts with, by the name of each value; empty to start without any.
        resizes: Changes of pool sizes at set times.
        failures: Deaths of workers at set times.
        faults: Temporary faults.
        cold_start_s: Mean seconds from the request for a replica until it serves.
        cold_start_cv: Coefficient of variation of these start-up times; 0 makes them equal.
        max_gpus: GPU budget for all existing workers, draining ones included; None for no limit.
        slo: Latency targets that decide whether a request is on time: for its TTFT, and for the mean gap between its tokens.
        sample_s: Seconds between two samples of the run's state.
        calendar_s: Wall-clock time at second 0, in seconds since 1970, for the planner's schedule.
        seed: Random seed, for hash ring positions and start-up times. The arrivals are drawn by the caller.
    """

    pools: Sequence[PoolSpec]
    router: RouterConfig = field(default_factory=RouterConfig)
    routers: SimulatedRouters = field(default_factory=SimulatedRouters)
    planner: DecideConfig | None = None
    patience: PlannerTimeouts = field(default_factory=PlannerTimeouts)
    memory: Learned = field(default_factory=dict)
    resizes: Sequence[Resize] = ()
    failures: Sequence[WorkerFailure] = ()
    faults: Faults = field(default_factory=Faults)
    cold_start_s: float = flag(
        "Mean time from requesting a replica until it is ready, seconds.", default=30.0, ge=0
    )
    cold_start_cv: float = flag(
        "Coefficient of variation of those times, log-normal; 0 makes them equal.", default=0.0, ge=0
    )
    max_gpus: int | None = flag(
        "Maximum GPUs that all existing workers hold together, draining ones included.",
        ge=0,
        unset="no ceiling",
    )
    slo: SloConfig = field(default_factory=SloConfig)
    sample_s: float = flag("Seconds between two samples of loads and replicas.", default=1.0, gt=0)
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
        """Whether prefill and decode run on separate workers; if not, aggregated workers do both."""
        return len(self.pools) == 2

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the workers that a request passes, in this order: prefill and decode, or only aggregated."""
        return (Role.PREFILL, Role.DECODE) if self.is_disaggregated else (Role.AGGREGATED,)

    @property
    def entry_role(self) -> Role:
        """Role of the workers that compute prompts, prefill or aggregated; the router's policy chooses among them."""
        return self.roles[0]

    @property
    def lease_s(self) -> float:
        """Simulated seconds for which a prefill worker first keeps a prompt's KV for the decode worker (the lease); infinite without leases."""
        model = self.pool(self.entry_role).model
        return (
            model.lease.duration_s if isinstance(model, ProfiledModel) and self.is_disaggregated else math.inf
        )

    def pool(self, role: Role) -> PoolSpec:
        """Return the worker pool of ``role``, which the scenario must have."""
        return next(pool for pool in self.pools if pool.role is role)


NOT_SIMULATED: Final = (
    "sessionHeader",
    "tokenizer",
    "auth",
    "corsAllowedOrigins",
    "keepAliveSeconds",
    "limits",
    "health",
    "drain",
    "gateway",
    "admission.retryAfterSeconds",
    "retries.continueBy",
    "tiers.header",
    "tiers.models",
    "tiers.keysSecret",
    "tiers.keysFile",
    "tiers.maxTenantShare",
)
"""Keys of a router section that have no effect in a simulation.

Requests of a trace have no session, tenant, text, API key or connection, rejected requests are not retried by clients, and metrics are
scraped each second.
"""


def unsimulated(config: RouterConfig) -> list[str]:
    """Return the keys, prefixed by ``router.``, that ``config`` sets and that have no effect in a simulation; empty if there are none."""
    given = config.to_manifest()
    found = []
    for key in NOT_SIMULATED:
        section, _, name = key.partition(".")
        if section in given and (not name or name in given[section]):
            found.append(f"router.{key}")
    return found


def graph_pools(graph: GraphDeployment) -> tuple[PoolSpec, ...]:
    """Return the worker pools of a graph's manifest, with the engine settings that the graph's workers get on a cluster.

    The settings (latency profile, KV capacity, batch size, KV lease, preemption) come from the manifest's ``engine`` section and services.
    Returns one pool per worker service, with the service's initial number of replicas.
    """
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
