"""`penstock report`: pictures, one HTML page and a text summary from a load run and a planner's ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console

from penstock_api import GraphDeployment
from penstock_cli import option
from penstock_core.errors import ConfigError
from penstock_manifests import load_graph
from penstock_report.build import as_json, require_plots, write_report
from penstock_report.findings import RunReport, analyse
from penstock_report.text import report_text
from penstock_simulator.counterfactual import Effort, compare

_WITHOUT_GRAPH = (
    "what other fleets would have cost is not shown: give the graph that served this run with --manifest"
)


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
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Graph that served the run: the same traffic is then simulated on other fleets.  [default: it is not]",
)
@click.option(
    "--counterfactual-cpu-s",
    "cpu_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Most processor time for simulating other fleets, real seconds.",
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
    help="Count requests whose TTFT is above this, simulated seconds.  [default: the manifest's SLO, else no target]",
)
@click.option(
    "--itl-target-s",
    type=float,
    help="Count inter-token gaps above this, simulated seconds.  [default: no target]",
)
@option.as_json("Print the analysis as JSON, without progress.")
def report(**options: Any) -> None:
    """Draw a report: replicas, signals with decisions, latencies, GPU-hours against other fleets.

    All times are simulated seconds from the load run's first moment. Needs the extra `plots`.
    """
    require_plots()
    output, is_json, manifest = options.pop("output"), options.pop("as_json"), options.pop("manifest")
    effort = Effort(cpu_s=options.pop("cpu_s"))
    graph = None if manifest is None else load_graph(manifest)
    found = analyse(options.pop("run_dir"), graph=graph, **options)
    console = Console()
    found = with_counterfactual(found, graph, effort, Console(stderr=True, quiet=is_json))
    files = write_report(found, output)
    if is_json:
        click.echo(orjson.dumps(as_json(found, files), option=orjson.OPT_INDENT_2).decode())
        return
    console.print(report_text(found))
    console.print(f"report: {files[-1]}", soft_wrap=True)


def with_counterfactual(
    found: RunReport, graph: GraphDeployment | None, effort: Effort, console: Console
) -> RunReport:
    """Return a report with what other fleets would have done, or with a remark that says why it lacks that.

    Args:
        found: The run.
        graph: That served it; None: not known.
        effort: Bound of the simulations.
        console: Shows which fleet is being simulated, where it is a terminal.
    """
    if graph is None and found.planner is None:
        return found
    if graph is None:
        return replace(found, remarks=(*found.remarks, _WITHOUT_GRAPH))
    if not console.is_terminal:
        console.print("simulating the same traffic on other fleets")
    try:
        with console.status("simulating the same traffic on other fleets") as status:
            compared = compare(
                found,
                graph,
                effort=effort,
                on_fleet=lambda name: status.update(f"simulating the same traffic on {name}"),
            )
    except ConfigError as exc:
        remark = f"what other fleets would have cost is not shown: {exc}"
        return replace(found, remarks=(*found.remarks, remark))
    return replace(found, counterfactual=compared)
