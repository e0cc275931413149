"""Records which product functions a process runs, one window after another; Python imports this module at start.

The folder PENSTOCK_HOUSE_PROBE holds ``window``, a number. When it grows, each process writes the functions that ran
since to ``<number before>/<pid>.json``, alongside its command line, and starts an empty record. A function is there
once, in the order of first calls: its file, its name, its first line, and the number of the function that called it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = re.compile(r"/((?:src|operator|planner)/penstock(?:_operator|_planner)?/.*)")
IS_FUNCTION = 0x1
"""``CO_OPTIMIZED``: bodies of modules and classes, which run when imported, do not carry it."""

FOLDER = os.environ.get("PENSTOCK_HOUSE_PROBE")
_files: dict[CodeType, str | None] = {}
_seen: dict[CodeType, CodeType | None] = {}


def _file(code: CodeType) -> str | None:
    """Return the product's file that a function is in; None: it is not a function of the product."""
    if code not in _files:
        found = PACKAGE.search(code.co_filename) if code.co_flags & IS_FUNCTION else None
        _files[code] = found[1] if found else None
    return _files[code]


def _record(frame: FrameType, event: str, _argument: object) -> None:
    if event != "call" or frame.f_code in _seen or _file(frame.f_code) is None:
        return
    caller = frame.f_back
    while caller is not None and _file(caller.f_code) is None:
        caller = caller.f_back
    _seen[frame.f_code] = None if caller is None else caller.f_code


def _calls(seen: dict[CodeType, CodeType | None]) -> list[list[object]]:
    numbers = {code: number for number, code in enumerate(seen)}
    return [
        [_file(code), code.co_qualname, code.co_firstlineno, numbers.get(caller)]
        for code, caller in seen.items()
    ]


def _follow(folder: Path) -> None:
    """Write a record for each window that ends."""
    window = 0
    while True:
        time.sleep(0.01)
        try:
            current = int((folder / "window").read_text())
        except (OSError, ValueError):
            continue
        if current != window:
            calls = _calls(_seen.copy())
            _seen.clear()
            record = {"command": sys.argv, "calls": calls}
            part = folder / str(window) / f"{os.getpid()}.part"
            part.write_text(json.dumps(record))
            part.rename(part.with_suffix(".json"))
            window = current


if FOLDER:
    threading.Thread(target=_follow, args=(Path(FOLDER),), daemon=True).start()
    threading.setprofile(_record)
    sys.setprofile(_record)
