"""The supervisor's edits of the statefile, each guarded against what others wrote in between.

Keeps the last good copy: a file that was deleted or broken by hand is written again from it, because
the processes it describes still run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from penstock_core import logs
from penstock_core.errors import ConfigError, NotFoundError
from penstock_core.local_state import EntryState
from penstock_graph.runtimes import PORT
from penstock_local.commands import ports_for
from penstock_local.liveness import ProcessId
from penstock_local.statefile import Entry, StateFile, retire
from penstock_local.store import StateStore

_T = TypeVar("_T")
_log = logs.get_logger(__name__)


class Record:
    """One statefile, as its arbiter edits it.

    Every method raises ConfigError when the file cannot be written (a full disk), ConflictError when its
    lock is held for too long; the caller tries again at its next tick.
    """

    __slots__ = ("state", "store")

    def __init__(self, store: StateStore, state: StateFile) -> None:
        """Begin from what was just written.

        Args:
            store: The file.
            state: Its content.
        """
        self.store = store
        self.state = state

    def read(self) -> StateFile:
        """Return the file as it is now."""
        try:
            state = self.store.read()
            why = "it is gone"
        except ConfigError as exc:
            state, why = None, str(exc)
        if state is None:
            _log.error("statefile lost, written again from memory", path=str(self.store.path), why=why)
            self.store.write(self.state)
            return self.state
        self.state = state
        return state

    def stopping(self) -> None:
        """Write that the graph is being stopped: nobody may add to it any more."""
        self._edit(lambda state: (replace(state, arbiter=replace(state.arbiter, stopping=True)), None))

    def claim_start(self, name: str) -> Entry | None:
        """Write ``starting`` with its ports and return the entry; None when it was withdrawn meanwhile.

        Raises:
            ClusterError: no port is free.
        """

        def claim(state: StateFile) -> tuple[StateFile, Entry | None]:
            entry = state.entries.get(name)
            if entry is None or not entry.is_replica:
                return state, None
            ports = ports_for(entry, state.entries.values())
            url = f"http://127.0.0.1:{ports[PORT]}" if PORT in ports else None
            changed = state.change(name, state=EntryState.STARTING, ports=ports, url=url)
            return changed, changed.entries[name]

        return self._edit(claim)

    def started(self, name: str, process: ProcessId) -> None:
        """Write which process serves an entry."""
        self._edit(lambda state: (state.change(name, pid=process.pid, create_time=process.create_time), None))

    def ready(self, name: str) -> None:
        """Write ``ready``, unless the entry was withdrawn meanwhile."""
        self._replica(name, lambda entry: replace(entry, state=EntryState.READY, reason=None, served=True))

    def restarting(self, name: str, reason: str) -> None:
        """Write that the process died and comes back."""
        self._replica(
            name,
            lambda entry: replace(
                entry,
                state=EntryState.STARTING,
                pid=None,
                create_time=None,
                restarts=entry.restarts + 1,
                reason=reason,
            ),
        )

    def failed(self, name: str, reason: str) -> None:
        """Write that an entry was given up; its GPUs are free."""
        self._replica(
            name,
            lambda entry: replace(
                entry, state=EntryState.FAILED, gpus=(), pid=None, create_time=None, reason=reason
            ),
        )

    def retired(self, name: str) -> None:
        """Take out an entry whose process has ended."""
        self._edit(lambda state: (retire(state, name), None))

    def _replica(self, name: str, change: Callable[[Entry], Entry]) -> None:
        def edit(state: StateFile) -> tuple[StateFile, None]:
            entry = state.entries.get(name)
            if entry is None or not entry.is_replica:
                return state, None
            return state.with_entry(name, change(entry)), None

        self._edit(edit)

    def _edit(self, change: Callable[[StateFile], tuple[StateFile, _T]]) -> _T:
        written = self.state

        def remember(state: StateFile) -> tuple[StateFile, _T]:
            nonlocal written
            written, answer = change(state)
            return written, answer

        try:
            answer = self.store.update(remember)
        except (NotFoundError, ConfigError):
            self.read()
            answer = self.store.update(remember)
        self.state = written
        return answer
