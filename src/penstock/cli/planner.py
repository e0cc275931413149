"""`penstock planner`: run it here or on a cluster, explain and replay its decisions, decide once, show what it learnt."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import click
import orjson
from pydantic.fields import FieldInfo

from penstock.api import Environment, GraphDeployment, PlannerMode
from penstock.api.manifests import load_graph, read_text
from penstock.api.planner import known_modes
from penstock.cli import fields, option
from penstock.cli.cluster import Connection, require_packages
from penstock.cli.graph_warnings import option_warnings, print_warnings, warnings_of
from penstock.cli.say import say, say_json
from penstock.cli.terminal import write_text
from penstock.core.errors import ConfigError, LedgerFileError, NotFoundError
from penstock.core.flags import flag, flag_of, time_scale
from penstock.core.http import loop
from penstock.engine.profiles.performance import planning_profile
from penstock.kube.objects.names import OPERATOR_CLASS
from penstock.performance.profile import PerformanceProfile
from penstock_planner import decision_input, learnt
from penstock_planner import explain as explaining
from penstock_planner import replay as replaying
from penstock_planner.core.ledger_history import Remembered
from penstock_planner.core.records import MALFORMED
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.pipeline import decide as decide_once
from penstock_planner.learnt import LEARNING, start_from
from penstock_planner.ledger import read_ledger
from penstock_planner.options import PlannerOptions, join, stated
from penstock_planner.service import PlannerService, run_until_stopped
from penstock_planner.sources.prometheus import require_client

EXAMPLES = ("load", "sla")
"""Modes that have an example, a file below ``penstock_planner/examples``."""
UNSCHEDULABLE_S = 15.0
"""Default of --unschedulable-after; seconds."""


@dataclass(frozen=True, slots=True)
class RunFlags:
    """What `penstock planner run` takes in addition to the planner's own options."""

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


def _refuse(run: RunFlags, cluster: ClusterFlags, said: Mapping[str, Any]) -> None:
    if cluster.all_namespaces and said.get("namespace") is not None:
        raise ConfigError("--namespace and --all-namespaces exclude each other; keep one")
    if run.speed != 1:
        raise ConfigError(f"--speed: {run.speed:g}; pods live in real time, leave it out on Kubernetes")
    if "memory" in said:
        raise ConfigError(
            "--memory: is of one graph, and this process plans all of a cluster; name a ConfigMap in the graph's planner.memory"
        )
    if "router-url" in said:
        raise ConfigError("--router-url: routers are found by their pods on Kubernetes; leave it out")


def _run_on_cluster(run: RunFlags, cluster: ClusterFlags, said: Mapping[str, Any]) -> None:
    """Plan all graphs until SIGTERM; options given explicitly, by kebab-case name, override every graph's own."""
    _refuse(run, cluster, said)
    if "mode" in said:
        print_warnings(option_warnings(said, said["mode"]))
    if run.dry_run:
        watched = {"all-namespaces": cluster.all_namespaces, "graph-name": cluster.graph_name}
        say_json({**said, **watched})
        return
    require_packages("--environment kubernetes", "kubernetes")
    from penstock.engine.profiles.performance import graph_performance  # noqa: PLC0415 - for the cluster alone
    from penstock_planner.cluster.service import ClusterService, run_until_stopped  # noqa: PLC0415 - optional extra

    folder = said.get("log-dir")
    service = ClusterService(
        overrides={key: said[key] for key in said if key not in {"namespace", "environment", "log-dir"}},
        engine_profile=graph_performance,
        namespace=said.get("namespace"),
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


_LOG_DIR: option.Option = click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="The planner's folder, or a ledger.  [default: the running graph's]",
)
_NAMESPACE: option.Option = click.option(
    "--namespace", help="Graph on this machine, without --log-dir.  [default: the only one there is]"
)


def ledger_folder(log_dir: Path | None, namespace: str | None) -> Path:
    """Return ``log_dir``, or the folder of a running graph's planner; with neither raise `ConfigError`."""
    if log_dir is not None:
        return log_dir
    from penstock.local.down import choose_namespace  # noqa: PLC0415 - only where it is used
    from penstock.local.store import StateStore  # noqa: PLC0415 - only where it is used

    try:
        chosen = choose_namespace(namespace)
    except NotFoundError as exc:
        raise ConfigError("--log-dir: needed, because no graph is running on this machine") from exc
    state = StateStore.of(chosen).read()
    if state is None:
        raise NotFoundError(
            f"namespace {chosen!r}: not running; start it with `penstock up FILE`, or give --log-dir"
        )
    if state.arbiter.planner_log_dir is None:
        raise ConfigError(f"--namespace: {chosen!r} has no planner on this machine; give --log-dir")
    return Path(state.arbiter.planner_log_dir)


@click.group()
def planner() -> None:
    """Scale prefill and decode workers inside a GPU budget; explain and replay every decision."""


@planner.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("--example", is_flag=True, help="Print an example FILE and stop.")
@click.option("--mode", type=option.Choice(EXAMPLES), help="Mode of the example.  [default: load]")
@click.option(
    "--profile",
    help="What mode sla plans by, in place of FILE's own: file or folder that `penstock profile` wrote, or a latency "
    "profile by name.",
)
@option.as_json("Decision and next state as JSON.")
def decide(file: Path | None, example: bool, mode: str | None, profile: str | None, as_json: bool) -> None:
    """Decide once from FILE (YAML or JSON; - is stdin): observations, state and configuration.

    A decision as `penstock planner explain --json` prints it is such a FILE too.
    """
    if example:
        file_name = f"{mode or PlannerMode.LOAD.value}.yaml"
        folder = resources.files("penstock_planner").joinpath("examples")
        say(folder.joinpath(file_name).read_text("utf-8"), nl=False)
        return
    if mode is not None:
        raise ConfigError("--mode: says which --example to print; FILE's own mode is its key config.mode")
    if file is None:
        raise ConfigError("FILE: missing; name one, - for stdin, or print one with --example")
    inputs = decision_input.parse(
        read_text(file), name=str(file), read=lambda named: planning_profile(None, named), profile=profile
    )
    decision, state = decide_once(*inputs)
    if as_json:
        say_json({"decision": to_plain(decision), "state": to_plain(state)})
        return
    record = {"decision": to_plain(decision), "kind": "adjustment", "at_s": decision.at_s, "origin_s": 0.0}
    say(explaining.in_words(record))


@planner.group()
def memory() -> None:
    """What a planner has learnt: start-ups, throughput, floors. `planner run --memory FILE` starts from an export."""


@memory.command()
@_LOG_DIR
@_NAMESPACE
@option.as_json("What `export` writes.")
def show(log_dir: Path | None, namespace: str | None, *, as_json: bool) -> None:
    """Say what was learnt, by role."""
    known = learnt.learnt(ledger_folder(log_dir, namespace))
    if as_json:
        say_json(learnt.as_json(known))
    else:
        say(learnt.in_words(known))


@memory.command()
@_LOG_DIR
@_NAMESPACE
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@option.as_json("Print FILE's path, and what was written there.")
def export(log_dir: Path | None, namespace: str | None, file: Path, *, as_json: bool) -> None:
    """Write what was learnt to FILE, for the planner of another graph of the same model."""
    text = learnt.as_json(learnt.learnt(ledger_folder(log_dir, namespace)))
    write_text(f"FILE {file}", file, text.decode())
    if as_json:
        say_json({"file": str(file), "learnt": orjson.loads(text)})


@memory.command("from-trace")
@click.argument("trace")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The graph whose planner starts from it.",
)
@click.option(
    "--qps",
    type=click.FloatRange(min=0, min_open=True),
    help="Mean rate, requests/s.  [default: the trace's]",
)
@click.option(
    "--cold-start-s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="From asking for a replica until it serves, seconds.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Most requests.  [default: all]")
def from_trace(
    trace: str, file: Path, *, manifest: Path, qps: float | None, cold_start_s: float, limit: int | None
) -> None:
    """Write to FILE what the graph's planner would have learnt from TRACE, as `penstock simulate --trace` reads it.

    For the first hour of a graph that has no ledger yet: throughput is that of its latency profile until workers show theirs.
    """
    from penstock.simulator.warm_start import learnt_from_trace  # noqa: PLC0415 - only where it is used

    known = learnt_from_trace(load_graph(manifest), trace, qps=qps, cold_start_s=cold_start_s, limit=limit)
    write_text(f"FILE {file}", file, learnt.as_json(known).decode())
    say(learnt.in_words(known))


@memory.command()
@click.option(
    "--log-dir", type=click.Path(path_type=Path), required=True, help="The planner's folder, or a ledger."
)
def reset(log_dir: Path) -> None:
    """Let the planner's next start begin with nothing learnt; its ledger keeps its history. Stop the planner first."""
    learnt.reset(log_dir)
    say("forgotten; the next start learns from nothing")


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
    **dict.fromkeys(("interval", "max_age", "deadline", "slo"), "SECONDS"),
    **dict.fromkeys(("budget", "num_gpu"), "GPUS"),
    "url": "URL",
    "memory": "FILE",
    "max_step": "REPLICAS",
}
"""Of options, by the end of their names."""


@planner.command()
@fields.options(RunFlags)
@fields.options(ClusterFlags)
@option.of_settings(PlannerOptions.model_fields, "PENSTOCK_PLANNER", _shape)
def run(**given: Any) -> None:
    """Plan until SIGTERM. Options: flag > environment variable > --config > --graph > default.

    With --environment kubernetes one process plans every graph that has spec.planner.enabled, while it holds
    the Lease penstock-planner. Options then come from each graph's spec.planner; those given as flag, in the
    environment or in --config override it in ALL graphs. Ledger and dashboard lie in LOG-DIR/NAMESPACE/GRAPH.
    """
    flags, cluster = fields.take(RunFlags, given), fields.take(ClusterFlags, given)
    graph_file = flags.graph_file
    if flags.operate:
        given["no_operation"] = False
    named = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    said = stated(given=named, file=flags.config_file)
    if said.get("environment") == Environment.KUBERNETES:
        if graph_file is not None:
            raise ConfigError(
                "--graph: graphs are read from the cluster with --environment kubernetes; use --graph-name NAME"
            )
        _run_on_cluster(flags, cluster, said)
        return
    fields.refuse_given(cluster, cluster.connection, needs="--environment kubernetes")
    draws = "max-gpu-budget" in said
    graph = load_graph(graph_file, draws=draws) if graph_file is not None else None
    options = join(given=named, file=flags.config_file, graph=graph)
    if options.prometheus_url is not None:
        require_client()
    performance = _performance(options, graph, is_profile_given=said.get("profile") is not None)
    if said.get("memory") is not None and options.mode not in LEARNING:
        raise ConfigError(
            f"--memory: mode {options.mode} learns nothing; leave it out or give --mode adaptive"
        )
    if graph is not None and graph_file is not None:
        print_warnings(warnings_of([graph], graph_file, mode=options.mode))
    print_warnings(option_warnings(said, options.mode))
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
    os.umask(0o077)  # ledger, state and event files are one user's, as all that `penstock up` leaves
    loop.run(_on_backend(service))


def _performance(
    options: PlannerOptions, graph: GraphDeployment | None, *, is_profile_given: bool
) -> PerformanceProfile | None:
    """Return what mode sla plans by; None in every other mode, which refuses a profile that was given."""
    if options.mode == PlannerMode.SLA:
        return planning_profile(None if graph is None else graph.spec, options.profile)
    if is_profile_given:
        raise ConfigError(
            f"--profile: {options.profile}, but mode {options.mode} plans by no profile; leave it out, or give --mode sla"
        )
    return None


def _on_backend(service: PlannerService) -> Callable[[asyncio.Event], Coroutine[Any, Any, None]]:
    """Return the process's main coroutine for the environment."""
    options = service.options
    if options.environment is Environment.KUBERNETES:
        raise ConfigError(
            "spec.planner.environment: kubernetes, yet a local planner was asked for; apply the graph to a "
            "cluster and give --environment kubernetes"
        )
    from penstock.local.store import StateStore  # noqa: PLC0415 - only where it is used
    from penstock.local.target import LocalTarget  # noqa: PLC0415 - only where it is used

    store = StateStore.of(options.namespace)
    state = store.read()
    router_url = options.router_url or (state.arbiter.router_url if state is not None else None)
    if state is None and not router_url:
        raise ConfigError(
            f"--namespace: {options.namespace!r} has no graph on this machine ({store.path} is not there); "
            "start it with `penstock up FILE`, or give the name that `penstock status` shows"
        )

    async def main(stop: asyncio.Event) -> None:
        target = LocalTarget(store)
        try:
            await run_until_stopped(service, target, router_url or None, stop, observer=target)
        finally:
            await target.close()

    return main


@planner.command()
@_LOG_DIR
@_NAMESPACE
@click.option("--last", type=click.IntRange(min=1), default=1, show_default=True, help="How many changes.")
@click.option("--all", "with_unchanged", is_flag=True, help="Count decisions that changed nothing, too.")
@click.option("--id", "decision_id", help="One decision, such as d000012.")
@option.as_json("The ledger's records as a JSON array.")
def explain(
    *,
    log_dir: Path | None,
    namespace: str | None,
    last: int,
    with_unchanged: bool,
    decision_id: str | None,
    as_json: bool,
) -> None:
    """Say why the last changes were made, rule by rule with its numbers, and why nothing has changed since."""
    folder = ledger_folder(log_dir, namespace)
    newest = (
        None if decision_id is not None else last if with_unchanged else 1
    )  # changes are never only counted
    ledger = read_ledger(folder, newest=newest)
    _notes(ledger.notes)
    try:
        records = explaining.select(ledger, last=last, decision_id=decision_id, with_unchanged=with_unchanged)
        words = [] if as_json else [explaining.in_words(record) for record in records]
        is_part = not (as_json or with_unchanged or decision_id is not None)
        held = explaining.held_in_words(ledger) if is_part else ""
        left = next((each["remembered"] for each in ledger.records[::-1] if each.get("remembered")), None)
        former = "" if left is None else learnt.former_run_in_words(Remembered(**left), folder, time.time())
    except MALFORMED as exc:
        raise LedgerFileError(
            f"{folder}: a decision is incomplete ({exc!r}); use the version that wrote it"
        ) from exc
    if as_json:
        say_json(records)
    elif records:
        say("\n\n".join(words))
        if held:
            say(f"\n{held}  (--all explains them)")
        if former:
            say(former)
    else:
        say("no decision yet", err=True)


@planner.command()
@click.argument("ledger_path", metavar="LEDGER", type=click.Path(path_type=Path))
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="What if: an option by its name. Repeatable."
)
@option.as_json("Result as JSON.")
@click.pass_context
def replay(ctx: click.Context, ledger_path: Path, changes: tuple[str, ...], as_json: bool) -> None:
    """Make every decision of a ledger again; exit 1 if one comes out otherwise.

    With --set nothing is verified: it prints which decisions would differ, each made from its recorded
    window and state.
    """
    ledger = read_ledger(ledger_path)
    _notes(ledger.notes)
    if changes:
        _print_what_if(*replaying.what_if(ledger, replaying.settings(changes)), as_json=as_json)
        return
    result = replaying.replay(ledger)
    if as_json:
        say_json(to_plain(result))
    else:
        for found in result.differences:
            say(f"line {found.line}: {found.id}: {found.what} differs")
            say(f"  recorded   {orjson.dumps(found.recorded).decode()}")
            say(f"  recomputed {orjson.dumps(found.recomputed).decode()}")
        say(f"{result.decisions} decisions made again, {len(result.differences)} differences")
    ctx.exit(1 if result.differences else 0)


def _print_what_if(total: int, different: list[tuple[Any, Any]], *, as_json: bool) -> None:
    if as_json:
        rows = [{"recorded": record["decision"], "what_if": to_plain(made)} for record, made in different]
        say_json({"decisions": total, "different": rows})
        return
    for record, made in different:
        recorded = {role["role"]: role["sentence"] for role in record["decision"]["roles"]}
        for role in made.roles:
            if recorded.get(role.role.value) != role.sentence:
                say(f"{made.id}  was: {recorded.get(role.role.value)}\n{'':9}now: {role.sentence}")
    say(f"{len(different)} of {total} decisions would differ")


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        say(note, err=True)
