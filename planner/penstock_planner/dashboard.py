"""TensorBoard dashboard: signals with thresholds, demand with its forecast, latencies with targets, and decisions.

Steps are simulated seconds since the planner first started; wall times are real. If the disk cannot be written, the dashboard stops
with one warning, and the planner continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import yaml
from tensorboardX import summary

from penstock.api import GraphDeployment, Role
from penstock.core.logs import get_logger
from penstock_planner.dashboard_picture import (
    DAY_S,
    HOUR_S,
    PICTURE_S,
    Clock,
    History,
    can_draw,
    former_gap_s,
    picture,
)
from penstock_planner.dashboard_runs import NOTES, Runs
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Decision
from penstock_planner.explain import wall_clock
from penstock_planner.learnt import memory_in_words
from penstock_planner.ledger import FormerChange, FormerRuns
from penstock_planner.observers import PlannerView
from penstock_planner.series import EXPECTED, points
from penstock_planner.stats import PlannerStats

POINTS_PER_INTERVAL = 15
"""Number of points drawn per adjustment interval. Chosen: enough to see demand rise within one interval; a day's run
still opens quickly."""

NEWEST = 200
"""Maximum number of replica changes (200) listed in the text tab. Chosen: a busy night of mode adaptive.

TensorBoard keeps only a sample of a text's steps, but always the last one; therefore each text lists all these changes.
"""

Charts = dict[str, list[Any]]
Draw = Callable[[Callable[[], object]], object]

log = get_logger(__name__)


class Dashboard:
    """Observer that draws a planner's TensorBoard dashboard; its folder is created when the first value is drawn."""

    def __init__(
        self,
        folder: Path,
        config: DecideConfig,
        graph: GraphDeployment | None = None,
        *,
        draw: Draw | None = None,
    ) -> None:
        """Prepare the dashboard without writing.

        Args:
            folder: Folder of the event files.
            config: Configuration of the planner.
            graph: Graph whose manifest the text tab shows; None shows none.
            draw: Function that runs the computation of a picture, now or later, for example in a thread; None runs it immediately.
        """
        self._run_drawing = draw or _run_now
        self._drawn: SimpleQueue[tuple[str, bytes, PlannerView]] = SimpleQueue()
        self._is_drawing = self._has_last = False
        self._config, self._graph = config, graph
        self._period_s = config.adjustment_interval_s / POINTS_PER_INTERVAL
        self._drawn_s = self._pictured_s = self._remembered_s = float("-inf")
        self._stats = PlannerStats(config, is_held=False)
        self._runs = Runs(folder)
        self._history = History()
        self._newest: deque[str] = deque(maxlen=NEWEST)
        self._view: PlannerView | None = None
        self._is_stopped = False

    @classmethod
    def of(
        cls,
        log_folder: Path,
        config: DecideConfig,
        graph: GraphDeployment | None,
        *,
        is_chosen: bool,
        draw: Draw | None = None,
    ) -> Dashboard | None:
        """Return the dashboard of a planner, or None if the planner has no dashboard.

        If the user chose ``log_folder``, the dashboard is in that folder. Otherwise only a planner in no-operation mode
        has a dashboard, since it is run to be observed. The dashboard is then in a subfolder for this run, such as
        ``runs/2026-11-22_07-30-00``.

        Args:
            log_folder: Folder of the ledger (the decision log).
            config: Configuration of the planner.
            graph: Graph whose manifest the text tab shows; None shows none.
            is_chosen: Whether the user chose ``log_folder``.
            draw: Function that is called with each computation of a picture and has to run it, such as in another
                thread; None runs it immediately.
        """
        if not is_chosen and not config.no_operation:
            log.info("no --log-dir: no dashboard", ledger=str(log_folder))
            return None
        run = f"{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}"
        folder = log_folder if is_chosen else log_folder / "runs" / run
        log.info("dashboard", folder=str(folder))
        return cls(folder, config, graph, draw=draw)

    def tick(self, view: PlannerView) -> None:
        """Write the values of a tick (metrics scrape) to TensorBoard's event files, unless the last ones were written too recently.

        A point is added to the curves 15 times (`POINTS_PER_INTERVAL`) per adjustment interval. An overview picture is
        drawn and written every 60 real seconds (`PICTURE_S`).
        """
        self._stats.tick(view)
        is_moment = self._history.tick(view)
        self._write(self._write_pictures)
        if is_moment and view.wall_s - self._pictured_s >= PICTURE_S and not self._is_drawing:
            self._draw_pictures(view)
        if view.at_s - self._drawn_s < self._period_s or not view.pools:
            return
        self._drawn_s = view.at_s
        is_first, self._view = self._view is None, view
        found = points(self._stats, is_decided=False)
        self._stats.drop_demands()
        if is_first:
            self._write(lambda: self._begin(view))
        self._write(lambda: self._draw(found, view))
        # A forecast is drawn at the time that it is for, so that it is next to the observed value.
        for at_s, tokens_per_s in self._stats.due(view.at_s):
            self._write(partial(self._draw, {EXPECTED: tokens_per_s}, view, at_s=at_s))

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Write the decision and the newest replica changes before it as text, and draw TTFT and ITL since the previous decision.

        Args:
            decision: The decision, which is recorded and not carried out yet.
            view: State of the planner at the newest tick (metrics scrape).
        """
        self._stats.decided(decision, view)
        self._history.decided(decision, view)
        step = _step(view)
        shown = self._text_of(decision, view.wall_s)
        text = "\n\n".join([shown, *self._newest])
        if not decision.is_hold:
            self._newest.appendleft(shown)
        self._write(lambda: self._runs.write_text("decisions", text, wall_s=view.wall_s, step=step))
        found = points(self._stats, is_decided=True)
        self._write(lambda: self._draw(found, view))
        if view.wall_s - self._remembered_s >= PICTURE_S:
            self._write(lambda: self._write_memory(view))

    def fill(self, former: FormerRuns, changes: Sequence[FormerChange], view: PlannerView) -> None:
        """Load the history of earlier runs, so that the text and the pictures of this run show it too.

        Call this before the first `tick`.

        Args:
            former: Records of the earlier runs.
            changes: Replica changes of the earlier runs, oldest first.
            view: State at the start of this run.
        """
        for pull in former.pulls(view.origin_s, former_gap_s):
            self._history.pulled(pull, view.origin_s, existing_gpus(pull.pools, self._config))
        for each in changes:
            self._newest.appendleft(self._text_of(each.decision, each.wall_s))
            if each.origin_s == view.origin_s:
                self._history.fill(each.decision, each.decision.at_s - each.origin_s)

    def draw_last(self) -> None:
        """Start drawing a final picture; does nothing if it was started already. Call `close` when the picture is done."""
        if self._view is not None and not self._has_last:
            self._has_last = True
            self._draw_pictures(self._view)

    def close(self) -> None:
        """Write the pictures and the learned state that are not written yet, and close the files."""
        self.draw_last()
        view = self._view
        if view is not None:
            self._write(lambda: self._runs.end_session(wall_s=view.wall_s))
            self._write(self._write_pictures)
            self._write(lambda: self._write_memory(view))
        self._runs.close()

    def _begin(self, view: PlannerView) -> None:
        """Write what TensorBoard needs only once: the layout of the charts, the settings, and the row of the HParams table."""
        config = self._config
        roles, in_pool = set(view.pools), view.grant is not None
        curves = curves_of(roles, config.mode, has_schedule=bool(config.schedule), in_pool=in_pool)
        self._runs.create(["", *curves], wall_s=view.wall_s)
        layout = summary.custom_scalars(layout_of(roles, config.mode, in_pool=in_pool))
        self._runs.put(NOTES, layout, wall_s=view.wall_s, step=0)
        settings = {
            "mode": str(config.mode),
            "GPU budget": "none" if view.max_gpu_budget is None else float(view.max_gpu_budget),
            "interval, s": config.adjustment_interval_s,
            "TTFT target, s": config.ttft_slo_s,
        }
        table = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        text = f"| setting | value |\n|---|---|\n{table}"
        self._runs.write_text("settings", text, wall_s=view.wall_s, step=0)
        if self._graph is not None:
            manifest = yaml.safe_dump(self._graph.to_manifest(), sort_keys=False, allow_unicode=True)
            text = f"```yaml\n{manifest}```"
            self._runs.write_text("manifest", text, wall_s=view.wall_s, step=0)
        self._runs.begin_session(settings, tuple(_COMPARED.values()), wall_s=view.wall_s)

    def _write_memory(self, view: PlannerView) -> None:
        """Write the learned state, in the words of `penstock planner memory show`; does nothing if the mode learns nothing."""
        if not view.memory:
            return
        self._remembered_s = view.wall_s
        gpus = {role: self._config.engine_gpus(role, pool.gpus) for role, pool in view.pools.items()}
        text = "\n".join(f"* {line}" for line in memory_in_words(view.memory, gpus))
        self._runs.write_text("memory", text, wall_s=view.wall_s, step=_step(view))

    def _text_of(self, decision: Decision, wall_s: float | None) -> str:
        """Return a decision as Markdown: its time on the clock, and each role's sentence with the rule and the reason."""
        when = "at an unknown time" if wall_s is None else wall_clock(wall_s, self._config.time_zone)
        lines = [
            f"* {role.sentence} (`{f'{role.rule}: ' if role.rule else ''}{role.reason.value}`)"
            for role in decision.roles
        ]
        prefix = "not acted on: no-operation\n" if decision.no_operation else ""
        return f"**{decision.id}** {when}\n{prefix}\n" + "\n".join(lines)

    def _draw_pictures(self, view: PlannerView) -> None:
        """Start drawing pictures of the current history; `_write_pictures` writes them when they are drawn."""
        found = [
            (name, *self._history.of(last_s)) for name, last_s in (("last hour", HOUR_S), ("last day", DAY_S))
        ]
        found = [each for each in found if len(each[1]) > 1]
        if not found or not can_draw():
            return
        self._pictured_s, self._is_drawing = view.wall_s, True
        clock = Clock(view.at_s - view.origin_s, view.wall_s, self._config.speed, self._config.time_zone)

        def draw() -> None:
            try:
                for name, moments, changes in found:
                    title = f"{name}, mode {self._config.mode}"
                    png = picture(moments, changes, title, clock, self._config.ttft_slo_s)
                    self._drawn.put((f"overview/{name}", png, view))
            finally:
                self._is_drawing = False

        self._run_drawing(draw)

    def _write_pictures(self) -> None:
        while not self._drawn.empty():
            tag, png, view = self._drawn.get()
            self._runs.write_picture(tag, png, wall_s=view.wall_s, step=_step(view))

    def _draw(
        self, found: dict[tuple[str, str], float], view: PlannerView, *, at_s: float | None = None
    ) -> None:
        compared = {("", name): found[curve] for curve, name in _COMPARED.items() if curve in found}
        self._runs.draw({**found, **compared}, wall_s=view.wall_s, step=_step(view, at_s))

    def _write(self, write: Callable[[], None]) -> None:
        if self._is_stopped:
            return
        try:
            write()
        except OSError as exc:
            self._is_stopped = True
            log.warning("dashboard stopped; planning continues", error=repr(exc))


def _run_now(work: Callable[[], object]) -> None:
    work()


def _step(view: PlannerView, at_s: float | None = None) -> int:
    return round((view.at_s if at_s is None else at_s) - view.origin_s)


def layout_of(roles: Collection[Role], mode: str, *, in_pool: bool) -> dict[str, Charts]:
    """Return TensorBoard's custom-scalars layout: for each category of the tab, by title, its charts (title and tag of the values).

    Each value is in one chart. The values by which the planner mode decides come first; the category with thresholds is
    only included in mode load.

    Args:
        roles: Roles of the graph's workers.
        mode: Mode of the planner, such as adaptive.
        in_pool: Whether the graph is in a GPU pool.
    """
    kinds = [role.value for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED) if role in roles]
    load = {"KV usage, fraction": "kv/usage_fraction"}
    if Role.PREFILL in roles:
        load["Prefill queue, requests"] = "prefill_queue/requests"
    has_thresholds = mode == Mode.LOAD
    categories = {
        **({"Load and thresholds": load} if has_thresholds else {}),
        **({"Targets and profile": _TARGETS} if mode == Mode.SLA else {}),
        **({"In time": {"Share served, and predicted": "in_time/share"}} if mode == Mode.ADAPTIVE else {}),
        "Demand and supply": _DEMAND,
        **({} if has_thresholds else {"Load": load}),
        "Replicas": {f"{kind} replicas": f"replicas/{kind}" for kind in kinds},
        "GPUs": {
            "GPUs of workers, and the budget": "gpus/count",
            "GPU-hours so far": "gpus/hours",
            **({"GPUs of its pool: held, granted, guaranteed, wanted": "gpu_pool/count"} if in_pool else {}),
        },
        "Latency": {f"{name.upper()}, s": f"{name}/seconds" for name in ("ttft", "itl")},
        "Planner": {"Lateness of ticks, p99, s": "lag/p99_seconds"},
    }
    # TensorBoard matches tags as regular expressions; without anchors gpus/hours would also match a longer tag.
    return {
        category: {title: ["Multiline", [f"^{tag}$"]] for title, tag in charts.items()}
        for category, charts in categories.items()
    }


_TARGETS = {
    "Share within the targets": "attainment/share",
    "Observed over profile": "correction/factor",
}
_DEMAND = {
    "Requests per second": "demand/requests_per_second",
    "Prefill tokens per second": "prefill/tokens_per_second",
    "Oldest wait and target, s": "wait/seconds",
    "Waiting requests": "wait/requests",
    "Start-up, s": "startup/seconds",
}
_COMPARED = {
    ("served", "in_time/share"): "compared/share in time",
    ("in use", "gpus/hours"): "compared/GPU-hours",
    ("p99", "ttft/seconds"): "compared/TTFT p99, s",
    ("rejected", "demand/requests_per_second"): "compared/rejected per second",
}
"""Curves whose last points the HParams table shows, with the tags under which the folder's own run repeats them."""

_CURVES: Final[Mapping[str, Sequence[str]]] = {
    "kv": ("measured", "up threshold", "down threshold"),
    "prefill_queue": ("measured", "up threshold", "down threshold"),
    "in_time": ("served", "predicted"),
    "attainment": ("ttft", "itl", "target"),
    "correction": ("prefill", "ttft", "itl"),
    "demand": ("arriving", "completed", "rejected"),
    "prefill": ("arriving", "computed", "expected", "supply"),
    "wait": ("oldest", "target", "waiting"),
    "startup": ("prefill", "decode", "aggregated"),
    "replicas": ("ready", "desired", "needed", "starting", "draining", "scheduled least", "scheduled most"),
    "gpus": ("in use", "budget"),
    "gpu_pool": ("in use", "granted", "guaranteed", "wanted"),
    "ttft": ("mean", "p50", "p99", "target"),
    "itl": ("mean", "p50", "p99", "target"),
    "lag": ("planner",),
}
"""All curves, by the first part of their charts' tags.

TensorBoard gives its seven colours to runs in turn. The curves of a chart follow each other and are seven at most, so that no
two of them have the same colour.
"""


def curves_of(roles: Collection[Role], mode: str, *, has_schedule: bool, in_pool: bool) -> list[str]:
    """Return the names of the TensorBoard runs (curves) that a planner draws.

    They are ordered so that the curves of one chart have different colours.

    Args:
        roles: Roles of the graph's workers.
        mode: Mode of the planner.
        has_schedule: Whether the planner has scheduled replica bounds.
        in_pool: Whether the graph is in a GPU pool.
    """
    no_charts = {
        "in_time": mode != Mode.ADAPTIVE,
        "attainment": mode != Mode.SLA,
        "correction": mode != Mode.SLA,
        "gpu_pool": not in_pool,
        "prefill_queue": Role.PREFILL not in roles,
    }
    absent = {("startup", role.value) for role in Role if role.is_worker and role not in roles}
    if mode != Mode.LOAD:
        absent |= set(product(("kv", "prefill_queue"), ("up threshold", "down threshold")))
    if mode != Mode.SLA:
        absent |= {("ttft", "target"), ("itl", "target")}
    if not has_schedule:
        absent |= {("replicas", "scheduled least"), ("replicas", "scheduled most")}
    if mode not in {Mode.SLA, Mode.ADAPTIVE}:
        absent |= {("replicas", "needed")}
    curves = [
        f"{chart}/{curve}"
        for chart, curves in _CURVES.items()
        for curve in curves
        if not no_charts.get(chart) and (chart, curve) not in absent
    ]
    return [NOTES, *curves]
