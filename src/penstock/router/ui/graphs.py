"""The other graphs on this machine, for the live page, from their statefiles and planners' state files; read-only."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from penstock.api import WORKER_ROLES, Role
from penstock.core.local_state import ARBITER_KEY, EMPTY_STATES, PLANNER_STATE_FILE, EntryState
from penstock.core.printable import printable
from penstock.router.ui.planner import MALFORMED_ERRORS, planner_state

_STALE_S = 60.0
"""Chosen: a planner writes at each of its intervals, which a graph can configure; only the graph's own page knows the interval."""


def other_graphs(statefile: Path | None) -> list[dict[str, Any]]:
    """Return summaries of the other graphs on this machine (those with a statefile in the same folder), sorted by name.

    A statefile is the file in which the local backend lists the processes of one graph; ``statefile`` is that of the router's
    own graph. The live page shows each summary: ``name``, ``port`` of a router (None if there is none), ``pools`` (ready and
    total workers by role), ``gpus`` (used and budget), ``planner`` (its phase in words) and ``change`` (its newest change).
    Files that cannot be read are ignored. Returns an empty list if ``statefile`` is None.
    """
    if statefile is None:
        return []
    found = []
    for path in sorted(statefile.parent.glob("*.json")):
        if path.name != statefile.name:
            try:
                found.append(_graph(path.stem, printable(orjson.loads(path.read_bytes()))))
            except (OSError, OverflowError, *MALFORMED_ERRORS):
                continue
    return found


def _graph(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    arbiter = data[ARBITER_KEY]
    entries = [each for key, each in data.items() if key != ARBITER_KEY and each["state"] not in EMPTY_STATES]
    ready: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for each in entries:
        if each["role"] in WORKER_ROLES:
            total[each["role"]] += 1
            ready[each["role"]] += each["state"] == EntryState.READY
    ports = [
        urlsplit(each["url"]).port for each in entries if each["role"] == Role.ROUTER and each.get("url")
    ]
    phase, change = _planner(arbiter.get("planner_log_dir"))
    if not _is_alive(int(arbiter["pid"])):
        phase = "its supervisor is gone"
    return {
        "name": name,
        "port": next(iter(ports), None),
        "pools": [
            {"role": role, "ready": ready[role], "total": count} for role, count in sorted(total.items())
        ],
        "gpus": {
            "used": sum(len(each.get("resources", {}).get("gpus", ())) for each in entries),
            "budget": arbiter.get("budget"),
        },
        "planner": phase,
        "change": change,
    }


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _planner(folder: str | None) -> tuple[str, str]:
    """Return a planner's phase in a few words, and its newest change; the change is empty if there is none."""
    if folder is None:
        return "no planner", ""
    try:
        data = printable(orjson.loads((Path(folder) / PLANNER_STATE_FILE).read_bytes()))
        state = planner_state(data, age_s=time.time() - float(data["wall_s"]), stale_s=_STALE_S)
    except (OSError, *MALFORMED_ERRORS):
        return "planner not heard of", ""
    phase = state.phase.replace("_", " ") if state.status == "current" else "planner gone or silent"
    return phase, str(state.changes[0]["sentence"]) if state.changes else ""
