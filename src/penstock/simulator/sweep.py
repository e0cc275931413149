"""Runs policies against rates and seeds, and sums up over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.simulator.observer import Recording
from penstock.simulator.oracle_search import foreseen
from penstock.simulator.scenario import Scenario
from penstock.simulator.scoreboard import goodput, mean, mean_tiers, score
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import Workload, WorkloadSpec, prepare
from penstock_planner.decide.config import Mode

GOODPUT_SHARE = 0.9
"""The DualMap paper's: goodput is the largest rate at which 90% of the requests are in time."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run.

    Attributes:
        label: Names the runs that differ from it in rate and seed alone; unique among what is compared.
        planner: Name of its planner; None: nothing scales.
    """

    label: str
    scenario: Scenario
    workload: WorkloadSpec
    qps: float | None
    seed: int
    planner: str | None = None


def simulate(spec: RunSpec) -> tuple[Recording, Workload, dict[str, Any]]:
    """Return a run's recording, its workload, and its figures with label, rate and seed in front."""
    workload = prepare(spec.workload, seed=spec.seed, qps=spec.qps)
    scenario = foreseen(replace(spec.scenario, seed=spec.seed), workload.requests)
    recording = Simulation(scenario, workload.requests).run()
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
    """Return a run's figures alone."""
    return simulate(spec)[2]


_NAMES = ("label", "policy", "planner", "router_count", "qps")
_SUMMED = (
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
    """Return one row per label and rate: means over the seeds, and the smallest and largest share on time."""
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["label"], run["qps"]), []).append(run)
    rows = []
    for members in groups.values():
        row: dict[str, Any] = {name: members[0][name] for name in _NAMES}
        row["seeds"] = len(members)
        row |= {name: mean(run[name] for run in members) for name in _SUMMED}
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
    """Add to each planner's row its GPU-hours as a multiple of each oracle's, alongside the same router at the same rate.

    ``regret`` is by the oracle's mode; empty where none was run.
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
    """Return the goodput of each label: the mean over its seeds, with the least and the most.

    ``is_lower_bound`` says that some seed still held the share at the highest rate, ``seeds_missing`` how
    many missed it at the lowest (they count as that many zeros nowhere: they are left out of the mean).
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
