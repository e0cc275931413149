"""One JSON line per completion request, with timings and workers and without prompts."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from penstock.core.errors import ConfigError
from penstock.core.logs import get_logger

log = get_logger(__name__)
_FLUSH_BYTES = 64 * 1024


class AccessLog:
    """Buffers lines; the router's tick flushes them at least once a second.

    A log that cannot be written any more (full disk) is reported once and skipped: requests matter more.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lines: list[bytes] = []
        self._size = 0
        self._is_failing = False

    @classmethod
    def open(cls, target: str) -> AccessLog:
        """Append to a file, or write to stdout for ``-``.

        Raises:
            ConfigError: the file cannot be opened.
        """
        if target == "-":
            return cls(sys.stdout.buffer)
        try:
            return cls(io.FileIO(Path(target), "ab"))
        except OSError as exc:
            raise ConfigError(
                f"--access-log: {target}: {exc}; give a file that can be appended to, or -"
            ) from exc

    def write(self, line: dict[str, Any]) -> None:
        """Add one line; ``ts`` is added."""
        encoded = orjson.dumps({"ts": round(time.time(), 3), **line}) + b"\n"
        self._lines.append(encoded)
        self._size += len(encoded)
        if self._size > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if not self._lines:
            return
        content = b"".join(self._lines)
        self._lines.clear()
        self._size = 0
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as exc:
            if not self._is_failing:
                problem = str(exc)
                log.warning("access log cannot be written; lines are lost until it can", problem=problem)
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Flush, and close unless it is stdout."""
        self.flush()
        if self._file is not sys.stdout.buffer:
            self._file.close()
