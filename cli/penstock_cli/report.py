"""`penstock report`: pictures, one HTML page and a text summary from a load run and a planner's ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console

from penstock_report.build import as_json, require_plots, write_report
from penstock_report.findings import analyse
from penstock_report.text import report_text


@click.command()
@click.option(
    "--run",
    "run_dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Output directory of `penstock load`.",
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    help="The planner's ledger.jsonl, or its --log-dir.  [default: no planner in the report]",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the PNG files and report.html; made if missing.",
)
@click.option(
    "--ttft-target-s",
    type=float,
    help="Count requests whose TTFT is above this, simulated seconds.  [default: no target]",
)
@click.option(
    "--itl-target-s",
    type=float,
    help="Count inter-token gaps above this, simulated seconds.  [default: no target]",
)
@click.option("--json", "is_json", is_flag=True, help="Print the analysis as JSON.")
def report(**options: Any) -> None:
    """Draw a report: replicas, signals with decisions, latencies, GPU-hours against static provisioning.

    All times are simulated seconds from the load run's first moment. Needs the extra `plots`.
    """
    require_plots()
    output, is_json = options.pop("output"), options.pop("is_json")
    found = analyse(options.pop("run_dir"), **options)
    files = write_report(found, output)
    if is_json:
        click.echo(orjson.dumps(as_json(found, files), option=orjson.OPT_INDENT_2).decode())
        return
    console = Console()
    console.print(report_text(found))
    console.print(f"report: {files[-1]}", soft_wrap=True)
