"""How many connections a process can hold, and what is said when it can hold no more.

libuv answers a lack of open files by closing new connections without a word, so the server looks for itself.
"""

from __future__ import annotations

import errno
import os
import resource

from penstock.core.http.limits import ServerLimits
from penstock.core.logs import get_logger

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
    """Return how many files this process has open; 0 where the system does not tell."""
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
