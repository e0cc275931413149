"""The planner's time series: one table of names and help texts, and their values, for both the metrics page and the dashboard.

Names contain their units. Unknown values are NaN or absent, never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from math import inf
from typing import Final, NamedTuple

from penstock.api import Role
from penstock.core import metric_names as names
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.config import Mode
from penstock_planner.decide.schedule import in_force, lowered_ceilings, raised_floors
from penstock_planner.stats import PlannerStats

Sample = tuple[str, tuple[str, ...], float | None]
"""Key in `SERIES`, values of the labels, and the number, which is None if unknown."""


class Series(NamedTuple):
    """Declaration of one quantity of the metrics page and the dashboard.

    Attributes:
        metric: Name on the metrics page; None if it is not on the page.
        text: Help text on the page.
        labels: Names of the labels of the metric.
        tag: Tag of the TensorBoard chart that shows the quantity, with label names in braces; None if it is not drawn.
        curve: TensorBoard run (curve) that draws the quantity, with label names in braces; TensorBoard colours and
            names curves by run.
        is_counter: Whether the metric is a counter, which never decreases.
        is_nan: Whether an unknown value is NaN on the page; otherwise the metric is left out.
        is_decided: Whether the quantity changes with decisions, and is only drawn after a decision.
    """

    metric: str | None = None
    text: str = ""
    labels: tuple[str, ...] = ()
    tag: str | None = None
    curve: str = ""
    is_counter: bool = False
    is_nan: bool = False
    is_decided: bool = False


def _counter(metric: str, text: str, *labels: str) -> Series:
    return Series(metric, text, labels, is_counter=True)


def _drawn(tag: str, curve: str, *labels: str, is_decided: bool = False) -> Series:
    return Series(labels=labels, tag=tag, curve=curve, is_decided=is_decided)


SERIES: Final[Mapping[str, Series]] = {
    "decisions": _counter(
        names.PLANNER_DECISIONS,
        "Recorded decisions per role; rule names the one that decided, empty where none did.",
        "role",
        "action",
        "rule",
        "reason",
    ),
    "ledger_errors": _counter(names.PLANNER_LEDGER_ERRORS, "Ledger records that could not be written."),
    "dropped_updates": _counter(
        names.PLANNER_DROPPED_UPDATES,
        "Updates of state.json and the dashboard that were dropped because the disk is slow.",
    ),
    "ticks": _counter(names.SCHEDULE_LAG_SAMPLES, "Ticks measured."),
    "replicas": Series(
        names.PLANNER_REPLICAS, "Replicas by state.", ("role", "state"), "replicas/{role}", "{state}"
    ),
    "desired": Series(
        names.PLANNER_DESIRED_REPLICAS, "Replicas requested by the last decision.", labels=("role",)
    ),
    "desired_now": _drawn("replicas/{role}", "desired", "role"),
    "scheduled": Series(
        names.PLANNER_SCHEDULED_REPLICAS,
        "Minimum and maximum replicas in the schedule now; absent while the schedule sets no bound.",
        ("role", "bound"),
        "replicas/{role}",
        "scheduled {bound}",
    ),
    "needed": Series(
        names.PLANNER_NEEDED_REPLICAS,
        "Replicas that the profile requires for the targets and the expected demand.",
        ("role",),
        "replicas/{role}",
        "needed",
        is_decided=True,
    ),
    "demand_needs": _drawn("replicas/{role}", "needed", "role", is_decided=True),
    "kv": Series(
        names.PLANNER_KV_USAGE,
        "Mean KV usage fraction of the newest pull.",
        tag="kv/usage_fraction",
        curve="measured",
        is_nan=True,
    ),
    "queue": Series(names.PLANNER_QUEUE, "Requests waiting for prefill at the newest pull.", is_nan=True),
    "queue_compared": _drawn("prefill_queue/requests", "measured"),
    "kv_threshold": _drawn("kv/usage_fraction", "{threshold}", "threshold"),
    "queue_threshold": _drawn("prefill_queue/requests", "{threshold}", "threshold"),
    "age": Series(
        names.PLANNER_READING_AGE,
        "Age of the oldest reading used, simulated seconds.",
        ("signal",),
        is_nan=True,
    ),
    "unknown": Series(
        names.PLANNER_UNKNOWN_READINGS, "Readings that were stale or missing.", ("signal",), is_nan=True
    ),
    "arrivals": Series(
        names.PLANNER_ARRIVALS,
        "Requests that arrived at the routers in the newest pull.",
        tag="demand/requests_per_second",
        curve="arriving",
        is_nan=True,
    ),
    "rejected": Series(
        names.PLANNER_REJECTED,
        "Arrived requests that were rejected or timed out in the queue.",
        tag="demand/requests_per_second",
        curve="rejected",
        is_nan=True,
    ),
    "completed": _drawn("demand/requests_per_second", "completed"),
    "oldest_wait": Series(
        names.PLANNER_OLDEST_WAIT,
        "Maximum wait in a router's queue now, simulated seconds.",
        tag="wait/seconds",
        curve="oldest",
        is_nan=True,
    ),
    "waiting": _drawn("wait/requests", "waiting"),
    "slo": _drawn("wait/seconds", "target"),
    "uncached_tokens": Series(
        names.PLANNER_UNCACHED_TOKENS,
        "Uncached prompt tokens/s that arrived in the newest pull.",
        tag="prefill/tokens_per_second",
        curve="arriving",
    ),
    "computed_tokens": _drawn("prefill/tokens_per_second", "computed"),
    "supply": _drawn("prefill/tokens_per_second", "supply", is_decided=True),
    "forecast": Series(
        names.PLANNER_FORECAST_TOKENS, "Uncached prompt tokens/s predicted for now by an earlier decision."
    ),
    "worker_tokens": Series(
        names.PLANNER_WORKER_TOKENS, "Prompt tokens/s that one worker computes by the corrected profile."
    ),
    "correction": Series(
        names.PLANNER_CORRECTION,
        "Ratio of observed seconds to the profile's seconds.",
        ("factor",),
        "correction/factor",
        "{factor}",
        is_decided=True,
    ),
    "target": Series(
        names.PLANNER_TARGET,
        "Latency target, simulated seconds.",
        ("latency",),
        "{latency}/seconds",
        "target",
    ),
    "goal": Series(
        names.PLANNER_ATTAINMENT_GOAL,
        "Fraction of requests that must meet the targets.",
        tag="attainment/share",
        curve="target",
    ),
    "attained": Series(
        names.PLANNER_ATTAINED,
        "Fraction of requests within the target in the last full adjustment interval.",
        ("latency",),
    ),
    "shares": Series(
        names.PLANNER_IN_TIME,
        "Fraction of requests on time in the last half hour: observed, and predicted by the "
        "planner's model for the same fleet.",
        ("figure",),
        "in_time/share",
        "{figure}",
        is_decided=True,
    ),
    "newly_attained": _drawn("attainment/share", "{latency}", "latency", is_decided=True),
    "mean_ttft": _drawn("ttft/seconds", "mean"),
    "mean_itl": _drawn("itl/seconds", "mean"),
    "quantile": _drawn("{latency}/seconds", "{quantile}", "latency", "quantile", is_decided=True),
    "startup": Series(
        names.PLANNER_STARTUP,
        "Simulated seconds from the newest replica's decision until it was ready.",
        ("role",),
        "startup/seconds",
        "{role}",
    ),
    "gpus": Series(
        names.PLANNER_GPUS,
        "GPUs of existing workers, draining ones included.",
        tag="gpus/count",
        curve="in use",
    ),
    "budget": Series(
        names.PLANNER_GPU_BUDGET, "GPU budget; infinite without one.", tag="gpus/count", curve="budget"
    ),
    "gpu_hours": _drawn("gpus/hours", "in use"),
    "pool_held": _drawn("gpu_pool/count", "in use"),
    "pool_granted": _drawn("gpu_pool/count", "granted"),
    "pool_guaranteed": _drawn("gpu_pool/count", "guaranteed"),
    "pool_wanted": _drawn("gpu_pool/count", "wanted", is_decided=True),
    "phase": Series(names.PLANNER_PHASE, "1 for the current phase.", ("phase",)),
    "lag": Series(
        names.SCHEDULE_LAG_P99,
        "Lateness of ticks, 99th percentile, simulated seconds.",
        tag="lag/p99_seconds",
        curve="planner",
    ),
}


EXPECTED: Final = ("expected", "prefill/tokens_per_second")
"""Curve and chart of the demand that an earlier decision forecast for a time; drawn when that time is reached."""


def points(stats: PlannerStats, *, is_decided: bool) -> dict[tuple[str, str], float]:
    """Return the finite values of a planner for the dashboard, by (TensorBoard run, tag of the chart).

    Args:
        stats: Statistics of the planner.
        is_decided: True returns only the quantities that change with decisions, False only the others.
    """
    found = {}
    for key, labels, value in samples(stats):
        series = SERIES[key]
        is_drawn = series.tag is not None and series.is_decided is is_decided
        if series.tag is not None and is_drawn and value is not None and abs(value) < inf:
            named = dict(zip(series.labels, labels, strict=True))
            found[series.curve.format_map(named), series.tag.format_map(named)] = value
    return found


def samples(stats: PlannerStats) -> Iterator[Sample]:
    """Yield the values of one planner for the metrics page and the dashboard.

    Each is a tuple: key of the quantity in `SERIES`, values of its labels, and the number, which is None if unknown.

    Args:
        stats: Statistics of the planner.
    """
    return chain(
        _counts(stats),
        _of_view(stats),
        _of_pull(stats),
        _of_demand(stats),
        _of_config(stats),
        _of_decision(stats),
    )


def _counts(stats: PlannerStats) -> Iterator[Sample]:
    for labels, count in stats.decisions.items():
        yield "decisions", labels, count
    for role, replicas in stats.desired.items():
        yield "desired", (role,), replicas
    yield "ledger_errors", (), stats.ledger_errors
    yield "dropped_updates", (), stats.dropped_updates
    yield "ticks", (), stats.ticks
    yield "gpu_hours", (), stats.gpu_seconds / 3600


def _of_view(stats: PlannerStats) -> Iterator[Sample]:
    view = stats.view
    if view is None:
        return
    for role, pool in view.pools.items():
        yield "replicas", (role.value, "ready"), pool.ready
        yield "replicas", (role.value, "starting"), pool.starting
        yield "replicas", (role.value, "draining"), pool.draining
        yield "desired_now", (role.value,), view.desired.get(role, pool.replicas)
    for role, took_s in view.startup_s.items():
        yield "startup", (role.value,), took_s
    for phase in PlannerPhase:
        yield "phase", (phase.value,), view.phase is phase
    yield "gpus", (), view.gpus
    yield "budget", (), inf if view.max_gpu_budget is None else view.max_gpu_budget
    yield "lag", (), view.lag_p99_s
    if view.grant is not None:
        yield "pool_held", (), view.gpus
        yield "pool_granted", (), view.grant
        yield "pool_guaranteed", (), view.guaranteed


def _of_pull(stats: PlannerStats) -> Iterator[Sample]:
    pull = stats.pull
    if pull is None:
        return
    yield "kv", (), pull.kv.mean
    yield "age", ("kv",), pull.kv.age_s
    yield "unknown", ("kv",), pull.kv.unknown
    queue = pull.queue
    if queue is None:
        return
    yield "queue", (), queue.value
    yield "age", ("queue",), queue.age_s
    yield "unknown", ("queue",), float(not queue.is_known)
    if queue.is_known:
        is_per_worker = stats.config is not None and stats.config.queue_per_worker
        yield "queue_compared", (), pull.queue_per_worker if is_per_worker else queue.value


def _of_demand(stats: PlannerStats) -> Iterator[Sample]:
    """Yield rates as total requests or tokens over total seconds, not as means of rates."""
    demands = stats.demands
    if not demands:
        if stats.pull is not None:
            for key in ("arrivals", "rejected", "oldest_wait"):
                yield key, (), None
        return
    period_s = sum(each.period_s for each in demands)
    yield "arrivals", (), sum(each.arrivals for each in demands) / period_s
    yield "rejected", (), sum(each.refused + each.timed_out for each in demands) / period_s
    yield "completed", (), sum(each.completed for each in demands) / period_s
    yield "uncached_tokens", (), sum(each.uncached_tokens for each in demands) / period_s
    yield "computed_tokens", (), sum(each.prefilled_tokens for each in demands) / period_s
    yield "oldest_wait", (), demands[-1].oldest_wait_s or 0.0
    yield "waiting", (), demands[-1].waiting
    first_tokens = sum(each.ttft_count for each in demands)
    gaps = sum(each.itl_count for each in demands)
    if first_tokens:
        yield "mean_ttft", (), sum(each.ttft_sum_s for each in demands) / first_tokens
    if gaps:
        yield "mean_itl", (), sum(each.itl_sum_s for each in demands) / gaps


def _of_config(stats: PlannerStats) -> Iterator[Sample]:
    config = stats.config
    if config is None:
        return
    if stats.view is not None:
        held = in_force(config.schedule, stats.view.wall_s)
        for bound, bounds in (("least", raised_floors({}, held)), ("most", lowered_ceilings({}, held))):
            for role, count in bounds.items():
                yield "scheduled", (role.value, bound), count
    yield "slo", (), config.ttft_slo_s
    if config.mode == Mode.LOAD:
        yield "kv_threshold", ("up threshold",), config.kv_up
        yield "kv_threshold", ("down threshold",), config.kv_down
        if stats.view is not None and Role.PREFILL in stats.view.pools:
            yield "queue_threshold", ("up threshold",), config.queue_up
            yield "queue_threshold", ("down threshold",), config.queue_down
    if config.mode == Mode.SLA:
        yield "target", ("ttft",), config.ttft_slo_s
        yield "target", ("itl",), config.itl_slo_s
        yield "goal", (), config.attainment


def _of_decision(stats: PlannerStats) -> Iterator[Sample]:
    yield "forecast", (), stats.expected_now()
    if stats.forecast is not None:
        yield "supply", (), stats.forecast.supply_tokens_per_s
    readings = stats.readings
    for role, each in readings.items():
        yield "needed", (role,), each.needed
    if stats.config is not None and stats.config.mode == Mode.ADAPTIVE:
        for role, count in stats.demand_needs.items():
            yield "demand_needs", (role,), count
    speeds = (each.worker_tokens_per_s for each in readings.values())
    yield "worker_tokens", (), next((speed for speed in speeds if speed is not None), None)
    # All roles have the same profile and the same corrections.
    for name, value in next((each.factors for each in readings.values()), {}).items():
        yield "correction", (name,), value
    yield "pool_wanted", (), stats.wanted_gpus
    if stats.shares is not None:
        yield "shares", ("served",), stats.shares.served
        yield "shares", ("predicted",), stats.shares.predicted
    for name, share in stats.attained.items():
        yield "attained", (name,), share
    for name, share in stats.newly_attained.items():
        yield "newly_attained", (name,), share
    for labels, quantile_s in stats.quantiles_s.items():
        yield "quantile", labels, quantile_s
