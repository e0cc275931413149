"""The listening sockets that the arbiter holds for a graph's routers, which come and go: connections wait meanwhile.

A router gets its socket at the start (`penstock.core.http.inherited_socket`). The watchdog holds the sockets, too, so that they
outlive an arbiter that is killed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from penstock.core import logs
from penstock.core.http.server import BACKLOG
from penstock.local.statefile import ProcessEntry

_HOST = "127.0.0.1"
_log = logs.get_logger(__name__)


class HeldSockets:
    """Sockets of one arbiter, by port."""

    def __init__(self) -> None:
        """Hold none."""
        self._sockets: dict[int, socket.socket] = {}

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors of all, which a child has to inherit to hold them."""
        return tuple(each.fileno() for each in self._sockets.values())

    def take_over(self, descriptors: Iterable[int]) -> None:
        """Hold what this process inherited from the one before."""
        for descriptor in descriptors:
            try:
                taken = socket.socket(fileno=descriptor)
            except OSError as exc:
                _log.warning("a socket that was held is gone", descriptor=descriptor, why=str(exc))
                continue
            taken.set_inheritable(False)
            self._sockets[taken.getsockname()[1]] = taken

    def hold(self, entries: Iterable[ProcessEntry]) -> None:
        """Hold the sockets of the entries that take one; a router whose port is in use says so itself when it starts."""
        for entry in entries:
            port = entry.port
            if not entry.takes_socket or port is None or port in self._sockets:
                continue
            try:
                self._sockets[port] = socket.create_server((_HOST, port), backlog=BACKLOG)
            except OSError as exc:
                _log.warning(
                    "the router's port is not held; restarts refuse connections", port=port, why=str(exc)
                )

    def descriptor_for(self, entry: ProcessEntry) -> int | None:
        """Return the file descriptor that a process is to be given; None: it listens by itself."""
        held = self._sockets.get(entry.port or 0) if entry.takes_socket else None
        return None if held is None else held.fileno()

    def release(self, entry: ProcessEntry) -> None:
        """Stop listening for an entry, in every process: nothing will serve it, so its clients are refused at once."""
        held = self._sockets.pop(entry.port or 0, None) if entry.takes_socket else None
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RD)  # ends the listening of all that hold it, the watchdog included
            held.close()
