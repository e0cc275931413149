"""`penstock planner`: run it, explain and replay what it decided, ask what it would decide."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from importlib import resources
from pathlib import Path
from typing import Any

import click
import orjson
from pydantic.fields import FieldInfo

from penstock.api import Environment, GraphDeployment, PlannerMode, Predictor
from penstock.api.manifests import load_graph
from penstock.api.planner import known_modes
from penstock.cli import fields, option
from penstock.cli.planner_cluster import (
    ClusterFlags,
    RunFlags,
    run_on_cluster,
)
from penstock.core.errors import ConfigError, NotFoundError, unwritable
from penstock.core.flags import flag_of
from penstock.core.http import loop
from penstock.engine.profiles.performance import planning_profile
from penstock.performance.profile import PerformanceProfile
from penstock.planner import decision_input, learnt
from penstock.planner import explain as explaining
from penstock.planner import replay as replaying
from penstock.planner.decide.codec import to_plain
from penstock.planner.decide.pipeline import decide as decide_once
from penstock.planner.learnt import start_from
from penstock.planner.ledger import read_ledger
from penstock.planner.options import PlannerOptions, join, stated
from penstock.planner.service import PlannerService, run_until_stopped
from penstock.planner.sources.prometheus import require_client

EXAMPLES = ("load", "sla")
"""Modes that have an example, a file below ``penstock/planner/examples``."""

_LOG_DIR: option.Option = click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="The planner's folder, or a ledger.  [default: the running graph's]",
)
_NAMESPACE: option.Option = click.option(
    "--namespace", help="Graph on this machine, without --log-dir.  [default: the only one there is]"
)


def ledger_folder(log_dir: Path | None, namespace: str | None) -> Path:
    """Return ``log_dir``, or the folder of a running graph's planner.

    Raises:
        ConfigError: neither is there.
    """
    if log_dir is not None:
        return log_dir
    from penstock.local.down import choose_namespace  # noqa: PLC0415 - only where it is used
    from penstock.local.store import StateStore  # noqa: PLC0415 - only where it is used

    try:
        chosen = choose_namespace(namespace)
    except NotFoundError as exc:
        raise ConfigError("--log-dir: needed, because no graph is running on this machine") from exc
    state = StateStore.of(chosen).read()
    if state is None or state.arbiter.planner_log_dir is None:
        raise ConfigError(f"--namespace: {chosen!r} has no planner on this machine; give --log-dir")
    return Path(state.arbiter.planner_log_dir)


@click.group()
def planner() -> None:
    """Scale prefill and decode workers inside a GPU budget; explain and replay every decision."""


@planner.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("--example", is_flag=True, help="Print an example FILE and stop.")
@click.option(
    "--mode",
    type=click.Choice(EXAMPLES),
    help="Mode of the example.  [default: load]",
)
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
        click.echo(
            resources.files("penstock.planner").joinpath("examples", file_name).read_text("utf-8"), nl=False
        )
        return
    if mode is not None:
        raise ConfigError("--mode: says which --example to print; FILE's own mode is its key config.mode")
    if file is None:
        raise ConfigError("FILE: missing; name one, - for stdin, or print one with --example")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}; print an example with --example") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not UTF-8 at byte {exc.start}; save it as UTF-8") from exc
    inputs = decision_input.parse(
        text, name=str(file), read=lambda named: planning_profile(None, named), profile=profile
    )
    decision, state = decide_once(*inputs)
    if as_json:
        answer = {"decision": to_plain(decision), "state": to_plain(state)}
        option.echo_json(answer)
        return
    record = {"decision": to_plain(decision), "kind": "adjustment", "at_s": decision.at_s, "origin_s": 0.0}
    click.echo(explaining.in_words(record))


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
    click.echo(learnt.as_json(known) if as_json else learnt.in_words(known), nl=not as_json)


@memory.command()
@_LOG_DIR
@_NAMESPACE
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export(log_dir: Path | None, namespace: str | None, file: Path) -> None:
    """Write what was learnt to FILE, for the planner of another graph of the same model."""
    text = learnt.as_json(learnt.learnt(ledger_folder(log_dir, namespace)))
    try:
        file.write_bytes(text)
    except OSError as exc:
        raise ConfigError(unwritable(f"FILE {file}", exc)) from exc


@memory.command()
@click.option(
    "--log-dir", type=click.Path(path_type=Path), required=True, help="The planner's folder, or a ledger."
)
def reset(log_dir: Path) -> None:
    """Let the planner's next start begin with nothing learnt; its ledger keeps its history. Stop the planner first."""
    learnt.reset(log_dir)
    click.echo("forgotten; the next start learns anew")


_CHOICES = {
    "environment": ["local", "kubernetes"],
    "metrics_source": ["router", "scrape", "prometheus"],
    "predictor": [predictor.value for predictor in Predictor],
    "mode": known_modes(),
}


def _shape(name: str, field: FieldInfo) -> tuple[str, dict[str, Any]]:
    spelling = flag_of(name)
    if isinstance(field.default, bool):
        # Alone, or with a value as the planner's document writes it: --no-operation=false.
        return spelling, {"type": bool, "is_flag": False, "flag_value": "true"}
    if name in _CHOICES:
        return spelling, {"type": click.Choice(_CHOICES[name])}
    return spelling, {"metavar": _metavar(name, float if isinstance(field.default, float) else str)}


def _metavar(name: str, kind: type) -> str:
    if name.endswith(("interval", "max_age", "deadline", "slo")):
        return "SECONDS"
    if name.endswith(("budget", "num_gpu")):
        return "GPUS"
    if name.endswith("url"):
        return "URL"
    if name == "memory":
        return "FILE"
    if name == "max_step":
        return "REPLICAS"
    return "NUMBER" if kind is float else "TEXT"


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
    graph_file, speed = flags.graph_file, flags.speed
    if flags.operate:
        given["no_operation"] = False
    named = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    said = stated(given=named, file=flags.config_file)
    if said.get("environment") == Environment.KUBERNETES:
        if graph_file is not None:
            raise ConfigError(
                "--graph: graphs are read from the cluster with --environment kubernetes; use --graph-name NAME"
            )
        run_on_cluster(flags, cluster, said)
        return
    cluster.refuse()
    graph = load_graph(graph_file) if graph_file is not None else None
    options = join(given=named, file=flags.config_file, graph=graph)
    if options.prometheus_url is not None:
        require_client()
    performance = _performance(options, graph, is_profile_given=said.get("profile") is not None)
    memory = start_from(options, graph)
    if flags.dry_run:
        option.echo_json(options.model_dump(mode="json", by_alias=True))
        return
    service = PlannerService(
        options,
        graph,
        speed=speed,
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
            await run_until_stopped(service, target, router_url or None, stop)
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
    records = explaining.select(ledger, last=last, decision_id=decision_id, with_unchanged=with_unchanged)
    if as_json:
        option.echo_json(records)
    elif records:
        click.echo(explaining.all_in_words(records))
        held = "" if with_unchanged or decision_id is not None else explaining.held_in_words(ledger)
        if held:
            click.echo(f"\n{held}  (--all explains them)")
    else:
        click.echo("no decision yet", err=True)


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
        option.echo_json(to_plain(result))
    else:
        for found in result.differences:
            click.echo(f"line {found.line}: {found.id}: {found.what} differs")
            click.echo(f"  recorded   {orjson.dumps(found.recorded).decode()}")
            click.echo(f"  recomputed {orjson.dumps(found.recomputed).decode()}")
        click.echo(f"{result.decisions} decisions made again, {len(result.differences)} differences")
    ctx.exit(1 if result.differences else 0)


def _print_what_if(total: int, different: list[tuple[Any, Any]], *, as_json: bool) -> None:
    if as_json:
        rows = [{"recorded": record["decision"], "what_if": to_plain(made)} for record, made in different]
        option.echo_json({"decisions": total, "different": rows})
        return
    for record, made in different:
        recorded = {role["role"]: role["sentence"] for role in record["decision"]["roles"]}
        for role in made.roles:
            if recorded.get(role.role.value) != role.sentence:
                click.echo(f"{made.id}  was: {recorded.get(role.role.value)}\n{'':9}now: {role.sentence}")
    click.echo(f"{len(different)} of {total} decisions would differ")


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        click.echo(note, err=True)
