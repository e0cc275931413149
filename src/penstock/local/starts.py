"""Starts under way: alongside the statefile a file names the `penstock up` that starts a graph, so that `down` finds it.

It is there before the first process of the graph, and gone once the graph serves or the start has been rolled back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.local_state import state_dir
from penstock.local import liveness
from penstock.local.statefile import ProcessId
from penstock.local.store import StateStore, read_own, replace_file

SUFFIX: Final = ".starting"


@contextlib.contextmanager
def starting(namespaces: Iterable[str]) -> Iterator[None]:
    """Record that this process starts graphs, for as long as the block runs.

    Raises:
        ConfigError: another process starts one of them.
    """
    with contextlib.ExitStack() as recorded:
        for namespace in namespaces:
            recorded.enter_context(_recorded(namespace))
        yield


@contextlib.contextmanager
def _recorded(namespace: str) -> Iterator[None]:
    store, path = StateStore.of(namespace), _path(namespace)
    me = liveness.identify(os.getpid())
    assert me is not None  # noqa: S101 - this process runs
    with store.locked():
        other = starting_process(namespace)
        if other is not None:
            raise ConfigError(
                f"namespace {namespace!r} is being started by `penstock up` (pid {other.pid}); wait for it, stop it with "
                f"`penstock down --namespace {namespace}`, or choose another --namespace"
            )
        replace_file(path, json.dumps({"pid": me.pid, "started": me.started}) + "\n")
    try:
        yield
    finally:
        forget(namespace)


def starting_process(namespace: str) -> ProcessId | None:
    """Return the running process that starts a graph, None where none does."""
    try:
        data = json.loads(read_own(_path(namespace)).decode("utf-8"))
        found = ProcessId(int(data["pid"]), str(data["started"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return found if liveness.is_alive(found) else None


def is_under_way(namespace: str) -> bool:
    """Return whether a graph without a statefile may get one: somebody starts it, or its arbiter has just begun."""
    return starting_process(namespace) is not None or bool(
        liveness.arbiters_of(str(StateStore.of(namespace).path))
    )


def recorded_starts() -> list[str]:
    """Return the namespaces of starts, those included whose `up` was killed, sorted."""
    return sorted(path.stem for path in state_dir().glob(f"*{SUFFIX}"))


def forget(namespace: str) -> None:
    """Delete the record of a start; does nothing if there is none."""
    store, path = StateStore.of(namespace), _path(namespace)
    if not path.exists():
        return
    with contextlib.suppress(PenstockError), store.locked():
        path.unlink(missing_ok=True)
        if not store.path.exists():
            store.lock_path.unlink(missing_ok=True)


def _path(namespace: str) -> Path:
    return state_dir() / f"{namespace}{SUFFIX}"
