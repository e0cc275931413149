"""Reads a load run and a planner's ledger (decision log), and analyses them: the data of `penstock report`."""

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
    """All data of a report, from which page, charts and text are made. The ledger is the planner's decision log.

    Attributes:
        load: The load run.
        planner: The planner's run; None without a ledger.
        use: GPU-hours during the load run; None without a ledger, or if the ledger does not cover the load run.
        violations: Numbers of requests and token gaps that missed the latency targets.
        demand: Demand at the routers; None without a ledger, or if the ledger has no demand.
        targets: How a planner in mode sla planned for its latency targets; None in other modes.
        prediction: Observed and predicted fractions of requests on time; None if the ledger has no predictions.
        counterfactual: Outcomes of other fleets; None if none were simulated.
        remarks: Further sentences for the reader.
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
        """Duration of the load run, simulated seconds."""
        duration_s: float = self.load.summary["throughput"]["duration_s"]
        return duration_s

    @property
    def lag(self) -> dict[str, Any]:
        """Lag of the load run's processes behind their schedules, as in the load run's summary."""
        lag: dict[str, Any] = self.load.summary["lag"]
        return lag

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader about the planner's run, the coverage of its ledger and the report's remarks."""
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
    """Read a load run and, if ``ledger`` is set, the planner's ledger (decision log), and return the report's data.

    Args:
        run: Output directory of `penstock load`.
        ledger: Ledger file or the planner's log directory; None for no planner.
        ttft_target_s: TTFT target, simulated seconds, > 0. None uses the target of a planner in mode sla, if there is one.
        itl_target_s: ITL target, as ``ttft_target_s``.

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
    """Return the report with the graph's SLO as its latency targets; unchanged if the report has a TTFT target already."""
    if report.violations.ttft_target_s is not None:
        return report
    slo, itl_s = graph.spec.slo, report.violations.itl_target_s
    itl_s = slo.itl_seconds if itl_s is None else itl_s
    missed = violations(report.load.results, ttft_target_s=slo.ttft_seconds, itl_target_s=itl_s)
    return replace(report, violations=missed)


def has_plots() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_plots() -> None:
    """Check that charts can be drawn, before other work is done.

    Raises:
        ConfigError: matplotlib is not installed; the message names the extra.
    """
    if not has_plots():
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'penstock[plots]'")
