"""`penstock planner run --environment kubernetes`: its own flags, and the process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli import option
from penstock.cli.cluster import Connection, require_packages
from penstock.core.errors import ConfigError
from penstock.core.flags import flag, flag_of, flags, time_scale
from penstock.core.http import loop
from penstock.kube.objects.names import OPERATOR_CLASS

UNSCHEDULABLE_S = 15.0
"""Default of --unschedulable-after; seconds."""


@dataclass(frozen=True, slots=True)
class RunFlags:
    """What `penstock planner run` takes beside the planner's own options."""

    graph_file: Path | None = flag("GraphDeployment to plan for.", name="--graph", default=None)
    config_file: Path | None = flag(
        "YAML with a section `Planner:` that holds options by their names.", name="--config", default=None
    )
    speed: float = time_scale()
    host: str = flag("Address of the planner's own /metrics.", default="127.0.0.1")
    metrics_port: int = flag("Its port; 0: off.", default=0, ge=0, le=65535)
    dry_run: bool = flag("Print the options that would apply, as JSON, and stop.", default=False)
    operate: bool = flag("The same as --no-operation=false.", default=False)


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Flags that only mean something on Kubernetes."""

    all_namespaces: bool = flag(
        "On Kubernetes: plan the graphs of every namespace, not of --namespace alone.",
        short=("-A",),
        default=False,
    )
    graph_name: str | None = flag("On Kubernetes: plan this graph only.", metavar="NAME", default=None)
    operator_class: str | None = flag(
        "On Kubernetes: plan the graphs with this spec.operatorClass.", metavar="NAME", unset=OPERATOR_CLASS
    )
    connection: Connection = field(default_factory=Connection)
    unschedulable_after: float | None = flag(
        "On Kubernetes: withdraw a replica that the scheduler has found no node for during so many seconds; make it "
        "longer than nodes take to appear.",
        gt=0,
        metavar="SECONDS",
        unset=f"{UNSCHEDULABLE_S:g}",
    )

    def refuse(self) -> None:
        """Refuse them for another backend.

        Raises:
            ConfigError: one of them was given.
        """
        for part in (self, self.connection):
            for name in flags(part):
                if getattr(part, name):
                    raise ConfigError(
                        f"{flag_of(name)}: only with --environment kubernetes; add that or leave it out"
                    )


def _refuse(run: RunFlags, cluster: ClusterFlags, said: Mapping[str, Any]) -> None:
    if cluster.all_namespaces and said.get("namespace") is not None:
        raise ConfigError("--namespace and --all-namespaces exclude each other; keep one")
    if run.speed != 1:
        raise ConfigError(f"--speed: {run.speed:g}; pods live in real time, leave it out on Kubernetes")
    if "memory" in said:
        raise ConfigError("--memory: is of one graph, and this process plans all of a cluster; leave it out")
    if "router-url" in said:
        raise ConfigError("--router-url: routers are found by their pods on Kubernetes; leave it out")


def run_on_cluster(run: RunFlags, cluster: ClusterFlags, said: Mapping[str, Any]) -> None:
    """Plan all graphs until SIGTERM.

    Args:
        run: Its speed must be 1; a dry run prints what would be watched and overridden, and stops.
        cluster: Of Kubernetes.
        said: Options given explicitly, by kebab-case name; they override every graph's own.

    Raises:
        ConfigError: flags that exclude each other, or no way to the cluster.
    """
    namespace = said.get("namespace")
    overrides = {
        key: value for key, value in said.items() if key not in {"namespace", "environment", "log-dir"}
    }
    _refuse(run, cluster, said)
    if run.dry_run:
        watched = {"all-namespaces": cluster.all_namespaces, "graph-name": cluster.graph_name}
        option.echo_json({**said, **watched})
        return
    require_packages("--environment kubernetes", "kubernetes")
    from penstock.engine.profiles.performance import graph_performance  # noqa: PLC0415 - for the cluster alone
    from penstock.planner.cluster.service import ClusterService, run_until_stopped  # noqa: PLC0415 - optional extra

    folder = said.get("log-dir")
    service = ClusterService(
        overrides=overrides,
        engine_profile=graph_performance,
        namespace=namespace,
        all_namespaces=cluster.all_namespaces,
        graph=cluster.graph_name,
        operator_class=cluster.operator_class or OPERATOR_CLASS,
        log_dir=Path(folder).expanduser() if folder is not None else None,
        host=run.host,
        metrics_port=run.metrics_port,
        unschedulable_s=cluster.unschedulable_after or UNSCHEDULABLE_S,
    )

    async def main(stop: asyncio.Event) -> None:
        async with cluster.connection.open() as client:
            await run_until_stopped(service, client, stop)

    loop.run(main)
