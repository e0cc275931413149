"""``state.json`` beside the ledger: the planner now, for `penstock status` and the router's live page.

Written whole or not at all; never read back by the planner.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from penstock.core.local_state import PLANNER_STATE_FILE
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.decision import Decision
from penstock.planner.observers import View

SHOWN_CHANGES = 20
"""Chosen: what a live page has room for; the ledger has them all."""

MIN_PERIOD_S = 0.2
"""Real seconds between two writes. Chosen: faster than people read, slow against a disk."""


class SnapshotWriter:
    """Replaces ``state.json`` at ticks and decisions."""

    def __init__(self, folder: Path, config: DecideConfig, *, now_s: Callable[[], float]) -> None:
        self._path = folder / PLANNER_STATE_FILE
        self._now_s = now_s
        self._rules = {
            "mode": str(config.mode),
            "kv": [config.kv_down, config.kv_up],
            "queue": [config.queue_down, config.queue_up],
            "is_queue_per_worker": config.queue_per_worker,
            "ttft_s": config.ttft_slo_s,
            "itl_s": config.itl_slo_s if config.mode == Mode.SLA else None,
        }
        self._written_s = float("-inf")
        self._changes: list[dict[str, Any]] = []
        self._newest: dict[str, Any] | None = None

    def tick(self, view: View) -> None:
        """Write, unless the last write is too recent."""
        if self._now_s() - self._written_s >= MIN_PERIOD_S:
            self._write(view)

    def decided(self, decision: Decision, view: View) -> None:
        """Keep the decision, for long if it changes replicas, and write at once."""
        self._newest = {
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
        if decision.changes:
            self._changes.append(self._newest)
            del self._changes[:-SHOWN_CHANGES]
        self._write(view)

    def _write(self, view: View) -> None:
        self._written_s = self._now_s()
        content = {field.name: getattr(view, field.name) for field in fields(view) if field.name != "latency"}
        content |= {"pid": os.getpid(), "elapsed_s": view.at_s - view.origin_s}
        content |= {"decisions": self._changes, "newest": self._newest, "rules": self._rules}
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))
        temporary.replace(self._path)
