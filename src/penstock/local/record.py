"""The supervisor's edits of the statefile, each guarded against what others wrote in between.

Keeps the last good copy: a file that was deleted or broken by hand is written again from it, because
the processes it describes still run. Where the file cannot be written (a full disk), edits hold in memory, so that
crashed processes are still restarted, and are made again on the file once it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.core import logs
from penstock.core.errors import ConfigError, NotFoundError
from penstock.core.local_state import EntryState
from penstock.local.build import ports_for
from penstock.local.liveness import ProcessId
from penstock.local.statefile import ProcessEntry, StateFile, retire
from penstock.local.store import StateStore, UnwritableError
from penstock.runtimes import PORT

_Change = Callable[[StateFile], StateFile]
_log = logs.get_logger(__name__)


class Record:
    """One statefile, as its arbiter edits it.

    Every method raises ConflictError when the file's lock is held for too long; the caller tries again at its
    next tick.
    """

    __slots__ = ("_pending", "state", "store")

    def __init__(self, store: StateStore, state: StateFile) -> None:
        """Begin from what was just written."""
        self.store = store
        self.state = state
        self._pending: tuple[_Change, ...] = ()
        """Edits that `state` holds and the file lacks."""

    def read(self) -> StateFile:
        """Return the file as it is now, with edits that could not be written yet."""
        if self._pending:
            self._edit()
            return self.state
        try:
            state = self.store.read()
            why = "it is gone"
        except ConfigError as exc:
            state, why = None, str(exc)
        if state is None:
            _log.error("statefile lost, written again from memory", path=str(self.store.path), why=why)
            self._edit()
        else:
            self.state = state
        return self.state

    def stopping(self) -> None:
        """Write that the graph is being stopped: nothing may be added to it any more."""
        self._edit(lambda state: replace(state, arbiter=replace(state.arbiter, stopping=True)))

    def claim_start(self, name: str) -> ProcessEntry | None:
        """Write ``starting`` with its ports and return the entry; None when it was withdrawn meanwhile.

        Raises:
            ClusterError: no port is free.
        """
        entries = self.state.entries
        if name in entries:
            ports = ports_for(entries[name], entries.values())
            url = f"http://127.0.0.1:{ports[PORT]}" if PORT in ports else None
            self.change(name, state=EntryState.STARTING, ports=ports, url=url)
        entry = self.state.entries.get(name)
        return entry if entry is not None and entry.is_replica else None

    def started(self, name: str, process: ProcessId) -> None:
        """Write which process serves an entry, also one that was withdrawn meanwhile."""
        self._edit(lambda state: state.change(name, pid=process.pid, started=process.started))

    def change(self, name: str, **fields: Any) -> None:
        """Write fields of an entry, unless it was withdrawn meanwhile."""

        def edit(state: StateFile) -> StateFile:
            entry = state.entries.get(name)
            return state.change(name, **fields) if entry is not None and entry.is_replica else state

        self._edit(edit)

    def restarting(self, name: str, reason: str) -> None:
        """Write that the process died and comes back."""
        entry = self.state.entries.get(name)
        restarts = 0 if entry is None else entry.restarts + 1
        self.change(name, state=EntryState.STARTING, pid=None, started=None, restarts=restarts, reason=reason)

    def retired(self, name: str) -> None:
        """Take out an entry whose process has ended."""
        self._edit(lambda state: retire(state, name))

    def _edit(self, *changes: _Change) -> None:
        """Make changes on the file, after those that it still lacks; keep all in memory where it cannot be written."""
        every = (*self._pending, *changes)

        def apply(state: StateFile) -> tuple[StateFile, None]:
            for change in every:
                state = change(state)
            self.state = state
            return state, None

        try:
            self.store.update(apply)
        except UnwritableError as exc:
            self._keep(every, exc)
        except (NotFoundError, ConfigError):
            for change in changes:
                self.state = change(self.state)
            try:
                self.store.write(self.state)
            except ConfigError as exc:
                self._keep(every or (lambda state: state,), exc)
            else:
                self._pending = ()
        else:
            if self._pending:
                _log.info("statefile can be written again", path=str(self.store.path))
            self._pending = ()

    def _keep(self, changes: tuple[_Change, ...], why: ConfigError) -> None:
        if not self._pending:
            _log.error("statefile cannot be written; going on from memory", why=str(why))
        self._pending = changes
