"""Limits of a server and timeouts of a client's request; durations are wall-clock seconds."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from penstock.core.logs import get_logger

log = get_logger(__name__)

_SPARE_FILES = 64
"""Number of file descriptors reserved for other uses. Chosen: logs, ledgers, pipes, probes and scrapes of one
process."""
MAX_LINGERING: Final = 128
"""Maximum number of connections at a time that are rejected with a response and read until the client has received
it. Chosen: each needs an open file for seconds; further ones are aborted without a response."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server. "Else 431" means that a request beyond the limit is rejected with that HTTP status.

    Attributes:
        max_header_bytes: Maximum length of request line and headers together; else 431.
        max_body_bytes: Maximum length of a body without framing; else 413.
        max_buffered_bytes: Maximum total length of the bodies of all connections until they are answered; else 503.
            Chosen: a handler's objects for a body need up to three times its size.
        header_timeout_s: Maximum time from the first byte of a request to the end of its headers; else 408.
        body_timeout_s: Maximum time without data inside a body; else 408.
        receive_timeout_s: Maximum time from the first byte of a request to the end of its body; else 408.
        keep_alive_s: Maximum idle time between requests; then the connection is closed.
        write_stall_s: Maximum time for which the client's send buffer stays full; then the connection is aborted.
        drain_idle_s: Time for which an idle connection stays open after the server began to drain, for a next
            request, whose response then announces the end. Chosen: a pooled connection in use is used again within
            seconds, and clients that poll do so every 1, 2, 5, 10 or 15 s, so that hardly any request meets the
            closing socket.
        closing_s: Limits after the server began to close: maximum time without data inside an arriving request (else
            503), and maximum time in which a client takes none of its unsent bytes (then the connection is aborted).
            Chosen: clients on slow lines send and receive some bytes each second, and a restart must not wait for
            silent ones.
        max_connections: Maximum number of open connections; further ones get 503 and are closed. It is lowered if the
            process's limit of open files requires it.
        reserve_connections: Number of additional connections, each for one vital request, such as a probe (see
            ``HttpServer``).
        files_per_connection: Number of open files that one connection needs, including those of its handler.
        write_high_bytes: Number of unsent bytes at which the response is paused; it resumes at a quarter of that
            number.
    """

    max_header_bytes: int = 32 * 1024
    max_body_bytes: int = 32 * 1024 * 1024
    max_buffered_bytes: int = 512 * 1024 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    receive_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    write_stall_s: float = 120.0
    drain_idle_s: float = 6.5
    closing_s: float = 2.0
    max_connections: int = 8192
    reserve_connections: int = 64
    files_per_connection: int = 1
    write_high_bytes: int = 64 * 1024

    def sweep_period_s(self) -> float:
        """Return the seconds between two checks of the timeouts: a quarter of the shortest limit, between 20 ms and 1 s."""
        shortest = min(
            self.header_timeout_s,
            self.body_timeout_s,
            self.receive_timeout_s,
            self.keep_alive_s,
            self.write_stall_s,
            self.drain_idle_s,
            self.closing_s,
        )
        return min(1.0, max(0.02, shortest / 4))

    def connections_within_files(self) -> int:
        """Return the number of connections to serve: ``max_connections``, or fewer if the limit of open files requires it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        places = (
            soft - _open_files() - _SPARE_FILES - MAX_LINGERING
        ) // self.files_per_connection - self.reserve_connections
        bound = max(1, min(self.max_connections, places))
        if bound < self.max_connections:
            log.warning(
                "fewer connections than configured: raise the limit of open files (ulimit -n)",
                connections=bound,
                max_connections=self.max_connections,
                open_files_limit=soft,
            )
        return bound


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count, not paths
    except OSError:
        return 0


class Timeouts(NamedTuple):
    """Timeouts of one request in wall-clock seconds; None means no limit.

    Attributes:
        connect_s: Maximum time to open the TCP connection (phase ``connect``).
        first_byte_s: Maximum time from sending the request to the response's head (phase ``first_byte``).
        idle_s: Maximum time without data inside the response (phase ``idle``).
        total_s: Maximum time from the call to the last byte (phase ``total``).
    """

    connect_s: float | None = 5.0
    first_byte_s: float | None = 600.0
    idle_s: float | None = 600.0
    total_s: float | None = None

    @classmethod
    def each(cls, limit_s: float) -> Timeouts:
        """Return timeouts with the same limit for every phase and for the total."""
        return cls(connect_s=limit_s, first_byte_s=limit_s, idle_s=limit_s, total_s=limit_s)

    def shortest_s(self) -> float:
        """Return the shortest timeout except ``connect_s``; infinity if all are None."""
        return min([inf if each is None else each for each in self[1:]])
