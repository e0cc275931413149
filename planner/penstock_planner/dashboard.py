"""TensorBoard dashboard: signals with their thresholds, demand with its forecast, latencies with their targets, decisions.

Steps are simulated seconds since the planner first started; wall times are real. A disk that cannot be written ends the
drawing with one warning, and the planner goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from penstock.api import Role
from penstock.core.logs import get_logger
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Decision
from penstock_planner.figures import Figures, View
from penstock_planner.series import points

POINTS_PER_INTERVAL = 15
"""Chosen: enough to see a ramp within one interval, few enough for a day's run to open quickly."""

FLUSH_S = 5.0
"""Real seconds between two flushes of the file. Chosen: TensorBoard reads it every 30 s."""

Charts = dict[str, list[Any]]

log = get_logger(__name__)


class Dashboard:
    """An observer that draws in ``folder``, TensorBoard's ``--logdir``, which is made with the first point."""

    def __init__(self, folder: Path, config: DecideConfig) -> None:
        self._folder = folder
        self._config = config
        self._period_s = config.adjustment_interval_s / POINTS_PER_INTERVAL
        self._drawn_s = float("-inf")
        self._flushed_s = float("-inf")
        self._figures = Figures(config, is_held=False)
        self._writer: EventsWriter | None = None
        self._has_layout = self._is_stopped = False

    @classmethod
    def of(cls, log_folder: Path, config: DecideConfig, *, is_chosen: bool) -> Dashboard | None:
        """Return the dashboard of a planner that keeps its ledger in a folder; None: it has none.

        A planner that only observes is run for its dashboard, so it has one in any case: in the folder that the
        user has chosen, else in a folder of this run below it, ``runs/2026-11-22_07-30-00``.
        """
        if not is_chosen and not config.no_operation:
            log.info("no --log-dir: no dashboard", ledger=str(log_folder))
            return None
        run = f"{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}"
        folder = log_folder if is_chosen else log_folder / "runs" / run
        log.info("dashboard", folder=str(folder))
        return cls(folder, config)

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
        # The expected value for a time is drawn next to the actual one.
        for at_s, tokens_per_s in self._figures.due(view.at_s):
            self._draw({"prefill/forecast_tokens_per_second": tokens_per_s}, view, at_s=at_s)

    def decided(self, decision: Decision, view: View) -> None:
        """Write the decision as text, and the latencies of the interval before it."""
        self._figures.decided(decision, view)
        step = round(view.at_s - view.origin_s)
        lines = [f"* {role.sentence} (`{role.reason.value}`)" for role in decision.roles]
        prefix = "not acted on: no-operation\n" if decision.no_operation else ""
        text = f"**{decision.id}** at {step} s\n{prefix}\n" + "\n".join(lines)
        self._put(summary.text("decisions", text), view, step=step)
        self._draw(points(self._figures, is_decided=True), view)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _draw(self, found: dict[str, float], view: View, *, at_s: float | None = None) -> None:
        if found:
            # One event for all points: one per point costs most of a planner's CPU.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found.items()]
            step = round((view.at_s if at_s is None else at_s) - view.origin_s)
            self._put(Summary(value=values), view, step=step)

    def _put(self, content: Summary, view: View, *, step: int) -> None:
        if self._is_stopped:
            return
        try:
            if self._writer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._writer = EventsWriter(str(self._folder / "events"))
            self._writer.write_event(Event(wall_time=view.wall_s, step=step, summary=content))
            if view.wall_s - self._flushed_s >= FLUSH_S:
                self._flushed_s = view.wall_s
                self._writer.flush()
        except OSError as exc:
            self._is_stopped = True
            log.warning("dashboard stopped; planning goes on", error=repr(exc))


def layout_of(roles: Collection[Role], mode: str) -> dict[str, Charts]:
    """Return the custom-scalars layout: categories of charts, each scalar in exactly one of them.

    What the mode decides by comes first; thresholds are there in the one mode that compares with them.
    """
    kinds = [role.value for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED) if role in roles]
    thresholds = ("scale_up", "scale_down") if mode == Mode.LOAD else ()
    load = {"KV usage": ["kv/mean", *(f"kv/{each}" for each in thresholds)]}
    if Role.PREFILL in roles:
        load["Prefill queue"] = [f"prefill_queue/{each}" for each in ("compared", *thresholds)]
    states = ("ready", "desired", "needed", "starting", "draining")
    latencies = ("mean_seconds", "p50_seconds", "p99_seconds", "target_seconds")
    categories = {
        **({"Load and thresholds": load} if thresholds else {}),
        **({"Targets and profile": _TARGETS} if mode == Mode.SLA else {}),
        "Demand and supply": {**_DEMAND, "Start-up": [f"startup/{kind}_seconds" for kind in kinds]},
        **({} if thresholds else {"Load": load}),
        "Replicas": {f"{kind} replicas": [f"replicas/{kind}_{each}" for each in states] for kind in kinds},
        "GPUs": {
            "In use and budget": ["gpus/in_use", "gpus/budget"],
            "GPU-hours": ["gpu_hours/cumulative"],
        },
        "Latency": {name.upper(): [f"{name}/{each}" for each in latencies] for name in ("ttft", "itl")},
        "Planner": {"Lag": ["lag/p99_seconds"]},
    }
    # TensorBoard matches tags as regular expressions; without anchors kv/mean would also match a longer tag.
    return {
        category: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in charts.items()}
        for category, charts in categories.items()
    }


_TARGETS = {
    "Share within the targets": ["attainment/ttft", "attainment/itl", "attainment/goal"],
    "Observed over profile": ["correction/prefill", "correction/ttft", "correction/itl"],
}
_DEMAND = {
    "Requests per second": [f"demand/{each}_per_second" for each in ("arrivals", "completed", "rejected")],
    "Prefill tokens per second": [
        f"prefill/{each}_tokens_per_second" for each in ("uncached", "computed", "forecast", "supply")
    ],
    "Oldest wait and SLO": ["wait/oldest_seconds", "wait/slo_seconds"],
    "Waiting requests": ["wait/requests"],
}
