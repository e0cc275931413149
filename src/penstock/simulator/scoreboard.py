"""Scores a run: fraction on time, latencies, cache hits against their bound, load imbalance, GPU-hours, replica changes, and tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.api import Tier
from penstock.router.policy.tiers import Slo, slo_of
from penstock.simulator.observer import Floats, Recording, SimulatedChange
from penstock.simulator.scenario import Scenario
from penstock.simulator.workload import Workload
from penstock.workload.statistics import describe

_DECIMALS = 6


def rounded(value: float | None) -> float | None:
    """Return ``value`` rounded to six decimals; None stays None."""
    return None if value is None else round(float(value), _DECIMALS)


def ratio(part: float, total: float) -> float | None:
    """Return ``part / total``, or None if ``total`` is 0."""
    return float(part / total) if total else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, rounded to six decimals; None if there are none."""
    known = [value for value in values if value is not None]
    return rounded(float(np.mean(known))) if known else None


def known(values: Floats) -> Floats:
    """Return the values of an array that are not NaN, in the same order."""
    return values[~np.isnan(values)]


VIOLATION_WINDOW_S = 10.0
VIOLATION_SHARE = 0.9
"""Fraction of requests on time below which a window of 10 seconds (`VIOLATION_WINDOW_S`) counts as violated. Chosen."""


def measures(recording: Recording, scenario: Scenario, *, warmup: int = 0) -> dict[str, Any]:
    """Return a run's figures by name: fraction of requests on time, GPU-hours, and number and size of the replica changes.

    Among the keys are ``in_time`` (fractions that met the target of TTFT, of gaps between tokens, and of both), ``gpu_hours``,
    ``violation_s`` (seconds in which fewer than 90% were on time), ``changes`` and ``lost`` (requests that were not served).

    A request that failed or was rejected counts as late for every target. The mean gap between the tokens of a request is (e2e -
    TTFT) / (output tokens - 1); a request with one output token always meets the target for this gap.

    Args:
        recording: Everything recorded of the run.
        scenario: Its scenario, for the targets.
        warmup: Number of requests at the start that are left out of the figure ``in_time``; the other figures include them.
    """
    requests = recording.requests
    is_ttft, is_itl = in_time(recording, scenario)
    is_both = is_ttft & is_itl
    judged = slice(warmup, None)
    span_s = float(requests.arrival_s[-1] - requests.arrival_s[0]) if requests.arrival_s.size else 0.0
    gpu_hours = recording.gpu_s / 3600
    return {
        "in_time": {
            name: mean(values[judged])
            for name, values in (("ttft", is_ttft), ("itl", is_itl), ("both", is_both))
        },
        "in_time_rps": rounded(ratio(int(is_both.sum()), span_s)),
        "in_time_per_gpu_hour": rounded(ratio(int(is_both.sum()), gpu_hours)),
        "gpu_hours": rounded(gpu_hours),
        "mean_gpus": rounded(ratio(recording.gpu_s, recording.end_s)),
        "violation_s": violation_s(requests.arrival_s, is_both),
        "changes": len(recording.changes),
        "replicas_moved": sum(abs(change.desired - change.current) for change in recording.changes),
        "reversals": reversals(recording.changes),
        "lost": int((~requests.is_ok).sum()),
    }


def in_time(recording: Recording, scenario: Scenario) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two boolean arrays over a run's requests: whether the TTFT is within its target, and whether the mean gap between tokens is.

    The requests are in order of arrival. One that failed or was rejected is False in both arrays. The targets are those of ``scenario``;
    ``recording`` is everything recorded of the run.
    """
    requests = recording.requests
    with np.errstate(invalid="ignore"):
        is_ttft = requests.ttft_s < scenario.slo.ttft_seconds
        is_itl = requests.is_ok & ~(requests.tpot_s > (scenario.slo.itl_seconds or np.inf))
    return is_ttft, is_itl


def violation_s(arrivals: Floats, is_in_time: NDArray[np.bool_]) -> float:
    """Return the number of simulated seconds in which fewer than 90% (`VIOLATION_SHARE`) of the arriving requests were on time.

    Whole windows of 10 s (`VIOLATION_WINDOW_S`) are counted; windows without arrivals are not.

    Args:
        arrivals: Arrival time of each request, seconds.
        is_in_time: Whether each request was on time.
    """
    total, good = _by_window(arrivals, is_in_time, VIOLATION_WINDOW_S)
    return float(((total > 0) & (good < VIOLATION_SHARE * total)).sum() * VIOLATION_WINDOW_S)


def _by_window(
    arrivals: Floats, is_in_time: NDArray[np.bool_], window_s: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of arrivals in each window from time 0 on, and the number of those that were on time."""
    places = np.floor_divide(arrivals, window_s).astype(np.int64)
    return np.bincount(places), np.bincount(places[is_in_time], minlength=places.max(initial=-1) + 1)


def reversals(changes: Sequence[SimulatedChange]) -> int:
    """Return the number of the planner's replica changes whose direction, up or down, differs from the same role's previous change."""
    count = 0
    before: dict[str, bool] = {}
    for change in changes:
        is_up = change.desired > change.current
        count += before.get(change.role.value, is_up) != is_up
        before[change.role.value] = is_up
    return count


def tier_scores(recording: Recording, workload: Workload, scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return figures (by name) of each priority tier, by tier, the highest first; empty if no request asks for a tier.

    Requests of the warm-up are left out. ``compliance`` is the fraction of admitted requests that met all targets of their tier.
    ``attainment`` is the number of requests that met all targets divided by the number of all requests of the tier, so a request that was
    rejected counts as late.

    Args:
        recording: Everything recorded of the run.
        workload: Its requests and warm-up.
        scenario: Its scenario, for the targets of each tier.
    """
    asked = np.array([request.tier for request in workload.requests], dtype=object)
    judged = np.arange(asked.size) >= workload.warmup
    tiers = scenario.router.tiers.under(scenario.slo)
    return {
        tier.value: _figures(recording, judged & (asked == tier), slo_of(tiers, tier))
        for tier in Tier
        if (asked == tier).any()
    }


def _figures(recording: Recording, own: Any, slo: Slo) -> dict[str, Any]:
    requests = recording.requests
    is_ok, is_rejected = requests.is_ok[own], requests.is_rejected[own]
    ttft, tpot, e2e = requests.ttft_s[own], requests.tpot_s[own], requests.e2e_s[own]
    is_met = is_ok.copy()
    for values, bound in ((ttft, slo.ttft_seconds), (tpot, slo.itl_seconds), (e2e, slo.end_to_end_seconds)):
        if bound is not None:
            is_met &= ~(values > bound)
    admitted = int((~is_rejected).sum())
    return {
        "requests": int(is_ok.size),
        "ok": int(is_ok.sum()),
        "rejected": int(is_rejected.sum()),
        "failed": int((~is_ok & ~is_rejected).sum()),
        "ttft_s": describe(known(ttft)),
        "tpot_s": describe(known(tpot)),
        "e2e_s": describe(known(e2e)),
        "compliance": rounded(ratio(int(is_met.sum()), admitted)),
        "attainment": rounded(ratio(int(is_met.sum()), is_ok.size)),
    }


def mean_tiers(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each priority tier's figures over several runs, by tier: counts are summed, all other figures are averaged.

    ``runs`` are the figures of each run; their key ``tiers`` holds the result of `tier_scores`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in runs[0]["tiers"]:
        rows = [run["tiers"][name] for run in runs if name in run["tiers"]]
        row: dict[str, Any] = {
            key: sum(each[key] for each in rows) for key in ("requests", "ok", "rejected", "failed")
        }
        for key in ("ttft_s", "tpot_s", "e2e_s"):
            row[key] = {rank: mean(each[key][rank] for each in rows) for rank in ("p50", "p99")}
        row |= {key: mean(each[key] for each in rows) for key in ("compliance", "attainment")}
        found[name] = row
    return found


def score(recording: Recording, workload: Workload, scenario: Scenario) -> dict[str, Any]:
    """Return all figures of a run by name, as plain data: counts of requests, latencies, cache hits, GPU-hours and replica changes.

    Requests of the warm-up are left out of latencies, ``on_time``, ``in_time`` and cache hits, but are in the counts. ``on_time`` is the
    fraction of requests with a TTFT below its target, and ``in_time`` holds the fractions that met the TTFT target, the target for gaps
    between tokens, and both; a request that failed or was rejected counts as late.

    Args:
        recording: Everything recorded of the run.
        workload: Its requests and warm-up.
        scenario: Its scenario, for the targets.
    """
    judged = slice(workload.warmup, None)
    requests = recording.requests
    ttft = requests.ttft_s[judged]
    is_ok = requests.is_ok[judged]
    with np.errstate(invalid="ignore"):
        in_time = int((ttft < scenario.slo.ttft_seconds).sum())
    hits = _hits(recording, workload, judged)
    return {
        "requests": len(workload.requests),
        "judged": int(is_ok.size),
        "ok": int(requests.is_ok.sum()),
        "rejected": int(requests.is_rejected.sum()),
        "failed": int((~requests.is_ok & ~requests.is_rejected).sum()),
        "continued": int(requests.is_continued.sum()),
        "rate_rps": rounded(workload.rate_rps),
        "slo_s": scenario.slo.ttft_seconds,
        "on_time": rounded(in_time / max(1, is_ok.size)),
        "ttft_s": describe(known(ttft)),
        "e2e_s": describe(known(requests.e2e_s[judged])),
        "wait_s": describe(known(requests.wait_s[judged])),
        "tpot_s": describe(known(requests.tpot_s[judged])),
        "itl_s": {name: rounded(value) for name, value in recording.itl_s.items()},
        "tiers": tier_scores(recording, workload, scenario),
        **hits,
        **_balance(recording, workload),
        **measures(recording, scenario, warmup=workload.warmup),
        "peak_gpus": max((sample.gpus for sample in recording.samples), default=0),
        "planning": {
            "decisions": recording.decisions,
            "changes": [{**asdict(change), "at_s": rounded(change.at_s)} for change in recording.changes],
        },
        "refused_joins": recording.refused_joins,
        "end_s": rounded(recording.end_s),
        "events": recording.events,
    }


def attainment_over_time(
    recording: Recording, slo_s: float, *, window_s: float
) -> tuple[list[float], list[float]]:
    """Return the fraction of requests with a TTFT below ``slo_s`` in each window of arrival time.

    Args:
        recording: Everything recorded of the run.
        slo_s: TTFT target, seconds.
        window_s: Width of a window, seconds.

    Returns:
        End times of the windows in simulated seconds, and the fractions; windows without arrivals are left out.
    """
    with np.errstate(invalid="ignore"):
        is_in_time = recording.requests.ttft_s < slo_s
    total, good = _by_window(recording.requests.arrival_s, is_in_time, window_s)
    found = np.flatnonzero(total)
    return ((found + 1) * window_s).tolist(), (good[found] / total[found]).tolist()


def goodput(points: Sequence[tuple[float, float]], *, share: float = 0.9) -> tuple[float | None, bool]:
    """Return the largest rate at which at least ``share`` of the requests are on time.

    The rate is interpolated linearly between the first simulated rate that misses the share and the rate before it. Higher rates are
    ignored, even if they reach the share again by chance.

    Args:
        points: (requests/s, fraction on time), in strictly increasing order of rate.
        share: Required fraction on time, 0-1.

    Returns:
        The rate, and whether it is only a lower bound: (None, False) if even the lowest rate misses the share, (highest rate, True) if no
        rate misses it.
    """
    best: float | None = None
    for index, (rate, capacity) in enumerate(points):
        if capacity >= share:
            best = rate
            continue
        if best is None:
            return None, False
        before_rate, before = points[index - 1]
        return before_rate + (rate - before_rate) * (before - share) / (before - capacity), False
    return best, best is not None


def _hits(recording: Recording, workload: Workload, judged: slice) -> dict[str, float | None]:
    requests = recording.requests
    bound = np.array(workload.ideal_hits, dtype=np.float64)[judged]
    prompts, cached = requests.prompt_tokens[judged], requests.cached_tokens[judged]
    rate, most = ratio(cached.sum(), prompts.sum()), ratio(bound.sum(), prompts.sum())
    return {
        "prompt_tokens_mean": rounded(float(prompts.mean()) if prompts.size else None),
        "hit_rate": rounded(rate),
        "hit_bound": rounded(most),
        "hit_share_of_bound": rounded(ratio(rate or 0.0, most or 0.0)),
        "hit_rate_per_request": rounded(float((cached / prompts).mean()) if prompts.size else None),
    }


def _balance(recording: Recording, workload: Workload) -> dict[str, float | None]:
    first_s = workload.requests[workload.warmup].arrival_s
    last_s = workload.requests[-1].arrival_s
    inside = [sample for sample in recording.samples if first_s <= sample.at_s <= last_s]
    loaded = [value for sample in inside if (value := sample.imbalance) is not None]
    computed = list(recording.computed_tokens.values())
    return {
        "imbalance_cv": rounded(float(np.mean(loaded)) if loaded else None),
        "pending_tokens_mean": rounded(
            float(np.mean([sum(sample.pending_tokens) for sample in inside])) if inside else None
        ),
        "busiest_share": rounded(ratio(max(computed, default=0), sum(computed))),
    }
