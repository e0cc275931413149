"""Reads a load run and a planner's ledger and holds what they show; page, pictures and text are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock_core.errors import ConfigError
from penstock_report.analysis import GpuUse, Violations, gpu_use, violations
from penstock_report.ledger_view import LoadOrigin, PlannerRun, load_planner_run
from penstock_workload.results import LoadRun, read_run


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that the page, the pictures and the text are made from.

    Attributes:
        load: The load run.
        planner: None without a ledger.
        use: None without a ledger, or where it saw nothing of the load run.
        violations: Against the targets given.
    """

    load: LoadRun
    planner: PlannerRun | None
    use: GpuUse | None
    violations: Violations

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of the planner's part; the load's notes are in its summary."""
        if self.planner is None:
            return ()
        if self.use is None:
            return (*self.planner.notes, "the ledger holds nothing from the time of the load run")
        duration_s = self.load.summary["throughput"]["duration_s"]
        covered_s = self.use.end_s - self.use.start_s
        if covered_s < 0.99 * duration_s:
            note = f"the ledger covers {covered_s:.0f} s of the load run's {duration_s:.0f} s"
            return (*self.planner.notes, note)
        return self.planner.notes


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
        ttft_target_s: Simulated seconds, > 0; None counts no violations.
        itl_target_s: Simulated seconds, > 0; None counts no violations.

    Raises:
        ConfigError: the run's files cannot be read, or a target is not above 0.
        LedgerError: the ledger cannot be read.
    """
    for flag, target in (("--ttft-target-s", ttft_target_s), ("--itl-target-s", itl_target_s)):
        if target is not None and not target > 0:
            raise ConfigError(f"{flag}: {target!r} must be above 0 simulated seconds")
    load = read_run(run)
    summary = load.summary
    duration_s = summary["throughput"]["duration_s"]
    planner = use = None
    if ledger is not None:
        started = summary["started"]
        origin = LoadOrigin(
            started["model_s"], started["unix_s"], speed=summary["settings"]["speed"], duration_s=duration_s
        )
        planner = load_planner_run(ledger, origin=origin)
        use = gpu_use(planner, start_s=0.0, end_s=duration_s)
    missed = violations(load.results, ttft_target_s=ttft_target_s, itl_target_s=itl_target_s)
    return RunReport(load, planner, use, missed)
