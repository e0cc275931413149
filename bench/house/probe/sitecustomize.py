"""Records which product files a process runs, one window after another; Python imports this module at start.

The folder PENSTOCK_HOUSE_PROBE holds ``window``, a number. When it grows, each process writes the files whose
functions ran since to ``<number before>/<pid>.json``, beside its command line, and starts an empty record.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType

PACKAGE = re.compile(r"/((?:src|operator|planner)/penstock(?:_operator|_planner)?/.*)")
IS_FUNCTION = 0x1
"""``CO_OPTIMIZED``: bodies of modules and classes, which run when imported, do not carry it."""

FOLDER = os.environ.get("PENSTOCK_HOUSE_PROBE")
_seen: set[str] = set()


def _record(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and frame.f_code.co_flags & IS_FUNCTION:
        _seen.add(frame.f_code.co_filename)


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
            found = (PACKAGE.search(name) for name in _seen.copy())
            files = sorted({each[1] for each in found if each})
            _seen.clear()
            record = {"command": sys.argv, "files": files}
            part = folder / str(window) / f"{os.getpid()}.part"
            part.write_text(json.dumps(record))
            part.rename(part.with_suffix(".json"))
            window = current


if FOLDER:
    threading.Thread(target=_follow, args=(Path(FOLDER),), daemon=True).start()
    threading.setprofile(_record)
    sys.setprofile(_record)
