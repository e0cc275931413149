"""Bounds of a server and of one request; durations are real seconds."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from penstock.core.logs import get_logger

log = get_logger(__name__)

_SPARE_FILES = 64
"""Chosen: logs, ledgers, pipes, probes and scrapes of one process."""
LINGERING: Final = 128
"""Chosen: connections at a time that are turned away with an answer and read on until their client has it. Each holds an
open file for seconds; those beyond are cut off without a word."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server accepts.

    Attributes:
        max_header_bytes: Request line and headers together; beyond it 431.
        max_body_bytes: Body without framing; beyond it 413.
        max_buffered_bytes: Bodies of all connections together until they are answered; beyond it 503. Chosen: a
            handler's objects of a body take up to three times its size.
        header_timeout_s: From the first byte of a request to the end of its headers; beyond it 408.
        body_timeout_s: Longest silence inside a body; beyond it 408.
        receive_timeout_s: From the first byte of a request to the end of its body; beyond it 408.
        keep_alive_s: Longest wait for the next request; beyond it the connection is closed.
        write_stall_s: Longest time that a client may leave its buffer full; beyond it it is cut off.
        drain_idle_s: Once the server drains: how long a connection without a request stays open for the next one, whose
            answer then announces its end. Chosen: a pooled connection in use is used again within seconds, and clients
            that ask at intervals ask every 1, 2, 5, 10 or 15 s, so that hardly a request meets the closing socket.
        closing_s: Once the server closes: longest silence inside a request that arrives, beyond it 503, and longest time
            for a client to take not one of its unsent bytes, beyond it it is cut off. Chosen: clients on slow lines send
            and take some bytes each second, and a restart must not wait for silent ones.
        max_connections: Open connections; further ones are answered 503 and closed. Fewer where the process's limit of
            open files leaves no room for as many.
        reserve_connections: Connections on top, for one vital request each (see ``HttpServer``).
        files_per_connection: Open files that one connection takes, with what its handler opens for it.
        write_high_bytes: Unsent bytes at which the response is paused; it resumes at a quarter of it.
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
        """Return how often connections are looked over: a quarter of the shortest limit, 20 ms to 1 s."""
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
        """Return how many connections to serve: ``max_connections``, or what the limit of open files leaves room for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        places = (
            soft - _open_files() - _SPARE_FILES - LINGERING
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
    """Limits of one request in real seconds; None is unbounded.

    Attributes:
        connect_s: Until the TCP connection stands (phase ``connect``).
        first_byte_s: From sending the request to the response's head (phase ``first_byte``).
        idle_s: Longest silence inside the response (phase ``idle``).
        total_s: From the call to the last byte (phase ``total``).
    """

    connect_s: float | None = 5.0
    first_byte_s: float | None = 600.0
    idle_s: float | None = 600.0
    total_s: float | None = None

    @classmethod
    def each(cls, limit_s: float) -> Timeouts:
        """Return the same limit for every phase and for all of them together."""
        return cls(connect_s=limit_s, first_byte_s=limit_s, idle_s=limit_s, total_s=limit_s)

    def shortest_s(self) -> float:
        """Return the shortest of the limits that the sweep applies, or infinity."""
        return min([inf if each is None else each for each in self[1:]])
