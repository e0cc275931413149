"""`penstock up`, `status` and `down`: a graph as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.live import Live

from penstock.api import GraphDeployment
from penstock.api.manifests import load_graph
from penstock.cli import fields, option
from penstock.cli.graph_warnings import machine_warnings, option_warnings, print_warnings, warnings_of
from penstock.cli.progress import working
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, printer, run_interruptible
from penstock.core.errors import ConfigError
from penstock.core.local_state import EntryState
from penstock.local.build import UpOptions, model_warnings
from penstock.local.down import Stopped, await_start, choose_namespace
from penstock.local.down import down as stop_graph
from penstock.local.render import render
from penstock.local.restart import restart as restart_router
from penstock.local.start_marker import StartMarker
from penstock.local.statefile import StateFile
from penstock.local.status import StatusReader
from penstock.local.store import StateStore
from penstock.local.up import Progress, StartedGraph, kept_file
from penstock.local.up import up as start_graph
from penstock.local.up_pool import up_pool
from penstock_planner.options import FLAGS, stated

_PLANNER = "planner_"
"""Before the names of the planner's options among those of `up`."""

_STAY_POLL_S = 0.2
"""Real seconds between two checks for the end of an arbiter that is not a child of this process. Chosen."""
_SIGNALLED = 128
"""An exit code less this is the signal that ended a program, as shells count."""
_TRACE_TOKENS = 121_912
"""Tokens of the built-in trace's longest request, prompt and answer."""

_NAMESPACE_HELP = "Name of the graph on this machine.  [default: the only graph]"


def _states(state: StateFile) -> str:
    return ", ".join(
        f"{name} {entry.state}"
        for name, entry in state.entries.items()
        if entry.state not in {EntryState.READY, EntryState.STOPPED}
    )


_PLANNER_OVERRIDES: option.Option = option.group(
    *(
        click.option(
            f"--Planner.{name}",
            f"{_PLANNER}{name.replace('-', '_')}",
            hidden=True,
            is_flag=False,
            flag_value="true" if name == "no-operation" else None,
        )
        for name in FLAGS
    )
)
"""``--Planner.OPTION`` for each option of the planner, the form of the planner's document; hidden in the help."""


@click.command()
@click.argument("files", metavar="FILE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@fields.options(UpOptions)
@click.option(
    "--pool",
    "pool_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="GpuPool whose GPUs the graphs of all FILEs share; their routers use the ports from --port "
    "upward.  [default: one graph alone]",
)
@click.option(
    "--foreground",
    is_flag=True,
    help="Stay in the foreground until the graph ends; Ctrl-C drains and stops it.",
)
@option.as_json("Print what was started as JSON.")
@_PLANNER_OVERRIDES
@click.pass_obj
def up(
    start_marker: StartMarker | None,
    /,
    files: tuple[Path, ...],
    *,
    pool_file: Path | None,
    foreground: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Start the graph of FILE (- is stdin) on this machine in the background, and wait until it is ready.

    --Planner.OPTION=VALUE sets an option of the graph's planner, such as --Planner.max-gpu-budget=4;
    `penstock planner run --help` lists them.
    """
    given = {name: options.pop(name) for name in list(options) if name.startswith(_PLANNER)}
    overrides = {
        name.removeprefix(_PLANNER).replace("_", "-"): value
        for name, value in given.items()
        if value is not None
    }
    said = fields.take(UpOptions, options, planner=overrides)
    if pool_file is None and len(files) > 1:
        raise ConfigError(
            f"FILE: {len(files)} graphs; to start several at once add --pool, otherwise start one after "
            "the other"
        )
    if foreground and len(files) > 1:
        raise ConfigError("--foreground: supports only one graph; remove it")
    if pool_file is None:
        files = (kept_file(files[0], said),)
    graphs = [load_graph(file, draws=pool_file is not None) for file in files]
    for file, graph in zip(files, graphs, strict=True):
        _warn(graph, file, overrides)
    console = Terminal(stderr=True)
    names = ", ".join(said.namespace or graph.name for graph in graphs)
    with working(f"starting {names}", console, at_once=False) as update:

        def show(state: StateFile, words: str) -> None:
            if start_marker is not None:
                start_marker.close()
            update(f"starting {names}: {_states(state) or words.strip()[:120]}")

        try:
            started = run_interruptible(_start(files, pool_file, said, show))
        except SystemExit as exc:
            by = signal.Signals(int(exc.code or 0) - _SIGNALLED).name
            say(f"{names}: stopped by {by} while starting; no process or statefile is left behind", err=True)
            raise
    for each, graph in zip(started, graphs, strict=True):
        _print_started(each, graph.spec.model.context_tokens, as_json=as_json)
    if foreground:
        sys.exit(_stay(started[0]))


async def _start(
    files: tuple[Path, ...], pool_file: Path | None, options: UpOptions, progress: Progress
) -> list[StartedGraph]:
    if pool_file is None:
        return [await start_graph(files[0], options, progress)]
    return await up_pool(files, pool_file, options, progress)


def _warn(graph: GraphDeployment, file: Path, overrides: Mapping[str, str]) -> None:
    mode = overrides.get("mode")
    print_warnings(warnings_of([graph], file, mode=mode))
    print_warnings(option_warnings(stated(given=overrides, file=None), mode or graph.spec.planner.mode))
    print_warnings(machine_warnings(graph, file))
    print_warnings(model_warnings(graph.spec))


def _print_started(started: StartedGraph, context_tokens: int | None, *, as_json: bool) -> None:
    state, arbiter = started.state, started.state.arbiter
    if as_json:
        data = {
            "namespace": arbiter.namespace,
            "url": arbiter.router_url,
            "model": arbiter.model,
            "speed": arbiter.speed,
            "statefile": str(started.statefile),
            "log_dir": arbiter.log_dir,
            "planner_log_dir": arbiter.planner_log_dir,
            "pid": arbiter.pid,
            "ready_s": started.ready_s,
            "processes": {name: entry.pid for name, entry in state.entries.items()},
        }
        say_json(data, is_indented=False)
        return
    for note in started.recovered:
        say(f"note: {note}")
    for name, entry in state.entries.items():
        if entry.reason is not None:
            say(f"note: {name} is {entry.state}: {entry.reason}")
    say(f"{arbiter.namespace} serves {arbiter.model} at {arbiter.router_url} ({started.ready_s:.1f} s)")
    say(f"  logs       {arbiter.log_dir}")
    say(f"  statefile  {started.statefile}")
    say("next:")
    body = json.dumps({"model": arbiter.model, "prompt": "Hello", "max_tokens": 8})
    say(f"  curl {arbiter.router_url}/v1/completions -H 'content-type: application/json' -d '{body}'")
    say(f"  {load_command(context_tokens, speed=arbiter.speed, url=arbiter.router_url)}")
    say(f"  penstock status --watch --namespace {arbiter.namespace}")
    if arbiter.planner_log_dir is not None:
        say(f"  penstock dashboard --log-dir {arbiter.planner_log_dir}")
    say(f"  penstock down --namespace {arbiter.namespace}")


def load_command(context_tokens: int | None, *, speed: float, url: str) -> str:
    """Return a command that replays the built-in trace.

    A shorter context than the trace needs cuts prompts to its fifth: `load` sends 4 bytes for a token, of which a small
    vocabulary makes up to four.
    """
    cut = ""
    if context_tokens is not None and context_tokens < _TRACE_TOKENS:
        cut = f" --max-input-tokens {context_tokens // 5} --on-long truncate"
    return f"penstock load --trace mooncake --rate 1 --limit 300 --speed {speed:g}{cut} --url {url}"


def _stay(started: StartedGraph) -> int:
    """Wait until the graph ends, passing signals on to its arbiter; return that one's exit code.

    An arbiter that is killed has a successor, whose exit code is unknown: then 0 means that it has gone.
    """
    store = StateStore(started.statefile)

    def pass_on(received: int, _frame: FrameType | None) -> None:
        state = store.read_quietly()
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.arbiter.pid if state is None else state.arbiter.pid, received)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = started.arbiter.wait()
    if code != -signal.SIGKILL:
        return code
    run_id = started.state.arbiter.run_id
    while (state := store.read_quietly()) is not None and state.arbiter.run_id == run_id:
        time.sleep(_STAY_POLL_S)
    return 0


@click.command()
@click.option("--namespace", help=_NAMESPACE_HELP)
@click.option("--watch", is_flag=True, help="Refresh the view until Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=0.5,
    show_default=True,
    help="Interval between updates of --watch, real seconds.",
)
@click.option("--all", "with_unchanged", is_flag=True, help="Also list decisions that changed nothing.")
@option.as_json("Print it as JSON.")
def status(
    *, namespace: str | None, watch: bool, interval_s: float, with_unchanged: bool, as_json: bool
) -> None:
    """Show processes, GPUs, in-flight work, queue, the last minute's traffic and the planner's last changes."""
    chosen = choose_namespace(namespace)
    if watch and not as_json:
        try:
            asyncio.run(_watch(chosen, interval_s, with_unchanged=with_unchanged))
        except KeyboardInterrupt:
            return
    else:
        asyncio.run(_show(chosen, with_unchanged=with_unchanged, as_json=as_json))


async def _show(namespace: str, *, with_unchanged: bool, as_json: bool) -> None:
    async with StatusReader(namespace, with_unchanged=with_unchanged) as reader:
        found = await reader.read()
    if as_json:
        say_json(asdict(found), is_indented=False)
    else:
        printer().print(render(found))


async def _watch(namespace: str, interval_s: float, *, with_unchanged: bool) -> None:
    async with StatusReader(namespace, with_unchanged=with_unchanged) as reader:
        with Live(render(await reader.read()), console=Terminal(), auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                live.update(render(await reader.read()), refresh=True)


@click.command()
@click.option("--namespace", help=_NAMESPACE_HELP)
@option.as_json("Print what was done as JSON.")
def restart(namespace: str | None, as_json: bool) -> None:
    """Restart the router of a graph so that edits of `router` in the manifest take effect; no request is lost.

    The old router finishes its streams while the new one serves. Edits of any other section need `down` and `up`.
    """
    with Terminal(stderr=True).status("restarting the router"):
        restarted = restart_router(choose_namespace(namespace))
    if as_json:
        say_json(asdict(restarted), is_indented=False)
        return
    took_over = f", with {', '.join(restarted.edits)}" if restarted.edits else ""
    say(
        f"{restarted.namespace}: router restarted in {restarted.took_s:.1f} s, pid {restarted.pid}{took_over}"
    )


@click.command()
@click.option("--namespace", help=_NAMESPACE_HELP)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    help="Maximum time for draining, real seconds.  [default: the services' grace periods]",
)
@click.option("--now", is_flag=True, help="Do not drain; running streams are cut off.")
@option.as_json("Print what was done as JSON.")
def down(namespace: str | None, timeout_s: float | None, now: bool, as_json: bool) -> None:
    """Drain and stop a graph started by `up`, and check that nothing is left."""
    with Terminal(stderr=True).status("draining"):
        await_start(namespace)
        stopped = stop_graph(choose_namespace(namespace), timeout_s=timeout_s, now=now)
    _print_stopped(stopped, as_json=as_json)


def _print_stopped(stopped: Stopped, *, as_json: bool) -> None:
    if as_json:
        say_json(asdict(stopped), is_indented=False)
        return
    for note in stopped.notes:
        say(f"note: {note}")
    how = "stopped without draining" if stopped.forced else "drained and stopped"
    say(f"{stopped.namespace}: {how} in {stopped.took_s:.1f} s; no process, statefile or port is left behind")
