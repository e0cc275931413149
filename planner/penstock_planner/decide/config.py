"""Configuration of the planner's decisions. Built from the options at start-up and recorded in the ledger's header."""

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
"""Simulated seconds (2) between two decisions of a mode that follows demand, such as adaptive.

Chosen: the interval of Knative's autoscaler (KPA). With 5, 2 and 1 s, a flash crowd on aggregated workers was 84.2,
86.6 and 85.9% on time, and a ledger (the planner's decision log) grows by half from 5 to 2 s."""

AGAIN_S = 1.0
"""Simulated seconds (1) between a decision that grows a role and the next one, in a mode that follows demand.

Chosen: one pull by default. Compared with waiting for the next interval of 5 s, a flash crowd on aggregated workers
was 83.1% on time instead of 73.9%."""

MAX_BACKOFF_INTERVALS = 16
"""Longest back-off after a failed scale-up, in adjustment intervals: 16.

Chosen: 8 minutes by default, long enough to stop churn and short enough to notice a repair."""


ParametersT = TypeVar("ParametersT")


class Mode(StrEnum):
    """Names of the policies (planner modes) in this distribution.

    The first three are the planner's own; the others are for comparison.

    Attributes:
        LOAD: Thresholds on the prefill queue and on KV usage.
        ADAPTIVE: Demand at the frontend and the observed throughput of workers.
        SLA: As ADAPTIVE, with a performance profile and latency targets.
        HPA: The Kubernetes HorizontalPodAutoscaler with its defaults.
        KEDA: Triggers of KEDA as in llm-d's guide for prefill and decode.
        ORACLE: A policy that knows all future arrivals, without a limit on replicas per decision.
        ORACLE_ONE_STEP: The policy of ORACLE, limited to one replica per decision.
    """

    LOAD = "load"
    ADAPTIVE = "adaptive"
    SLA = "sla"
    HPA = "hpa"
    KEDA = "keda"
    ORACLE = "oracle"
    ORACLE_ONE_STEP = "oracle-one-step"


@dataclass(frozen=True, slots=True)
class DecideConfig:
    """Thresholds, bounds, budgets and intervals of the decisions of one planner, as recorded in its ledger (the decision log).

    Meaning and valid ranges are those of the keys in ``spec.planner``. The defaults of thresholds, budgets and
    intervals are those of NVIDIA Dynamo's planner documentation. Comparisons with a threshold are strict. Times are
    simulated seconds. "Late" and "on time" refer to the targets ``ttft_slo_s`` and ``itl_slo_s``.

    Attributes:
        adjustment_interval_s: Simulated seconds of one adjustment interval, > 0: the time between two decisions (modes
            adaptive and sla decide more often), and the unit of grace periods and back-offs.
        metric_pulling_interval_s: Simulated seconds between two metrics scrapes, > 0.
        max_gpu_budget: Maximum GPUs of all roles together, draining workers included. None means no limit.
        min_gpu_budget: Minimum GPUs of each role by itself, >= 0.
        min_total_gpus: Minimum GPUs of all roles together, draining workers not counted, >= 0.
        kv_up, kv_down: Mean KV usage fraction above which decode (or aggregated) grows, and below which it shrinks.
        queue_up, queue_down: Number of queued requests above which prefill grows, and below which it shrinks.
        decode_gpus, prefill_gpus: GPUs of one replica, >= 0. ``decode_gpus`` is also used for aggregated replicas.
        no_operation: Whether decisions are recorded but not carried out.
        min_replicas, max_replicas: Replica bounds by role, in addition to the GPU bounds. An absent role has no such
            bound.
        decode_grace_intervals: Number of adjustment intervals after a new decode (or aggregated) worker became ready in
            which that role does not scale down, >= 0 (Dynamo's NEW_DECODE_WORKER_GRACE_PERIOD).
        queue_buffer_intervals: Number of adjustment intervals over which a falling prefill queue is extrapolated, >= 0
            (Dynamo's NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD). With 0 it is extrapolated only to the interval's end.
        mode: Name of the policy that decides.
        max_step: Maximum number of replicas that one decision adds to or removes from a role, >= 1. None means no
            limit.
        queue_per_worker: Whether the queue thresholds apply to the queue divided by the ready prefill workers, rather
            than to the whole queue.
        ttft_slo_s: TTFT target in seconds, > 0; ``slo.ttft`` of the graph.
        scale_to_zero_after_s: Simulated seconds without requests after which all roles scale to zero. None disables
            it.
        in_time: Fraction of requests that modes adaptive and sla try to serve on time, in (0, 1).
        gpu_percent_per_point: Extra GPU cost accepted to serve one percentage point more of the requests on time, as a
            percentage of 4 x the GPU-hours in which requests keep workers busy.
        itl_slo_s: ITL target in seconds, > 0; ``slo.itl`` of the graph. None means no target.
        attainment: Fraction of requests that must meet the latency targets (``slo.attainment`` of the graph), used with
            the formulas for a performance profile; equal to ``in_time``.
        predictor: How mode sla predicts demand: along its trend or as constant.
        performance: Performance profile of the engines; None in modes that need no profile.
        schedule: Entries of minimum and maximum replicas by time of the week.
        time_zone: IANA name of the time zone for days and weeks of learned demand.
        external: Roles whose replicas another client sets (``scaling.managedBy: external``). Their GPUs count against
            the budget, and the planner never changes them.
        learning_identity: Identity of the model, engine, profile and time scale of this planner. Learned state with
            another identity is discarded. Empty accepts any.
        startups_s: Start-up time of a role's replicas in seconds as stated in the manifest, > 0. A role is absent if
            nothing is stated.
        startup_timeout_s: Longest start-up of a replica to wait for, > 0.
        switches_roles: Whether workers can change between prefill and decode without a restart.
        parameters: Parameters that only the policy of ``mode`` has. None means the defaults of these parameters, or
            that the policy has no parameters of its own.
        grant: GPUs that a GPU pool lets the graph hold now, in place of ``max_gpu_budget``. None if the graph is in
            no pool.
        grant_note: Name of that pool and of the graphs that hold the GPUs which this graph lacks, in words. Empty if it
            lacks none.
        speed: Simulated seconds per real second, > 0. Used only to write clock times in sentences.
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
    learning_identity: str = ""
    startups_s: Mapping[Role, float] = field(default_factory=dict)
    startup_timeout_s: float = 600.0
    switches_roles: bool = False
    parameters: Any = None
    grant: int | None = None
    grant_note: str = ""
    speed: float = 1.0

    @property
    def policy(self) -> PlannerPolicy:
        """Return the planner policy with the name ``mode``: its function and its properties."""
        return policy_of(self.mode)

    def parameters_as(self, model: type[ParametersT]) -> ParametersT:
        """Return the parameters that only the present policy has, as an instance of the dataclass ``model``.

        Returns the defaults of ``model`` if the parameters are unset or of another type.
        """
        return self.parameters if isinstance(self.parameters, model) else model()

    def in_mode(self, mode: str) -> DecideConfig:
        """Return the configuration with another policy (planner mode).

        Parameters of the old policy are dropped. If the new policy has an interval between decisions of its own, this
        interval and the maximum step of the new policy are used too.

        Args:
            mode: Name of the new policy.
        """
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
        """Return the configuration with minimum and maximum replicas tightened by those of the active schedule entries.

        A scheduled minimum above 0 disables scale to zero.

        Args:
            held: Schedule entries that are active now; empty returns the configuration unchanged.
        """
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
        """Return the configuration without limits on GPUs and on replicas per decision if the graph is in a GPU pool.

        Returns this configuration if the graph is in no pool.

        It is used to calculate how many replicas the graph would have if the pool granted all GPUs that it requests.
        """
        return self if self.grant is None else replace(self, max_gpu_budget=None, max_step=None)

    @property
    def within_pool(self) -> DecideConfig:
        """Return the configuration in which the GPU budget is the number of GPUs that a GPU pool grants the graph.

        Returns this configuration if the graph is in no pool.
        """
        return self if self.grant is None else replace(self, max_gpu_budget=self.grant)

    @property
    def reads_calendar(self) -> bool:
        """Whether decisions need the wall-clock time, for scheduled replica bounds or for demand learned by time of the week."""
        return bool(self.schedule) or self.policy.follows_demand

    @property
    def interval_s(self) -> float:
        """Return the simulated seconds between two decisions.

        It is the adjustment interval, or 2 s (`ADAPTIVE_INTERVAL_S`) if that is shorter, in a mode that counts starting
        replicas as supply. Deciding more often does not make such a mode add too many replicas.
        """
        if not self.policy.follows_demand:
            return self.adjustment_interval_s
        return min(self.adjustment_interval_s, max(ADAPTIVE_INTERVAL_S, self.metric_pulling_interval_s))

    @property
    def after_growth_s(self) -> float:
        """Return the simulated seconds between a decision that grows a role and the next decision.

        It is 1 s, or the time between two metrics scrapes if that is longer, in a mode that counts starting replicas as
        supply. In another mode it is the interval between any two decisions.
        """
        if not self.policy.follows_demand:
            return self.interval_s
        return min(self.interval_s, max(AGAIN_S, self.metric_pulling_interval_s))

    @property
    def decisions_per_adjustment(self) -> int:
        """Return the number of decisions per adjustment interval, >= 1; back-offs and grace periods are counted in decisions."""
        return round(self.adjustment_interval_s / self.interval_s)

    @property
    def total_floor(self) -> int:
        """Return the minimum GPUs of all roles together: ``min_total_gpus``, but at most the GPU budget."""
        budget = self.max_gpu_budget
        return self.min_total_gpus if budget is None else min(self.min_total_gpus, budget)

    def engine_gpus(self, role: Role, observed: int) -> int:
        """Return the GPUs of one replica: the larger of the configured and the observed number, so that the budget holds with either.

        Args:
            role: Role of the replica.
            observed: GPUs per replica that the backend reports; 0 if it does not know.
        """
        return max(self.prefill_gpus if role is Role.PREFILL else self.decode_gpus, observed)

    def floor(self, role: Role, engine_gpus: int) -> int:
        """Return the role's minimum replicas: enough for ``min_gpu_budget``, at least ``min_replicas``, and never below 1.

        The role's maximum is not applied here. The result is at least 1, because a role without workers has no metric
        by which it could grow again. A separate rule scales all roles to zero together, and back when the routers count
        requests.

        Args:
            role: Role to look up.
            engine_gpus: GPUs of one replica.
        """
        by_gpus = math.ceil(self.min_gpu_budget / engine_gpus) if engine_gpus > 0 else 1
        return max(1, by_gpus, self.min_replicas.get(role, 0))

    def thresholds(self, role: Role) -> tuple[float, float]:
        """Return mode load's thresholds (down, up) for a role: queued requests for prefill, KV usage fraction for the other roles."""
        if role is Role.PREFILL:
            return self.queue_down, self.queue_up
        return self.kv_down, self.kv_up


def targets_of(slo: SloConfig) -> dict[str, Any]:
    """Return a graph's latency targets as values by field name of `DecideConfig`.

    The attainment (fraction of requests that must meet them) fills two fields, because older ledgers (decision logs)
    use both names.
    """
    return {
        "ttft_slo_s": slo.ttft_seconds,
        "itl_slo_s": slo.itl_seconds,
        "attainment": slo.attainment,
        "in_time": slo.attainment,
    }


def config_from(plain: Mapping[str, Any]) -> DecideConfig:
    """Return the configuration from plain data: values by field name, as in a record of the ledger (decision log).

    Absent fields take their default.
    """
    fields = {
        key: value for key, value in plain.items() if key != "baseline"
    }  # a key in ledgers of versions in which policies had no parameters
    performance, parameters = fields.pop("performance", None), fields.pop("parameters", None)
    # A ledger of a version without modes was decided by the document's rule, which uses the queue per worker.
    config = from_plain(DecideConfig, {"queue_per_worker": "mode" not in fields, **fields})
    model = None if parameters is None else config.policy.parameters
    return replace(
        config,
        performance=None if performance is None else profile_from(performance),
        parameters=parameters if model is None else from_plain(model, parameters),
    )
