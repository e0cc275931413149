"""Judges a run: effective request capacity, latencies, hits against their bound, imbalance, GPU-hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.simulator.figures import known, ratio, rounded
from penstock.simulator.measures import measures
from penstock.simulator.observer import Recording
from penstock.simulator.scenario import Scenario
from penstock.simulator.tier_scores import tier_scores
from penstock.simulator.workload import Workload
from penstock.workload.statistics import describe


def score(recording: Recording, workload: Workload, scenario: Scenario) -> dict[str, Any]:
    """Return a run's figures as plain data; requests of the warm-up are left out of all but the counts.

    ``capacity`` is the share of judged requests whose TTFT is below the SLO; a request that failed or was
    rejected has missed it.
    """
    judged = slice(workload.warmup, None)
    requests = recording.requests
    ttft = requests.ttft_s[judged]
    is_ok = requests.is_ok[judged]
    with np.errstate(invalid="ignore"):
        in_time = int((ttft < scenario.slo_s).sum())
    hits = _hits(recording, workload, judged)
    return {
        "requests": len(workload.requests),
        "judged": int(is_ok.size),
        "ok": int(requests.is_ok.sum()),
        "rejected": int(requests.is_rejected.sum()),
        "failed": int((~requests.is_ok & ~requests.is_rejected).sum()),
        "rate_rps": rounded(workload.rate_rps),
        "slo_s": scenario.slo_s,
        "capacity": rounded(in_time / max(1, is_ok.size)),
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
        "planner": {
            "decisions": recording.decisions,
            "changes": [
                {
                    "at_s": rounded(change.at_s),
                    "role": change.role.value,
                    "current": change.current,
                    "desired": change.desired,
                    "sentence": change.sentence,
                }
                for change in recording.changes
            ],
        },
        "refused_joins": recording.refused_joins,
        "end_s": rounded(recording.end_s),
        "events": recording.events,
    }


def attainment_over_time(
    recording: Recording, slo_s: float, *, window_s: float
) -> tuple[list[float], list[float]]:
    """Return (window ends, share of the window's arrivals with TTFT below the SLO); empty windows are left out."""
    arrivals, ttft = recording.requests.arrival_s, recording.requests.ttft_s
    times, shares = [], []
    end_s = window_s
    while arrivals.size and end_s <= arrivals[-1] + window_s:
        inside = (arrivals >= end_s - window_s) & (arrivals < end_s)
        if inside.any():
            with np.errstate(invalid="ignore"):
                shares.append(float((ttft[inside] < slo_s).sum() / inside.sum()))
            times.append(end_s)
        end_s += window_s
    return times, shares


def goodput(points: Sequence[tuple[float, float]], *, share: float = 0.9) -> tuple[float | None, bool]:
    """Return the largest rate at which ``share`` of the requests are in time, and whether it is only a lower bound.

    Up to the first rate that misses the share; between it and the one before, the line is interpolated.
    A higher rate that holds it again by chance does not count.

    Args:
        points: (requests/s, capacity), by strictly increasing rate.
        share: In (0, 1].

    Returns:
        (None, False) where even the lowest rate misses it; (highest rate, True) where none does.
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
