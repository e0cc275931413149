"""Restarting the router of a running graph with its manifest as it is now; `penstock restart` calls it.

The old router finishes its streams alongside the new one, and new connections wait for that at the socket that the arbiter
holds, so that no request is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.api import Role
from penstock.api.manifests import load_graph, read_text
from penstock.core.errors import ClusterError, ConfigError, NotFoundError
from penstock.core.local_state import EntryState
from penstock.local.edits import kept_path, waiting_edits
from penstock.local.plan import startup_s
from penstock.local.statefile import ArbiterInfo, StateFile
from penstock.local.store import StateStore, keep_text
from penstock.runtimes import RuntimeContext, process_specs

_POLL_S = 0.1
_MARGIN_S: Final = 60.0
"""Real seconds added to a router's time to start. Chosen: those that an arbiter gets to come up, if it was killed just now."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Restarted:
    """What a restart did.

    Attributes:
        edits: Keys below ``spec`` that the new router has taken over, sorted.
    """

    namespace: str
    router_url: str
    pid: int
    edits: tuple[str, ...]
    took_s: float


def only_for_router(arbiter: ArbiterInfo, edits: tuple[str, ...]) -> bool:
    """Return whether edits are of the router alone: every process keeps its command and its variables."""
    if not all(key.startswith("router.") for key in edits):
        return False
    place = RuntimeContext(python="", graph_file="", discovery="", namespace="", speed=arbiter.speed)
    files = (kept_path(Path(arbiter.log_dir), arbiter.namespace), Path(arbiter.graph))
    before, after = (process_specs(load_graph(file, draws=bool(arbiter.pool)), place) for file in files)
    return before == after


def restart(namespace: str) -> Restarted:
    """Restart the router, and return when its successor serves.

    Raises:
        NotFoundError: the graph does not run.
        ConfigError: the manifest cannot be used, or has edits that other processes need, too.
        ClusterError: the successor does not serve in time.
    """
    store = StateStore.of(namespace)
    state = store.running()
    if state is None:
        raise NotFoundError(f"namespace {namespace!r}: nothing is running; start it with `penstock up FILE`")
    arbiter, began_s = state.arbiter, time.monotonic()
    edits = waiting_edits(arbiter)
    if edits and not only_for_router(arbiter, edits):
        raise ConfigError(
            f"{arbiter.graph}: edits of {', '.join(edits)} are not for the router alone; "
            f"run `penstock down --namespace {namespace}`, then `penstock up {arbiter.graph}`"
        )
    if edits:
        keep_text(read_text(Path(arbiter.graph)), kept_path(Path(arbiter.log_dir), namespace))
    pid = _await_successor(store, *store.update(_asked))
    return Restarted(namespace, arbiter.router_url, pid, edits, time.monotonic() - began_s)


def _asked(state: StateFile) -> tuple[StateFile, tuple[str, int | None, float]]:
    """Ask for a successor of the router; return its entry's name, its process before, and how long a start may take."""
    for name, entry in state.entries.items():
        if entry.role == Role.ROUTER and entry.is_replica:
            wait_s = startup_s(entry, state.arbiter.speed) + _MARGIN_S
            return state.with_entry(name, replace(entry, renew=True)), (name, entry.pid, wait_s)
    raise ClusterError(
        f"namespace {state.arbiter.namespace!r}: its router was given up; see `penstock status`, then `penstock down` and "
        "`penstock up` again"
    )


def _await_successor(store: StateStore, name: str, before: int | None, wait_s: float) -> int:
    deadline_s, reason = time.monotonic() + wait_s, None
    while time.monotonic() < deadline_s:
        state = store.read_quietly()
        entry = None if state is None else state.entries.get(name)
        if entry is not None:
            if entry.state is EntryState.READY and entry.pid not in {None, before} and entry.pid is not None:
                return entry.pid
            if entry.state is EntryState.FAILED:
                raise ClusterError(
                    f"{name}: {entry.reason}; mend the manifest, then `penstock down` and `penstock up`"
                )
            reason = entry.reason
        time.sleep(_POLL_S)
    raise ClusterError(
        f"{name}: no successor serves within {wait_s:g} s (real){'' if reason is None else f': {reason}'}; see its log"
    )
