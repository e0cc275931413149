"""`penstock demo --kubernetes`: the README's part on Kubernetes, on a context of the kubeconfig; it ends clean.

Every command is kubectl's or helm's, printed before it runs, so that a reader can run it as well. All of it happens in a
namespace that the demo makes, by a release and an operator class of its own: other installations are left alone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import yaml

from penstock.api.manifests import load_graph
from penstock.cli.demo_steps import clear, conclude, end_load, has_results, refuse_failed, start_load
from penstock.cli.kubectl import KubectlContext, StopSignal, current_context
from penstock.cli.terminal import Terminal
from penstock.core.errors import ClusterError, ConfigError, PenstockError
from penstock.core.flags import flag
from penstock.core.http.loop import ended_or_stopped
from penstock.local.ports import is_free
from penstock.report.findings import analyse, with_graph

CLUSTER_DAY: Final = (
    "day:rate=0.1,peak=30,period_s=240,step_length_s=60,duration_s=240,requests=mooncake,output_tokens=450,"
    "max_tokens=16000"
)
"""The requests of a real trace over one day of four minutes: a cluster's workers run in real time. Chosen: some 360
requests that take three prefill and two decode workers of the sample at noon."""
DEFAULT_NAMESPACE: Final = "penstock-demo"
RELEASE: Final = "penstock"
_PACKAGED_CHART = Path(__file__).parent / "data" / "chart"
_CHART_IN_CLONE = Path(__file__).parents[3] / "charts" / "penstock"
_LEDGERS: Final = "/var/lib/penstock"
"""Where the chart's planner keeps them, NAMESPACE/GRAPH below it."""
_PERIOD_S = 2.0
"""Real seconds between two looks at the graph. Chosen: as often as the planner decides."""
_SETTLE_S = 90.0
"""Real seconds that the planner gets after the last request to shrink. Chosen; it may hold more than it began with, having
learnt what a slow start costs."""
_INSTALL_S, _READY_S, _DELETE_S, _FORWARD_S = 300.0, 180.0, 180.0, 30.0
"""Real seconds that each step gets. Chosen: pulling the image takes most of the first."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where on Kubernetes the demo runs."""

    context: str | None = flag(
        "With --kubernetes: context of the kubeconfig to use.", metavar="NAME", unset="its current context"
    )
    namespace: str | None = flag(
        "With --kubernetes: namespace that the demo creates, and deletes when it ends.",
        metavar="NAME",
        unset=DEFAULT_NAMESPACE,
    )
    image: str | None = flag(
        "With --kubernetes: image of operator, planner, router and workers; load it into a kind "
        "cluster first.",
        metavar="REPOSITORY:TAG",
        unset="the release's",
    )
    yes: bool = flag("With --kubernetes: change the cluster without asking for confirmation.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDemo:
    """What the demo does on a cluster; the fields that both demos have are explained by `penstock demo`'s flags."""

    manifest: Path
    output_dir: Path
    port: int
    trace: str
    rate_rps: float | None
    as_json: bool
    where: ClusterOptions


def chart_folder() -> Path:
    """Return the chart: the wheel's, or the clone's under an editable install."""
    return _PACKAGED_CHART if _PACKAGED_CHART.is_dir() else _CHART_IN_CLONE


def kinds(chart: Path) -> tuple[str, ...]:
    """Return the names of the chart's CRDs."""
    files = sorted((chart / "files" / "crds").glob("*.yaml"))
    return tuple(yaml.safe_load(each.read_text(encoding="utf-8"))["metadata"]["name"] for each in files)


def install_values(namespace: str, image: str | None, *, has_kinds: bool) -> list[str]:
    """Return helm's arguments for the release; the operator class keeps other installations away from the graph."""
    values = {
        "operatorClass": namespace,
        "operator.replicas": "1",
        "crds.install": str(not has_kinds).lower(),
    }
    if image is not None:
        repository, tag = image_parts(image)
        values |= {"image.repository": repository}
        words = ["--set-string", f"image.tag={tag}"]
    else:
        words = []
    return [*words, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


def image_parts(image: str) -> tuple[str, str]:
    """Return an image's repository and tag; a registry's port is not a tag."""
    repository, colon, tag = image.rpartition(":")
    if not colon or "/" in tag or not repository or not tag:
        raise ConfigError(
            f"--image {image}: has no tag; write it as REPOSITORY:TAG, such as localhost/penstock:dev"
        )
    return repository, tag


def graph_line(graph: Any) -> str:
    """Return a GraphDeployment's state as the live table says it: phase, replicas by role, GPUs, the last change."""
    status = graph.get("status", {})
    summary, planner = status.get("summary", {}), status.get("planner", {})
    parts = [status.get("phase", "Pending")]
    parts += [f"{role} {summary[role]}" for role in ("prefill", "decode") if role in summary]
    parts += [f"GPUs {summary['gpus']}"] if "gpus" in summary else []
    last = planner.get("lastDecision")
    return ", ".join(parts) + (f"; last decision: {last}" if last else "")


def is_at_rest(graph: Any, at_first: dict[str, str]) -> bool:
    """Return whether a graph has as few replicas as it began with."""
    summary = graph.get("status", {}).get("summary", {})
    return bool(summary) and all(summary.get(role) == said for role, said in at_first.items())


async def run_cluster_demo(demo: ClusterDemo, stop: asyncio.Event) -> bool:
    """Run all steps; what was installed is removed in any case. Return whether the demo came to its own end.

    Args:
        demo: What to do.
        stop: Set by a signal: the step under way ends there, and the cluster is cleaned.

    Raises:
        ConfigError: kubectl, helm or a context is missing, the namespace exists, or the user did not agree.
        PenstockError: a step failed, something is left, or the load run had no successful request.
    """
    console = Terminal(stderr=demo.as_json)
    began_s = time.monotonic()
    chart = chart_folder()
    cluster = await _reach(demo.where, console)
    has_kinds = await _check_capacity(cluster, kinds(chart))
    values = install_values(cluster.namespace, demo.where.image, has_kinds=has_kinds)
    _agree(cluster, demo.where)
    clear(demo.output_dir)
    graph = load_graph(demo.manifest)
    manifest = graph.to_manifest()
    manifest["spec"]["operatorClass"] = cluster.namespace
    manifest["metadata"].pop("namespace", None)
    name, port = manifest["metadata"]["name"], demo.port
    if not is_free(port):
        raise ConfigError(
            f"--port {port}: is in use by another process; choose another port, or 0 for a free one"
        )
    applied = demo.output_dir / "graph.yaml"
    _write(applied, yaml.safe_dump(manifest, sort_keys=False))
    try:
        async with _cleaned(cluster, () if has_kinds else kinds(chart)):
            words = ("install", RELEASE, str(chart), "--create-namespace", *values)
            wait = ("--wait", "--timeout", f"{_INSTALL_S:.0f}s")
            await cluster.helm(*words, *wait, limit_s=_INSTALL_S + 30, stop=stop)
            await cluster.kubectl("apply", "--filename", str(applied), stop=stop)
            ready = ("wait", "--for=condition=Ready", f"gd/{name}", f"--timeout={_READY_S:.0f}s")
            await cluster.kubectl(*ready, limit_s=_READY_S + 30, stop=stop)
            await _serve(cluster, demo, name, stop)
    except StopSignal:
        console.print("stopped before any load was sent")
    if stop.is_set() and not has_results(demo.output_dir / "run"):
        console.print("stopped before any request had ended; there is nothing to report")
        return False
    ledger = demo.output_dir / "log" / "planner"
    found = analyse(demo.output_dir / "run", ledger=ledger if ledger.is_dir() else None)
    found = with_graph(found, graph)
    conclude(found, demo.output_dir / "report", console, as_json=demo.as_json)
    if ledger.is_dir():
        console.print(f"why, exactly penstock planner explain --log-dir {ledger}", soft_wrap=True)
    console.print(f"took {time.monotonic() - began_s:.0f} s")
    if not found.load.summary["requests"]["ok"] and not stop.is_set():
        raise PenstockError(f"no request succeeded; the load's log is in {demo.output_dir / 'run'}")
    return not stop.is_set()


async def _reach(where: ClusterOptions, console: Terminal) -> KubectlContext:
    """Return the cluster that answers at the context."""
    missing = [each for each in ("kubectl", "helm") if shutil.which(each) is None]
    if missing:
        raise ConfigError(f"--kubernetes: needs {' and '.join(missing)} on PATH; install what is missing")
    context = where.context or await current_context()
    cluster = KubectlContext(context, where.namespace or DEFAULT_NAMESPACE, console)
    server = json.loads(await cluster.ask("version", "--output=json"))["serverVersion"]["gitVersion"]
    console.print(f"context {context}: Kubernetes {server} answers", soft_wrap=True)
    return cluster


async def _check_capacity(cluster: KubectlContext, names: tuple[str, ...]) -> bool:
    """Return whether the cluster has Penstock's kinds; refuse a namespace that exists, and half of the kinds."""
    if await cluster.ask("get", "namespace", cluster.namespace, "--ignore-not-found", "--output=name"):
        raise ConfigError(
            f"--namespace {cluster.namespace}: exists on context {cluster.context}, and the demo would delete it; choose another."
            f" If a killed demo left it: kubectl delete gd --all --namespace {cluster.namespace} &&"
            f" helm uninstall {RELEASE} --namespace {cluster.namespace} && kubectl delete namespace {cluster.namespace}"
        )
    listed = await cluster.ask("get", "crd", *names, "--ignore-not-found", "--output=name")
    held = {line.partition("/")[2] for line in listed.split()}
    lacking = [each for each in names if each not in held]
    if held and lacking:
        raise ConfigError(
            f"--kubernetes: context {cluster.context} has CRDs of another Penstock version, which "
            f"lacks {', '.join(lacking)}; upgrade that installation first, or use another cluster"
        )
    return bool(held)


def _agree(cluster: KubectlContext, where: ClusterOptions) -> None:
    """Ask whether to change the cluster, unless --yes allows it."""
    what = (
        f"create namespace {cluster.namespace} on context {cluster.context}, install Penstock, send load, "
        "and remove everything"
    )
    if where.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"--kubernetes: would {what}; stdin is not a terminal; pass --yes to confirm")
    click.confirm(f"{what[0].upper()}{what[1:]}?", abort=True, err=True)


@asynccontextmanager
async def _cleaned(cluster: KubectlContext, made_kinds: tuple[str, ...]) -> AsyncIterator[None]:
    """Remove what the demo makes, whatever happens within; kinds only if this demo made them and none is used."""
    try:
        yield
    except asyncio.CancelledError:
        where = f"--context {cluster.context} --namespace {cluster.namespace}"
        cluster.console.print(
            f"not cleaned up; run: kubectl delete gd --all {where} && helm uninstall {RELEASE} "
            f"--kube-context {cluster.context} --namespace {cluster.namespace} && kubectl delete "
            f"namespace {cluster.namespace} --context {cluster.context}",
            soft_wrap=True,
        )
        raise
    except BaseException:
        await _clean(cluster, made_kinds)
        raise
    await _clean(cluster, made_kinds)


async def _clean(cluster: KubectlContext, made_kinds: tuple[str, ...]) -> None:
    limit = f"--timeout={_DELETE_S:.0f}s"
    notes: list[str] = []

    async def attempt(*command: str, with_helm: bool = False) -> None:
        do = cluster.helm if with_helm else cluster.kubectl
        try:
            await do(*command, limit_s=_DELETE_S + 30)
        except ClusterError as exc:
            notes.append(str(exc))

    if await cluster.ask(
        "get", "crd", "graphdeployments.penstock.dev", "--ignore-not-found", "--output=name"
    ):
        await attempt("delete", "gd", "--all", limit)
    await attempt("uninstall", RELEASE, "--ignore-not-found", "--wait", with_helm=True)
    await attempt("delete", "namespace", cluster.namespace, "--ignore-not-found", limit)
    if made_kinds and not await _users(cluster, made_kinds):
        await attempt("delete", "crd", *made_kinds, "--ignore-not-found", limit)
    left = await cluster.ask("get", "namespace", cluster.namespace, "--ignore-not-found", "--output=name")
    if left:
        raise ClusterError(f"{left.strip()} was left on context {cluster.context}: {'; '.join(notes)}")
    for note in notes:
        cluster.console.print(f"note: {note}", soft_wrap=True)
    cluster.console.print(
        f"everything from the demo was removed from context {cluster.context}", soft_wrap=True
    )


async def _users(cluster: KubectlContext, names: tuple[str, ...]) -> str:
    """Return the objects of Penstock's kinds on the entire cluster; empty: none."""
    listed = await cluster.ask("get", "crd", *names, "--ignore-not-found", "--output=name")
    held = [line.partition("/")[2] for line in listed.split()]
    if not held:
        return ""
    return await cluster.ask("get", ",".join(held), "--all-namespaces", "--output=name")


async def _serve(cluster: KubectlContext, demo: ClusterDemo, name: str, stop: asyncio.Event) -> None:
    """Forward the router's port, replay the trace through it, and say how the graph grows and shrinks."""
    run_dir = demo.output_dir / "run"
    async with _forwarded(cluster, f"service/{name}-frontend", demo, stop) as url:
        before = json.loads(await cluster.ask("get", "gd", name, "--output=json"))
        summary = before.get("status", {}).get("summary", {})
        at_first = {role: summary[role] for role in ("prefill", "decode") if role in summary}
        cluster.console.print(f"serving at {url}; starting a day of four minutes", soft_wrap=True)
        replay = await start_load(run_dir, url, demo.trace, speed=1.0, rate_rps=demo.rate_rps)
        watch = _Watch(cluster, name)
        try:
            ended = asyncio.create_task(replay.wait())
            while replay.returncode is None and not stop.is_set():
                await watch.poll()
                await ended_or_stopped(ended, stop, timeout_s=_PERIOD_S)
            deadline_s = time.monotonic() + _SETTLE_S
            while time.monotonic() < deadline_s and not stop.is_set():
                if is_at_rest(await watch.poll(), at_first):
                    break
                await asyncio.sleep(_PERIOD_S)
        finally:
            await end_load(replay)
        if not stop.is_set():
            refuse_failed(replay, run_dir)
    await _fetch_ledger(cluster, name, demo.output_dir / "log" / "planner")


class _Watch:
    """Prints a graph's state where it has changed."""

    def __init__(self, cluster: KubectlContext, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._began_s = time.monotonic()
        self._last = ""

    async def poll(self) -> Any:
        """Read the graph, say what is new, and return it; a busy API server's silence is not an end."""
        try:
            graph = json.loads(await self._cluster.ask("get", "gd", self._name, "--output=json"))
        except ClusterError as exc:
            self._cluster.console.print(f"note: {exc}", soft_wrap=True)
            return {}
        line = graph_line(graph)
        if line != self._last:
            self._last = line
            self._cluster.console.print(f"{time.monotonic() - self._began_s:4.0f} s  {line}", soft_wrap=True)
        return graph


@asynccontextmanager
async def _forwarded(
    cluster: KubectlContext, target: str, demo: ClusterDemo, stop: asyncio.Event
) -> AsyncIterator[str]:
    """Lead a port of this machine to the routers while the context lasts."""
    command = cluster.kubectl_words("port-forward", target, f"{demo.port}:8000")
    cluster.say(command)
    with (demo.output_dir / "run" / "port-forward.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + _FORWARD_S
        while is_free(demo.port):
            if stop.is_set():
                raise StopSignal
            if process.returncode is not None or time.monotonic() > deadline_s:
                said = (demo.output_dir / "run" / "port-forward.log").read_text(errors="replace").strip()
                raise ClusterError(f"kubectl port-forward {target}: does not listen on {demo.port}: {said}")
            await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{demo.port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _fetch_ledger(cluster: KubectlContext, name: str, folder: Path) -> None:
    """Copy the planner's ledger, which says why it decided; without one the report has no GPU-hours."""
    path = f"{_LEDGERS}/{cluster.namespace}/{name}/ledger.jsonl"
    try:
        text = await cluster.kubectl(
            "exec", f"deployment/{RELEASE}-planner", "--", "cat", path, is_quiet=True
        )
    except ClusterError as exc:
        cluster.console.print(f"note: the planner's ledger cannot be read: {exc}", soft_wrap=True)
        return
    _write(folder / "ledger.jsonl", text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
