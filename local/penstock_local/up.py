"""Starting a graph in the background, and waiting until it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_core.clock import ModelClock
from penstock_core.errors import ClusterError, ConfigError, PortInUseError
from penstock_core.local_state import EntryState
from penstock_graph.loading import load_graph
from penstock_graph.models import GraphDeployment, Role
from penstock_graph.runtimes import PLANNER_ROLE, RuntimeContext
from penstock_local import liveness, process_log
from penstock_local.build import LocalOptions, initial_state
from penstock_local.ports import is_free
from penstock_local.probes import Probes
from penstock_local.statefile import Entry, StateFile
from penstock_local.statefile_json import to_json
from penstock_local.store import StateStore, log_root

_POLL_S = 0.1
_ARBITER_START_S = 20.0
"""Real seconds for the arbiter to write its file. Chosen: importing takes one or two on a busy machine."""
_LEFTOVER_GRACE_S = 5.0
"""Real seconds that processes of a killed arbiter get to end. Chosen."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line asks for.

    Attributes:
        namespace: Name on this machine; None: the graph's own.
        speed: Modelled seconds per real second, > 0.
        port: The router's port.
        gpus: GPUs of the host; None: the planner's maxGpuBudget.
        log_dir: Folder of all logs; None: beside the state folder.
        with_planner: Start the planner if the graph has one.
        timeout_s: How long to wait until the graph serves, real seconds.
    """

    namespace: str | None = None
    speed: float = 1.0
    port: int = 8000
    gpus: int | None = None
    log_dir: Path | None = None
    with_planner: bool = True
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Started:
    """A graph that serves.

    Attributes:
        state: Its statefile.
        statefile: Where that lies.
        ready_s: How long it took, real seconds.
        recovered: What a killed arbiter had left and was cleared up, for people.
        arbiter: The background process, a child of this one.
    """

    state: StateFile
    statefile: Path
    ready_s: float
    recovered: tuple[str, ...]
    arbiter: subprocess.Popen[bytes]


Progress = Callable[[StateFile, str], None]
"""Called with the statefile and the router's own words while waiting."""


def prepare(file: Path, options: UpOptions) -> tuple[StateStore, StateFile]:
    """Check everything that can be checked before a process is started.

    Args:
        file: The manifest.
        options: What the command line asks for.

    Returns:
        The namespace's store and the first content of its statefile.

    Raises:
        InvalidSpecError: the manifest has problems.
        ConfigError: an option is out of bounds, the namespace is taken, or the GPUs do not suffice.
    """
    graph = load_graph(file)
    namespace = options.namespace or graph.name
    store = StateStore.of(namespace)
    store.refuse_running()
    return store, initial_state(graph, _local_options(graph, file, store, namespace, options), os.environ)


def _check_port(port: int) -> None:
    if not is_free(port):
        raise PortInUseError(
            f"--port: 127.0.0.1:{port} is in use by another process; stop it or choose another --port"
        )


def _local_options(
    graph: GraphDeployment, file: Path, store: StateStore, namespace: str, options: UpOptions
) -> LocalOptions:
    if options.gpus is not None and options.gpus < 0:
        raise ConfigError(f"--gpus: {options.gpus} must be 0 or more")
    ModelClock(options.speed)  # refuses a speed that is none
    log_dir = (options.log_dir or log_root() / namespace).expanduser().absolute()
    planner_dir = graph.spec.planner.log_dir
    return LocalOptions(
        namespace=namespace,
        speed=options.speed,
        port=options.port,
        gpus=options.gpus,
        log_dir=str(log_dir),
        with_planner=options.with_planner,
        context=RuntimeContext(
            python=sys.executable,
            graph_file=str(file.absolute()),
            discovery=str(store.path.absolute()),
            namespace=namespace,
            speed=options.speed,
            log_dir=str(Path(planner_dir).absolute() if planner_dir else log_dir / "planner"),
        ),
    )


def recover(store: StateStore) -> tuple[str, ...]:
    """End what a killed arbiter left behind and remove its file; returns what was done, for people.

    Raises:
        ConfigError: the arbiter runs.
        ClusterError: a process could not be ended.
    """
    store.refuse_running()
    left = liveness.leftovers(store.read_quietly(), str(store.path))
    resisting = liveness.end(left, grace_s=_LEFTOVER_GRACE_S)
    if resisting:
        pids = ", ".join(str(process.pid) for process in resisting)
        raise ClusterError(f"processes {pids} of an earlier run cannot be ended; end them and try again")
    if not left and not store.path.exists():
        return ()
    store.remove()
    done = [f"ended process {process.pid} of an earlier run" for process in left]
    return (*done, f"removed the stale statefile {store.path}")


async def up(file: Path, options: UpOptions, progress: Progress) -> Started:
    """Start a graph and return when it serves.

    Args:
        file: The manifest.
        options: What the command line asks for.
        progress: Told every tenth of a second how far it is.

    Raises:
        InvalidSpecError: the manifest has problems.
        ConfigError: nothing was started; the message says what to change.
        ClusterError: it was started and did not come to serve; everything was stopped again.
    """
    store, state = prepare(file, options)
    recovered = recover(store)
    _check_port(options.port)
    began_s = time.monotonic()
    arbiter = _spawn_arbiter(store, state)
    try:
        await _wait_claimed(store, arbiter, state.arbiter.log_dir)
        running = await _wait_ready(store, arbiter, options.timeout_s, progress)
    except BaseException:
        await asyncio.shield(_withdraw(arbiter))
        raise
    return Started(running, store.path, time.monotonic() - began_s, recovered, arbiter)


def _spawn_arbiter(store: StateStore, state: StateFile) -> subprocess.Popen[bytes]:
    """Start the background process in a session of its own, its log beside the others."""
    log_dir = Path(state.arbiter.log_dir)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        log = (log_dir / "arbiter.log").open("ab")
    except OSError as exc:
        raise ConfigError(
            f"--log-dir: {log_dir} cannot be written: {exc.strerror}; choose another folder"
        ) from exc
    with log:
        arbiter = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, "-m", "penstock_local.arbiter", str(store.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert arbiter.stdin is not None  # noqa: S101 - asked for above
    with contextlib.suppress(BrokenPipeError), arbiter.stdin as pipe:
        pipe.write(json.dumps(to_json(state)).encode())
    return arbiter


async def _withdraw(arbiter: subprocess.Popen[bytes]) -> None:
    """Stop what was started; SIGTERM twice means: at once."""
    for _ in range(2):
        if arbiter.poll() is None:
            arbiter.terminate()
            await asyncio.sleep(0.2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(arbiter.wait, 15.0)


async def _wait_claimed(store: StateStore, arbiter: subprocess.Popen[bytes], log_dir: str) -> None:
    deadline = time.monotonic() + _ARBITER_START_S
    while True:
        state = store.read_quietly()
        if state is not None and state.arbiter.pid == arbiter.pid:
            return
        if arbiter.poll() is not None or time.monotonic() > deadline:
            words = process_log.last_lines(Path(log_dir) / "arbiter.log")
            raise ClusterError(f"the arbiter did not start: {words or 'it said nothing'}; log: {log_dir}")
        await asyncio.sleep(_POLL_S)


async def _wait_ready(
    store: StateStore, arbiter: subprocess.Popen[bytes], timeout_s: float, progress: Progress
) -> StateFile:
    probes = Probes()
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            state = store.read_quietly()
            if arbiter.poll() is not None or state is None:
                raise ClusterError(f"the arbiter ended while starting; see {store.path.parent}")
            _raise_if_hopeless(state)
            ready, words = await probes.readiness(state.arbiter.router_url)
            progress(state, words)
            if ready and _router_is_ours(state):
                return state
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"not ready within {timeout_s:g} s (real): {words}; logs: {state.arbiter.log_dir}"
                )
            await asyncio.sleep(_POLL_S)
    finally:
        await probes.close()


def _router_is_ours(state: StateFile) -> bool:
    return any(
        entry.role == Role.ROUTER and entry.state is EntryState.READY for entry in state.entries.values()
    )


def _raise_if_hopeless(state: StateFile) -> None:
    """Raise when the router was given up, or every replica of a worker role."""
    by_role: dict[str, list[Entry]] = {}
    for entry in state.entries.values():
        by_role.setdefault(entry.role, []).append(entry)
    for role, entries in by_role.items():
        failed = [entry for entry in entries if entry.state is EntryState.FAILED]
        if role != PLANNER_ROLE and failed and len(failed) == len(entries):
            raise ClusterError(
                f"{failed[0].service}: {failed[0].reason}; everything was stopped, logs: {state.arbiter.log_dir}"
            )
