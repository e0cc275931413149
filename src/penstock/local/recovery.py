"""Clears up what a killed arbiter, or a start that failed, left behind; `up` and `down` call it."""

from __future__ import annotations

from penstock.core.errors import ClusterError
from penstock.local import liveness, private
from penstock.local.liveness import ProcessId
from penstock.local.statefile import StateFile
from penstock.local.store import StateStore

_GRACE_S = 5.0
"""Real seconds that processes of a killed arbiter get to end. Chosen."""


def recover(store: StateStore) -> tuple[str, ...]:
    """End what a killed arbiter left behind and remove its file; returns what was done, for people.

    Raises:
        ConfigError: the arbiter runs.
        ClusterError: a process could not be ended.
    """
    store.refuse_running()
    state = store.read_quietly()
    left = liveness.leftovers(state, str(store.path))
    pids = _pids(left)
    resisting = liveness.end(left, grace_s=_GRACE_S)
    if resisting:
        names = ", ".join(str(pid) for pid in _pids(resisting))
        raise ClusterError(f"processes {names} of an earlier run cannot be ended; end them and try again")
    if not left and not store.path.exists():
        return ()
    if state is not None:
        private.remove_endpoints(state.arbiter.endpoint)
    private.remove_all_endpoints(store.path)
    store.remove()
    done = [f"ended process {pid} of an earlier run" for pid in pids]
    return (*done, f"removed the stale statefile {store.path}")


def kill(store: StateStore, state: StateFile) -> None:
    """Kill the arbiter, its watchdog and every process of a graph at once.

    Raises:
        ClusterError: one cannot be killed.
    """
    arbiter = ProcessId(state.arbiter.pid, state.arbiter.started)
    every = [*liveness.marked(str(store.path)), arbiter, *liveness.recorded(state)]
    resisting = liveness.end(every, grace_s=0.0)
    if resisting:
        names = ", ".join(str(pid) for pid in _pids(resisting))
        raise ClusterError(f"processes {names} cannot be ended; end them and run `penstock down` again")


def _pids(leaders: list[ProcessId]) -> list[int]:
    return [member.pid for leader in leaders for member in liveness.group_of(leader)]
