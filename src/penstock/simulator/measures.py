"""What a planner is judged by: requests in time, what they cost, how often it changed its mind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.simulator.figures import mean, ratio, rounded
from penstock.simulator.observer import Floats, PlannerChange, Recording
from penstock.simulator.scenario import Scenario

VIOLATION_WINDOW_S = 10.0
VIOLATION_SHARE = 0.9
"""Chosen: ten seconds of arrivals of which fewer than nine in ten are in time count as ten seconds of violation."""


def measures(recording: Recording, scenario: Scenario, *, warmup: int = 0) -> dict[str, Any]:
    """Return a run's figures as plain data.

    A request that failed or was rejected has missed every target. The mean gap between a request's tokens is
    (e2e - TTFT) / (output tokens - 1); with one token it is always in time.

    Args:
        recording: Of the run.
        scenario: With the targets.
        warmup: Requests at the beginning that are not judged.
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
    """Return, for every request, whether its TTFT and whether its mean gap between tokens is in time."""
    requests = recording.requests
    with np.errstate(invalid="ignore"):
        is_ttft = requests.ttft_s < scenario.slo_s
        is_itl = requests.is_ok & ~(requests.tpot_s > (scenario.itl_slo_s or np.inf))
    return is_ttft, is_itl


def violation_s(arrivals: Floats, is_in_time: NDArray[np.bool_]) -> float:
    """Return the seconds in which arrivals were served badly: see `VIOLATION_SHARE`.

    Args:
        arrivals: Seconds, never decreasing.
        is_in_time: Of the same requests.
    """
    if not arrivals.size:
        return 0.0
    places = np.floor_divide(arrivals, VIOLATION_WINDOW_S).astype(np.int64)
    total = np.bincount(places)
    good = np.bincount(places, weights=is_in_time.astype(np.float64))
    return float(((total > 0) & (good < VIOLATION_SHARE * total)).sum() * VIOLATION_WINDOW_S)


def reversals(changes: Sequence[PlannerChange]) -> int:
    """Return how often a role's change went the other way than its change before."""
    count = 0
    before: dict[str, bool] = {}
    for change in changes:
        is_up = change.desired > change.current
        count += before.get(change.role.value, is_up) != is_up
        before[change.role.value] = is_up
    return count
