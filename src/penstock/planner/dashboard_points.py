"""The dashboard's numbers by their TensorBoard tags. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import Demand
from penstock.planner.forecast import Forecast, forecast_of
from penstock.planner.histogram import share_within
from penstock.planner.profiled import profile_reading
from penstock.planner.sources.base import Buckets


def demand_points(demands: Sequence[Demand]) -> dict[str, float]:
    """Return the points of the pulls since the last ones: rates and means over all of them, gauges of the newest.

    Args:
        demands: In order of time; none: nothing is known and nothing is drawn.
    """
    if not demands:
        return {}
    newest, period_s = demands[-1], sum(each.period_s for each in demands)
    return {
        "demand/arrivals_per_second": sum(each.arrivals for each in demands) / period_s,
        "demand/rejected_per_second": sum(each.refused + each.timed_out for each in demands) / period_s,
        "demand/completed_per_second": sum(each.completed for each in demands) / period_s,
        "prefill/uncached_tokens_per_second": sum(each.uncached_tokens for each in demands) / period_s,
        "prefill/computed_tokens_per_second": sum(each.prefilled_tokens for each in demands) / period_s,
        "wait/oldest_seconds": newest.oldest_wait_s or 0.0,
        "wait/requests": newest.waiting,
        **_mean("ttft", [(each.ttft_sum_s, each.ttft_count) for each in demands]),
        **_mean("itl", [(each.itl_sum_s, each.itl_count) for each in demands]),
    }


def _mean(name: str, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
    count = sum(each for _, each in sums)
    return {f"{name}/mean_seconds": sum(total_s for total_s, _ in sums) / count} if count else {}


def forecast_in(decision: Decision) -> Forecast | None:
    """Return what a decision expected to arrive, and what its workers could compute; None in a mode without forecast."""
    found = (forecast_of((step.name, step.inputs) for step in role.steps) for role in decision.roles)
    return next((each for each in found if each is not None), None)


def profile_points(decision: Decision) -> dict[str, float]:
    """Return the correction factors of a decision of mode sla, and the replicas that its targets need; else nothing."""
    points: dict[str, float] = {}
    for role in decision.roles:
        reading = profile_reading((step.name, step.inputs) for step in role.steps)
        if reading is None:
            continue
        points |= {f"correction/{name}": factor for name, factor in reading.factors.items()}
        if reading.needed is not None:
            points[f"replicas/{role.role.value}_needed"] = reading.needed
    return points


def target_points(config: DecideConfig) -> dict[str, float]:
    """Return the targets of mode sla, drawn beside what is observed; nothing in another mode."""
    if config.mode != Mode.SLA:
        return {}
    points = {"ttft/target_seconds": config.ttft_slo_s, "attainment/goal": config.attainment}
    return points if config.itl_slo_s is None else {**points, "itl/target_seconds": config.itl_slo_s}


def attainment_points(
    latency: Mapping[str, Buckets], config: DecideConfig, *, rejected: float
) -> dict[str, float]:
    """Return the share of first tokens, and of gaps between tokens, within the targets of mode sla.

    Args:
        latency: What the router's histograms gained, ``ttft`` and ``itl``; without samples nothing is drawn.
        config: Targets.
        rejected: Requests refused or timed out meanwhile; each has missed its TTFT.
    """
    if config.mode != Mode.SLA:
        return {}
    points: dict[str, float] = {}
    first = share_within(latency.get("ttft", ()), config.ttft_slo_s, missed=rejected)
    if first is not None:
        points["attainment/ttft"] = first
    gaps = None if config.itl_slo_s is None else share_within(latency.get("itl", ()), config.itl_slo_s)
    return points if gaps is None else {**points, "attainment/itl": gaps}
