"""What the rules are set to; built from the options once and recorded in the ledger's header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock.api import Predictor, Role
from penstock.performance.profile import PerformanceProfile
from penstock.planner.decide.baselines.settings import BaselineSettings
from penstock.planner.decide.policy import PlannerPolicy, policy_of

ADAPTIVE_INTERVAL_S = 2.0
"""Chosen: the KPA's tick. A flash crowd on aggregated workers was 84.2, 86.6 and 85.9% in time at 5, 2 and 1 s, and a
ledger grows by half from 5 to 2 s."""

AGAIN_S = 1.0
"""Chosen: the shortest time between two decisions of mode adaptive, one pull by default. Against waiting for the next
interval of 5 s, a flash crowd on aggregated workers was 83.1 in place of 73.9% in time."""

MAX_BACKOFF_INTERVALS = 16
"""Chosen: 8 minutes at the default interval; long enough to stop churn, short enough to notice a repair."""


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
    """Thresholds, budgets and intervals. Defaults are the planner document's.

    Attributes:
        adjustment_interval_s: Simulated seconds between decisions, > 0.
        metric_pulling_interval_s: Simulated seconds between pulls, in (0, adjustment_interval_s].
        max_gpu_budget: Ceiling of prefill + decode GPUs together, draining workers' included; None: no ceiling.
        min_gpu_budget: Floor of each role's GPUs, >= 0.
        min_total_gpus: Floor of prefill + decode GPUs together, draining workers' not counted, >= 0.
        kv_up: Scale decode (or aggregated) up above this mean KV usage fraction, open.
        kv_down: Scale it down below this, open.
        queue_up: Scale prefill up above this many queued requests, open.
        queue_down: Scale it down below this, open.
        decode_gpus: GPUs of one decode or aggregated engine, >= 0.
        prefill_gpus: GPUs of one prefill engine, >= 0.
        no_operation: Decide and record, never act.
        min_replicas: Floor by role beside the GPU floor; absent: 0.
        max_replicas: Ceiling by role beside the GPU ceiling; absent: none.
        decode_grace_intervals: NEW_DECODE_WORKER_GRACE_PERIOD, intervals without scale-down after a new
            decode (or aggregated) worker, >= 0.
        queue_buffer_intervals: NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD, intervals over which a falling prefill
            queue is extrapolated, >= 0; 0 looks no further than the interval's end.
        mode: Which policy decides, by its name in `policy`.
        max_step: Most replicas that one decision adds to or removes from a role, >= 1; None: no such bound.
        queue_per_worker: Divide the queue by the ready prefill workers before it is compared; the document
            compares its total length.
        ttft_slo_s: TTFT that counts as in time, > 0; the graph's ``router.ttftSloSeconds``, in mode sla
            ``planner.sla.ttftSeconds``.
        scale_to_zero_after_s: Simulated seconds without any request after which modes adaptive and sla remove the last
            replica of every role, > 0; None: never.
        in_time: Share of requests in time that floors are chosen for, in (0, 1).
        gpu_percent_per_point: Share of the GPU-hours, in percent, that one more percentpoint in time may cost, > 0.
        itl_slo_s: ITL that mode sla holds, > 0; None: any.
        attainment: Share of the requests for which mode sla holds the targets, in [0.5, 1).
        predictor: How mode sla forecasts demand.
        performance: What mode sla plans by; None in every other mode that needs no profile.
        external: Roles whose replicas somebody else sets; they count against the budget and are never changed.
        baseline: What the other autoscalers are set to; the planner's own modes do not read it.
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
    gpu_percent_per_point: float = 10.0
    itl_slo_s: float | None = None
    attainment: float = 0.99
    predictor: Predictor = Predictor.TREND
    performance: PerformanceProfile | None = None
    external: tuple[Role, ...] = ()
    baseline: BaselineSettings = field(default_factory=BaselineSettings)

    @property
    def policy(self) -> PlannerPolicy:
        """Return what decides, and what its drivers have to know of it."""
        return policy_of(self.mode)

    def in_mode(self, mode: str) -> DecideConfig:
        """Return the configuration under another policy; one that says how often it decides also says by how much."""
        policy = policy_of(mode)
        if policy.interval_s is None:
            return replace(self, mode=mode)
        return replace(
            self,
            mode=mode,
            adjustment_interval_s=policy.interval_s,
            metric_pulling_interval_s=min(self.metric_pulling_interval_s, policy.interval_s),
            max_step=policy.max_step,
        )

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
        """Return the GPUs of one engine of ``role``: the larger of configured and observed.

        The larger one keeps the ceiling true in either account.
        """
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
