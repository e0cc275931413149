"""The planner's series: one table of name, help and how each is read, for the metrics page and the dashboard alike.

Names spell their units. What is unknown is NaN or absent, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from penstock.api import Role
from penstock.core import metric_names as names
from penstock.planner.core.state import PlannerPhase
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.observation import Demand, Pull
from penstock.planner.figures import Figures
from penstock.planner.observers import View

Samples = Iterable[tuple[tuple[str, ...], float | None]]
"""Values of the labels, and the number; None: unknown."""


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity.

    Attributes:
        read: Returns its samples.
        metric: Its name on the metrics page; None: not there.
        text: The page's help.
        labels: Names of its labels.
        tag: Its TensorBoard tag, with labels in braces; None: not drawn.
        is_counter: It only grows.
        is_nan: An unknown value is shown as NaN on the page, else left out.
        is_decided: It changes with decisions and is drawn then.
    """

    read: Callable[[Figures], Samples]
    metric: str | None = None
    text: str = ""
    labels: tuple[str, ...] = ()
    tag: str | None = None
    is_counter: bool = False
    is_nan: bool = False
    is_decided: bool = False


def points(figures: Figures, *, is_decided: bool) -> dict[str, float]:
    """Return the dashboard's known and finite numbers by tag."""
    return {
        series.tag.format_map(dict(zip(series.labels, labels, strict=True))): value
        for series in SERIES
        if series.tag is not None and series.is_decided is is_decided
        for labels, value in series.read(figures)
        if value is not None and abs(value) < inf
    }


def _of_view(read: Callable[[View], Samples]) -> Callable[[Figures], Samples]:
    return lambda figures: read(figures.view) if figures.view is not None else ()


def _of_pull(read: Callable[[Pull], float | None]) -> Callable[[Figures], Samples]:
    return lambda figures: [((), read(figures.pull))] if figures.pull is not None else ()


def _of_config(
    mode: Mode, read: Callable[[DecideConfig], Mapping[tuple[str, ...], float | None]]
) -> Callable[[Figures], Samples]:
    """Return a reader of settings that only one mode uses."""
    return lambda figures: (
        read(figures.config).items() if figures.config is not None and figures.config.mode == mode else ()
    )


def _of_demand(read: Callable[[list[Demand]], float | None]) -> Callable[[Figures], Samples]:
    def samples(figures: Figures) -> Samples:
        if figures.demands:
            return [((), read(figures.demands))]
        return [((), None)] if figures.pull is not None else ()

    return samples


def _rate(count: Callable[[Demand], float]) -> Callable[[Figures], Samples]:
    """Return a reader of requests or tokens over seconds, not of a mean of rates."""
    return _of_demand(lambda demands: sum(map(count, demands)) / sum(each.period_s for each in demands))


def _mean(total: Callable[[Demand], float], count: Callable[[Demand], float]) -> Callable[[Figures], Samples]:
    def mean(demands: list[Demand]) -> float | None:
        samples = sum(map(count, demands))
        return sum(map(total, demands)) / samples if samples else None

    return _of_demand(mean)


def _signals(
    kv: Callable[[Pull], float | None], queue: Callable[[Pull], float | None]
) -> Callable[[Figures], Samples]:
    def samples(figures: Figures) -> Samples:
        pull = figures.pull
        if pull is None:
            return ()
        return [(("kv",), kv(pull)), *([(("queue",), queue(pull))] if pull.queue is not None else [])]

    return samples


def _queue(figures: Figures) -> Samples:
    pull = figures.pull
    return [((), pull.queue.value)] if pull is not None and pull.queue is not None else ()


def _compared_queue(figures: Figures) -> Samples:
    pull = figures.pull
    if pull is None or pull.queue is None or not pull.queue.is_known:
        return ()
    is_per_worker = figures.config is not None and figures.config.queue_per_worker
    return [((), pull.queue_per_worker if is_per_worker else pull.queue.value)]


def _queue_thresholds(figures: Figures) -> Samples:
    has_queue = figures.view is not None and Role.PREFILL in figures.view.pools
    return _thresholds_of_queue(figures) if has_queue else ()


_thresholds_of_queue = _of_config(
    Mode.LOAD, lambda config: {("scale_up",): config.queue_up, ("scale_down",): config.queue_down}
)


def _replicas(view: View) -> Samples:
    for role, pool in view.pools.items():
        yield (role.value, "ready"), pool.ready
        yield (role.value, "starting"), pool.starting
        yield (role.value, "draining"), pool.draining


def _supply(figures: Figures) -> Samples:
    return [((), figures.forecast.supply_tokens_per_s)] if figures.forecast is not None else ()


def _worker_tokens(figures: Figures) -> Samples:
    known = (each.worker_tokens_per_s for each in figures.readings.values())
    return [((), next((each for each in known if each is not None), None))]


def _factors(figures: Figures) -> Samples:
    # Every role's reading is of the same profile and of the same corrections.
    factors = next((each.factors for each in figures.readings.values()), {})
    return [((name,), value) for name, value in factors.items()]


_ROLE: Final = ("role",)
_LATENCY: Final = ("latency",)

SERIES: Final = (
    Series(
        lambda figures: figures.decisions.items(),
        names.PLANNER_DECISIONS,
        "Recorded decisions per role; action hold carries its reason.",
        ("role", "action", "reason"),
        is_counter=True,
    ),
    Series(
        lambda figures: [((), figures.ledger_errors)],
        names.PLANNER_LEDGER_ERRORS,
        "Ledger records that could not be written.",
        is_counter=True,
    ),
    Series(
        lambda figures: [((), figures.dropped_updates)],
        names.PLANNER_DROPPED_UPDATES,
        "Updates of state.json and the dashboard that a slow disk had no room for.",
        is_counter=True,
    ),
    Series(
        lambda figures: [((), figures.ticks)],
        names.SCHEDULE_LAG_SAMPLES,
        "Ticks measured.",
        is_counter=True,
    ),
    Series(
        _of_view(_replicas),
        names.PLANNER_REPLICAS,
        "Replicas by state.",
        ("role", "state"),
        "replicas/{role}_{state}",
    ),
    Series(
        lambda figures: [((role,), count) for role, count in figures.desired.items()],
        names.PLANNER_DESIRED_REPLICAS,
        "Replicas wanted by the last decision.",
        _ROLE,
    ),
    Series(
        _of_view(
            lambda view: [
                ((role.value,), view.desired.get(role, pool.ready + pool.starting))
                for role, pool in view.pools.items()
            ]
        ),
        labels=_ROLE,
        tag="replicas/{role}_desired",
    ),
    Series(
        lambda figures: [((role,), each.needed) for role, each in figures.readings.items()],
        names.PLANNER_NEEDED_REPLICAS,
        "Replicas that targets and expected demand need by the profile.",
        _ROLE,
        "replicas/{role}_needed",
        is_decided=True,
    ),
    Series(
        _of_pull(lambda pull: pull.kv.mean),
        names.PLANNER_KV_USAGE,
        "Mean KV usage fraction of the newest pull.",
        tag="kv/mean",
        is_nan=True,
    ),
    Series(
        _queue,
        names.PLANNER_QUEUE,
        "Requests waiting for prefill at the newest pull.",
        is_nan=True,
    ),
    Series(_compared_queue, tag="prefill_queue/compared"),
    Series(
        _of_config(Mode.LOAD, lambda config: {("scale_up",): config.kv_up, ("scale_down",): config.kv_down}),
        labels=("threshold",),
        tag="kv/{threshold}",
    ),
    Series(_queue_thresholds, labels=("threshold",), tag="prefill_queue/{threshold}"),
    Series(
        _signals(lambda pull: pull.kv.age_s, lambda pull: None if pull.queue is None else pull.queue.age_s),
        names.PLANNER_READING_AGE,
        "Oldest reading used, simulated seconds.",
        ("signal",),
        is_nan=True,
    ),
    Series(
        _signals(
            lambda pull: pull.kv.unknown,
            lambda pull: None if pull.queue is None else float(not pull.queue.is_known),
        ),
        names.PLANNER_UNKNOWN_READINGS,
        "Readings that were stale or missing.",
        ("signal",),
        is_nan=True,
    ),
    Series(
        _rate(lambda demand: demand.arrivals),
        names.PLANNER_ARRIVALS,
        "Requests that arrive at the routers, newest pull.",
        tag="demand/arrivals_per_second",
        is_nan=True,
    ),
    Series(
        _rate(lambda demand: demand.refused + demand.timed_out),
        names.PLANNER_REJECTED,
        "Of those, refused or timed out in the queue.",
        tag="demand/rejected_per_second",
        is_nan=True,
    ),
    Series(_rate(lambda demand: demand.completed), tag="demand/completed_per_second"),
    Series(
        _of_demand(lambda demands: demands[-1].oldest_wait_s or 0.0),
        names.PLANNER_OLDEST_WAIT,
        "Longest wait in a router's queue now, simulated seconds.",
        tag="wait/oldest_seconds",
        is_nan=True,
    ),
    Series(_of_demand(lambda demands: demands[-1].waiting), tag="wait/requests"),
    Series(
        lambda figures: [((), figures.config.ttft_slo_s)] if figures.config is not None else (),
        tag="wait/slo_seconds",
    ),
    Series(
        _rate(lambda demand: demand.uncached_tokens),
        names.PLANNER_UNCACHED_TOKENS,
        "Uncached prompt tokens/s that arrive, newest pull.",
        tag="prefill/uncached_tokens_per_second",
    ),
    Series(_rate(lambda demand: demand.prefilled_tokens), tag="prefill/computed_tokens_per_second"),
    Series(_supply, tag="prefill/supply_tokens_per_second", is_decided=True),
    Series(
        lambda figures: [((), figures.expected_now())],
        names.PLANNER_FORECAST_TOKENS,
        "Uncached prompt tokens/s that an earlier decision expected for now.",
    ),
    Series(
        _worker_tokens,
        names.PLANNER_WORKER_TOKENS,
        "Prompt tokens/s that one worker computes by the corrected profile.",
    ),
    Series(
        _factors,
        names.PLANNER_CORRECTION,
        "Seconds observed over seconds by the profile.",
        ("factor",),
        "correction/{factor}",
        is_decided=True,
    ),
    Series(
        _of_config(Mode.SLA, lambda config: {("ttft",): config.ttft_slo_s, ("itl",): config.itl_slo_s}),
        names.PLANNER_TARGET,
        "Latency target, simulated seconds.",
        _LATENCY,
        "{latency}/target_seconds",
    ),
    Series(
        _of_config(Mode.SLA, lambda config: {(): config.attainment}),
        names.PLANNER_ATTAINMENT_GOAL,
        "Share of requests that targets are to hold for.",
        tag="attainment/goal",
    ),
    Series(
        lambda figures: [((name,), share) for name, share in figures.attained.items()],
        names.PLANNER_ATTAINED,
        "Share within the target in the last whole adjustment interval.",
        _LATENCY,
    ),
    Series(
        lambda figures: [((name,), share) for name, share in figures.newly_attained.items()],
        labels=_LATENCY,
        tag="attainment/{latency}",
        is_decided=True,
    ),
    Series(
        _mean(lambda demand: demand.ttft_sum_s, lambda demand: demand.ttft_count), tag="ttft/mean_seconds"
    ),
    Series(_mean(lambda demand: demand.itl_sum_s, lambda demand: demand.itl_count), tag="itl/mean_seconds"),
    Series(
        lambda figures: figures.quantiles_s.items(),
        labels=("latency", "quantile"),
        tag="{latency}/{quantile}_seconds",
        is_decided=True,
    ),
    Series(
        _of_view(lambda view: [((role.value,), took_s) for role, took_s in view.startup_s.items()]),
        names.PLANNER_STARTUP,
        "Simulated seconds from the newest replica's decision until it was ready.",
        _ROLE,
        "startup/{role}_seconds",
    ),
    Series(
        _of_view(lambda view: [((), view.gpus)]),
        names.PLANNER_GPUS,
        "GPUs of existing workers, draining ones included.",
        tag="gpus/in_use",
    ),
    Series(
        _of_view(lambda view: [((), inf if view.max_gpu_budget is None else view.max_gpu_budget)]),
        names.PLANNER_GPU_BUDGET,
        "Ceiling; infinite without one.",
        tag="gpus/budget",
    ),
    Series(lambda figures: [((), figures.gpu_seconds / 3600)], tag="gpu_hours/cumulative"),
    Series(
        _of_view(lambda view: [((phase.value,), view.phase is phase) for phase in PlannerPhase]),
        names.PLANNER_PHASE,
        "1 for the current phase.",
        ("phase",),
    ),
    Series(
        _of_view(lambda view: [((), view.lag_p99_s)]),
        names.SCHEDULE_LAG_P99,
        "Lateness of ticks, 99th percentile, simulated seconds.",
        tag="lag/p99_seconds",
    ),
)
"""Every series."""
