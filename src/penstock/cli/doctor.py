"""`penstock doctor`: what is wrong with Penstock on a cluster or on this machine, and what to do about it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli import doctor_local, option
from penstock.core.errors import ConfigError
from penstock.operator.doctor.findings import Finding, Severity, counts, is_healthy

if TYPE_CHECKING:
    from penstock.operator.doctor.facts import Facts

_COLOURS = {
    Severity.PROBLEM: "red",
    Severity.WARNING: "yellow",
    Severity.UNKNOWN: "cyan",
    Severity.OK: "green",
}

_SUMMARY = {
    Severity.PROBLEM: "problem(s)",
    Severity.WARNING: "warning(s)",
    Severity.UNKNOWN: "unknown",
    Severity.OK: "ok",
}


@click.command()
@click.option("--namespace", "-n", metavar="NAME", help="Check its graphs.  [default: the context's]")
@click.option("--all-namespaces", "-A", is_flag=True, help="Check the graphs of every namespace.")
@click.option("--graph", metavar="NAME", help="Check this graph alone.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0, max=300),
    default=6.0,
    show_default=True,
    help="Time between two observations, seconds, which show what changes; Leases are renewed every 5 s.",
)
@option.kubeconfig()
@click.option("--local", is_flag=True, help="Check this machine and its graphs in place of a cluster.")
@option.as_json("Print one JSON object instead of lines.")
def doctor(
    *,
    namespace: str | None,
    all_namespaces: bool,
    graph: str | None,
    interval: float,
    kubeconfig: Path | None,
    context: str | None,
    local: bool,
    as_json: bool,
) -> None:
    """Check a cluster: definitions, operator, planner, rights, graphs, metrics, GPUs, clocks.

    Or, with --local, what `penstock up` needs and started, and what its clients meet. Only reads. Every finding says
    what to do about it. Exits 0 if nothing is broken (there may be warnings and things that could not be read), 1 if
    there is a problem.
    """
    if all_namespaces and namespace is not None:
        raise ConfigError("--namespace and --all-namespaces exclude each other; keep one")
    if local:
        if all_namespaces or graph or kubeconfig or context:
            raise ConfigError(
                "--local: checks no cluster; remove --all-namespaces, --graph, --kubeconfig and --context"
            )
        findings = doctor_local.diagnose(asyncio.run(doctor_local.gather(namespace)))
    else:
        where = _Where(namespace, all_namespaces, graph, kubeconfig, context)
        findings = _of_cluster(where, interval)
    if as_json:
        report = {"healthy": is_healthy(findings), "findings": [asdict(each) for each in findings]}
        click.echo(json.dumps(report, indent=2))
    else:
        _print(findings)
    if not is_healthy(findings):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class _Where:
    """Which cluster, and what of it."""

    namespace: str | None
    all_namespaces: bool
    graph: str | None
    kubeconfig: Path | None
    context: str | None


def _of_cluster(where: _Where, interval_s: float) -> list[Finding]:
    try:
        from penstock.kube.client import KubeClient  # noqa: PLC0415 - the extra may be absent
        from penstock.operator.doctor.gather import Scope, gather  # noqa: PLC0415
        from penstock.operator.doctor.judge import judge  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"{exc.name}: not installed; a cluster's doctor needs `pip install 'penstock[kubernetes]'`, "
            "this machine's is `penstock doctor --local`"
        ) from exc

    async def gather_facts() -> Facts:
        client = await KubeClient.connect(kubeconfig=where.kubeconfig, context=where.context)
        try:
            namespace = None if where.all_namespaces else where.namespace or client.namespace
            return await gather(client, Scope(namespace, where.graph, interval_s, version("penstock")))
        finally:
            await client.close()

    # What goes wrong here is a finding, said once; the client's own log would say it again.
    logging.getLogger("penstock.kube").setLevel(logging.ERROR)
    return judge(asyncio.run(gather_facts()))


def _print(findings: Sequence[Finding]) -> None:
    for each in findings:
        word = click.style(f"{each.severity:<8}", fg=_COLOURS[each.severity])
        click.echo(f"{word} {each.subject}: {each.message}")
        if each.remedy:
            click.echo(f"{'':<8}   -> {each.remedy}")
    found = counts(findings)
    click.echo(", ".join(f"{found[word]} {text}" for word, text in _SUMMARY.items()))
