"""``state.json`` beside the ledger: the planner now, for `penstock status` and the live table.

Written whole or not at all; never read back by the planner.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from penstock.planner.decide.decision import Decision
from penstock.planner.observers import View

FILE_NAME = "state.json"

SHOWN_DECISIONS = 20
"""Chosen: what a live table has room for; the ledger has them all."""

MIN_PERIOD_S = 0.2
"""Real seconds between two writes. Chosen: faster than people read, slow against a disk."""


class SnapshotWriter:
    """Replaces ``state.json`` at ticks and decisions."""

    def __init__(self, folder: Path, *, now_s: Callable[[], float]) -> None:
        self._path = folder / FILE_NAME
        self._now_s = now_s
        self._written_s = float("-inf")
        self._decisions: list[dict[str, Any]] = []

    def tick(self, view: View) -> None:
        """Write, unless the last write is too recent."""
        if self._now_s() - self._written_s >= MIN_PERIOD_S:
            self._write(view)

    def decided(self, decision: Decision, view: View) -> None:
        """Keep the decision and write at once."""
        self._decisions.append(
            {
                "id": decision.id,
                "at_s": decision.at_s - view.origin_s,
                "wall_s": view.wall_s,
                "no_operation": decision.no_operation,
                "roles": {
                    role.role.value: {
                        "action": role.action.value,
                        "reason": role.reason.value,
                        "current": role.current,
                        "desired": role.desired,
                        "sentence": role.sentence,
                    }
                    for role in decision.roles
                },
            }
        )
        del self._decisions[:-SHOWN_DECISIONS]
        self._write(view)

    def _write(self, view: View) -> None:
        self._written_s = self._now_s()
        content = {field.name: getattr(view, field.name) for field in fields(view) if field.name != "latency"}
        content |= {"pid": os.getpid(), "elapsed_s": view.at_s - view.origin_s, "decisions": self._decisions}
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))
        temporary.replace(self._path)
