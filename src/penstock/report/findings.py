"""Reads a load run and a planner's ledger, and holds what they show: the body of `penstock report`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.api import GraphDeployment
from penstock.core.errors import ConfigError
from penstock.report.analysis import (
    DemandSummary,
    GpuUse,
    PredictionSummary,
    TargetsSummary,
    Violations,
    demand_summary,
    gpu_use,
    prediction_summary,
    targets_summary,
    violations,
)
from penstock.report.counterfactual import Counterfactual
from penstock.report.ledger_view import LoadOrigin, PlannerRun, load_planner_run
from penstock.workload.results import LoadRun, read_run


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that the page, the pictures and the text are made from.

    Attributes:
        planner: None without a ledger.
        use: None without a ledger, or where it saw nothing of the load run.
        violations: Against the targets given.
        demand: At the routers, by the ledger; None without one, or where it knew none.
        targets: How a planner of mode sla planned for them; None in another mode.
        prediction: How near the planner's model came to what was served; None where the ledger has none.
        counterfactual: None where no other fleets were simulated.
        remarks: What else a reader should know.
    """

    load: LoadRun
    planner: PlannerRun | None
    use: GpuUse | None
    violations: Violations
    demand: DemandSummary | None = None
    targets: TargetsSummary | None = None
    prediction: PredictionSummary | None = None
    counterfactual: Counterfactual | None = None
    remarks: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """How long the load run lasted, simulated seconds."""
        duration_s: float = self.load.summary["throughput"]["duration_s"]
        return duration_s

    @property
    def lag(self) -> dict[str, Any]:
        """How late the processes of the load run were."""
        lag: dict[str, Any] = self.load.summary["lag"]
        return lag

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader should know in addition to the load's notes, which are in its summary."""
        if self.planner is None:
            return self.remarks
        coverage: tuple[str, ...] = ()
        if self.use is None or not self.use.covers(self.duration_s):
            covered_s = 0.0 if self.use is None else self.use.end_s - self.use.start_s
            coverage = (f"the ledger covers {covered_s:.0f} s of the load run's {self.duration_s:.0f} s",)
        return (*self.planner.notes, *coverage, *self.remarks)


def analyse(
    run: Path,
    *,
    ledger: Path | None = None,
    ttft_target_s: float | None = None,
    itl_target_s: float | None = None,
) -> RunReport:
    """Read a load run and, if given, the planner's ledger.

    Args:
        run: Output directory of `penstock load`.
        ledger: A ledger file or the planner's log directory.
        ttft_target_s: Simulated seconds, > 0; None: the target of a planner in mode sla, else none.
        itl_target_s: Likewise.

    Raises:
        ConfigError: the run's files cannot be read, or a target is not above 0.
        LedgerError: the ledger cannot be read.
    """
    for flag, target in (("--ttft-slo", ttft_target_s), ("--itl-slo", itl_target_s)):
        if target is not None and not target > 0:
            raise ConfigError(f"{flag}: {target!r} must be above 0 simulated seconds")
    load = read_run(run)
    summary = load.summary
    duration_s = summary["throughput"]["duration_s"]
    planner = use = demand = targets = prediction = None
    if ledger is not None:
        started, speed = summary["started"], summary["settings"]["speed"]
        planner = load_planner_run(ledger, origin=LoadOrigin(started["model_s"], started["unix_s"], speed))
        use = gpu_use(planner, start_s=0.0, end_s=duration_s)
        demand = demand_summary(planner, start_s=0.0, end_s=duration_s)
        targets = targets_summary(planner, start_s=0.0, end_s=duration_s)
        prediction = prediction_summary(planner, start_s=0.0, end_s=duration_s)
    if planner is not None and targets is not None:
        config = planner.config
        ttft_target_s = config.ttft_slo_s if ttft_target_s is None else ttft_target_s
        itl_target_s = config.itl_slo_s if itl_target_s is None else itl_target_s
    missed = violations(load.results, ttft_target_s=ttft_target_s, itl_target_s=itl_target_s)
    return RunReport(load, planner, use, missed, demand, targets, prediction)


def with_graph(report: RunReport, graph: GraphDeployment) -> RunReport:
    """Return a report against the SLO of the graph that served, where no target was given."""
    if report.violations.ttft_target_s is not None:
        return report
    slo, itl_s = graph.spec.slo, report.violations.itl_target_s
    itl_s = slo.itl_seconds if itl_s is None else itl_s
    missed = violations(report.load.results, ttft_target_s=slo.ttft_seconds, itl_target_s=itl_s)
    return replace(report, violations=missed)


def has_plots() -> bool:
    """Return whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_plots() -> None:
    """Say early what a report needs.

    Raises:
        ConfigError: matplotlib is not installed; the message names the extra.
    """
    if not has_plots():
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'penstock[plots]'")
