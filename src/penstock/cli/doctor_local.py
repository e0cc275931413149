"""`penstock doctor --local`: `diagnose` reads this machine's programs, GPUs and graphs; the rest judges what was read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from penstock.cli.doctor_install import (
    disk_findings,
    limit_findings,
    missing_packages,
    nearest,
    program_findings,
    state_findings,
)
from penstock.core.errors import PenstockError
from penstock.core.findings import worker_fault
from penstock.core.local_state import EntryState, state_dir
from penstock.core.overload import is_overloaded
from penstock.local import liveness
from penstock.local.edits import waiting_edits
from penstock.local.probes import Probes
from penstock.local.process_log import ARBITER, log_path, tail
from penstock.local.process_problems import process_problems
from penstock.local.recurring import TAIL_BYTES, recurring
from penstock.local.restart import only_for_router
from penstock.local.statefile import ArbiterInfo, ProcessId, StateFile
from penstock.local.status import LocalGraphStatus, ProcessStatus, StatusReader
from penstock.local.store import StateStore, namespaces
from penstock.runtimes import PLANNER_ROLE
from penstock_operator.doctor.findings import Finding, ok, problem, warning
from penstock_planner.core.phase import PlannerPhase

_COMMAND_CHARACTERS: Final = 120


def orphans(folder: Path, only: str | None = None) -> list[Finding]:
    """Return the leaked processes of every graph of a state folder, or of one namespace, by pid.

    Those of a graph whose statefile is missing are found by their mark.
    """
    by_file: dict[Path, set[int]] = {path: set() for path in folder.glob("*.json")}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = process.environ().get(liveness.MARK_VARIABLE)
            if mark is not None and Path(mark).parent == folder:
                by_file.setdefault(Path(mark), set()).add(process.pid)
    found = [
        orphan
        for path, marked in by_file.items()
        if only in {None, path.stem}
        for orphan in _orphans_of(path, marked)
    ]
    return [finding for _, finding in sorted(found, key=lambda each: each[0])]


def _orphans_of(path: Path, marked: set[int]) -> Iterator[tuple[int, Finding]]:
    state = StateStore(path).read_quietly()
    grouped = set(liveness.group_pids(liveness.recorded(state)))
    is_running = state is not None and liveness.arbiter_is_alive(state)
    reason, leaked = "its graph has no arbiter", marked | grouped
    if state is not None and is_running:
        reason = "its graph's statefile does not list it"
        family = liveness.family_pids(liveness.recorded(state))
        leaked = marked - family - _descendants(state.arbiter.pid)
    for pid in leaked:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                command = " ".join(process.cmdline())[:_COMMAND_CHARACTERS]
                remedy = f"kill -9 {pid}" if is_running else f"penstock down --namespace {path.stem}"
                message = f"process {pid} was left behind, because {reason}: {command}"
                yield pid, problem(f"graph {path.stem}", message, remedy)


def _descendants(arbiter: int) -> set[int]:
    """Return the arbiter and all below it: its watchdog, and what it has started and not recorded yet."""
    try:
        return {arbiter, *(child.pid for child in psutil.Process(arbiter).children(recursive=True))}
    except psutil.Error:
        return {arbiter}


async def hung(state: StateFile) -> dict[str, Finding]:
    """Return, by name, the processes of a running graph that are stopped, entirely or in part, or do not answer."""
    arbiter = state.arbiter
    leaders = {"arbiter": arbiter.process}
    for name, entry in state.entries.items():
        if (process := entry.process) is not None:
            leaders[name] = process
    probes = Probes()

    async def reason(name: str, leader: ProcessId) -> str | None:
        stopped, entry = liveness.stopped_in_group(leader), state.entries.get(name)
        if stopped is not None:
            return stopped
        if entry is None or entry.state is not EntryState.READY or not (entry.url and entry.health_path):
            return None
        url = entry.url + entry.health_path
        answer = await probes.health(url)
        return None if answer is None else f"health check of {url}: {answer}"

    try:
        reasons = await asyncio.gather(*(reason(*each) for each in leaders.items()))
    finally:
        await probes.close()
    return {
        name: problem(
            f"graph {arbiter.namespace}",
            worker_fault(name, why),
            f"kill -9 {leader.pid}; it is then restarted automatically",
        )
        for (name, leader), why in zip(leaders.items(), reasons, strict=True)
        if why is not None
    }


FOREIGN_MIB: Final = 1024
"""Chosen: memory of an idle GPU's driver is below it, a process that computes takes more."""

LAG_S: Final = 0.1
"""Chosen: a process that runs this late measures the machine in place of the graph; simulated seconds."""

_QUERY: Final = ("--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits")
_SMI_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it; memory in MiB."""

    index: int
    name: str
    total_mib: int
    used_mib: int


Graphs = dict[str, LocalGraphStatus | str]
"""By namespace: a graph's status, or why it cannot be read."""


async def diagnose(only: str | None) -> list[Finding]:
    """Look at this machine, and at the graph of one namespace or at all of them."""
    folder = state_dir()
    existing = nearest(folder)
    graphs: Graphs = {}
    of_files: list[Finding] = []
    hanging: dict[str, dict[str, Finding]] = {}
    for namespace in namespaces() if only is None else [only]:
        graphs[namespace] = await _graph(namespace)
        with contextlib.suppress(PenstockError):
            state = StateStore.of(namespace).running()
            if state is not None:
                hanging[namespace] = await hung(state)
                of_files += [*edit_findings(state.arbiter), *hanging[namespace].values()]
    return [
        *program_findings(missing_packages()),
        *state_findings(folder, is_writable=os.access(existing, os.W_OK | os.X_OK)),
        *limit_findings(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        *disk_findings(existing),
        *gpu_findings(_gpus(), graphs),
        *graph_findings(graphs, folder, hanging),
        *warnings_of_logs(graphs),
        *of_files,
        *orphans(folder.absolute(), only),
    ]


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's lines.

    Raises:
        ValueError: a line does not have the queried columns.
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        index, name, total, used = (part.strip() for part in line.split(","))
        found.append(Gpu(int(index), name, int(total), int(used)))
    return tuple(found)


def _gpus() -> tuple[Gpu, ...] | str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_SMI_S, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    if done.returncode:
        return (done.stdout + done.stderr).strip() or f"exit {done.returncode}"
    try:
        return parse_gpus(done.stdout)
    except ValueError as exc:
        return f"its output cannot be read: {exc}"


async def _graph(namespace: str) -> LocalGraphStatus | str:
    try:
        async with StatusReader(namespace) as reader:
            return await reader.read()
    except PenstockError as exc:
        return str(exc)


def gpu_findings(gpus: tuple[Gpu, ...] | str | None, graphs: Graphs) -> Iterator[Finding]:
    """Judge the machine's GPUs: None without nvidia-smi, a text if that failed."""
    if gpus is None:
        yield ok("GPUs", "nvidia-smi is not on PATH; simulated workers and vLLM on a CPU do not need it")
        return
    if isinstance(gpus, str):
        yield problem("GPUs", f"nvidia-smi: {gpus}", "check the driver: nvidia-smi; dmesg | grep -i nvrm")
        return
    names = ", ".join(dict.fromkeys(each.name for each in gpus))
    yield ok("GPUs", f"{len(gpus)} {names}" if gpus else "nvidia-smi lists no GPUs")
    known = [graph for graph in graphs.values() if not isinstance(graph, str)]
    if len(known) < len(graphs):
        return  # the GPUs' owner is unknown then
    held = {gpu for graph in known for each in graph.processes for gpu in each.gpus}
    for each in gpus:
        if each.index not in held and each.used_mib > FOREIGN_MIB:
            message = (
                f"GPU {each.index} does not belong to a graph, but {each.used_mib} of its "
                f"{each.total_mib} MiB are in use"
            )
            yield warning(
                "GPUs", message, "find the process with nvidia-smi; a worker on this GPU may lack memory"
            )


def edit_findings(arbiter: ArbiterInfo) -> Iterator[Finding]:
    """Report a manifest that was edited under a running graph: what waits for a restart, or cannot be used."""
    subject = f"graph {arbiter.namespace}"
    try:
        keys = waiting_edits(arbiter)
    except PenstockError as exc:
        message = (
            f"it still serves with the manifest it was started with, because the edited one is invalid: {exc}"
        )
        yield warning(subject, message, f"penstock validate {arbiter.graph}")
        return
    if keys:
        message = (
            f"{arbiter.graph} was edited since the start; these keys take effect at the next start: "
            f"{', '.join(keys)}"
        )
        again = f"penstock down --namespace {arbiter.namespace}, then penstock up {arbiter.graph}"
        is_for_router = only_for_router(arbiter, keys)
        yield warning(
            subject, message, f"penstock restart --namespace {arbiter.namespace}" if is_for_router else again
        )


def warnings_of_logs(graphs: Graphs) -> Iterator[Finding]:
    """Report what the processes of running graphs warn of repeatedly: someone should read it."""
    now = datetime.now()  # noqa: DTZ005 - as the logs have it
    for namespace, graph in graphs.items():
        if isinstance(graph, str) or not graph.running:
            continue
        for name in (ARBITER, *(each.name for each in graph.processes)):
            path = log_path(graph.log_dir, name)
            for each in recurring(tail(path, TAIL_BYTES).splitlines(), now):
                message = f"{name} logged {each.times} times in {each.over_s:,.0f} s: {each.text}"
                yield (problem if each.is_error else warning)(f"graph {namespace}", message, f"tail {path}")


def graph_findings(
    graphs: Graphs, folder: Path, hanging: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Iterator[Finding]:
    """Check the graphs whose statefiles are in a folder, without the processes that hang, of which `hung` says more."""
    if not graphs:
        yield ok(
            "graphs",
            "no graph runs on this machine; start one: penstock up manifests/samples/disaggregated.yaml",
        )
    for namespace, graph in graphs.items():
        subject = f"graph {namespace}"
        down = f"penstock down --namespace {namespace}"
        if isinstance(graph, str):
            yield problem(subject, graph, f"list the graphs of this machine: ls {folder}")
        elif not graph.running:
            message = "its arbiter is gone, so nothing is restarted or scaled"
            yield problem(subject, message, f"{down}, then penstock up FILE")
        elif graph.stopping:
            yield warning(subject, "it is being stopped", f"penstock status --namespace {namespace} --watch")
        else:
            yield from _of_graph(subject, graph, down, hanging.get(namespace, ()))


def _of_graph(
    subject: str, graph: LocalGraphStatus, down: str, hanging: Collection[str]
) -> Iterator[Finding]:
    yield ok(subject, f"serves {graph.model} at {graph.router_url}")
    if graph.queue is None:
        message = f"its router does not answer at {graph.router_url}"
        yield problem(subject, message, f"tail {graph.log_dir}/*")
    yield from _of_traffic(subject, graph)
    for found in process_problems(graph):
        yield (problem if found.is_broken else warning)(subject, found.message, found.remedy)
    for each in graph.processes:
        if each.name not in hanging:
            yield from _of_process(subject, each, graph, down)
    if graph.gpus_used > graph.gpu_budget:
        message = f"{graph.gpus_used} GPUs are held, which exceeds the budget of {graph.gpu_budget}"
        yield problem(subject, message, f"{down}, and report this as a bug")
    yield from _of_planner(subject, graph)
    for name, lag_s in graph.lag_p99_s.items():
        if lag_s > LAG_S:
            message = (
                f"{name} lags by {lag_s:.2f} s or more in 1 of 100 ticks; the machine is too busy for "
                "this load"
            )
            yield warning(subject, message, "lower --speed, or run fewer workers")


def _of_traffic(subject: str, graph: LocalGraphStatus) -> Iterator[Finding]:
    """Say what clients meet: rejections, waits beyond the SLO, first tokens that come late."""
    traffic, queue = graph.traffic, graph.queue
    if traffic is None:
        return
    is_late = traffic.ttft_p50_s is not None and traffic.ttft_p50_s > traffic.ttft_slo_s
    message = f"in the last {traffic.period_s:.0f} s: {traffic}; the TTFT SLO is {traffic.ttft_slo_s:g} s"
    if queue is not None and queue.requests:
        message += f"; {queue.requests} requests are waiting, the oldest for {queue.oldest_s:.1f} s"
    remedy = f"allow more replicas or a larger budget; {graph.gpus_used} of {graph.gpu_budget} GPUs are held"
    if graph.planner_log_dir is not None:
        remedy = f"penstock planner explain --log-dir {graph.planner_log_dir}; {remedy}"
    if is_overloaded(
        arrivals=traffic.arrivals,
        rejected=traffic.rejected,
        oldest_wait_s=0.0 if queue is None else queue.oldest_s,
        ttft_slo_s=traffic.ttft_slo_s,
    ):
        yield problem(subject, f"it is overloaded: {message}", remedy)
    elif traffic.rejected or is_late:
        yield warning(subject, message, remedy)
    else:
        yield ok(subject, message)


_LIVING = (EntryState.READY, EntryState.STARTING, EntryState.REQUESTED, EntryState.DRAINING)


def _of_process(
    subject: str, process: ProcessStatus, graph: LocalGraphStatus, down: str
) -> Iterator[Finding]:
    reason = process.reason or "no reason given"
    log = f"tail {log_path(graph.log_dir, process.name)}"
    if process.state == EntryState.FAILED:
        remedy = f"{log}; fix the cause, then {down} and penstock up FILE: it is not restarted automatically"
        yield problem(subject, f"{process.name} failed: {reason}", remedy)
    elif process.state not in _LIVING:
        yield problem(subject, worker_fault(process.name, reason), log)
    elif process.restarts:
        times = "once" if process.restarts == 1 else f"{process.restarts} times"
        yield warning(subject, f"{process.name} was restarted {times}", log)


def _of_planner(subject: str, graph: LocalGraphStatus) -> Iterator[Finding]:
    if graph.planner_log_dir is None:
        return
    if graph.planner is None:
        name = next((each.name for each in graph.processes if each.role == PLANNER_ROLE), PLANNER_ROLE)
        log = f"tail {log_path(graph.log_dir, name)}"
        yield warning(subject, "its planner has not written its state", log)
    elif graph.planner.phase == PlannerPhase.TARGET_UNAVAILABLE:
        message = (
            "its planner cannot read the statefile, so it makes no decisions and the replicas stay as "
            "they are"
        )
        yield warning(subject, message, f"penstock planner explain --log-dir {graph.planner_log_dir}")
