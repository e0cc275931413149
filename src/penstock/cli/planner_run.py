"""`penstock planner run`: plan one graph of this machine, or all graphs of a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from penstock.api import Environment, GraphDeployment, PlannerMode
from penstock.api.manifests import load_graph
from penstock.api.planner import known_modes
from penstock.assess.shadow.watched import FLAG as SHADOW_FLAG
from penstock.assess.shadow.watched import ReplicaSource
from penstock.cli import fields, option
from penstock.cli.cluster import Connection, require_packages
from penstock.cli.graph_warnings import option_warnings, print_warnings, warnings_of
from penstock.cli.planner_shadow import ShadowFlags, ShadowRun
from penstock.cli.say import say_json
from penstock.core.errors import ConfigError
from penstock.core.flags import flag, flag_of, time_scale
from penstock.core.http import loop
from penstock.engine.profiles.performance import planning_profile
from penstock.kube.objects.names import OPERATOR_CLASS
from penstock.performance.profile import PerformanceProfile
from penstock_planner.learnt import LEARNING, start_from
from penstock_planner.options import PlannerOptions, join, stated
from penstock_planner.service import PlannerService, run_until_stopped
from penstock_planner.sources.prometheus import require_client

UNSCHEDULABLE_S = 15.0
"""Default of --unschedulable-after; seconds."""


@dataclass(frozen=True, slots=True)
class RunFlags:
    """What `penstock planner run` takes in addition to the planner's own options."""

    graph_file: Path | None = flag("GraphDeployment to plan for.", name="--graph", default=None)
    config_file: Path | None = flag(
        "YAML file whose section `Planner:` holds options by name.", name="--config", default=None
    )
    speed: float = time_scale()
    host: str = flag("Address on which the planner serves /metrics.", default="127.0.0.1")
    metrics_port: int = flag("Port of the planner's /metrics; 0 turns it off.", default=0, ge=0, le=65535)
    dry_run: bool = flag("Print the options that would apply, as JSON, and stop.", default=False)
    operate: bool = flag("The same as --no-operation=false.", default=False)


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Flags that only mean something on Kubernetes."""

    all_namespaces: bool = flag(
        "On Kubernetes: plan the graphs of every namespace instead of only those of --namespace.",
        short=("-A",),
        default=False,
    )
    graph_name: str | None = flag("On Kubernetes: plan only this graph.", metavar="NAME", default=None)
    operator_class: str | None = flag(
        "On Kubernetes: plan the graphs with this spec.operatorClass.", metavar="NAME", unset=OPERATOR_CLASS
    )
    connection: Connection = field(default_factory=Connection)
    unschedulable_after: float | None = flag(
        "On Kubernetes: roll back a replica that has been unschedulable for this many seconds; set "
        "it above your node provisioning time.",
        gt=0,
        metavar="SECONDS",
        unset=f"{UNSCHEDULABLE_S:g}",
    )


def _refuse(run: RunFlags, cluster: ClusterFlags, explicit: Mapping[str, Any]) -> None:
    if cluster.all_namespaces and explicit.get("namespace") is not None:
        raise ConfigError("--namespace and --all-namespaces are mutually exclusive; use one")
    if run.speed != 1:
        raise ConfigError(f"--speed: {run.speed:g}; pods run in real time, so remove it on Kubernetes")
    if "memory" in explicit:
        raise ConfigError(
            "--memory: holds the memory of one graph, but this process plans all graphs of a "
            "cluster; name a ConfigMap in the graph's planner.memory"
        )
    if "router-url" in explicit:
        raise ConfigError("--router-url: on Kubernetes routers are discovered from their pods; remove it")


def _run_on_cluster(run: RunFlags, cluster: ClusterFlags, explicit: Mapping[str, Any]) -> None:
    """Plan all graphs until SIGTERM; options given explicitly, by kebab-case name, override every graph's own."""
    _refuse(run, cluster, explicit)
    if "mode" in explicit:
        print_warnings(option_warnings(explicit, explicit["mode"]))
    if run.dry_run:
        watched = {"all-namespaces": cluster.all_namespaces, "graph-name": cluster.graph_name}
        say_json({**explicit, **watched})
        return
    require_packages("--environment kubernetes", "kubernetes")
    from penstock.engine.profiles.performance import graph_performance  # noqa: PLC0415 - for the cluster alone
    from penstock_planner.cluster.service import ClusterService, run_until_stopped  # noqa: PLC0415 - optional extra

    folder = explicit.get("log-dir")
    service = ClusterService(
        overrides={
            key: explicit[key] for key in explicit if key not in {"namespace", "environment", "log-dir"}
        },
        engine_profile=graph_performance,
        namespace=explicit.get("namespace"),
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


def _shape(name: str, field: FieldInfo) -> tuple[str, dict[str, Any]]:
    spelling = flag_of(name)
    if isinstance(field.default, bool):
        # Alone, or with a value as the planner's document writes it: --no-operation=false.
        return spelling, {"type": bool, "is_flag": False, "flag_value": "true"}
    if name == "mode":
        return spelling, {"type": option.Choice(known_modes())}
    if choices := option.choices_of(field):
        return spelling, {"type": choices}
    metavar = next((word for end, word in _METAVARS.items() if name.endswith(end)), None)
    return spelling, {"metavar": metavar or ("NUMBER" if isinstance(field.default, float) else "TEXT")}


_METAVARS = {
    **dict.fromkeys(("interval", "max_age", "deadline"), "SECONDS"),
    "slo": "DURATION",
    **dict.fromkeys(("budget", "num_gpu"), "GPUS"),
    "url": "URL",
    "memory": "FILE",
    "max_step": "REPLICAS",
}
"""Metavars of options, by the end of their names."""


@click.command()
@fields.options(RunFlags)
@fields.options(ShadowFlags)
@fields.options(ClusterFlags)
@option.of_settings(PlannerOptions.model_fields, "PENSTOCK_PLANNER", _shape)
def run(**given: Any) -> None:
    """Plan until SIGTERM. Options: flag > environment variable > --config > --graph > default.

    With --environment kubernetes one process plans every graph that has spec.planner.enabled, while it holds
    the Lease penstock-planner. Options then come from each graph's spec.planner; those given as flag, in the
    environment or in --config override it in ALL graphs. Ledger and dashboard are in LOG-DIR/NAMESPACE/GRAPH.
    """
    flags, cluster = fields.take(RunFlags, given), fields.take(ClusterFlags, given)
    shadow = fields.take(ShadowFlags, given)
    graph_file = flags.graph_file
    if flags.operate:
        given["no_operation"] = False
    named = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    explicit = stated(given=named, file=flags.config_file)
    refuse_misplaced(shadow, cluster, explicit)
    if explicit.get("environment") == Environment.KUBERNETES:
        if graph_file is not None:
            raise ConfigError(
                "--graph: graphs are read from the cluster with --environment kubernetes; use --graph-name NAME"
            )
        _run_on_cluster(flags, cluster, explicit)
        return
    draws = "max-gpu-budget" in explicit
    graph = load_graph(graph_file, draws=draws) if graph_file is not None else None
    options = join(given=named, file=flags.config_file, graph=graph)
    if options.prometheus_url is not None:
        require_client()
    performance = _performance(options, graph, is_profile_given=explicit.get("profile") is not None)
    if explicit.get("memory") is not None and options.mode not in LEARNING:
        raise ConfigError(f"--memory: mode {options.mode} does not learn; remove it, or give --mode adaptive")
    if graph is not None and graph_file is not None:
        print_warnings(warnings_of([graph], graph_file, mode=options.mode))
    print_warnings(option_warnings(explicit, options.mode))
    memory = start_from(options, graph)
    if flags.dry_run:
        say_json(options.model_dump(mode="json", by_alias=True))
        return
    service = PlannerService(
        options,
        graph,
        speed=flags.speed,
        host=flags.host,
        metrics_port=flags.metrics_port,
        graph_file=graph_file,
        performance=performance,
        memory=memory,
    )
    if shadow.shadow:
        ShadowRun.of(shadow, service, explicit).run(cluster.connection)
        return
    os.umask(0o077)  # ledger, state and event files are one user's, as all that `penstock up` leaves
    loop.run(_on_backend(service))


def refuse_misplaced(shadow: ShadowFlags, cluster: ClusterFlags, explicit: Mapping[str, Any]) -> None:
    """Refuse flags of ``--shadow`` without it, and flags of a cluster where none is planned.

    Raises:
        ConfigError: a flag has no effect, or contradicts another.
    """
    is_on_cluster = explicit.get("environment") == Environment.KUBERNETES
    if not shadow.shadow:
        fields.refuse_given(shadow, needs=SHADOW_FLAG)
    elif is_on_cluster:
        raise ConfigError(
            f"{SHADOW_FLAG}: watches a fleet that is not a graph, so leave out --environment kubernetes; --replicas-from scale"
            " reads a Deployment from the cluster"
        )
    if not is_on_cluster:
        fields.refuse_given(cluster, needs="--environment kubernetes")
        if shadow.replicas_from is not ReplicaSource.SCALE:
            needs = "--replicas-from scale" if shadow.shadow else "--environment kubernetes"
            fields.refuse_given(cluster.connection, needs=needs)


def _performance(
    options: PlannerOptions, graph: GraphDeployment | None, *, is_profile_given: bool
) -> PerformanceProfile | None:
    """Return what mode sla plans by; None in every other mode, which refuses a profile that was given."""
    if options.mode == PlannerMode.SLA:
        return planning_profile(None if graph is None else graph.spec, options.profile)
    if is_profile_given:
        raise ConfigError(
            f"--profile: {options.profile}, but mode {options.mode} does not use a profile; remove "
            "it, or give --mode sla"
        )
    return None


def _on_backend(service: PlannerService) -> Callable[[asyncio.Event], Coroutine[Any, Any, None]]:
    """Return the process's main coroutine for the environment."""
    options = service.options
    from penstock.local.store import StateStore  # noqa: PLC0415 - only where it is used
    from penstock.local.target import LocalTarget  # noqa: PLC0415 - only where it is used

    store = StateStore.of(options.namespace)
    state = store.read()
    router_url = options.router_url or (state.arbiter.router_url if state is not None else None)
    if state is None and not router_url:
        raise ConfigError(
            f"--namespace: {options.namespace!r} has no graph on this machine ({store.path} does not "
            "exist); start it with `penstock up FILE`, or give the name that `penstock status` shows"
        )

    async def main(stop: asyncio.Event) -> None:
        target = LocalTarget(store)
        try:
            await run_until_stopped(service, target, router_url or None, stop, observer=target)
        finally:
            await target.close()

    return main
