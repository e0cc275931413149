"""`penstock doctor`: what is wrong with Penstock on a cluster or on this machine, and what to do about it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import doctor_install, doctor_local, fields, option
from penstock.cli.cluster import Connection, require_packages
from penstock.cli.say import say, say_json
from penstock.core.errors import ConfigError
from penstock.core.flags import flag
from penstock_operator.doctor.findings import Finding, Severity, counts, is_healthy

if TYPE_CHECKING:
    from penstock_operator.doctor.facts import Facts

_SHOWN = {
    Severity.PROBLEM: ("red", "problem(s)"),
    Severity.WARNING: ("yellow", "warning(s)"),
    Severity.UNKNOWN: ("cyan", "unknown"),
    Severity.OK: ("green", "ok"),
}
"""Colour, and word of the last line."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What is checked."""

    namespace: str | None = flag(
        "Check the graphs of this namespace.", short=("-n",), metavar="NAME", unset="the context's"
    )
    all_namespaces: bool = flag("Check the graphs of every namespace.", short=("-A",), default=False)
    graph: str | None = flag("Check this graph alone.", metavar="NAME", default=None)
    interval: float = flag(
        "Seconds between the two observations that are compared for changes; set it above 5, the "
        "seconds after which Leases are renewed.",
        default=6.0,
        ge=0,
        le=300,
    )
    connection: Connection = field(default_factory=Connection)
    install: bool = flag(
        "Check whether this machine is ready for Penstock: packages, ports, limits, shared memory.",
        default=False,
    )
    local: bool = flag("Check this machine and its graphs instead of a cluster.", default=False)


@click.command()
@fields.options(DoctorOptions)
@option.as_json("Print one JSON object instead of lines.")
def doctor(*, as_json: bool, **given: Any) -> None:
    """Check a cluster: definitions, operator, planner, permissions, graphs, metrics, GPUs, clocks.

    Or, with --install, whether this machine is ready for Penstock; with --local, what `penstock up` needs, what it
    started, and how requests fare. The check changes nothing. Every finding says what to do about it. The exit
    status is 0 if nothing is broken (warnings and unreadable parts are possible), and 1 if there is a problem.
    """
    said = fields.take(DoctorOptions, given)
    if said.all_namespaces and said.namespace is not None:
        raise ConfigError("--namespace and --all-namespaces are mutually exclusive; use one")
    if said.install and (said.local or said.namespace is not None):
        raise ConfigError("--install: does not check graphs; remove --local and --namespace")
    if not (said.local or said.install):
        findings = _of_cluster(said)
    elif said.all_namespaces or said.graph or said.connection != Connection():
        raise ConfigError(
            f"{'--local' if said.local else '--install'}: does not check a cluster; remove "
            "--all-namespaces, --graph, --kubeconfig and --context"
        )
    elif said.install:
        findings = list(doctor_install.install_findings(doctor_install.install_facts()))
    else:
        findings = asyncio.run(doctor_local.diagnose(said.namespace))
    if as_json:
        say_json({"healthy": is_healthy(findings), "findings": findings})
    else:
        _print(findings)
    if not is_healthy(findings):
        sys.exit(1)


def _of_cluster(said: DoctorOptions) -> list[Finding]:
    require_packages("penstock doctor without --local", "kubernetes")
    from penstock_operator.doctor.check import check  # noqa: PLC0415 - the extra may be absent
    from penstock_operator.doctor.gather import Scope, gather  # noqa: PLC0415 - the extra may be absent

    async def gather_facts() -> Facts:
        async with said.connection.open() as client:
            namespace = None if said.all_namespaces else said.namespace or client.namespace
            return await gather(client, Scope(namespace, said.graph, said.interval, version("penstock")))

    # A failure here is reported once, as a finding; the client's own log would repeat it.
    logging.getLogger("penstock.kube").setLevel(logging.ERROR)
    return check(asyncio.run(gather_facts()))


def _print(findings: Sequence[Finding]) -> None:
    for each in findings:
        word = click.style(f"{each.severity:<8}", fg=_SHOWN[each.severity][0])
        say(f" {each.subject}: {each.message}", head=word)
        if each.remedy:
            say(f"{'':<8}   -> {each.remedy}")
    found = counts(findings)
    say(", ".join(f"{found[word]} {text}" for word, (_, text) in _SHOWN.items()))
