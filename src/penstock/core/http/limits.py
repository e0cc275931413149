"""Bounds of servers, pools and requests, and how many connections a process can hold; durations are real seconds.

libuv answers a lack of open files by closing new connections without a word, so the server looks for itself.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from penstock.core.logs import get_logger


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server accepts; all durations are real seconds.

    Attributes:
        max_header_bytes: Request line and headers together; beyond it 431.
        max_body_bytes: Body without framing; beyond it 413.
        max_buffered_bytes: Bodies of all connections together, complete or not, until they are answered; beyond it 503.
            Chosen: a handler's objects of a body take up to three times its size.
        header_timeout_s: From the first byte of a request to the end of its headers; beyond it 408.
        body_timeout_s: Longest silence inside a body; beyond it 408.
        receive_timeout_s: From the first byte of a request to the end of its body; beyond it 408.
        keep_alive_s: Longest wait for the next request; beyond it the connection is closed.
        write_stall_s: Longest time that a client may leave its buffer full; beyond it it is cut off.
        closing_s: Once the server closes: longest time for a request to arrive in full, beyond it 503, and for a client
            to take not one of its unsent bytes, beyond it it is cut off. Responses that clients read go on. Chosen:
            clients on slow lines take some bytes each second, and a restart must not wait for silent ones.
        max_connections: Open connections; further ones are answered 503 and closed. Fewer are served where the
            process's limit of open files leaves no room for as many.
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
            self.closing_s,
        )
        return min(1.0, max(0.02, shortest / 4))


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of one pool.

    Attributes:
        max_connections: Open connections of all origins; beyond it a request raises SaturatedError.
        max_idle_per_origin: Kept-alive connections without a request.
        keep_alive_s: Longest rest of a kept connection, real seconds; below the servers' own limit, so
            that this side closes first and no request meets a closing socket.
        max_body_bytes: Longest body that ``request`` returns.
        close_s: Longest wait of ``close`` for its connections' ends, real seconds. An aborted socket takes
            one turn of the event loop; an attempt under way finds the pool closed and ends by itself.
    """

    max_connections: int = 16384
    max_idle_per_origin: int = 1024
    keep_alive_s: float = 30.0
    max_body_bytes: int = 64 * 1024 * 1024
    close_s: float = 2.0


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


log = get_logger(__name__)

# Chosen: logs, ledgers, pipes, probes and scrapes of one process.
_SPARE_FILES = 64
# Chosen: often enough to be seen, seldom enough for a log under attack; real seconds.
_REPORT_S = 10.0


def connections_within_files(limits: ServerLimits) -> int:
    """Return how many connections to serve: the configured bound, or what the limit of open files leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.max_connections
    places = (soft - open_files() - _SPARE_FILES) // limits.files_per_connection - limits.reserve_connections
    bound = max(1, min(limits.max_connections, places))
    if bound < limits.max_connections:
        log.warning(
            "fewer connections than configured: raise the limit of open files (ulimit -n)",
            connections=bound,
            max_connections=limits.max_connections,
            open_files_limit=soft,
        )
    return bound


def open_files() -> int:
    """Return how many files this process has open; 0 where the system does not report it."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count, not paths
    except OSError:
        return 0


class ExhaustionLog:
    """Says that connections are turned away, and why; at most one line of a kind in ten seconds.

    Attributes:
        refused: Connections turned away since the last line, counted by their server.
    """

    __slots__ = ("_files_said_s", "_refused_said_s", "refused")

    def __init__(self) -> None:
        self.refused = 0
        self._refused_said_s = self._files_said_s = float("-inf")

    def look(self, now_s: float, *, bound: int) -> None:
        """Report what has run out."""
        if self.refused and now_s - self._refused_said_s >= _REPORT_S:
            log.warning("connections refused: all are in use", refused=self.refused, max_connections=bound)
            self.refused, self._refused_said_s = 0, now_s
        if now_s - self._files_said_s < _REPORT_S:
            return
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as exc:
            if exc.errno in {errno.EMFILE, errno.ENFILE}:
                self._files_said_s = now_s
                log.error(  # noqa: TRY400 - the place says nothing
                    "no file left: new connections are closed unanswered; raise the limit of open files (ulimit -n)",
                    problem=str(exc),
                    open_files=open_files(),
                )
