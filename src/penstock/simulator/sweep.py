"""Simulates combinations of policies, rates and seeds, and summarises the results over the seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.simulator.observer import Recording
from penstock.simulator.oracle_search import with_best_schedule
from penstock.simulator.scenario import Scenario
from penstock.simulator.scoreboard import goodput, mean, mean_tiers, score
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import Workload, WorkloadSpec, prepare
from penstock_planner.decide.config import Mode
from penstock_planner.ledger import Ledger

GOODPUT_SHARE = 0.9
"""Fraction of requests that must be on time at the goodput, the largest rate at which they are; source: the DualMap paper."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of a sweep.

    Attributes:
        label: Label shared by the runs that differ only in rate and seed; unique among the compared policies and planners.
        scenario: Scenario of the run; its seed is replaced by ``seed``.
        workload: Source of the requests.
        qps: Mean rate in requests/s to which the workload is scaled; None keeps the rate of the workload.
        seed: Random seed.
        planner: Name of the planner; None if nothing scales.
        ledger: File to which the planner writes its ledger (decision log); None writes none.
    """

    label: str
    scenario: Scenario
    workload: WorkloadSpec
    qps: float | None
    seed: int
    planner: str | None = None
    ledger: Path | None = None


def simulate(spec: RunSpec) -> tuple[Recording, Workload, dict[str, Any]]:
    """Simulate one run; return its recording, its requests, and its figures (results by name; label, policy, planner, rate and seed first)."""
    workload = prepare(spec.workload, seed=spec.seed, qps=spec.qps)
    scenario = with_best_schedule(replace(spec.scenario, seed=spec.seed), workload.requests)
    ledger = None if spec.ledger is None else Ledger(spec.ledger)
    with contextlib.nullcontext() if ledger is None else contextlib.closing(ledger):
        recording = Simulation(scenario, workload.requests, ledger=ledger).run()
    if ledger is not None and ledger.problem:
        raise ConfigError(ledger.problem)
    figures = score(recording, workload, scenario)
    named = {
        "label": spec.label,
        "policy": spec.scenario.router.policy,
        "planner": spec.planner,
        "router_count": spec.scenario.routers.count,
        "qps": spec.qps,
        "seed": spec.seed,
    }
    return recording, workload, {**named, **figures}


def figures_of(spec: RunSpec) -> dict[str, Any]:
    """Simulate one run, and return only its figures: the results as plain data, by name."""
    return simulate(spec)[2]


_NAMES = ("label", "policy", "planner", "router_count", "qps")
_AVERAGED = (
    "on_time",
    "prompt_tokens_mean",
    "hit_rate",
    "hit_bound",
    "hit_share_of_bound",
    "hit_rate_per_request",
    "imbalance_cv",
    "busiest_share",
    "pending_tokens_mean",
    "gpu_hours",
    "in_time_rps",
    "violation_s",
    "changes",
    "reversals",
)
_RANKED = ("ttft_s", "e2e_s")


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per label and rate: each figure's mean over the seeds, and the range of the fraction of requests on time.

    A label names a compared combination of policy, planner and number of routers. ``runs`` holds the figures of single runs.
    """
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["label"], run["qps"]), []).append(run)
    rows = []
    for members in groups.values():
        row: dict[str, Any] = {name: members[0][name] for name in _NAMES}
        row["seeds"] = len(members)
        row |= {name: mean(run[name] for run in members) for name in _AVERAGED}
        for name in _RANKED:
            row[name] = {rank: mean(run[name][rank] for run in members) for rank in ("p50", "p90", "p99")}
        row["in_time"] = {
            name: mean(run["in_time"][name] for run in members) for name in ("ttft", "itl", "both")
        }
        shares = [run["on_time"] for run in members]
        row["on_time_min"], row["on_time_max"] = min(shares), max(shares)
        row["rate_rps"] = mean(run["rate_rps"] for run in members)
        row["lost"] = sum(run["failed"] + run["rejected"] for run in members)
        row["continued"] = sum(run["continued"] for run in members)
        row["tiers"] = mean_tiers(members)
        rows.append(row)
    return rows


def add_regrets(rows: Sequence[dict[str, Any]]) -> None:
    """Add ``regret`` to each row of `summarise`: the row's GPU-hours divided by the GPU-hours of each oracle, by the oracle's planner mode.

    The run of an oracle (a schedule that knows every arrival in advance) with the same routing policy, number of routers and rate is used.
    A regret of 1.2 means 20% more GPU-hours than the oracle's. ``regret`` is empty if there is no such run.
    """
    known = {(row["policy"], row["planner"], row["router_count"], row["qps"]): row for row in rows}
    for row in rows:
        oracles = {
            mode: best["gpu_hours"]
            for mode in (Mode.ORACLE.value, Mode.ORACLE_ONE_STEP.value)
            if (best := known.get((row["policy"], mode, row["router_count"], row["qps"]))) is not None
        }
        row["regret"] = {name: round(row["gpu_hours"] / hours, 6) for name, hours in oracles.items() if hours}


def goodputs(runs: Sequence[dict[str, Any]], *, share: float = GOODPUT_SHARE) -> list[dict[str, Any]]:
    """Return one row per label (compared policy and planner) with its goodput: the mean, minimum and maximum over its seeds.

    The goodput is the largest rate, in requests/s, at which the fraction ``share`` of the requests is on time.

    ``is_lower_bound`` is True if at least one seed reached ``share`` even at the highest rate. ``seeds_missing`` is the number of seeds
    that missed ``share`` even at the lowest rate; these seeds have no goodput, and are left out of the mean.

    Args:
        runs: Figures of the runs; those without a rate are ignored.
        share: Required fraction of requests on time, 0-1.
    """
    curves: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for run in runs:
        if run["rate_rps"] is not None:
            of_seed = curves.setdefault(run["label"], {}).setdefault(run["seed"], [])
            of_seed.append((run["qps"] if run["qps"] is not None else run["rate_rps"], run["on_time"]))
    rows = []
    for label, of_label in curves.items():
        found = [goodput(sorted(points), share=share) for points in of_label.values()]
        rates = [rate for rate, _ in found if rate is not None]
        rows.append(
            {
                "label": label,
                "goodput_rps": mean(rates),
                "min_rps": min(rates, default=None),
                "max_rps": max(rates, default=None),
                "is_lower_bound": any(is_bound for _, is_bound in found),
                "seeds_missing": len(found) - len(rates),
                "share": share,
            }
        )
    return rows
