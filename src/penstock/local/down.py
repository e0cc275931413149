"""Stopping a graph, and clearing up what a killed arbiter or a failed start left; `up` and `penstock down` call it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.core.errors import ClusterError, ConfigError, NotFoundError
from penstock.local import liveness, ports, start_marker, starts
from penstock.local.plan import grace_s
from penstock.local.pool import PoolStore
from penstock.local.statefile import ProcessId, StateFile
from penstock.local.store import (
    StateStore,
    cache_folder,
    drop_cache,
    namespaces,
    remove_all_endpoints,
    remove_endpoints,
)

_GRACE_S = 5.0
"""Real seconds that processes of a killed arbiter get to end. Chosen."""


def recover(store: StateStore) -> tuple[str, ...]:
    """End what a killed arbiter left behind and remove its file; returns what was done, as text."""
    store.refuse_running()
    state = store.read_quietly()
    left = liveness.leftovers(state, str(store.path))
    pids = liveness.group_pids(left)
    _end(left, _GRACE_S)
    if left:
        drop_cache(cache_folder(store.path.stem))
    if not left and not store.path.exists():
        return ()
    if state is not None:
        remove_endpoints(state.arbiter.endpoint)
    remove_all_endpoints(store.path)
    store.remove()
    done = [f"ended process {pid} of an earlier run" for pid in pids]
    return (*done, f"removed the stale statefile {store.path}")


def kill(store: StateStore, state: StateFile) -> None:
    """Kill the arbiter, its watchdog and every process of a graph at once."""
    _end([*liveness.marked(str(store.path)), state.arbiter.process, *liveness.recorded(state)], 0.0)
    drop_cache(cache_folder(store.path.stem))


def _end(processes: list[ProcessId], grace_s: float) -> None:
    if survivors := liveness.end(processes, grace_s=grace_s):
        names = ", ".join(map(str, liveness.group_pids(survivors)))
        raise ClusterError(f"processes {names} cannot be ended; end them and try again")


_POLL_S = 0.1
_FORCE_S = 20.0
"""Real seconds that a forced stop may take: a floor of grace and SIGKILL. Chosen."""
_UNRECORDED_S = 60.0
"""Real seconds of an orderly stop by a statefile that cannot be read: Kubernetes' grace period of 30 s twice. Chosen."""
_ROLL_BACK_S = 60.0
"""Real seconds in which an `up` that is asked to stop takes back what it has started. Chosen: the withdrawal of an arbiter
and the killing of its processes take up to 30 s, and a busy machine doubles that."""
_MARGIN_S = 15.0
"""Real seconds added to the processes' own grace periods before a stop is forced. Chosen."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a stop did."""

    namespace: str
    took_s: float
    forced: bool
    notes: tuple[str, ...]


def choose_namespace(given: str | None) -> str:
    """Return the namespace meant: the given one, or the only one there is."""
    if given is not None:
        return given
    known = _known()
    if not known:
        raise NotFoundError("no graph is running on this machine; start one with `penstock up FILE`")
    running = [
        name
        for name in known
        if StateStore.of(name).running() is not None or starts.starting_process(name) is not None
    ]
    candidates = running or known
    if len(candidates) > 1:
        raise ConfigError(f"--namespace: needed, because several are here: {', '.join(candidates)}")
    return candidates[0]


def _known() -> list[str]:
    return sorted({*namespaces(), *starts.recorded_starts()})


def await_start(namespace: str | None) -> None:
    """Where nothing is known of a graph, wait for an `up` that has begun to record it; None: any graph."""
    start_marker.wait(until=lambda: namespace in _known() if namespace else bool(_known()))


def default_timeout_s(state: StateFile) -> float:
    """Return how long an orderly stop may take, real seconds: planner and router, then workers, and a margin."""
    speed = state.arbiter.speed
    front = [grace_s(entry, speed) for entry in state.entries.values() if not entry.is_worker]
    back = [grace_s(entry, speed) for entry in state.entries.values() if entry.is_worker]
    return max(front, default=0.0) + max(back, default=0.0) + _MARGIN_S


def down(namespace: str, *, timeout_s: float | None, now: bool) -> Stopped:
    """Drain and stop a graph: planner, then router, then workers; returns when nothing is left.

    An `up` that still starts it is stopped first, with every graph that it starts: a start is all or none.
    """
    store = StateStore.of(namespace)
    began_s = time.monotonic()
    notes: tuple[str, ...] = tuple(_stop_start(namespace))
    arbiters = liveness.arbiters_of(str(store.path))  # before the statefile, which one may write meanwhile
    state = store.running()
    if state is None:
        notes = (*notes, *_end_unrecorded(store, arbiters, now=now), *recover(store))
        if not notes:
            raise NotFoundError(
                f"namespace {namespace!r}: nothing is running; start it with `penstock up FILE`"
            )
        _remove_pools()
        return Stopped(namespace, time.monotonic() - began_s, forced=True, notes=notes)
    arbiter = state.arbiter.process
    patience_s = default_timeout_s(state) if timeout_s is None else timeout_s
    forced = now
    ended = not now and _stop(arbiter, signal.SIGTERM, patience_s)
    if not ended:
        forced = True
        ended = _stop(arbiter, signal.SIGQUIT, _FORCE_S)
    if not ended:
        kill(store, store.read_quietly() or state)
        notes = (*notes, f"killed arbiter {state.arbiter.pid}, which did not end")
    notes = (*notes, *recover(store))
    _verify(store, state)
    _remove_pools()
    return Stopped(namespace, time.monotonic() - began_s, forced=forced, notes=notes)


def _remove_pools() -> None:
    """Delete the pools whose last graph has gone, so that `penstock pool` shows none that are over."""
    for pool in PoolStore.all():
        pool.remove_if_over()


def _stop_start(namespace: str) -> Iterator[str]:
    """Stop the `up` that starts a graph, and yield what was done; one that ends meanwhile by itself is waited for."""
    starter = starts.starting_process(namespace)
    if starter is not None:
        together = [name for name in starts.recorded_starts() if starts.starting_process(name) == starter]
        with contextlib.suppress(ProcessLookupError):
            os.kill(starter.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _ROLL_BACK_S
        while starts.starting_process(namespace) == starter and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        how = "stopped"
        if starts.starting_process(namespace) == starter:
            _end([starter], 0.0)
            how = f"killed, as it did not end within {_ROLL_BACK_S:g} s,"
        yield f"{how} `penstock up` (pid {starter.pid}), which was still starting {', '.join(together)}"
    starts.forget(namespace)


def _stop(arbiter: ProcessId, sent: signal.Signals, patience_s: float) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(arbiter.pid, sent)
    deadline = time.monotonic() + patience_s
    while liveness.is_alive(arbiter):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _end_unrecorded(store: StateStore, arbiters: Sequence[ProcessId], *, now: bool) -> tuple[str, ...]:
    """Stop arbiters that no statefile names: not yet, or it cannot be read; how long their processes drain is unknown."""
    is_unreadable = store.path.exists() and store.read_quietly() is None
    why = "whose statefile cannot be read" if is_unreadable else "which was starting"
    for arbiter in arbiters:
        if not now and _stop(arbiter, signal.SIGTERM, _UNRECORDED_S):
            continue
        if not _stop(arbiter, signal.SIGQUIT, _FORCE_S) and liveness.end([arbiter], grace_s=0.0):
            raise ClusterError(f"arbiter {arbiter.pid} cannot be ended; end it and run `penstock down` again")
    return tuple(f"stopped arbiter {arbiter.pid}, {why}" for arbiter in arbiters)


def _verify(store: StateStore, state: StateFile) -> None:
    """Raise when a process, the statefile or a port is left."""
    left = [f"process {pid}" for pid in liveness.group_pids(liveness.leftovers(state, str(store.path)))]
    left += [str(path) for path in (store.path, store.lock_path, store.discovery_folder) if path.exists()]
    left += [
        f"port {port}"
        for entry in state.entries.values()
        for port in entry.ports.values()
        if not ports.is_free(port)
    ]
    if left:
        raise ClusterError(f"still there after the stop: {', '.join(left)}; run `penstock down --now`")
