"""Settings of the planner: the document's fifteen options and what load mode needs besides.

The eight names from adjustmentIntervalSeconds on are the document's options. ``namespace``,
``environment``, ``servedModelName``, ``logDir`` and the two ``…EngineNumGpu`` complete the fifteen; null
takes them from the graph or from where the planner runs. All durations are modelled seconds.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from penstock_graph.models.base import (
    DnsLabel,
    Flag,
    Integer,
    Number,
    ProfileName,
    ServedName,
    SpecModel,
    Text,
    Violation,
    refuse,
)
from penstock_graph.models.enums import Environment, MetricsSource, PlannerMode, Predictor

Seconds = Annotated[Number, Field(gt=0, le=86400)]
KvThreshold = Annotated[Number, Field(gt=0, le=1)]
QueueThreshold = Annotated[Number, Field(gt=0, le=1_000_000)]
EngineGpus = Annotated[Integer, Field(ge=1, le=512)]


class SlaConfig(SpecModel):
    """Targets of the planner's SLA mode."""

    ttft_seconds: Seconds = Field(default=0.5, description="TTFT to hold; seconds.")
    itl_seconds: Seconds = Field(default=0.05, description="ITL to hold; seconds.")
    profile: ProfileName | None = Field(
        default=None, description="Measured profile to plan by; null: engine.profile."
    )
    predictor: Predictor = Field(default=Predictor.HOLT_WINTERS, description="How demand is forecast.")


class PlannerMetricsConfig(SpecModel):
    """Where the planner reads, and how old a reading may be."""

    source: MetricsSource = Field(
        default=MetricsSource.ROUTER,
        description="First source: router, prometheus or scrape; others back it up.",
    )
    prometheus_url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = Field(
        default=None, description="Prometheus to ask; null: not asked."
    )
    max_age_seconds: Seconds = Field(
        default=10, description="Age above which a reading is stale and decides nothing; seconds."
    )

    @model_validator(mode="after")
    def _check(self) -> PlannerMetricsConfig:
        if self.source is MetricsSource.PROMETHEUS and self.prometheus_url is None:
            message = "null, yet source is prometheus; give its URL or choose router or scrape"
            refuse([Violation(("prometheusUrl",), message, (("source",),))])
        return self


class PlannerConfig(SpecModel):
    """The graph's planner."""

    enabled: Flag = Field(default=True, description="Run a planner for this graph.")
    mode: PlannerMode = Field(
        default=PlannerMode.LOAD, description="load: thresholds; sla: TTFT and ITL targets."
    )
    no_operation: Flag = Field(default=False, description="Observe, decide and log, but change nothing.")
    namespace: DnsLabel | None = Field(
        default=None, description="Namespace that the planner looks at; null: the graph's."
    )
    environment: Environment | None = Field(
        default=None, description="Backend to scale; null: where the planner was started."
    )
    served_model_name: ServedName | None = Field(
        default=None, description="Model whose metrics are read; null: model.servedName."
    )
    log_dir: Text | None = Field(
        default=None, description="Folder for dashboard, ledger and state; null: the backend's default."
    )
    adjustment_interval_seconds: Seconds = Field(
        default=30, description="Time between two scaling decisions; seconds."
    )
    metric_pulling_interval_seconds: Seconds = Field(
        default=1, description="Time between two metric pulls; seconds."
    )
    max_gpu_budget: Annotated[Integer, Field(ge=1, le=100_000)] | None = Field(
        default=8,
        description="Most GPUs of prefill plus decode; null: no ceiling (kubectl apply needs --server-side to keep a null).",
    )
    min_gpu_budget: Annotated[Integer, Field(ge=0, le=100_000)] = Field(
        default=1, description="Fewest GPUs of each role, prefill and decode."
    )
    decode_kv_scale_up_threshold: KvThreshold = Field(
        default=0.9, description="Mean KV usage above which decode grows; a fraction, above 0 to 1."
    )
    decode_kv_scale_down_threshold: KvThreshold = Field(
        default=0.5, description="Mean KV usage below which decode shrinks; a fraction, above 0 to 1."
    )
    prefill_queue_scale_up_threshold: QueueThreshold = Field(
        default=0.5, description="Queued requests per prefill worker above which prefill grows; may exceed 1."
    )
    prefill_queue_scale_down_threshold: QueueThreshold = Field(
        default=0.2, description="Queued requests per prefill worker below which prefill shrinks."
    )
    decode_engine_num_gpu: EngineGpus | None = Field(
        default=None, description="GPUs of one decode engine; null: the service's gpusPerReplica."
    )
    prefill_engine_num_gpu: EngineGpus | None = Field(
        default=None, description="GPUs of one prefill engine; null: the service's gpusPerReplica."
    )
    new_decode_worker_grace_intervals: Annotated[Integer, Field(ge=0, le=1000)] = Field(
        default=3, description="Adjustment intervals after a new decode worker without a decode scale-down."
    )
    new_prefill_worker_queue_buffer_intervals: Annotated[Integer, Field(ge=0, le=1000)] = Field(
        default=3,
        description="Intervals ahead in which a queue falling below its threshold needs no new prefill worker.",
    )
    sla: SlaConfig = Field(default=SlaConfig(), description="Targets of mode sla.")
    metrics: PlannerMetricsConfig = Field(
        default=PlannerMetricsConfig(), description="Where metrics come from."
    )

    @model_validator(mode="after")
    def _check(self) -> PlannerConfig:
        refuse([*self._threshold_violations(), *self._interval_violations(), *self._budget_violations()])
        return self

    def _threshold_violations(self) -> list[Violation]:
        pairs = (
            ("decodeKv", self.decode_kv_scale_down_threshold, self.decode_kv_scale_up_threshold),
            ("prefillQueue", self.prefill_queue_scale_down_threshold, self.prefill_queue_scale_up_threshold),
        )
        return [
            Violation(
                (f"{prefix}ScaleDownThreshold",),
                f"{down:g} is not below {prefix}ScaleUpThreshold {up:g}; lower it, or the pool would flap",
                ((f"{prefix}ScaleUpThreshold",),),
            )
            for prefix, down, up in pairs
            if down >= up
        ]

    def _interval_violations(self) -> list[Violation]:
        pull, adjust = self.metric_pulling_interval_seconds, self.adjustment_interval_seconds
        if pull <= adjust:
            return []
        message = (
            f"{pull:g} s exceeds adjustmentIntervalSeconds {adjust:g} s; pull at least once per adjustment"
        )
        return [Violation(("metricPullingIntervalSeconds",), message, (("adjustmentIntervalSeconds",),))]

    def _budget_violations(self) -> list[Violation]:
        if self.max_gpu_budget is None or self.min_gpu_budget <= self.max_gpu_budget:
            return []
        message = f"{self.min_gpu_budget} exceeds maxGpuBudget {self.max_gpu_budget}; lower it or raise maxGpuBudget"
        return [Violation(("minGpuBudget",), message, (("maxGpuBudget",),))]
