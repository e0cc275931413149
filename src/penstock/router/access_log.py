"""Access log: one JSON line per completion request, with timings and workers, and without prompts."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from typing import Any, BinaryIO

import orjson

from penstock.core.errors import ConfigError
from penstock.core.logs import get_logger

log = get_logger(__name__)
_FLUSH_BYTES = 64 * 1024


def _open_own(path: str, flags: int) -> int:
    """Open a file that only its owner may read, or a pipe, without waiting for the pipe's reader."""
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


class AccessLog:
    """Writes the access log; lines are buffered, and the router's tick flushes them at least once a second.

    ``file`` is the open file to which lines are appended. If it cannot be written (full disk), the failure is reported once
    and lines are dropped: requests are more important.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lines = bytearray()
        self._is_failing = False

    @classmethod
    def open(cls, target: str) -> AccessLog:
        """Return a log that appends to a file, or writes to stdout if ``target`` is ``-``.

        Raises:
            ConfigError: the file cannot be opened.
        """
        try:
            return cls(sys.stdout.buffer if target == "-" else io.FileIO(target, "ab", opener=_open_own))
        except OSError as exc:
            raise ConfigError(
                f"--access-log: {target}: {exc}; give a file that can be appended to, or -"
            ) from exc

    def write(self, line: dict[str, Any]) -> None:
        """Add one line to the buffer: the JSON object ``line``, with the present time added as ``ts`` (Unix seconds).

        The buffer is written to the log at the next `flush`, or now if it is full.
        """
        self._lines += orjson.dumps({"ts": round(time.time(), 3), **line}) + b"\n"
        if len(self._lines) > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines to the log; if that fails, they are dropped, and the first failure of a series is reported."""
        if not self._lines:
            return
        content, self._lines = bytes(self._lines), bytearray()
        try:
            written = self._file.write(content)
            self._file.flush()
            if written is None:
                raise BlockingIOError(errno.EAGAIN, "the reader of the pipe is too slow")
        except OSError as exc:
            if not self._is_failing:
                problem = str(exc)
                log.warning("access log cannot be written; lines are lost until it can", problem=problem)
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Flush, and close the file unless it is stdout."""
        self.flush()
        if self._file is not sys.stdout.buffer:
            self._file.close()
