"""`penstock demo`: the main workflow on this machine, which ends by itself with a report."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Self

import click
import orjson
import yaml
from click.core import ParameterSource
from rich.console import Group
from rich.live import Live
from rich.text import Text

from penstock.api.manifests import load_graph
from penstock.cli import fields, option
from penstock.cli.demo_kubernetes import CLUSTER_DAY, ClusterDemo, ClusterOptions, run_cluster_demo
from penstock.cli.demo_steps import (
    COUNTERFACTUAL_FLEETS,
    clear,
    conclude,
    end_load,
    has_results,
    refuse_failed,
    start_load,
)
from penstock.cli.report import with_counterfactual
from penstock.cli.samples import sample_files
from penstock.cli.terminal import Terminal
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.flags import flag, time_scale
from penstock.core.http.loop import ended_or_stopped, run
from penstock.local.build import UpOptions
from penstock.local.down import down
from penstock.local.ports import unused_port
from penstock.local.relay_rate import affordable_speed, machine_rate, needed_rate
from penstock.local.render import render
from penstock.local.status import LineFollower, LocalGraphStatus, StatusReader
from penstock.local.up import StartedGraph, up
from penstock.report.findings import analyse, with_graph
from penstock.router.policy.registry import policy_names

_REFRESH_REAL_S = 0.5
_PLAIN_PERIOD_REAL_S = 5.0
"""Chosen: where no terminal redraws the table, a line every five seconds shows that it is running."""
_SETTLE_S = 45.0
"""Simulated seconds that the planner gets after the last request to shrink. Chosen: five real seconds; it may well hold
more than it began with, having learnt what a slow start costs."""
DAYS = (
    "day:rate=0.1,peak=30,period_s=480,step_length_s=120,duration_s=960,requests=mooncake,output_tokens=200,"
    "max_tokens=22000"
)
"""The requests of a real trace over two days of 480 simulated seconds: a start-up takes some 7 of them, as 20 minutes of
24 hours. Chosen: prompts that a worker computes in 3 s at most, and answers that fill one decode worker at noon."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo does; the help of its fields is the command line's."""

    manifest: Path
    output_dir: Path = flag(
        "Folder for results, logs, ledger, TensorBoard events and the report; files of an earlier "
        "demo are deleted.",
        default=Path("demo-output"),
        path="folder",
        convert=Path.absolute,
    )
    port: int = flag(
        "The router's TCP port on 127.0.0.1; 0 takes a free one.",
        default=0,
        ge=0,
        le=65535,
        convert=lambda port: port or unused_port(),
    )
    trace: str = flag("Trace to replay, as `penstock load` takes it.", default=DAYS)
    rate_rps: float | None = flag(
        "Mean arrivals per simulated second; the trace's times are scaled to match.",
        name="--rate",
        gt=0,
        unset="the trace's",
    )
    speed: float = time_scale(9.0, more=", lowered before the start if this machine cannot keep up")
    as_json: bool = flag(
        "Print the report as JSON, as `penstock report --json` does; progress goes to stderr.",
        name="--json",
        default=False,
    )


async def run_demo(options: DemoOptions, stop: asyncio.Event) -> bool:
    """Run all steps; the graph is always stopped. Return whether the demo came to its own end.

    Args:
        options: What to do.
        stop: Set by a signal: the load ends there, and what it measured is reported.

    Raises:
        PenstockError: a step failed, or the load run had no successful request.
    """
    console = Terminal(stderr=options.as_json)
    began_s = time.monotonic()
    clear(options.output_dir)
    options = await _at_affordable_speed(options, console)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.set)
    async with _graph(options, console, stop) as started:
        if started is not None:
            await _load_and_watch(options, started, console, stop)
    if stop.is_set() and not has_results(options.output_dir / "run"):
        console.print("stopped before any request had ended; there is nothing to report")
        return False
    ledger = options.output_dir / "log" / "planner"
    graph = load_graph(options.manifest)
    found = with_graph(analyse(options.output_dir / "run", ledger=ledger), graph)
    if not stop.is_set():
        # Only now: while the graph runs it would take processor time from the measurement.
        found = await asyncio.to_thread(with_counterfactual, found, graph, COUNTERFACTUAL_FLEETS, console)
    conclude(found, options.output_dir / "report", console, as_json=options.as_json)
    console.print(f"dashboard    penstock dashboard --log-dir {ledger}", soft_wrap=True)
    console.print(f"why, exactly penstock planner explain --log-dir {ledger}", soft_wrap=True)
    console.print(f"took {time.monotonic() - began_s:.0f} s")
    if not found.load.summary["requests"]["ok"] and not stop.is_set():
        raise PenstockError("no request succeeded; the logs are in " + str(options.output_dir / "log"))
    return not stop.is_set()


async def _at_affordable_speed(options: DemoOptions, console: Terminal) -> DemoOptions:
    """Return the options with a speed that this machine keeps up with, and say so if it is lower than requested."""
    rate = await machine_rate()
    if rate is None:
        console.print(f"could not measure this machine; speed {options.speed:g} may be too fast for it")
        return options
    speed = affordable_speed(options.speed, rate)
    if speed < options.speed:
        console.print(
            f"This machine relays {rate:,.0f} events/s; speed {options.speed:g} needs "
            f"{needed_rate(options.speed):,.0f}. Using speed {speed:g} ({options.speed / speed:.1f}x "
            "longer).",
            soft_wrap=True,
        )
    return replace(options, speed=speed)


@asynccontextmanager
async def _graph(
    options: DemoOptions, console: Terminal, stop: asyncio.Event
) -> AsyncIterator[StartedGraph | None]:
    """Start the graph and stop it afterwards; None: a signal came before it served."""
    console.print(f"starting the graph of {options.manifest.name} at speed {options.speed:g}")
    starting = asyncio.create_task(
        up(
            options.manifest,
            UpOptions(speed=options.speed, port=options.port, log_dir=options.output_dir / "log"),
            lambda _state, _words: None,
        )
    )
    await ended_or_stopped(starting, stop)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        yield None
        return
    started = starting.result()
    arbiter = started.state.arbiter
    console.print(f"serving {arbiter.model} at {arbiter.router_url} after {started.ready_s:.1f} s")
    try:
        yield started
    finally:
        stopped = await asyncio.to_thread(down, arbiter.namespace, timeout_s=None, now=False)
        for note in stopped.notes:
            console.print(f"note: {note}")
        console.print(f"drained and stopped in {stopped.took_s:.1f} s; nothing is left running")


async def _load_and_watch(
    options: DemoOptions, started: StartedGraph, console: Terminal, stop: asyncio.Event
) -> None:
    run_dir = options.output_dir / "run"
    url = started.state.arbiter.router_url
    replay = await start_load(run_dir, url, options.trace, speed=options.speed, rate_rps=options.rate_rps)
    try:
        async with StatusReader(started.state.arbiter.namespace) as reader:
            with _Display(console, run_dir / "results.jsonl") as display:
                ended = asyncio.create_task(replay.wait())
                while replay.returncode is None and not stop.is_set():
                    display.show(await reader.read(), "replaying")
                    await ended_or_stopped(ended, stop, timeout_s=_REFRESH_REAL_S)
                deadline_s = time.monotonic() + _SETTLE_S / options.speed
                while time.monotonic() < deadline_s and not stop.is_set():
                    display.show(await reader.read(), "the load has ended; the planner may scale down now")
                    await asyncio.sleep(_REFRESH_REAL_S)
                display.show(await reader.read(), "stopped" if stop.is_set() else "done")
    finally:
        await end_load(replay)
    if not stop.is_set():
        refuse_failed(replay, run_dir)


class _Display:
    """The live table on a terminal, elsewhere a line now and then; counts outcomes as the load generator appends them."""

    def __init__(self, console: Terminal, results: Path) -> None:
        self._console = console
        self._lines = LineFollower(results)
        self._counts: Counter[str] = Counter(ok=0, failed=0, rejected=0)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: LocalGraphStatus, doing: str) -> None:
        self._counts.update(orjson.loads(line)["status"] for line in self._lines.new_lines())
        head = f"{doing}: {', '.join(f'{count} {name}' for name, count in self._counts.items())}"
        if self._live is not None:
            self._live.update(Group(Text(head, style="bold"), render(status)), refresh=True)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _PLAIN_PERIOD_REAL_S
            self._console.print(f"{head}; {_line(status)}", soft_wrap=True)


def _line(status: LocalGraphStatus) -> str:
    pools = ", ".join(f"{pool.role} {pool.ready}/{pool.desired}" for pool in status.pools)
    queue = "unknown" if status.queue is None else str(status.queue.requests)
    traffic = "" if status.traffic is None else f", {status.traffic}"
    last = f"; last change: {status.decisions[-1].sentence}" if status.decisions else ""
    return f"{pools}, GPUs {status.gpus_used}/{status.gpu_budget}, prefill queue {queue}{traffic}{last}"


@click.command()
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Manifest of the graph to run.  [default: twelve simulated H100s]",
)
@click.option(
    "--policy",
    type=option.Choice(policy_names()),
    help="How the router chooses a worker.  [default: the manifest's]",
)
@fields.options(DemoOptions)
@click.option(
    "--kubernetes",
    is_flag=True,
    help="Run the demo on a cluster in real time: install the README's sample, send load, and remove it. "
    "Needs kubectl and helm.",
)
@fields.options(ClusterOptions)
@click.pass_context
def demo(
    called: click.Context, /, manifest: Path | None, policy: str | None, *, kubernetes: bool, **options: Any
) -> None:
    """Start a graph, replay real requests over two short days, let the planner scale it, stop it, and report.

    Real local processes, simulated engines: no GPU and no cluster. Times are simulated seconds. Ctrl-C stops the
    graph and reports what was measured so far; a second one leaves the report out.

    With --kubernetes the demo runs on a cluster, such as a kind cluster: one day of four real minutes, in a namespace
    of its own.
    """
    where = fields.take(ClusterOptions, options)
    if kubernetes:
        own_manifest: Any = sample_files()["disaggregated"]
        if _is_given(called, "speed"):
            raise ConfigError("--speed: a cluster's workers run in real time; leave it out")
    else:
        fields.refuse_given(where, needs="--kubernetes")
        own_manifest = resources.files("penstock.cli") / "data" / "demo.yaml"
    with resources.as_file(own_manifest) as packaged, tempfile.TemporaryDirectory() as folder:
        chosen = manifest or packaged
        if policy is not None:
            chosen = with_policy(chosen, policy, Path(folder))
        said = fields.take(DemoOptions, options, manifest=chosen)
        if kubernetes:
            trace = said.trace if _is_given(called, "trace") else CLUSTER_DAY
            is_complete = run(lambda stop: run_cluster_demo(_on_cluster(said, trace, where), stop))
        else:
            is_complete = run(lambda stop: run_demo(said, stop))
    if not is_complete:
        sys.exit(128 + signal.SIGINT)


def _is_given(called: click.Context, parameter: str) -> bool:
    return called.get_parameter_source(parameter) is not ParameterSource.DEFAULT


def _on_cluster(said: DemoOptions, trace: str, where: ClusterOptions) -> ClusterDemo:
    return ClusterDemo(
        manifest=said.manifest,
        output_dir=said.output_dir,
        port=said.port,
        trace=trace,
        rate_rps=said.rate_rps,
        as_json=said.as_json,
        where=where,
    )


def with_policy(manifest: Path, policy: str, folder: Path) -> Path:
    """Write the graph of ``manifest`` with another router policy into ``folder``; return the new file."""
    plain = load_graph(manifest).to_manifest()
    plain["spec"].setdefault("router", {})["policy"] = policy
    path = folder / manifest.name
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path
