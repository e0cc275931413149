"""`penstock report`: pictures, one HTML page and a text summary from a load run and a planner's ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from penstock.api import GraphDeployment
from penstock.api.manifests import load_graph
from penstock.cli import fields, option
from penstock.cli.progress import working
from penstock.cli.report_shadow import report_shadow
from penstock.cli.say import say_json
from penstock.cli.terminal import Terminal
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.flags import duration_flag, flag
from penstock.report.findings import RunReport, analyse, require_plots, with_graph
from penstock.report.page import write_report
from penstock.report.plain import as_json as plain_report
from penstock.report.text import report_text
from penstock.simulator.counterfactual import MAX_FLEETS, compare

_NOT_SHOWN = "the cost of other fleets is not shown: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What `penstock report` reads, compares and writes."""

    run: Path | None = flag(
        "Output directory of `penstock load`.", unset="required, except with the ledger of a shadow planner"
    )
    ledger: Path | None = flag(
        "The planner's ledger.jsonl, or its log folder.", unset="no planner in the report"
    )
    manifest: Path | None = flag(
        "Manifest of the graph that served the run, for simulating the same traffic on other fleets.",
        path="existing file",
        unset="the manifest named in the ledger",
    )
    counterfactual_fleets: int = flag(
        "How many fixed fleets to simulate at most; the planner, the HPA and the oracle take up to 15"
        " more simulations.",
        default=MAX_FLEETS,
        ge=1,
    )
    profile: str | None = flag(
        "Latency profile of the watched engines, by name or .yaml path; only without --run.",
        unset="the nearest one, scaled to the observed latencies",
    )
    output: Path = flag("Folder for the PNG files and report.html; created if missing.", path="folder")
    ttft_slo_s: float | None = duration_flag(
        "Count requests whose TTFT is above this, simulated time.",
        name="--ttft-slo",
        gt=0,
        unset="in mode sla the ledger's target, otherwise the graph's SLO, otherwise none",
    )
    itl_slo_s: float | None = duration_flag(
        "Count inter-token gaps above this, simulated time.",
        name="--itl-slo",
        gt=0,
        unset="in mode sla the ledger's target, otherwise the graph's SLO, otherwise none",
    )


@click.command()
@fields.options(ReportOptions)
@option.as_json("Print the analysis as JSON, without progress.")
def report(*, as_json: bool, **given: Any) -> None:
    """Draw a report: replicas, signals with decisions, latencies, GPU-hours against other fleets.

    All times are simulated seconds from the start of the load run. Needs the extra `plots`.

    Without --run, the ledger is that of `penstock planner run --no-operation --shadow`: its planner is compared with the autoscaler
    that it watched.
    """
    said = fields.take(ReportOptions, given)
    if said.run is None:
        _report_shadow(said, as_json=as_json)
        return
    if said.profile is not None:
        raise ConfigError(
            "--profile: has an effect only without --run, in the report of a shadow planner; remove it"
        )
    require_plots()
    found = analyse(said.run, ledger=said.ledger, ttft_target_s=said.ttft_slo_s, itl_target_s=said.itl_slo_s)
    console = Terminal()
    graph, remark = _graph_of(found, said.manifest)
    if graph is not None:
        progress = Terminal(stderr=True, quiet=as_json)
        found = with_counterfactual(found, graph, said.counterfactual_fleets, progress)
    found = replace(found, remarks=(*found.remarks, *remark))
    files = write_report(found, said.output)
    if as_json:
        say_json(plain_report(found, files))
        return
    console.print(report_text(found))
    console.print(f"report: {files[-1]}", soft_wrap=True)


def _report_shadow(said: ReportOptions, *, as_json: bool) -> None:
    if said.ledger is None:
        raise ConfigError(
            "--run: required; give the output directory of `penstock load`, or a shadow planner's --ledger"
        )
    if said.manifest is not None:
        raise ConfigError("--manifest: has an effect only with --run; remove it")
    report_shadow(
        said.ledger,
        said.output,
        ttft_slo_s=said.ttft_slo_s,
        itl_slo_s=said.itl_slo_s,
        profile=said.profile,
        as_json=as_json,
    )


def _graph_of(found: RunReport, manifest: Path | None) -> tuple[GraphDeployment | None, tuple[str, ...]]:
    """Return the graph that served, else why it is not known; without a planner it is not needed."""
    if manifest is not None:
        return load_graph(manifest), ()
    if found.planner is None:
        return None, ()
    named = found.planner.graph_file
    if named is None:
        return None, (f"{_NOT_SHOWN}the ledger does not name the graph; give it with --manifest",)
    try:
        return load_graph(named), ()
    except PenstockError as exc:
        return None, (
            f"{_NOT_SHOWN}the graph named in the ledger cannot be read; give it with --manifest: {exc}",
        )


def with_counterfactual(
    found: RunReport, graph: GraphDeployment, max_fleets: int, console: Terminal
) -> RunReport:
    """Return a report with service times and what other fleets would have done, or with a remark why not."""
    found = with_graph(found, graph)
    try:
        with working("simulating the same traffic on other fleets", console) as show:
            compared = compare(
                found,
                graph,
                max_fleets=max_fleets,
                on_fleet=lambda name: show(f"simulating the same traffic on {name}"),
            )
    except ConfigError as exc:
        return replace(found, remarks=(*found.remarks, f"{_NOT_SHOWN}{exc}"))
    return replace(found, counterfactual=compared)
