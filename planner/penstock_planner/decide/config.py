"""What the rules are set to; built from the options once and recorded in the ledger's header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from penstock.api import Predictor, Role, SloConfig
from penstock.performance.profile import PerformanceProfile, profile_from
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.policy import PlannerPolicy, policy_of
from penstock_planner.decide.schedule import Schedule, ScheduledBounds, lowered_ceilings, raised_floors

ADAPTIVE_INTERVAL_S = 2.0
"""Chosen: the KPA's tick. A flash crowd on aggregated workers was 84.2, 86.6 and 85.9% in time at 5, 2 and 1 s, and a
ledger grows by half from 5 to 2 s."""

AGAIN_S = 1.0
"""Chosen: the shortest time between two decisions of mode adaptive, one pull by default. Against waiting for the next
interval of 5 s, a flash crowd on aggregated workers was 83.1 in place of 73.9% in time."""

MAX_BACKOFF_INTERVALS = 16
"""Chosen: 8 minutes at the default interval; long enough to stop churn, short enough to notice a repair."""


ParametersT = TypeVar("ParametersT")


class Mode(StrEnum):
    """The policies that come with this distribution: the planner's own, then what it is measured against."""

    LOAD = "load"
    ADAPTIVE = "adaptive"
    SLA = "sla"
    HPA = "hpa"
    ORACLE = "oracle"
    ORACLE_ONE_STEP = "oracle-one-step"


@dataclass(frozen=True, slots=True)
class DecideConfig:
    """Thresholds, budgets and intervals, as the ledger records them. Defaults are the planner document's.

    Bounds and meaning are those of ``spec.planner``'s keys; thresholds are compared openly.

    Attributes:
        max_gpu_budget: Ceiling of prefill + decode GPUs together, draining workers' included; None: no ceiling.
        min_gpu_budget: Floor of each role's GPUs, >= 0.
        min_total_gpus: Floor of prefill + decode GPUs together, draining workers' not counted, >= 0.
        kv_up, kv_down: Mean KV usage fraction above and below which decode (or aggregated) grows and shrinks.
        queue_up, queue_down: Queued requests above and below which prefill does.
        decode_gpus, prefill_gpus: GPUs of one engine, >= 0; of decode also those of an aggregated one.
        min_replicas, max_replicas: By role alongside the GPUs' bounds; absent: none.
        decode_grace_intervals: NEW_DECODE_WORKER_GRACE_PERIOD, intervals without scale-down after a new
            decode (or aggregated) worker, >= 0.
        queue_buffer_intervals: NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD, intervals over which a falling prefill
            queue is extrapolated, >= 0; 0 looks no further than the interval's end.
        mode: Which policy decides, by its name in `policy`.
        max_step: Most replicas that one decision adds to or removes from a role, >= 1; None: no such bound.
        ttft_slo_s: TTFT target, > 0; the graph's ``slo.ttft``.
        itl_slo_s: ITL target, > 0; None: none. The graph's ``slo.itl``.
        performance: What mode sla plans by; None in every other mode that needs no profile.
        learns_from: Model, engine, profile and time scale that memories are of; a memory of another is not taken. Empty: any.
        schedule: Bounds that hold for periods of the calendar.
        time_zone: IANA's name; days and weeks that repeat are those of its clocks.
        external: Roles whose replicas another writer sets; they count against the budget and are never changed.
        startups_s: Start-up of a role's replicas as the manifest states it, seconds, > 0; absent: not stated.
        startup_timeout_s: Longest start-up that is waited for, > 0.
        switches_roles: Workers can change between prefill and decode without a start.
        parameters: What the policy itself is set to, of its own model; None: the model's defaults, or it has none.
        grant: GPUs that a pool lets the graph hold now, in place of ``max_gpu_budget``; None: it is in no pool.
        grant_note: Which pool that is, and who holds what the graph lacks; words.
        speed: Simulated seconds per real one, > 0; no rule reads it, only the clock times in sentences.
    """

    adjustment_interval_s: float = 30.0
    metric_pulling_interval_s: float = 1.0
    max_gpu_budget: int | None = 8
    min_gpu_budget: int = 1
    min_total_gpus: int = 0
    kv_up: float = 0.9
    kv_down: float = 0.5
    queue_up: float = 0.5
    queue_down: float = 0.2
    decode_gpus: int = 1
    prefill_gpus: int = 1
    no_operation: bool = False
    min_replicas: Mapping[Role, int] = field(default_factory=dict)
    max_replicas: Mapping[Role, int] = field(default_factory=dict)
    decode_grace_intervals: int = 3
    queue_buffer_intervals: int = 3
    mode: str = Mode.LOAD
    max_step: int | None = 1
    queue_per_worker: bool = False
    ttft_slo_s: float = 5.0
    scale_to_zero_after_s: float | None = None
    in_time: float = 0.99
    gpu_percent_per_point: float = 20.0
    itl_slo_s: float | None = None
    attainment: float = 0.99
    predictor: Predictor = Predictor.TREND
    performance: PerformanceProfile | None = None
    schedule: tuple[ScheduledBounds, ...] = ()
    time_zone: str = "UTC"
    external: tuple[Role, ...] = ()
    learns_from: str = ""
    startups_s: Mapping[Role, float] = field(default_factory=dict)
    startup_timeout_s: float = 600.0
    switches_roles: bool = False
    parameters: Any = None
    grant: int | None = None
    grant_note: str = ""
    speed: float = 1.0

    @property
    def policy(self) -> PlannerPolicy:
        """Return what decides."""
        return policy_of(self.mode)

    def parameters_as(self, model: type[ParametersT]) -> ParametersT:
        """Return the policy's parameters, the model's defaults where none are given."""
        return self.parameters if isinstance(self.parameters, model) else model()

    def in_mode(self, mode: str) -> DecideConfig:
        """Return the configuration under another policy; one that says how often it decides also says by how much."""
        policy = policy_of(mode)
        parameters = self.parameters if mode == self.mode else None
        if policy.interval_s is None:
            return replace(self, mode=mode, parameters=parameters)
        return replace(
            self,
            mode=mode,
            parameters=parameters,
            adjustment_interval_s=policy.interval_s,
            metric_pulling_interval_s=min(self.metric_pulling_interval_s, policy.interval_s),
            max_step=policy.max_step,
        )

    def scheduled(self, held: Schedule) -> DecideConfig:
        """Return the configuration while entries of the schedule hold; below a scheduled floor nothing goes to zero."""
        if not held:
            return self
        floors = any(count for each in held for count in each.floors.values())
        return replace(
            self,
            min_replicas=raised_floors(self.min_replicas, held),
            max_replicas=lowered_ceilings(self.max_replicas, held),
            scale_to_zero_after_s=None if floors else self.scale_to_zero_after_s,
        )

    @property
    def unbounded(self) -> DecideConfig:
        """Return the configuration by which a graph in a pool says what it wants: without GPUs and steps that bound it."""
        return self if self.grant is None else replace(self, max_gpu_budget=None, max_step=None)

    @property
    def within_pool(self) -> DecideConfig:
        """Return the configuration with the grant for a budget."""
        return self if self.grant is None else replace(self, max_gpu_budget=self.grant)

    @property
    def reads_calendar(self) -> bool:
        """Whether pulls need the real time: for a schedule, or for what the week has taught."""
        return bool(self.schedule) or self.policy.follows_demand

    @property
    def interval_s(self) -> float:
        """Return the simulated seconds between two decisions.

        A mode that counts replicas which start as supply over-compensates nothing by deciding often, and one step a
        decision needs many decisions where start-ups are short.
        """
        if not self.policy.follows_demand:
            return self.adjustment_interval_s
        return min(self.adjustment_interval_s, max(ADAPTIVE_INTERVAL_S, self.metric_pulling_interval_s))

    @property
    def again_s(self) -> float:
        """Return the simulated seconds between a decision that grows a role and the next one."""
        if not self.policy.follows_demand:
            return self.interval_s
        return min(self.interval_s, max(AGAIN_S, self.metric_pulling_interval_s))

    @property
    def decisions_per_adjustment(self) -> int:
        """Return how often the mode decides in an adjustment interval: its pauses are counted in decisions."""
        return round(self.adjustment_interval_s / self.interval_s)

    @property
    def total_floor(self) -> int:
        """Return the fewest GPUs of all roles together; a budget below the floor goes before it."""
        budget = self.max_gpu_budget
        return self.min_total_gpus if budget is None else min(self.min_total_gpus, budget)

    def engine_gpus(self, role: Role, observed: int) -> int:
        """Return the GPUs of one engine: the larger of configured and observed keeps the ceiling true in either account."""
        return max(self.prefill_gpus if role is Role.PREFILL else self.decode_gpus, observed)

    def floor(self, role: Role, engine_gpus: int) -> int:
        """Return the fewest replicas of ``role``: n x GPUs per engine >= min_gpu_budget, and min_replicas.

        Never below 1: workers that are gone give no signal to come back on. Scaling to zero, which comes back on what the
        routers count, takes all roles below it at once.
        """
        by_gpus = math.ceil(self.min_gpu_budget / engine_gpus) if engine_gpus > 0 else 1
        return max(1, by_gpus, self.min_replicas.get(role, 0))

    def thresholds(self, role: Role) -> tuple[float, float]:
        """Return (down, up) of the role's signal."""
        if role is Role.PREFILL:
            return self.queue_down, self.queue_up
        return self.kv_down, self.kv_up


def targets_of(slo: SloConfig) -> dict[str, Any]:
    """Return the fields of `DecideConfig` that hold a graph's targets; ledgers have the attainment under two names."""
    return {
        "ttft_slo_s": slo.ttft_seconds,
        "itl_slo_s": slo.itl_seconds,
        "attainment": slo.attainment,
        "in_time": slo.attainment,
    }


def config_from(plain: Mapping[str, Any]) -> DecideConfig:
    """Return the configuration that `to_plain` wrote; absent keys take their default."""
    fields = {
        key: value for key, value in plain.items() if key != "baseline"
    }  # of ledgers before policies had parameters
    performance, parameters = fields.pop("performance", None), fields.pop("parameters", None)
    # A ledger from before there were modes was decided by the document's rule on the queue per worker.
    config = from_plain(DecideConfig, {"queue_per_worker": "mode" not in fields, **fields})
    model = None if parameters is None else config.policy.parameters
    return replace(
        config,
        performance=None if performance is None else profile_from(performance),
        parameters=parameters if model is None else from_plain(model, parameters),
    )
