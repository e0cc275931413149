"""The files that show the planner: ``state.json`` and the dashboard, written by a separate thread.

A disk that hangs delays no decision for them. The planner decides by none of them; it goes on with the changes shown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import orjson

from penstock.core.local_state import PLANNER_STATE_FILE
from penstock.core.logs import get_logger
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Decision
from penstock_planner.observers import Observers, View
from penstock_planner.problems import ProblemTracker
from penstock_planner.served_shares import shares_of
from penstock_planner.stats import PlannerStats

if TYPE_CHECKING:
    # TensorBoard's writer, which readers of the files need not load.
    from penstock_planner.dashboard import Dashboard

SHOWN_CHANGES = 20
"""Chosen: what a live page has room for; the ledger has them all."""

MIN_PERIOD_S = 0.2
"""Real seconds between two writes. Chosen: faster than people read, slow against a disk."""

QUEUED = 30
"""Chosen: half a minute of ticks of one graph; what a slower disk misses is counted."""

_SHOWN = ("action", "reason", "current", "desired", "sentence")

CLOSE_S = 2.0
"""Real seconds that a process waits at its end for what is queued. Chosen: a busy disk takes some of it, one that hangs
takes all."""

log = get_logger(__name__)


class FileThread:
    """Runs file operations in order; one for all graphs of a process."""

    def __init__(self) -> None:
        self._works: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        # A thread that a disk holds must not hold the process.
        self._thread = threading.Thread(target=self._run, name="planner files", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Run it after all earlier ones; it must not raise."""
        self._works.put(work)

    def close(self) -> None:
        """Wait for the queue to empty, `CLOSE_S` at most."""
        self._works.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("files of the planner not finished: the disk does not answer", waited_s=CLOSE_S)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()


class FileObservers:
    """Shows one planner in its files; what a slow disk dropped is counted in ``stats``."""

    def __init__(
        self,
        folder: Path,
        config: DecideConfig,
        dashboard: Dashboard | None,
        thread: FileThread,
        stats: PlannerStats,
    ) -> None:
        self._dashboard = dashboard
        written = [] if dashboard is None else [dashboard]
        self._observers = Observers([SnapshotWriter(folder, config, now_s=time.monotonic), *written])
        self._thread = thread
        self._stats = stats
        self._slots = threading.Semaphore(QUEUED)

    def tick(self, view: View) -> None:
        """Show a tick, unless the disk queue is full."""
        self._submit(lambda: self._observers.tick(view))

    def decided(self, decision: Decision, view: View) -> None:
        """Show a decision, unless the disk queue is full."""
        self._submit(lambda: self._observers.decided(decision, view))

    def close(self) -> None:
        """Close the dashboard after all earlier writes."""
        if self._dashboard is not None:
            self._thread.submit(self._dashboard.close)

    def _submit(self, show: Callable[[], None]) -> None:
        if not self._slots.acquire(blocking=False):
            self._stats.dropped_updates += 1
            return

        def write() -> None:
            show()
            self._slots.release()

        self._thread.submit(write)


class SnapshotWriter:
    """Replaces ``state.json``, atomically, at ticks and decisions."""

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
        self._tracker = ProblemTracker(needs_demand=config.policy.follows_demand)
        self._problems: tuple[str, ...] = ()
        self._pull_s = config.metric_pulling_interval_s
        self._written_s = float("-inf")
        self._changes, self._origin_s = shown_changes(self._path)
        self._newest: dict[str, Any] | None = None

    def tick(self, view: View) -> None:
        """Write, unless the last write is too recent."""
        self._problems = self._tracker.after(view)
        if self._now_s() - self._written_s >= MIN_PERIOD_S:
            self._write(view)

    def decided(self, decision: Decision, view: View) -> None:
        """Keep the decision, for long if it changes replicas, and write at once."""
        shares = shares_of(decision)
        self._newest = {
            "served": None if shares is None else (shares.served, shares.predicted),
            "id": decision.id,
            "at_s": decision.at_s - view.origin_s,
            "wall_s": view.wall_s,
            "no_operation": decision.no_operation,
            "roles": {
                role.role.value: {name: getattr(role, name) for name in _SHOWN} for role in decision.roles
            },
        }
        if decision.changes:
            self._changes.append(self._newest)
            del self._changes[:-SHOWN_CHANGES]
        self._write(view)

    def _write(self, view: View) -> None:
        self._written_s = self._now_s()
        if (
            view.origin_s != self._origin_s
        ):  # another timeline: nothing says how long ago earlier changes were
            self._origin_s = view.origin_s
            for each in self._changes:
                each["at_s"] = each["at_s"] if each is self._newest else None
        content = {field.name: getattr(view, field.name) for field in fields(view) if field.name != "latency"}
        content |= {"pid": os.getpid(), "elapsed_s": view.at_s - view.origin_s, "pull_s": self._pull_s}
        content |= {"problems": self._problems}
        content |= {"decisions": self._changes, "newest": self._newest, "rules": self._rules}
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))
        temporary.replace(self._path)


def shown_changes(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Return the changes that a planner before this one showed, oldest first, and the origin of their times.

    None and no changes where there was none, or its file cannot be read; a pipe or a device is none.
    """
    try:
        if not path.is_file():
            return [], None
        found = orjson.loads(path.read_bytes())
        changes = [
            each for each in found["decisions"] if isinstance(each, dict) and each["roles"] and "at_s" in each
        ]
        return changes[-SHOWN_CHANGES:], float(found["origin_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return [], None
