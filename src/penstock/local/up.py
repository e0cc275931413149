"""Starting a graph in the background, and waiting until it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.api import Environment, GraphDeployment, PlannerMode, Role
from penstock.api.manifests import STDIN, load_graph, read_text
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ClusterError, ConfigError, InvalidSpecError, PortInUseError, unwritable
from penstock.core.flags import check_bounds
from penstock.core.local_state import EMPTY_STATES, EntryState
from penstock.engine.profiles.performance import planning_profile
from penstock.local import liveness, process_log
from penstock.local.build import UpOptions, check_model, initial_state
from penstock.local.down import kill, recover
from penstock.local.edits import kept_path
from penstock.local.plan import startup_s
from penstock.local.ports import is_free
from penstock.local.probes import Probes, frontend_of
from penstock.local.starts import starting
from penstock.local.statefile import ProcessEntry, StateFile, to_json
from penstock.local.store import FILE_MODE, StateStore, keep_text, log_root, make_folder
from penstock.runtimes import PLANNER_ROLE, RuntimeContext, runtime_of
from penstock.runtimes.build import missing_extras
from penstock_planner.learnt import LEARNING, former_run, former_run_in_words, start_from
from penstock_planner.options import join

_POLL_S = 0.1
_ARBITER_START_S = 60.0
"""Real seconds that an arbiter needs to come up, or a killed one to be succeeded. Chosen: importing takes one or two, and took
over 20 where thirty programs shared two cores."""
_PATIENCE_S = 300.0
"""Real seconds that every graph gets until it serves, however short its own limits. Chosen: a busy machine."""
_WITHDRAW_S = 15.0
"""Real seconds that an arbiter may take to stop at once: a floor of grace, SIGKILL and a margin. Chosen."""


@dataclass(frozen=True, slots=True)
class StartedGraph:
    """A graph that serves."""

    state: StateFile
    statefile: Path
    ready_s: float
    recovered: tuple[str, ...]
    arbiter: subprocess.Popen[bytes]


Progress = Callable[[StateFile, str], None]
"""Called with the statefile and the router's own words while waiting."""


def prepare(file: Path, options: UpOptions) -> tuple[StateStore, StateFile]:
    """Check everything that can be checked before a process is started."""
    graph = _planned_as(load_graph(file, draws=options.pool is not None), options.planner)
    namespace = options.namespace or graph.name
    store = StateStore.of(namespace)
    store.refuse_running()
    if problems := missing_extras(graph, with_planner=options.with_planner):
        raise InvalidSpecError(problems)
    if options.with_planner and graph.spec.planner.enabled:
        _check_profile(graph, options.planner)
    check_bounds(options)
    SimulatedClock(options.speed)  # refuses a speed that is none
    log_dir = _log_dir(options, namespace)
    context = _context(graph, file, store, options, log_dir)
    runtime_of(graph.spec.runtime).check_installed(graph.spec, context)
    check_model(graph.spec)
    state = initial_state(graph, options, context, log_dir=log_dir, environment=os.environ)
    return store, replace(state, arbiter=replace(state.arbiter, run_id=secrets.token_hex(8)))


def kept_file(file: Path, options: UpOptions) -> Path:
    """Return a manifest's file; what comes once, as standard input and a shell's ``<(…)`` do, is kept alongside the graph's logs."""
    if str(file) != STDIN and not file.is_fifo():
        return file
    text = read_text(file)
    graph = load_graph(text if "\n" in text else f"{text}\n")
    namespace = options.namespace or graph.name
    StateStore.of(namespace).refuse_running()  # whose router would follow the new text
    return keep_text(text, kept_path(_log_dir(options, namespace), namespace))


def _log_dir(options: UpOptions, namespace: str) -> Path:
    return (options.log_dir or log_root() / namespace).expanduser().absolute()


def _check_profile(graph: GraphDeployment, overrides: Mapping[str, str]) -> None:
    """Refuse a graph whose planner would end at its start for lack of a profile or a matching memory."""
    options = join(given=dict(overrides), graph=graph)
    if options.mode == PlannerMode.SLA:
        planning_profile(graph.spec, options.profile)
    start_from(options, graph)


def _planned_as(graph: GraphDeployment, overrides: Mapping[str, str]) -> GraphDeployment:
    """Return the graph with the command line's planner settings that `up` itself depends on."""
    if not overrides:
        return graph
    if "namespace" in overrides:
        raise ConfigError("--Planner.namespace: is the graph's name on this machine; give --namespace")
    options = join(given=dict(overrides), graph=graph)
    if options.environment is not Environment.LOCAL:
        raise ConfigError(
            f"--Planner.environment: {options.environment.value}: `penstock up` starts a local planner; apply "
            "the graph to a cluster instead"
        )
    planner = graph.spec.planner.model_copy(update={"max_gpu_budget": options.max_gpu_budget})
    return graph.model_copy(update={"spec": graph.spec.model_copy(update={"planner": planner})})


def _former_run(state: StateFile, file: Path, options: UpOptions) -> Iterator[str]:
    """Yield what becomes of what a planner had learnt in the same log folder."""
    folder = state.arbiter.planner_log_dir
    if folder is None:
        return
    graph = load_graph(file, draws=options.pool is not None)
    planner = join(given=dict(options.planner), graph=graph)
    profile = planning_profile(graph.spec, planner.profile) if planner.mode == PlannerMode.SLA else None
    config = planner.decide_config(graph, profile, speed=options.speed)
    left = former_run(Path(folder), config.learning_identity)
    if left is not None and planner.mode in LEARNING:
        yield former_run_in_words(left, folder, time.time())


_APPLIED = frozenset({"log-dir", "environment"})
"""Options that `up` passes to the planner in its own way."""


def _context(
    graph: GraphDeployment, file: Path, store: StateStore, options: UpOptions, log_dir: Path
) -> RuntimeContext:
    given, planner_dir = options.planner, options.planner.get("log-dir")
    if options.pool is not None and graph.spec.planner.max_gpu_budget is None:
        given = {
            "max-gpu-budget": "none",
            **given,
        }  # the planner reads the file by itself, and knows no pool yet
    return RuntimeContext(
        python=sys.executable,
        graph_file=str(kept_path(log_dir, store.path.stem)),
        followed_file=str(file.absolute()),
        discovery=str(store.path.absolute()),
        namespace=store.path.stem,
        speed=options.speed,
        log_dir=str(Path(planner_dir).expanduser().absolute() if planner_dir else log_dir / "planner"),
        planner_args=tuple(
            # A planner that restarts elsewhere understands an absolute path, too.
            f"--{name}={Path(value).expanduser().absolute() if name == 'memory' else value}"
            for name, value in given.items()
            if name not in _APPLIED
        ),
    )


async def up(file: Path, options: UpOptions, progress: Progress) -> StartedGraph:
    """Start a graph and return when it serves; meanwhile `penstock down` finds this start."""
    with starting([options.namespace or load_graph(file).name]):
        return await start(file, options, progress)


async def start(file: Path, options: UpOptions, progress: Progress) -> StartedGraph:
    """Start a graph of a start that is recorded, and return when it serves."""
    store, state = prepare(file, options)
    recovered = (*recover(store), *_former_run(state, file, options))
    if not is_free(options.port):
        raise PortInUseError(
            f"--port: 127.0.0.1:{options.port} is in use by another process; stop it or choose another --port"
        )
    keep_text(read_text(file), kept_path(Path(state.arbiter.log_dir), store.path.stem))
    began_s = time.monotonic()
    arbiter = _spawn_arbiter(store, state)
    try:
        timeout_s = ready_timeout_s(state) if options.timeout_s is None else options.timeout_s
        running = await _wait_ready(store, state, arbiter, timeout_s, progress)
    except BaseException:
        await asyncio.shield(_roll_back(store, state, arbiter))
        raise
    return StartedGraph(running, store.path, time.monotonic() - began_s, recovered, arbiter)


def ready_timeout_s(state: StateFile) -> float:
    """Return how long a graph may take until it serves, real seconds: as long as its slowest process may to start."""
    speed = state.arbiter.speed
    slowest_s = max((startup_s(entry, speed) for entry in state.entries.values()), default=0.0)
    return max(_PATIENCE_S, slowest_s + _ARBITER_START_S)


def _spawn_arbiter(store: StateStore, state: StateFile) -> subprocess.Popen[bytes]:
    log_dir = Path(state.arbiter.log_dir)
    try:
        make_folder(log_dir)
        path = process_log.log_path(state.arbiter.log_dir, process_log.ARBITER)
        path.touch(mode=FILE_MODE)
        log = path.open("ab")
    except OSError as exc:
        raise ConfigError(unwritable(f"--log-dir {log_dir}", exc)) from exc
    with log:
        arbiter = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, "-m", liveness.ARBITER_MODULE, str(store.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert arbiter.stdin is not None  # noqa: S101 - asked for above
    with contextlib.suppress(BrokenPipeError), arbiter.stdin as pipe:
        pipe.write(json.dumps(to_json(state)).encode())
    return arbiter


async def _roll_back(store: StateStore, requested: StateFile, arbiter: subprocess.Popen[bytes]) -> None:
    """Stop all started processes at once, for an arbiter by two SIGTERMs."""
    for _ in range(2):
        if arbiter.poll() is None:
            arbiter.terminate()
            await asyncio.sleep(0.2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(arbiter.wait, _WITHDRAW_S)
    if arbiter.poll() is None:
        arbiter.kill()
    left = store.read_quietly()
    if left is not None and left.arbiter.run_id == requested.arbiter.run_id:
        await asyncio.to_thread(kill, store, left)
        await asyncio.to_thread(recover, store)


async def _wait_ready(
    store: StateStore,
    requested: StateFile,
    arbiter: subprocess.Popen[bytes],
    timeout_s: float,
    progress: Progress,
) -> StateFile:
    """Wait until the router of this very start serves; an arbiter that was killed is given time to come back."""
    probes = Probes()
    began_s = alive_s = time.monotonic()
    log_dir = requested.arbiter.log_dir
    try:
        while True:
            state, now_s = store.read_quietly(), time.monotonic()
            is_ours = state is not None and state.arbiter.run_id == requested.arbiter.run_id
            if state is None or not is_ours:
                if arbiter.poll() is not None:
                    raise _no_arbiter(log_dir)
                if now_s - began_s > timeout_s:
                    raise ClusterError(
                        f"the arbiter, pid {arbiter.pid}, wrote no statefile within {timeout_s:g} s (real) and was stopped. "
                        f"Where the machine is only busy, wait longer: --timeout {2 * timeout_s:g}; log: {log_dir}"
                    )
                alive_s = now_s
                await asyncio.sleep(_POLL_S)
                continue
            if liveness.arbiter_is_alive(state):
                alive_s = now_s
            elif now_s - alive_s > _ARBITER_START_S:
                raise _no_arbiter(log_dir)
            _raise_if_hopeless(state)
            ready, words = await frontend_of(state, probes).readiness(state.entries)
            progress(state, words)
            if ready and _serves(state):
                return state
            if time.monotonic() - began_s > timeout_s:
                reasons = [f"{name}: {entry.reason}" for name, entry in state.entries.items() if entry.reason]
                raise ClusterError(
                    f"not ready within {timeout_s:g} s (real): {'; '.join([words, *reasons])}; everything was stopped. Where "
                    f"it only loads, wait longer: --timeout {2 * timeout_s:g}, or a larger startupTimeoutSeconds of its "
                    f"service; logs: {log_dir}"
                )
            await asyncio.sleep(_POLL_S)
    finally:
        await probes.close()


def _no_arbiter(log_dir: str) -> ClusterError:
    words = process_log.last_lines(process_log.log_path(log_dir, process_log.ARBITER))
    return ClusterError(
        f"the arbiter did not start, or has ended: {words or 'it said nothing'}; log: {log_dir}"
    )


def _serves(state: StateFile) -> bool:
    """Return whether the router is this start's own, and every role that has processes has a ready one.

    A router that holds requests until workers are back is ready without any.
    """
    entries = state.entries.values()
    ready = {entry.role for entry in entries if entry.state is EntryState.READY}
    return Role.ROUTER in ready and all(
        entry.role in ready for entry in entries if entry.state not in EMPTY_STATES
    )


def _raise_if_hopeless(state: StateFile) -> None:
    """Raise when the router was given up, or every replica of a worker role."""
    by_role: dict[str, list[ProcessEntry]] = {}
    for entry in state.entries.values():
        by_role.setdefault(entry.role, []).append(entry)
    for role, entries in by_role.items():
        failed = [entry for entry in entries if entry.state is EntryState.FAILED]
        if role != PLANNER_ROLE and failed and len(failed) == len(entries):
            raise ClusterError(
                f"{failed[0].service}: {failed[0].reason}; everything was stopped, logs: {state.arbiter.log_dir}"
            )
