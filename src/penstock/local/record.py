"""The supervisor's edits of the statefile, each guarded against what others wrote in between.

Keeps the last good copy: a file that was deleted or broken by hand is written again from it, because
the processes it describes still run. Where the file cannot be written (a full disk), edits hold in memory, so that
crashed processes are still restarted, and reach the file once it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from penstock.core import logs
from penstock.core.errors import ConfigError, NotFoundError
from penstock.core.local_state import EntryState
from penstock.local.commands import ports_for
from penstock.local.liveness import ProcessId
from penstock.local.merge import merge
from penstock.local.statefile import ProcessEntry, StateFile, retire
from penstock.local.store import StateStore, UnwritableError
from penstock.runtimes import PORT

_T = TypeVar("_T")
_log = logs.get_logger(__name__)


class Record:
    """One statefile, as its arbiter edits it.

    Every method raises ConflictError when the file's lock is held for too long; the caller tries again at its
    next tick.
    """

    __slots__ = ("_base", "state", "store")

    def __init__(self, store: StateStore, state: StateFile) -> None:
        """Begin from what was just written."""
        self.store = store
        self.state = state
        self._base: StateFile | None = None
        """The file's content while `state` holds edits that it lacks; else None."""

    def read(self) -> StateFile:
        """Return the file as it is now, with edits that could not be written yet."""
        if self._base is not None:
            self._edit(lambda state: (state, None))
            return self.state
        try:
            state = self.store.read()
            why = "it is gone"
        except ConfigError as exc:
            state, why = None, str(exc)
        if state is None:
            _log.error("statefile lost, written again from memory", path=str(self.store.path), why=why)
            self._rewrite()
            return self.state
        self.state = state
        return state

    def stopping(self) -> None:
        """Write that the graph is being stopped: nothing may be added to it any more."""
        self._edit(lambda state: (replace(state, arbiter=replace(state.arbiter, stopping=True)), None))

    def claim_start(self, name: str) -> ProcessEntry | None:
        """Write ``starting`` with its ports and return the entry; None when it was withdrawn meanwhile.

        Raises:
            ClusterError: no port is free.
        """

        def claim(state: StateFile) -> tuple[StateFile, ProcessEntry | None]:
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
        self._edit(lambda state: (state.change(name, pid=process.pid, started=process.started), None))

    def ready(self, name: str) -> None:
        """Write ``ready``, unless the entry was withdrawn meanwhile."""
        self._replica(name, lambda entry: replace(entry, state=EntryState.READY, reason=None, served=True))

    def unready(self, name: str, reason: str) -> None:
        """Write that a process which had served does not, unless the entry was withdrawn meanwhile."""
        self._replica(name, lambda entry: replace(entry, state=EntryState.STARTING, reason=reason))

    def restarting(self, name: str, reason: str) -> None:
        """Write that the process died and comes back."""
        self._replica(
            name,
            lambda entry: replace(
                entry,
                state=EntryState.STARTING,
                pid=None,
                started=None,
                restarts=entry.restarts + 1,
                reason=reason,
            ),
        )

    def failed(self, name: str, reason: str) -> None:
        """Write that an entry was given up; its GPUs are free."""
        self._replica(
            name,
            lambda entry: replace(
                entry, state=EntryState.FAILED, gpus=(), pid=None, started=None, reason=reason
            ),
        )

    def retired(self, name: str) -> None:
        """Take out an entry whose process has ended."""
        self._edit(lambda state: (retire(state, name), None))

    def _replica(self, name: str, change: Callable[[ProcessEntry], ProcessEntry]) -> None:
        def edit(state: StateFile) -> tuple[StateFile, None]:
            entry = state.entries.get(name)
            if entry is None or not entry.is_replica:
                return state, None
            return state.with_entry(name, change(entry)), None

        self._edit(edit)

    def _edit(self, change: Callable[[StateFile], tuple[StateFile, _T]]) -> _T:
        try:
            return self._change_file(change)
        except (NotFoundError, ConfigError):
            if self._rewrite():
                return self._change_file(change)
            self.state, answer = change(self.state)
            return answer

    def _change_file(self, change: Callable[[StateFile], tuple[StateFile, _T]]) -> _T:
        """Change the file, with edits that it lacks; keep all in memory where it cannot be written."""
        outcome: list[tuple[StateFile, StateFile, _T]] = []

        def remember(found: StateFile) -> tuple[StateFile, _T]:
            current = found if self._base is None else merge(self._base, self.state, found)
            changed, answer = change(current)
            outcome[:] = [(found, changed, answer)]
            return changed, answer

        try:
            self.store.update(remember)
        except UnwritableError as exc:
            if not outcome:
                raise
            if self._base is None:
                _log.error("statefile cannot be written; going on from memory", why=str(exc))
            self._base = outcome[0][0]
        else:
            if self._base is not None:
                _log.info("statefile can be written again", path=str(self.store.path))
            self._base = None
        _, self.state, answer = outcome[0]
        return answer

    def _rewrite(self) -> bool:
        try:
            self.store.write(self.state)
        except ConfigError as exc:
            if self._base is None:
                _log.error("statefile cannot be written; going on from memory", why=str(exc))
                self._base = self.state
            return False
        self._base = None
        return True
