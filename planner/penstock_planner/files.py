"""The files that display the planner: ``state.json`` and the dashboard, written by a separate thread.

The planner does not read them, and a disk that hangs delays no decision. If writing is slow, ticks can be dropped; a decision that
changes replicas is never dropped. After a restart, both files are filled from the ledger.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import orjson

from penstock.core.local_state import PLANNER_STATE_FILE
from penstock.core.logs import get_logger
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.ledger import FormerChange, FormerRuns
from penstock_planner.observers import Observers, PlannerView
from penstock_planner.problems import ProblemTracker
from penstock_planner.served_shares import shares_of
from penstock_planner.stats import PlannerStats

if TYPE_CHECKING:
    # TensorBoard's writer, which readers of the files need not load.
    from penstock_planner.dashboard import Dashboard

SHOWN_CHANGES = 20
"""Maximum number of changes in ``state.json``. Chosen: what fits on a live page; the ledger has them all."""

MIN_PERIOD_S = 0.2
"""Minimum real seconds between two writes of ``state.json``. Chosen: faster than people read, slow enough for a disk."""

QUEUED = 30
"""Maximum number of queued ticks (30). Chosen: half a minute of one graph. Further ticks are dropped and counted."""

DROPPED_SHOWN_S: Final = 60.0
"""Real seconds for which dropped ticks are shown as a problem. Chosen: the live page covers one minute."""

_SHOWN = ("action", "reason", "current", "desired", "sentence")

LATE_S = 2.0
"""Real seconds (2) for which the writing thread makes no progress at shutdown before the disk counts as hanging.

Chosen: a busy disk makes some progress within that time, one that hangs makes none.
"""

CLOSE_S = 20.0
"""Timeout (20 real seconds) at shutdown for queued writes, and once more for the writes of pictures that are drawn meanwhile.

Chosen: below the 30 s that Kubernetes gives a process by default.
"""

log = get_logger(__name__)


class FileThread:
    """Runs file operations in order in one thread, for all graphs of a process.

    A second thread draws pictures, so that drawing delays no write.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._drawings: deque[Callable[[], object]] = deque()
        # A daemon thread, so that a system call which hangs on the disk does not prevent the process from exiting.
        self._thread = threading.Thread(target=self._run, name="planner files", daemon=True)
        self._thread.start()
        # The drawing thread is not a daemon: exiting while it computes in a library would abort the process. The interpreter
        # waits for it, and it ends when there is nothing to draw.
        self._artist: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], object]) -> None:
        """Queue a file operation for the writing thread; it runs after all operations that were queued before it.

        Returns at once.
        """
        self._works.put(work)

    def draw(self, work: Callable[[], object]) -> None:
        """Queue a computation that does not touch the disk, such as drawing a picture, for the drawing thread.

        It runs after all computations that were queued before it.
        """
        with self._lock:
            self._drawings.append(work)
            if self._artist is None:
                self._artist = threading.Thread(target=self._run_drawings, name="planner pictures")
                self._artist.start()

    def close(self) -> None:
        """Wait until all pictures are drawn and all queued operations are done, then stop the thread.

        Gives up on queued writes after 20 real seconds (`CLOSE_S`), on writes of pictures after another 20, and after 2
        real seconds (`LATE_S`) in which the writing thread makes no progress because the disk hangs. What is not
        written by then is lost. Does nothing if the thread is not running.
        """
        if not self._thread.is_alive():
            return
        is_written = self._wait()
        artist = self._artist
        if artist is not None:
            artist.join()
        is_written = is_written and self._wait()
        self._works.put(None)
        if is_written:
            self._thread.join(LATE_S)

    def _wait(self) -> bool:
        """Return True when all submitted operations are done; False, with a warning, after 20 real seconds or if the disk hangs.

        The disk hangs if the thread uses no processor time for 2 real seconds (`LATE_S`), which means that it is
        blocked in a system call.
        """
        ident = self._thread.ident
        assert ident is not None  # noqa: S101 - it was started
        clock, is_done = time.pthread_getcpuclockid(ident), threading.Event()
        self._works.put(is_done.set)
        used_s, since_s = time.clock_gettime(clock), time.monotonic()
        until_s = since_s + CLOSE_S
        while not is_done.wait(0.05):
            now_s, now_used_s = time.monotonic(), time.clock_gettime(clock)
            if now_used_s != used_s:
                used_s, since_s = now_used_s, now_s
            elif now_s - since_s >= LATE_S:
                log.warning("files of the planner not finished: the disk does not respond", waited_s=LATE_S)
                return False
            if now_s >= until_s:
                log.warning("files of the planner not finished in time", left=self._works.qsize())
                return False
        return True

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            _run(work)

    def _run_drawings(self) -> None:
        while True:
            with self._lock:
                if not self._drawings:
                    self._artist = None
                    return
                work = self._drawings.popleft()
            _run(work)


def _run(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as exc:  # noqa: BLE001 - root of the thread, which others need
        log.warning("the dashboard is not updated: a write failed", error=repr(exc))


class FileObservers:
    """Observer that shows one planner in the files of its folder, ``state.json`` and the dashboard, which another thread writes."""

    def __init__(
        self,
        folder: Path,
        config: DecideConfig,
        dashboard: Dashboard | None,
        thread: FileThread,
        stats: PlannerStats,
    ) -> None:
        """Prepare the files without writing.

        Args:
            folder: Folder of the ledger and of ``state.json``.
            config: Configuration of the planner.
            dashboard: Dashboard to draw; None if there is none.
            thread: Thread that writes.
            stats: Statistics in which dropped ticks are counted.
        """
        self._dashboard = dashboard
        self._snapshots = SnapshotWriter(folder, config, now_s=time.monotonic, stats=stats)
        written = [] if dashboard is None else [dashboard]
        self._observers = Observers([self._snapshots, *written])
        self._thread = thread
        self._stats = stats
        self._slots = threading.Semaphore(QUEUED)
        # The ledger up to this point; decisions of this run are passed to `decided`.
        self._former: FormerRuns | None = FormerRuns.before_now(folder)

    def tick(self, view: PlannerView) -> None:
        """Queue the planner's state at a tick (metrics scrape) to be written. Drops it if 30 ticks (`QUEUED`) are waiting."""
        if self._slots.acquire(blocking=False):
            self._submit(lambda: self._observers.tick(view), view, is_tick=True)
        else:
            self._stats.dropped_updates += 1

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Queue a decision to be written. If the queue is full, a decision that changes no replicas is dropped instead.

        A decision that changes replicas is never dropped.

        Args:
            decision: The decision, which is recorded and not carried out yet.
            view: State of the planner at the newest tick (metrics scrape).
        """
        if any(role.desired != role.current for role in decision.roles):
            self._submit(lambda: self._observers.decided(decision, view), view, is_tick=False)
        elif self._slots.acquire(blocking=False):
            self._submit(lambda: self._observers.decided(decision, view), view, is_tick=True)
        else:
            self._stats.dropped_updates += 1

    def close(self) -> None:
        """Queue a last picture and the closing of the dashboard, after all writes that are already queued.

        Returns without waiting for them.
        """
        dashboard, thread = self._dashboard, self._thread
        if dashboard is not None:

            def draw_last() -> None:
                dashboard.draw_last()
                thread.draw(lambda: thread.submit(dashboard.close))

            thread.submit(draw_last)

    def _submit(self, show: Callable[[], None], view: PlannerView, *, is_tick: bool) -> None:
        def write() -> None:
            try:
                self._fill(view)
                show()
            finally:
                if is_tick:
                    self._slots.release()

        self._thread.submit(write)

    def _fill(self, view: PlannerView) -> None:
        """Show the changes of earlier runs, before the first write of this run."""
        former, self._former = self._former, None
        if former is None:
            return
        changes = former.changes(SHOWN_CHANGES)
        self._snapshots.fill(changes, view)
        if self._dashboard is not None:
            self._dashboard.fill(former, changes, view)


class SnapshotWriter:
    """Observer that writes the planner's current state to ``state.json`` at ticks (metrics scrapes) and decisions.

    Each write is atomic.
    """

    def __init__(
        self,
        folder: Path,
        config: DecideConfig,
        *,
        now_s: Callable[[], float],
        stats: PlannerStats | None = None,
    ) -> None:
        """Prepare the file without writing.

        Args:
            folder: Folder of ``state.json``.
            config: Configuration of the planner.
            now_s: Monotonic clock in real seconds.
            stats: Statistics that count dropped ticks; None if no ticks are dropped.
        """
        self._stats = stats
        self._drops = deque([(now_s(), 0 if stats is None else stats.dropped_updates)])
        self._path = folder / PLANNER_STATE_FILE
        self._now_s = now_s
        self._rules = {
            "mode": str(config.mode),
            "kv": [config.kv_down, config.kv_up],
            "queue": [config.queue_down, config.queue_up],
            "is_queue_per_worker": config.queue_per_worker,
            "ttft_s": config.ttft_slo_s,
            "itl_s": config.itl_slo_s,
        }
        self._tracker = ProblemTracker(needs_demand=config.policy.follows_demand)
        self._problems: tuple[str, ...] = ()
        self._pull_s = config.metric_pulling_interval_s
        self._written_s = float("-inf")
        self._changes: list[dict[str, Any]] = []
        self._origin_s: float | None = None
        self._newest: dict[str, Any] | None = None

    def fill(self, changes: Sequence[FormerChange], view: PlannerView) -> None:
        """Add replica changes of earlier runs to the list that ``state.json`` shows.

        Changes from another boot of the host, or from a run with another time factor (simulated seconds per real
        second), are written without ``at_s`` (their simulated time), since it cannot be compared with the times of this
        run.

        Args:
            changes: Changes to add, oldest first; only the newest 20 (`SHOWN_CHANGES`) are kept.
            view: State at the start of this run.
        """
        self._origin_s = view.origin_s
        for each in changes:
            is_same = each.origin_s == view.origin_s
            at_s = each.decision.at_s - each.origin_s if is_same else None
            self._changes.append(_shown(each.decision, at_s, each.wall_s))
        del self._changes[:-SHOWN_CHANGES]

    def tick(self, view: PlannerView) -> None:
        """Write the planner's state to ``state.json``, unless the last write was less than 0.2 real seconds (`MIN_PERIOD_S`) ago."""
        self._problems = self._tracker.after(view)
        if self._now_s() - self._written_s >= MIN_PERIOD_S:
            self._write(view)

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Write the planner's state to ``state.json`` with this decision as the newest.

        A decision that changes replicas is also added to the list of replica changes.

        Args:
            decision: The decision, which is recorded and not carried out yet.
            view: State of the planner at the newest tick (metrics scrape).
        """
        self._newest = _shown(decision, decision.at_s - view.origin_s, view.wall_s)
        if decision.changes:
            self._changes.append(self._newest)
            del self._changes[:-SHOWN_CHANGES]
        self._write(view)

    def _write(self, view: PlannerView) -> None:
        self._written_s = self._now_s()
        if view.origin_s != self._origin_s:  # on another timeline the age of earlier changes is unknown
            self._origin_s = view.origin_s
            for each in self._changes:
                each["at_s"] = each["at_s"] if each is self._newest else None
        content = {field.name: getattr(view, field.name) for field in fields(view) if field.name != "latency"}
        content |= {"pid": os.getpid(), "elapsed_s": view.at_s - view.origin_s, "pull_s": self._pull_s}
        content |= {"problems": (*self._problems, *self._dropped())}
        content |= {"decisions": self._changes, "newest": self._newest, "rules": self._rules}
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))
        temporary.replace(self._path)

    def _dropped(self) -> list[str]:
        """Return a sentence about the ticks dropped in the last minute; empty if there were none."""
        if self._stats is None:
            return []
        now_s, total = self._now_s(), self._stats.dropped_updates
        drops = self._drops
        drops.append((now_s, total))
        while now_s - drops[1][0] > DROPPED_SHOWN_S:
            drops.popleft()
        number = total - drops[0][1]
        return (
            [f"{number} ticks of the last minute are missing from the dashboard: writing takes too long"]
            if number
            else []
        )


def _shown(decision: Decision, at_s: float | None, wall_s: float | None) -> dict[str, Any]:
    shares = shares_of(decision)
    return {
        "served": None if shares is None else (shares.served, shares.predicted),
        "id": decision.id,
        "at_s": at_s,
        "wall_s": wall_s,
        "no_operation": decision.no_operation,
        "roles": {role.role.value: {name: getattr(role, name) for name in _SHOWN} for role in decision.roles},
    }
