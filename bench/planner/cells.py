"""One cell of the scoreboard: a policy on a case with a seed, simulated to the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from workloads import Case

from penstock.simulator.baselines import configured
from penstock.simulator.observer import Floats, Recording
from penstock.simulator.oracle import ScheduleTarget
from penstock.simulator.oracle_search import with_schedule
from penstock.simulator.scenario import Scenario
from penstock.simulator.scoreboard import in_time, measures
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import prepare
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.policy import policy_of
from penstock_planner.served_shares import agreement

BIN_S = 300
"""Chosen: cumulative figures are kept by five minutes."""

LATER_BIN = 24
"""What a planner may learn from ends after two hours."""
LEAST_LATER_BINS = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        case: What is served.
        policy: A mode's name, or a name for a fixed fleet.
        seed: Of arrivals and lengths.
        fleet: At time 0; None: the case's. A fleet that is given stays as it is.
        aim: What an oracle's schedule is made for; None for every other policy.
    """

    case: Case
    policy: str
    seed: int
    fleet: tuple[int, ...] | None = None
    aim: ScheduleTarget | None = None


def config_of(case: Case, mode: str) -> DecideConfig:
    """Return what a policy is configured with: the defaults, the case's budget, GPUs and targets."""
    base = DecideConfig(
        max_gpu_budget=case.budget,
        prefill_gpus=case.gpus,
        decode_gpus=case.gpus,
        ttft_slo_s=case.slo_s,
        metric_pulling_interval_s=case.pull_s,
        switches_roles=case.switches_roles,
    )
    found, policy = configured(base, mode, case.pools()), policy_of(mode)
    if policy.needs_profile and not policy.is_oracle:
        return replace(found, itl_slo_s=case.itl_slo_s)
    return found  # what the board's other policies decide by leaves ITL out: TRIED.md


def scenario_of(cell: Cell) -> Scenario:
    """Return the cell's world; an oracle has no schedule there yet."""
    case = cell.case
    return Scenario(
        pools=case.pools(cell.fleet),
        router=case.router,
        planner=config_of(case, cell.policy) if cell.fleet is None else None,
        failures=case.failures,
        faults=case.faults,
        cold_start_s=case.cold_start_s,
        cold_start_cv=case.cold_start_cv,
        max_gpus=case.budget,
        slo=case.slo,
        sample_s=case.sample_s,
        seed=cell.seed,
    )


def record(cell: Cell) -> Recording:
    """Return the cell's run in full."""
    requests = prepare(cell.case.spec, seed=cell.seed, qps=cell.case.qps).requests
    scenario = scenario_of(cell)
    if cell.aim is not None:
        scenario = with_schedule(scenario, requests, cell.aim)
    return Simulation(scenario, requests).run()


def run_cell(cell: Cell) -> dict[str, Any]:
    """Return the cell's figures as plain data."""
    recording = record(cell)
    served = np.sort(recording.requests.ttft_s[~np.isnan(recording.requests.ttft_s)])
    return {
        "case": cell.case.name,
        "policy": cell.policy,
        "seed": cell.seed,
        "fleet": cell.fleet,
        "requests": len(recording.requests.arrival_s),
        "ttft_p50_s": _rank(served, 0.5),
        "ttft_p99_s": _rank(served, 0.99),
        "peak_gpus": max(sample.gpus for sample in recording.samples),
        "windows": len(recording.share_windows),
        "windows_agreed": agreement(recording.share_windows),
        "bins": _bins(recording, scenario_of(cell)),
        **measures(recording, scenario_of(cell)),
    }


def later(bins: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any] | None:
    """Return the share in time, the GPU-hours and the mean GPUs of runs after the first two hours; None of short ones."""
    number = len(bins[0]["requests"]) - LATER_BIN
    if number < LEAST_LATER_BINS:
        return None
    requests, good, hours = (
        sum(sum(each[name][LATER_BIN:]) for each in bins) for name in ("requests", "in_time", "gpu_hours")
    )
    gpu_hours = hours / len(bins)
    return {
        "in_time": {"both": good / requests},
        "gpu_hours": gpu_hours,
        "mean_gpus": gpu_hours * 3600 / (number * BIN_S),
    }


def _bins(recording: Recording, scenario: Scenario) -> dict[str, list[float]]:
    """Return arrivals, those of them in time, and GPU-hours held, each by `BIN_S`; the last bin has all that follows."""
    arrivals = recording.requests.arrival_s
    number = int(arrivals[-1] // BIN_S) + 1
    is_ttft, is_itl = in_time(recording, scenario)
    times = np.array([*(sample.at_s for sample in recording.samples), recording.end_s])
    held = np.array([sample.gpus for sample in recording.samples]) * np.maximum(
        0.0, np.diff(np.minimum(times, recording.end_s))
    )

    def by_bin(at_s: Floats, weights: Floats | None = None) -> list[float]:
        places = np.minimum(at_s // BIN_S, number - 1).astype(np.int64)
        sums = np.bincount(places, weights=weights, minlength=number)
        return [round(float(each), 4) for each in sums]

    return {
        "requests": by_bin(arrivals),
        "in_time": by_bin(arrivals, (is_ttft & is_itl).astype(np.float64)),
        "gpu_hours": by_bin(times[:-1], held / 3600),
    }


def _rank(ordered: Floats, share: float) -> float | None:
    return (
        round(float(ordered[min(ordered.size - 1, int(share * ordered.size))]), 4) if ordered.size else None
    )
