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

_TAIL_BYTES = 64 * 1024
"""Chosen: vLLM prints the traceback of its engine core twice and then that of its API server, some 20 kB."""
_REASON_LINES = 3
_LINE_CHARACTERS = 240
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOGGED = re.compile(r"(\(\w+ pid=\d+\) )?(ERROR \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
"""What vLLM puts before a line: the process, and in its log the level, the time and the place."""
_EXCEPTION_LINE = re.compile(
    r"(\w+\.)*\w*(Error|Exception|Interrupt)(: \S|$)|Fatal Python error: |\s*what\(\):|[\w ./-]+: error: "
)
"""The last line of a traceback, of an abort, or of a refused command line, after what is put before it."""
_TRACE = re.compile(r"\s|$|Traceback \(most recent|During handling of|The above exception|Process \w+:")
"""Begins of the other lines of a traceback, and of what joins two."""
_DETAILED = re.compile(r"\d+ validation errors? for ")
"""An error whose cause is in its next line: pydantic's."""
_JOINED_BY = 10
"""Maximum number of lines of other kinds between two tracebacks of one failure. Chosen: processes log their own end between them."""
_NOISE = re.compile(r"resource_tracker|warnings\.warn\(|nanobind: ")
"""What an interpreter says of leaks while it ends, whatever the cause."""


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


def tail(path: Path, max_bytes: int) -> str:
    """Return the last lines of a log, entire except for the first, within ``max_bytes``; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, size_of(path) - max_bytes))
            return file.read(max_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(path: Path, since: int = 0, *, only_errors: bool = False) -> str:
    """Return why a process may have ended, by what it wrote after byte ``since``, joined by `` | ``; empty if unknown.

    The first error of the last failure comes first, as its cause, then its last error, then the last lines that are
    not noise of the end; at most three. ``only_errors`` leaves out lines of a process that reported no error.
    """
    size = size_of(path)
    start = since if since <= size else 0
    try:
        with path.open("rb") as file:
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [_COLOUR.sub("", line).rstrip() for line in text.splitlines()]
    errors = _last_failure(lines)
    if only_errors and not errors:
        return ""
    after = errors[-1] + 1 if errors else 0
    shown = list(dict.fromkeys(_error(lines, at) for at in (errors[:1] + errors[-1:])))
    rest = [line.strip() for line in lines[after:] if line.strip() and not _NOISE.search(line)]
    rest = [line for line in rest if not any(line in error for error in shown)]
    left = _REASON_LINES - len(shown)
    return " | ".join(line[:_LINE_CHARACTERS] for line in (*shown, *rest[len(rest) - min(left, len(rest)) :]))


def _last_failure(lines: list[str]) -> list[int]:
    """Return where the errors of the last failure are: those that only tracebacks and a few lines more are between."""
    found: list[int] = []
    others = 0
    for at in range(len(lines) - 1, -1, -1):
        plain = _LOGGED.sub("", lines[at], count=1)
        if _EXCEPTION_LINE.match(plain):
            found.insert(0, at)
            others = 0
        elif found and not _TRACE.match(plain):
            others += 1
            if others > _JOINED_BY:
                break
    return found


def _error(lines: list[str], at: int) -> str:
    """Return an error without what vLLM's log puts before it, and with its cause where the next line has it."""
    words = _LOGGED.sub("", lines[at], count=1).strip()
    following = "".join(lines[at + 1 : at + 2])
    return f"{words}: {_LOGGED.sub('', following, count=1).strip()}" if _DETAILED.search(words) else words
