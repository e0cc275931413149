"""`penstock profile`: measure engines of several sizes, recommend one per role, and write the graph that runs them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.api import GraphDeployment, SloConfig
from penstock.api.manifests import load_graph
from penstock.cli import fields, option
from penstock.cli.cluster import Connection, require_packages
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, run_interruptible
from penstock.core.errors import ConfigError, NotFoundError
from penstock.core.flags import flag, flag_of
from penstock.kube.objects.names import GRAPH_KEY, PROFILE_KEY, PROFILER, SUMMARY_KEY
from penstock.performance.profile import PROFILE_FILE
from penstock.performance.quality import sweep_warnings
from penstock.performance.recommend import Recommendation, Targets, recommend
from penstock.performance.sweep import Sweep
from penstock.profiler.files import (
    GRAPH_FILE,
    choice_tables,
    graph_back,
    plain_result,
    read_sweep,
    write_result,
)
from penstock.profiler.plan import ProfileConfig, ProfilePlan, plan_profile
from penstock.profiler.session import Measured, ProfileProgress, run_profile
from penstock.profiler.workers import detect_gpus

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient


MAX_BYTES: Final = 1 << 20
"""Maximum size in bytes of a ConfigMap's data. Source: kubernetes.io/docs/concepts/configuration/configmap."""

KEYS: Final = (PROFILE_KEY, GRAPH_KEY, SUMMARY_KEY)
"""Keys of a result's ConfigMap; without a graph where a target is missed."""


@dataclass(frozen=True, slots=True)
class ConfigMapFlags:
    """Flags of `penstock profile` that say which ConfigMap keeps the result."""

    config_map: str | None = flag(
        "Store profile, graph and recommendation in this ConfigMap, for planner.sla.profile; a "
        "missed target is then reported in the result instead of failing the command.",
        metavar="NAME",
        unset="none",
    )
    namespace: str | None = flag(
        "Namespace of the ConfigMap.", short=("-n",), metavar="NAME", unset="the context's"
    )
    connection: Connection = field(default_factory=Connection)

    def keep(self, files: Sequence[Path], summary: Sequence[str]) -> None:
        """Write what was measured to the ConfigMap, if one is named."""
        if self.config_map is not None:
            run_interruptible(self._write(self.config_map, result_data(files, summary)))

    async def _write(self, name: str, data: Mapping[str, str]) -> None:
        require_packages("--config-map", "kubernetes")
        async with self.connection.open() as client:
            await apply_result(client, name, self.namespace or client.namespace, data)


def result_data(files: Sequence[Path], summary: Sequence[str]) -> dict[str, str]:
    """Return the data of a result's ConfigMap: profile, graph and what is recommended, one line each.

    Raises:
        ConfigError: no profile was written, or all together are too large.
    """
    data = {each.name: each.read_text(encoding="utf-8") for each in files if each.name in KEYS}
    if PROFILE_KEY not in data:
        raise ConfigError(f"--config-map: {PROFILE_KEY} was not written; give --output-dir")
    data[SUMMARY_KEY] = "".join(f"{line}\n" for line in summary)
    size = sum(len(key) + len(text.encode()) for key, text in data.items())
    if size > MAX_BYTES:
        raise ConfigError(
            f"--config-map: the result has {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}; measure fewer sizes"
        )
    return data


async def apply_result(client: KubeClient, name: str, namespace: str, data: Mapping[str, str]) -> None:
    """Write a result's ConfigMap by server-side apply; keys of an earlier result that this one lacks go.

    Raises:
        ConfigError: a ConfigMap of that name holds other keys.
        ClusterError: the API server refused or failed.
    """
    from penstock.kube.kinds import CONFIG_MAP  # noqa: PLC0415 - optional extra

    try:
        live = await client.get(CONFIG_MAP, name, namespace=namespace)
    except NotFoundError:
        live = {}
    others = sorted({*(live.get("data") or {}), *(live.get("binaryData") or {})} - set(KEYS))
    if others:
        raise ConfigError(
            f"--config-map: ConfigMap {namespace}/{name} holds {', '.join(others)}; choose another name, or delete it"
        )
    obj = {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": name, "namespace": namespace},
        "data": dict(data),
    }
    await client.apply(obj, field_manager=PROFILER)


@contextmanager
def _shown_steps() -> Iterator[Callable[[ProfileProgress], None]]:
    """Give what shows a step: a bar on a terminal, elsewhere a line each."""
    console = Terminal(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(step: ProfileProgress) -> None:
            progress.update(task, completed=step.finished, total=step.planned, description=step.doing)
            if not console.is_terminal:
                console.print(f"{step.finished}/{step.planned} {step.doing}", highlight=False)

        yield show


@click.command()
@click.option(
    "--config",
    "graph_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="GraphDeployment whose workers are started, one engine size after another.",
)
@click.option(
    "--from",
    "source",
    metavar="PATH",
    help="Do not measure; read the output folder of this command or of Dynamo's profiler, or a latency "
    "profile by its name in `penstock engine profiles`.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for points, profile, arrays, plots and graph; points that it holds are not measured "
    "again. Required for measuring.  [default: nothing is written with --from]",
)
@fields.options(ProfileConfig, isl=3000, osl=500, ttft_s=None, itl_s=None)
@click.option("--dry-run", is_flag=True, help="Print what would be measured, without starting anything.")
@fields.options(ConfigMapFlags)
@option.as_json("Print the result as JSON, without a progress bar.")
def profile(graph_file: Path | None, source: str | None, **options: Any) -> None:
    """Measure TTFT and ITL of engine sizes, and recommend the best sizes for prefill and decode that meet targets.

    Targets that are not given are the graph's spec.slo. Started again with the same folder, the command resumes where it
    stopped. Times are simulated seconds if workers are simulated.
    """
    is_dry, as_json = options.pop("dry_run"), options.pop("as_json")
    flags = fields.take(ConfigMapFlags, options)
    graph = load_graph(graph_file) if graph_file is not None else None
    _fill_targets(options, SloConfig() if graph is None else graph.spec.slo)
    targets = fields.take(Targets, options)
    directory: Path | None = options["output_dir"]
    if graph_file and directory and (directory / GRAPH_FILE).resolve() == graph_file.resolve():
        raise ConfigError(
            f"--output-dir {directory}: the graph written there would replace --config {graph_file}; "
            "give another folder"
        )
    if flags.config_map is None:
        fields.refuse_given(flags, flags.connection, needs="--config-map")
    if source is not None:
        _refuse_with_source(options, is_dry=is_dry)
        sizes = options["sizes"]
        sweep = read_sweep(source, gpus=sizes[0] if sizes else None)
        _conclude(Measured(sweep, ()), targets, graph, directory, flags, as_json=as_json)
        return
    if directory is None:
        raise ConfigError("--output-dir: missing; give a folder, in which finished points are kept")
    plan = plan_profile(ProfileConfig(targets=targets, graph=graph, **options), detect=detect_gpus)
    if is_dry:
        _print_plan(plan, as_json=as_json)
        return
    _conclude(_measured(plan, is_quiet=as_json), targets, graph, directory, flags, as_json=as_json)


def _fill_targets(options: dict[str, Any], slo: SloConfig) -> None:
    """Take the graph's targets where none are given."""
    for name, target_s in (("ttft_s", slo.ttft_seconds), ("itl_s", slo.itl_seconds)):
        options[name] = target_s if options[name] is None else options[name]
    if options["itl_s"] is None:
        raise ConfigError("--itl-slo: missing, and no graph has slo.itl; give one, such as 50ms")


_MEASURING = ("endpoint", "gpus", "max_gpus", "max_context", "max_concurrency", "kv_tokens", "speed", "model")
"""Options that say how to measure."""


def _refuse_with_source(options: dict[str, Any], *, is_dry: bool) -> None:
    given = [flag_of(name) for name in _MEASURING if options[name] is not None]
    given += ["--dry-run"] if is_dry else []
    if given:
        raise ConfigError(
            f"{given[0]}: controls the measurement, but --from does not measure; remove one of the two"
        )
    if options["sizes"] is not None and len(options["sizes"]) != 1:
        raise ConfigError("--tp: with --from it is the size of a Dynamo engine; give one number")


def _measured(plan: ProfilePlan, *, is_quiet: bool) -> Measured:
    if plan.note:
        say(plan.note, err=True)
    with nullcontext(lambda _: None) if is_quiet else _shown_steps() as show:
        return run_interruptible(run_profile(plan, show))


def _conclude(
    measured: Measured,
    targets: Targets,
    graph: GraphDeployment | None,
    directory: Path | None,
    flags: ConfigMapFlags,
    *,
    as_json: bool,
) -> None:
    """Check, recommend, write and print; exits with 1 where a target is missed, unless a ConfigMap keeps that."""
    recommendation = recommend(measured.sweep, targets)
    warnings = [*sweep_warnings(measured.sweep), *measured.doubts, *recommendation.notes]
    named = flags.config_map or (str((directory / PROFILE_FILE).resolve()) if directory is not None else "")
    manifest = None
    if graph is not None and directory is not None and not recommendation.misses:
        manifest = graph_back(graph, recommendation, named)
    paths = _written(measured.sweep, recommendation, warnings, manifest, directory)
    flags.keep(paths, [*recommendation.lines(), *recommendation.misses])
    for warning in warnings:
        say(f"warning: {warning}", err=True)
    if as_json:
        result = plain_result(measured.sweep, recommendation, warnings)
        say_json({**result, "files": [str(path) for path in paths]})
    else:
        _print_result(measured.sweep, recommendation, paths)
    for miss in recommendation.misses:
        say(f"penstock: {miss}", err=True)
    if recommendation.misses and flags.config_map is None:
        sys.exit(1)


def _written(
    sweep: Sweep,
    recommendation: Recommendation,
    warnings: Sequence[str],
    manifest: dict[str, Any] | None,
    directory: Path | None,
) -> list[Path]:
    if directory is None:
        return []
    paths = write_result(directory, sweep, recommendation, warnings=warnings, graph=manifest)
    if not _has_plots():
        return paths
    from penstock.profiler import charts  # noqa: PLC0415 - matplotlib is an extra

    return [*paths, *charts.draw_all(sweep, recommendation, directory)]


def _has_plots() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _print_result(sweep: Sweep, recommendation: Recommendation, paths: Sequence[Path]) -> None:
    Terminal().print(*choice_tables(sweep, recommendation), sep="\n")
    if not _has_plots():
        say("no plots were drawn: they need matplotlib; pip install 'penstock[plots]'", err=True)
    for line in recommendation.lines():
        say(line)
    for path in paths:
        say(f"wrote {path}", err=True)


def _print_plan(plan: ProfilePlan, *, as_json: bool) -> None:
    described = plan.describe()
    if as_json:
        say_json(described)
        return
    if plan.note:
        say(plan.note)
    for engine in described["engines"]:
        say(f"{engine['name']}:")
        if not engine["prompt_tokens"]:
            say(
                "  lengths and batches depend on the size of the KV cache, which the engine reports once "
                "it runs"
            )
            continue
        say(f"  TTFT of prompts of {', '.join(map(str, engine['prompt_tokens']))} tokens")
        for context, counts in engine["in_flight_by_context"].items():
            say(f"  ITL of {', '.join(map(str, counts))} requests of {context} tokens")
