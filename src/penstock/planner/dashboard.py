"""TensorBoard dashboard: signals with their thresholds, demand with its forecast, latencies with their targets, decisions.

Steps are simulated seconds since the planner first started; wall times are real. Events are written by a
thread of this module's own, because tensorboardX's queue blocks for ever once its writer has died (full
disk): then points are dropped and counted, and the planner goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from datetime import datetime
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from penstock.core.logs import get_logger
from penstock.planner.dashboard_layout import layout_of
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Decision
from penstock.planner.figures import Figures
from penstock.planner.observers import View
from penstock.planner.series import points

MAX_WAITING = 2000
"""Chosen: a minute of points at speed 20; beyond it the disk is not coming back soon."""

POINTS_PER_INTERVAL = 15
"""Chosen: enough to see a ramp within one interval, few enough for a day's run to open quickly."""

FLUSH_S = 2.0
"""Real seconds without an event after which the file is flushed."""

CLOSE_TIMEOUT_S = 5.0
"""Real seconds to wait for the last points."""

log = get_logger(__name__)


def folder_of(log_folder: Path, config: DecideConfig, *, is_chosen: bool, now: datetime) -> Path | None:
    """Return TensorBoard's folder; None: no dashboard.

    Args:
        log_folder: Of ledger and state.
        config: A planner that only observes is run for its dashboard, so it has one in any case.
        is_chosen: The user gave the folder, so the dashboard lies in it; else in a folder of this run below it.
        now: Names that folder, ``runs/2026-11-22_07-30-00``.
    """
    if is_chosen:
        return log_folder
    return log_folder / "runs" / f"{now:%Y-%m-%d_%H-%M-%S}" if config.no_operation else None


class Dashboard:
    """A listener that draws."""

    def __init__(self, folder: Path, config: DecideConfig) -> None:
        """Start the writing thread, which makes the folder.

        Args:
            folder: TensorBoard's ``--logdir``.
            config: For thresholds and budget.
        """
        self._config = config
        self._period_s = config.adjustment_interval_s / POINTS_PER_INTERVAL
        self._drawn_s = float("-inf")
        self._figures = Figures(config, is_held=False)
        self._has_layout = False
        self._waiting: queue.Queue[Event | None] = queue.Queue(MAX_WAITING)
        self.dropped = 0
        self._folder = folder
        self._thread = threading.Thread(target=self._write_all, name="dashboard", daemon=True)
        self._thread.start()

    def tick(self, view: View) -> None:
        """Draw the newest numbers, a few times per adjustment interval."""
        self._figures.tick(view)
        if view.at_s - self._drawn_s < self._period_s or not view.pools:
            return
        self._drawn_s = view.at_s
        if not self._has_layout:
            self._has_layout = True
            self._put(summary.custom_scalars(layout_of(set(view.pools), self._config.mode)), view, step=0)
        self._draw(points(self._figures, is_decided=False), view)
        self._figures.drop_demands()
        # What was expected for a time stands beside what came at that time.
        for at_s, tokens_per_s in self._figures.due(view.at_s):
            self._draw({"prefill/forecast_tokens_per_second": tokens_per_s}, view, at_s=at_s)

    def decided(self, decision: Decision, view: View) -> None:
        """Write the decision as text, and the latencies of the interval behind it."""
        self._figures.decided(decision, view)
        step = round(view.at_s - view.origin_s)
        lines = [f"* {role.sentence} (`{role.reason.value}`)" for role in decision.roles]
        prefix = "not acted on: no-operation\n" if decision.no_operation else ""
        text = f"**{decision.id}** at {step} s\n{prefix}\n" + "\n".join(lines)
        self._put(summary.text("decisions", text), view, step=step)
        self._draw(points(self._figures, is_decided=True), view)

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_TIMEOUT_S`."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self.dropped:
            log.warning("dashboard points dropped", points=self.dropped)

    def _draw(self, found: dict[str, float], view: View, *, at_s: float | None = None) -> None:
        if found:
            # One event for all points: one per point costs most of a planner's CPU.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found.items()]
            step = round((view.at_s if at_s is None else at_s) - view.origin_s)
            self._put(Summary(value=values), view, step=step)

    def _put(self, content: Summary, view: View, *, step: int) -> None:
        try:
            self._waiting.put_nowait(Event(wall_time=view.wall_s, step=step, summary=content))
        except queue.Full:
            if not self.dropped:
                log.warning("dashboard does not keep up: points are dropped")
            self.dropped += 1

    def _write_all(self) -> None:
        """Run the thread: one event after another until None; the first error ends the writing, with one warning."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            writer = EventsWriter(str(self._folder / "events"))
            while True:
                try:
                    event = self._waiting.get(timeout=FLUSH_S)
                except queue.Empty:
                    writer.flush()
                    continue
                if event is None:
                    break
                writer.write_event(event)
            writer.close()
        except Exception as exc:  # noqa: BLE001 - root of the thread; the planner must outlive the dashboard
            log.warning("dashboard stopped; planning goes on", error=repr(exc))
            self._drain()

    def _drain(self) -> None:
        """Take events off until None, so that none is counted as dropped for a disk that is not coming back."""
        while self._waiting.get() is not None:
            pass
