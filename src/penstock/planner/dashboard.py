"""TensorBoard dashboard: signals with their thresholds, demand with its forecast, latencies with their targets, decisions.

Steps are simulated seconds since the planner first started; wall times are real. Events are written by a
thread of this module's own, because tensorboardX's queue blocks for ever once its writer has died (full
disk): then points are dropped and counted, and the planner goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from penstock.api import Role
from penstock.core.histogram import quantile
from penstock.core.logs import get_logger
from penstock.planner.dashboard_layout import layout_of
from penstock.planner.dashboard_points import (
    demand_points,
    profile_points,
    target_points,
)
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import Demand
from penstock.planner.followed import Attainment, ExpectedDemand
from penstock.planner.histogram import gained
from penstock.planner.observers import View
from penstock.planner.sources.base import Buckets

MAX_WAITING = 2000
"""Chosen: a minute of points at speed 20; beyond it the disk is not coming back soon."""

POINTS_PER_INTERVAL = 15
"""Chosen: enough to see a ramp within one interval, few enough for a day's run to open quickly."""

CLOSE_TIMEOUT_S = 5.0
"""Real seconds to wait for the last points."""

log = get_logger(__name__)

_Call = Callable[[], None]


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
        """Start the writing thread; the folder is made by tensorboardX.

        Args:
            folder: TensorBoard's ``--logdir``.
            config: For thresholds and budget.
        """
        self._config = config
        self._period_s = config.adjustment_interval_s / POINTS_PER_INTERVAL
        self._drawn_s = float("-inf")
        self._last_s: float | None = None
        self._gpu_seconds = 0.0
        self._before: dict[str, Buckets] = {}
        self._demands: list[Demand] = []
        self._expected = ExpectedDemand()
        self._attainment = Attainment(config)
        self._has_layout = False
        self._waiting: queue.Queue[_Call | None] = queue.Queue(MAX_WAITING)
        self.dropped = 0
        self._folder = folder
        self._writer: Any = None
        self._thread = threading.Thread(target=self._write_all, name="dashboard", daemon=True)
        self._thread.start()

    def tick(self, view: View) -> None:
        """Draw the newest numbers, a few times per adjustment interval."""
        if self._last_s is not None:
            self._gpu_seconds += view.gpus * max(0.0, view.at_s - self._last_s)
        self._last_s = view.at_s
        if view.pull is not None and view.pull.demand is not None:
            self._demands.append(view.pull.demand)
        self._attainment.tick(view)
        if view.at_s - self._drawn_s < self._period_s or not view.pools:
            return
        self._drawn_s = view.at_s
        if not self._has_layout:
            self._has_layout = True
            layout = layout_of(set(view.pools), self._config.mode)
            self._put(lambda: self._writer.add_custom_scalars(layout))
        points = {
            **self._points(view),
            **self._signals(view),
            **target_points(self._config),
            **demand_points(self._demands),
        }
        self._demands = []
        self._draw(points, view)
        self._draw_expected(view)

    def decided(self, decision: Decision, view: View) -> None:
        """Write the decision as text, and the latencies of the interval behind it."""
        step = _step(view)
        lines = [f"* {role.sentence} (`{role.reason.value}`)" for role in decision.roles]
        prefix = "not acted on: no-operation\n" if decision.no_operation else ""
        text = f"**{decision.id}** at {step} s\n{prefix}\n" + "\n".join(lines)
        self._put(lambda: self._writer.add_text("decisions", text, step, view.wall_s))
        points: dict[str, float] = {}
        for key, buckets in self._attainment.latency.items():
            fresh = gained(self._before.get(key, ()), buckets)
            for q in (0.5, 0.99):
                value = quantile(fresh, q)
                if value is not None:
                    points[f"{key}/p{q * 100:.0f}_seconds"] = value
        self._before = dict(self._attainment.latency)
        forecast = self._expected.decided(decision, view.at_s)
        if forecast is not None and forecast.supply_tokens_per_s is not None:
            points["prefill/supply_tokens_per_second"] = forecast.supply_tokens_per_s
        attained = self._attainment.points(view.at_s) or {}
        self._draw({**points, **profile_points(decision), **attained}, view)

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_TIMEOUT_S`."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self.dropped:
            log.warning("dashboard points dropped", points=self.dropped)

    def _points(self, view: View) -> dict[str, float]:
        points: dict[str, float] = {
            "gpus/in_use": view.gpus,
            "gpu_hours/cumulative": self._gpu_seconds / 3600,
        }
        if view.max_gpu_budget is not None:
            points["gpus/budget"] = view.max_gpu_budget
        for role, pool in view.pools.items():
            points[f"replicas/{role.value}_ready"] = pool.ready
            points[f"replicas/{role.value}_desired"] = view.desired.get(role, pool.ready + pool.starting)
            points[f"replicas/{role.value}_starting"] = pool.starting
            points[f"replicas/{role.value}_draining"] = pool.draining
        for role, took_s in view.startup_s.items():
            points[f"startup/{role.value}_seconds"] = took_s
        if view.lag_p99_s is not None:
            points["lag/p99_seconds"] = view.lag_p99_s
        return points

    def _signals(self, view: View) -> dict[str, float]:
        points: dict[str, float] = {}
        config = self._config
        if config.mode == Mode.LOAD:
            points["kv/scale_up"], points["kv/scale_down"] = config.kv_up, config.kv_down
            if Role.PREFILL in view.pools:
                points["prefill_queue/scale_up"] = config.queue_up
                points["prefill_queue/scale_down"] = config.queue_down
        points["wait/slo_seconds"] = config.ttft_slo_s
        if view.pull is None:
            return points
        kv_mean, queue = view.pull.kv.mean, view.pull.queue
        waiting = queue.value if queue is not None and queue.is_known else None
        if config.queue_per_worker:
            waiting = view.pull.queue_per_worker
        if kv_mean is not None:
            points["kv/mean"] = kv_mean
        if waiting is not None:
            points["prefill_queue/compared"] = waiting
        return points

    def _draw_expected(self, view: View) -> None:
        """Draw what was expected for a time once that time has come, so that it stands beside what came."""
        for at_s, tokens_per_s in self._expected.due(view.at_s):
            self._draw({"prefill/forecast_tokens_per_second": tokens_per_s}, view, at_s=at_s)

    def _draw(self, points: dict[str, float], view: View, *, at_s: float | None = None) -> None:
        if points:
            step, wall_s = round((view.at_s if at_s is None else at_s) - view.origin_s), view.wall_s
            self._put(lambda: self._add_scalars(points, step, wall_s))

    def _add_scalars(self, points: dict[str, float], step: int, wall_s: float) -> None:
        # One event for all points: the library's own call per point costs most of a planner's CPU.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step, wall_s)

    def _put(self, call: _Call) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if not self.dropped:
                log.warning("dashboard does not keep up: points are dropped")
            self.dropped += 1

    def _write_all(self) -> None:
        """Run the thread: make the writer, then one call after another until None."""
        try:
            self._writer = SummaryWriter(str(self._folder), flush_secs=2)
            _guard(self._writer)
            while (call := self._waiting.get()) is not None:
                call()
            self._writer.close()
        except Exception as exc:  # noqa: BLE001 - root of the thread; the planner must outlive the dashboard
            log.warning("dashboard stopped", error=repr(exc))


class _File:
    """Stands between tensorboardX and its file: the first error ends the writing, with one warning.

    Left to itself, the library's thread would die of a full disk with a traceback, and the queue that nobody
    empties any more would keep the process from ending.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._is_given_up = False

    def write_event(self, event: Any) -> None:
        self._try(lambda: self._inner.write_event(event))

    def flush(self) -> None:
        self._try(self._inner.flush)

    def close(self) -> None:
        self._try(self._inner.close)

    def _try(self, call: _Call) -> None:
        if self._is_given_up:
            return
        try:
            call()
        except OSError as exc:
            self._is_given_up = True
            log.warning("dashboard not written any more; planning goes on", error=str(exc))


def _guard(writer: Any) -> None:
    """Put a `_File` before the file of a SummaryWriter; the library has no public place for one."""
    events = writer.file_writer.event_writer
    events._ev_writer = events._worker._record_writer = _File(events._ev_writer)  # noqa: SLF001


def _step(view: View) -> int:
    return round(view.at_s - view.origin_s)
