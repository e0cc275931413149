"""Settings of the planner in a graph's manifest. All durations are simulated seconds.

The planner document's fifteen options are `penstock planner run`'s; the manifest has those that nothing else in the graph says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from pydantic import Field, JsonValue

from penstock.api.base import (
    WHOLE,
    DnsLabel,
    Flag,
    Integer,
    Number,
    Seconds,
    Share,
    SpecModel,
    Text,
    WholeSeconds,
    entry,
    one_of,
)
from penstock.api.enums import MetricsSource, PlannerMode, Predictor
from penstock.api.rule import Rule
from penstock.api.schedule import ScheduleEntry, TimeZone
from penstock.core.plugins import registered

DEFAULT_GPU_BUDGET: Final = 8
"""GPU budget of a graph that is in no GPU pool and sets none. Chosen: one node's."""

QueueThreshold = Annotated[Number, Field(gt=0, le=1_000_000)]

POLICIES = "penstock.planner_policies"
"""Entry points of the planner policies that a manifest can name."""


def known_modes() -> tuple[str, ...]:
    """Return every mode that a manifest can name here, those of Penstock first."""
    return tuple(dict.fromkeys((*(mode.value for mode in PlannerMode), *registered(POLICIES))))


PolicyName = Annotated[DnsLabel, one_of(known_modes)]
"""One of `PlannerMode`, or of an installed distribution that registers a planner policy."""


class SlaConfig(SpecModel):
    """How the planner meets spec.slo in mode sla."""

    profile: Text | None = entry(
        None,
        "Performance profile to plan by, as `penstock profile` writes it: its file or folder, on Kubernetes "
        "the name of a ConfigMap with the key profile.json; null: engine.profile, runtime simulated alone.",
    )
    predictor: Predictor = entry(
        Predictor.TREND,
        "How demand is forecast: trend follows its slope until a new replica is ready, constant expects it to stay.",
    )


class ObjectiveConfig(SpecModel):
    """What requests that meet spec.slo may cost in GPU-hours, modes adaptive and sla."""

    gpu_percent_per_point: Annotated[Integer, Field(ge=1, le=1000), WHOLE] = entry(
        20,
        "Extra GPU cost accepted per percentage point of on-time requests, as a percentage of 4 x busy GPU-hours.",
    )


class PlannerMetricsConfig(SpecModel):
    """Where the planner reads, and how old a reading may be."""

    source: MetricsSource = entry(
        MetricsSource.ROUTER, "First source: router, prometheus or scrape; others back it up."
    )
    prometheus_url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = entry(
        None, "Prometheus to query; null: none."
    )
    max_age_seconds: WholeSeconds = entry(
        10, "Age above which a reading is stale and decides nothing; seconds."
    )

    rules = (
        Rule(
            path="prometheusUrl",
            must="source prometheus needs prometheusUrl",
            cel="self.source != 'prometheus' || has(self.prometheusUrl)",
            holds=lambda m: m.source is not MetricsSource.PROMETHEUS or m.prometheus_url is not None,
            text="null, yet source is prometheus",
            remedy="give its URL or choose router or scrape",
        ),
    )


def _below(pool: str, holds: Callable[[Any], bool]) -> Rule[Any]:
    down, up = f"{pool}ScaleDownThreshold", f"{pool}ScaleUpThreshold"
    return Rule(
        path=down,
        must=f"{down} is below {up}",
        cel=f"self.{down} < self.{up}",
        holds=holds,
        text=f"%s is not below {up} %s",
        values=(f"self.{down}", f"self.{up}"),
        remedy="lower it, or the pool would flap",
    )


def _within_budget(key: str, least: Callable[[Any], int]) -> Rule[Any]:
    return Rule(
        path=key,
        must=f"{key} is at most maxGpuBudget",
        cel=f"!has(self.maxGpuBudget) || self.{key} <= self.maxGpuBudget",
        holds=lambda p: p.own_gpu_budget is None or least(p) <= p.own_gpu_budget,
        text="%d exceeds maxGpuBudget %d",
        values=(f"self.{key}", "self.maxGpuBudget"),
        remedy="lower it or raise maxGpuBudget",
    )


class PlannerConfig(SpecModel):
    """The graph's planner."""

    enabled: Flag = entry(True, "Run a planner for this graph.")
    mode: PolicyName = entry(
        PlannerMode.ADAPTIVE.value,
        "adaptive: demand at the router against what replicas are observed to do; load: thresholds; "
        "sla: TTFT and ITL targets by a performance profile; any other: a planner policy that is installed next to the planner.",
    )
    policy_parameters: dict[str, JsonValue] | None = entry(
        None,
        "Parameters of an installed planner policy, by name. null: its defaults.",
    )
    no_operation: Flag = entry(False, "Observe, decide and log, but change nothing.")
    adjustment_interval_seconds: WholeSeconds = entry(
        30,
        "Time between two scaling decisions, mode load; adaptive and sla decide every 2 s, or as often as this where "
        "it is less, and use it only as the back-off after a replica fails to become ready. Seconds.",
    )
    metric_pulling_interval_seconds: Seconds = entry(1, "Time between two metric pulls; seconds.")
    max_gpu_budget: Annotated[Integer, Field(ge=1, le=100_000)] | None = entry(
        DEFAULT_GPU_BUDGET,
        "Maximum GPUs for prefill and decode together. Not written: 8, and in a GpuPool no bound but the pool's; null: no ceiling (kubectl apply "
        "needs --server-side to keep a null).",
    )
    min_gpu_budget: Annotated[Integer, Field(ge=0, le=100_000)] = entry(
        1, "Minimum GPUs per role, prefill and decode."
    )
    min_total_gpus: Annotated[Integer, Field(ge=0, le=100_000)] = entry(
        0, "Minimum GPUs for prefill and decode together; 0: only the minimum of each role applies."
    )
    max_step: Annotated[Integer, Field(ge=1, le=1000)] = entry(
        1,
        "Maximum number of replicas by which one decision changes a role; more than 1 counts in modes adaptive and sla, when they "
        "grow.",
    )
    scale_to_zero_after_seconds: WholeSeconds | None = entry(
        None,
        "Time without any request after which the last replica of every role goes, modes adaptive and sla; "
        "the next request brings one of each back. Seconds; null: never.",
    )
    memory: Text | None = entry(
        None,
        "What a planner of the same model and workers had learnt, to start from, modes adaptive and sla: the file "
        "that `penstock planner memory export` writes, on Kubernetes the name of a ConfigMap with the key memory.json; null: "
        "nothing. A ledger that remembers something wins.",
    )
    schedule: Annotated[tuple[ScheduleEntry, ...], Field(max_length=20)] = entry(
        (),
        "Scheduled replica bounds per role, in every mode; at most 20 entries.",
    )
    time_zone: TimeZone = entry(
        "UTC",
        "IANA time zone in which demand repeats daily and weekly; modes adaptive and sla.",
    )
    objective: ObjectiveConfig = entry(
        ObjectiveConfig(), "What requests in time may cost, modes adaptive and sla: floors are chosen by it."
    )
    decode_kv_scale_up_threshold: Share = entry(
        0.9, "Mean KV usage above which decode grows, mode load; a fraction, above 0 to 1."
    )
    decode_kv_scale_down_threshold: Share = entry(
        0.5, "Mean KV usage below which decode shrinks, mode load; a fraction, above 0 to 1."
    )
    prefill_queue_per_worker: Flag = entry(
        False, "Divide the prefill queue by the ready prefill workers before it is compared, mode load."
    )
    prefill_queue_scale_up_threshold: QueueThreshold = entry(
        0.5, "Queued requests above which prefill grows, mode load; may exceed 1."
    )
    prefill_queue_scale_down_threshold: QueueThreshold = entry(
        0.2, "Queued requests below which prefill shrinks, mode load."
    )
    new_decode_worker_grace_intervals: Annotated[Integer, Field(ge=0, le=1000)] = entry(
        3, "Adjustment intervals after a new decode worker without a decode scale-down, mode load."
    )
    new_prefill_worker_queue_buffer_intervals: Annotated[Integer, Field(ge=0, le=1000)] = entry(
        3,
        "Intervals ahead in which a queue falling below its threshold needs no new prefill worker, mode load.",
    )
    sla: SlaConfig = entry(SlaConfig(), "Profile and forecast, mode sla.")
    metrics: PlannerMetricsConfig = entry(PlannerMetricsConfig(), "Where metrics come from.")

    @property
    def own_gpu_budget(self) -> int | None:
        """The budget that is written; None: null or none is, and the default is for graphs in no GPU pool alone."""
        return self.max_gpu_budget if "max_gpu_budget" in self.model_fields_set else None

    rules = (
        Rule(
            path="policyParameters",
            must="policyParameters needs the mode of an installed policy",
            cel="!has(self.policyParameters) || !(self.mode in ['adaptive', 'load', 'sla'])",
            holds=lambda p: p.policy_parameters is None or p.mode not in set(PlannerMode),
            text="mode %s has no parameters of its own",
            values=("self.mode",),
            remedy="remove them, or choose the mode that they are for",
        ),
        _below("decodeKv", lambda p: p.decode_kv_scale_down_threshold < p.decode_kv_scale_up_threshold),
        _below(
            "prefillQueue",
            lambda p: p.prefill_queue_scale_down_threshold < p.prefill_queue_scale_up_threshold,
        ),
        Rule(
            path="metricPullingIntervalSeconds",
            must="metricPullingIntervalSeconds is at most adjustmentIntervalSeconds",
            cel="self.metricPullingIntervalSeconds <= self.adjustmentIntervalSeconds",
            holds=lambda p: p.metric_pulling_interval_seconds <= p.adjustment_interval_seconds,
            text="%s s exceeds adjustmentIntervalSeconds %s s",
            values=("self.metricPullingIntervalSeconds", "self.adjustmentIntervalSeconds"),
            remedy="pull at least once per adjustment",
        ),
        _within_budget("minGpuBudget", lambda p: p.min_gpu_budget),
        _within_budget("minTotalGpus", lambda p: p.min_total_gpus),
        Rule(
            path="scaleToZeroAfterSeconds",
            must="scaleToZeroAfterSeconds needs mode adaptive or sla",
            cel="!has(self.scaleToZeroAfterSeconds) || self.mode != 'load'",
            holds=lambda p: p.scale_to_zero_after_seconds is None or p.mode != PlannerMode.LOAD,
            text="%s s, but mode %s has no signal to come back on without a worker",
            values=("self.scaleToZeroAfterSeconds", "self.mode"),
            remedy="choose mode adaptive or sla, or remove it",
        ),
        Rule(
            path="minGpuBudget",
            must="scaleToZeroAfterSeconds needs minGpuBudget 0",
            cel="!has(self.scaleToZeroAfterSeconds) || self.minGpuBudget == 0",
            holds=lambda p: p.scale_to_zero_after_seconds is None or p.min_gpu_budget == 0,
            text="%d GPUs of each role stay, so scaleToZeroAfterSeconds %s s has no effect",
            values=("self.minGpuBudget", "self.scaleToZeroAfterSeconds"),
            remedy="set it to 0",
        ),
        Rule(
            path="minTotalGpus",
            must="scaleToZeroAfterSeconds needs minTotalGpus 0",
            cel="!has(self.scaleToZeroAfterSeconds) || self.minTotalGpus == 0",
            holds=lambda p: p.scale_to_zero_after_seconds is None or p.min_total_gpus == 0,
            text="%d GPUs stay, so scaleToZeroAfterSeconds %s s has no effect",
            values=("self.minTotalGpus", "self.scaleToZeroAfterSeconds"),
            remedy="set it to 0",
        ),
    )


_LOAD = (PlannerMode.LOAD,)
READ_IN_MODES: Mapping[str, tuple[PlannerMode, ...]] = {
    "adjustment_interval_seconds": _LOAD,
    "max_step": (PlannerMode.ADAPTIVE, PlannerMode.SLA),
    "memory": (PlannerMode.ADAPTIVE, PlannerMode.SLA),
    "objective": (PlannerMode.ADAPTIVE, PlannerMode.SLA),
    "time_zone": (PlannerMode.ADAPTIVE, PlannerMode.SLA),
    "decode_kv_scale_up_threshold": _LOAD,
    "decode_kv_scale_down_threshold": _LOAD,
    "prefill_queue_per_worker": _LOAD,
    "prefill_queue_scale_up_threshold": _LOAD,
    "prefill_queue_scale_down_threshold": _LOAD,
    "new_decode_worker_grace_intervals": _LOAD,
    "new_prefill_worker_queue_buffer_intervals": _LOAD,
    "sla": (PlannerMode.SLA,),
}
"""Keys by which only some modes decide. A key of another mode is reported, not refused: an API server fills defaults in, so
that it cannot be distinguished from one that was given, and a flag may choose another mode for the same file."""


def unread_keys(planner: PlannerConfig, mode: str) -> tuple[str, ...]:
    """Return the keys that are given and that a mode does not decide by, in the model's order."""
    given = {*planner.model_fields_set, *(f"objective.{key}" for key in planner.objective.model_fields_set)}
    unread = [key for key, modes in READ_IN_MODES.items() if key in given and mode not in modes]
    return tuple(key for key in unread if "." not in key or key.partition(".")[0] not in unread)
