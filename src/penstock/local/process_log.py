"""Log files of the processes: bounded in size, and read back for the reason of a failure."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

MAX_BYTES = 16 * 1024 * 1024
"""Chosen: with one older generation, at most 32 MB a process."""

ARBITER = "arbiter"
"""Name of the arbiter's own log."""

_TAIL_BYTES = 4096
_REASON_LINES = 3
_LINE_CHARACTERS = 240
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"(\(\w+ pid=\d+\) )?(\w+\.)*\w*(Error|Exception): \S")
"""The last line of a traceback, as it is or with the process that vLLM puts before it."""


def log_path(log_dir: str, name: str) -> Path:
    """Return where the process ``name`` writes its stdout and stderr."""
    return Path(log_dir) / f"{name}.log"


def size_of(path: Path) -> int:
    """Return the bytes written so far, 0 when there is no file yet."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def bound(path: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Keep a log within ``max_bytes`` plus one older generation, ``NAME.log.1``; return whether it was cut.

    The writer keeps its descriptor, opened for appending, so the file is copied and then emptied in
    place; lines written between the two steps are lost. On a full disk the copy is given up, not the bound.
    """
    if size_of(path) <= max_bytes:
        return False
    older = path.with_name(path.name + ".1")
    try:
        shutil.copyfile(path, older)
    except OSError:
        with contextlib.suppress(OSError):
            older.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
        return True
    return False


def last_lines(path: Path, since: int = 0, lines: int = _REASON_LINES) -> str:
    """Return the last non-empty lines written after byte ``since``, joined by `` | ``; empty when there are none.

    An exception before them takes the place of the first: what other threads log afterwards says less.
    """
    size = size_of(path)
    start = since if since <= size else 0
    try:
        with path.open("rb") as file:
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    plain = (_COLOUR.sub("", line).strip()[:_LINE_CHARACTERS] for line in text.splitlines())
    kept = [line for line in plain if line]
    quoted, raised = kept[-lines:], [line for line in kept if _RAISED.match(line)]
    if raised and raised[-1] not in quoted:
        quoted[0] = raised[-1]
    return " | ".join(quoted)
