"""`penstock report` without a load run: compares a shadow planner with the autoscaler that it watched."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.api import Role, SloConfig
from penstock.assess.assessment import AssessOptions
from penstock.assess.shadow.comparison import ShadowHistory, load_history
from penstock.assess.shadow.prediction import Prediction, observed_history, predict
from penstock.assess.shadow.report import HEADS, ShadowReport, as_plain, facts, headline, rows, write_page
from penstock.cli.progress import working
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, printer, table
from penstock.core.errors import ConfigError, ObservationError


def report_shadow(
    ledger: Path,
    output: Path,
    *,
    ttft_slo_s: float | None,
    itl_slo_s: float | None,
    profile: str | None,
    as_json: bool,
) -> None:
    """Write the report of a shadow planner's ledger and print it.

    Args:
        ledger: The planner's ledger, or its log folder.
        output: Folder for the page.
        ttft_slo_s: TTFT that counts as in time; None: the planner's target.
        itl_slo_s: Must be None: only first tokens are compared.
        profile: Latency profile of the engines; None: the nearest one, fitted.
        as_json: Print JSON, without progress.

    Raises:
        ConfigError: the ledger is not of a shadow planner, or an option has no effect.
        LedgerError: the ledger cannot be read.
    """
    if itl_slo_s is not None:
        raise ConfigError("--itl-slo: a shadow report compares first tokens only; remove it")
    found = load_history(ledger)
    config = found.run.config
    slo = SloConfig().with_given(
        ttft_s=config.ttft_slo_s if ttft_slo_s is None else ttft_slo_s,
        itl_s=None,
        attainment=config.attainment,
    )
    with working("reading the ledger", Terminal(stderr=True, quiet=as_json)) as show:
        prediction, remarks = _prediction(found, slo, profile, show)
    report = ShadowReport(found, slo, prediction, remarks)
    file = write_page(report, output)
    if as_json:
        say_json(as_plain(report, [file]))
        return
    say(headline(report))
    say("")
    printer().print(table(HEADS, rows(report)))
    for name, value in facts(report):
        say(f"{name}: {value}")
    for note in report.notes:
        say(f"note: {note}")
    say(f"report: {file}")


def _prediction(
    found: ShadowHistory, slo: SloConfig, profile: str | None, show: Any
) -> tuple[Prediction | None, tuple[str, ...]]:
    """Return the prediction, or None and why there is none."""
    if Role.AGGREGATED not in found.watched:
        return None, ("prefill and decode are watched apart: what would have been served is not simulated",)
    gpus = max(1, found.run.config.engine_gpus(Role.AGGREGATED, 0))
    options = AssessOptions(
        slo=slo, gpus=gpus, profile=profile, cold_start_s=found.record.cold_start_s, seeds=1
    )
    try:
        observed = observed_history(found, say=show)
    except (ConfigError, ObservationError) as exc:
        return None, (f"what was served is not compared: {exc}",)
    with TemporaryDirectory() as scratch:
        return predict(found, observed, options, Path(scratch), say=show), observed.notes
