"""Draws the dashboard's overview picture: replicas over demand, waits, GPUs, and each change with its reason, on one time axis.

TensorBoard's charts cannot show this. Needs matplotlib (``penstock[plots]``); without it the dashboard has only the charts.
"""

from __future__ import annotations

import importlib.util
import io
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zoneinfo import ZoneInfo

from penstock.api import Role
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull
from penstock_planner.observers import PlannerView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Dates: TypeAlias = Sequence[Any]
"""Dates on an axis: matplotlib takes them, but its types name numbers alone."""

DAY_S: Final = 86_400.0
HOUR_S: Final = 3_600.0

PICTURE_S: Final = 60.0
"""Real seconds between two pictures. Chosen: one takes half a second of processor time."""

MOMENT_S: Final = 10.0
MOMENTS: Final = 8_640
"""Maximum number of moments kept (8640), one every 10 simulated seconds (`MOMENT_S`): one day.

Chosen: a rise of demand within a minute is visible."""

CHANGES: Final = 200
LISTED: Final = 40
"""Maximum number of changes listed below a picture; `CHANGES` is the number kept. Chosen: twice the height without a list."""

_COLOURS: Final = {"prefill": "#4c78a8", "decode": "#f58518", "aggregated": "#54a24b"}


@dataclass(frozen=True, slots=True)
class Clock:
    """Converts simulated times of the planner to wall-clock times, given one time on both clocks.

    Attributes:
        at_s: A time in simulated seconds since the planner first started.
        wall_s: The same time in real seconds since 1970.
        speed: Simulated seconds per real second, > 0.
        time_zone: IANA name of the time zone for display.
    """

    at_s: float
    wall_s: float
    speed: float
    time_zone: str

    def of(self, at_s: float) -> datetime:
        """Return the wall-clock time at ``at_s``, simulated seconds since the planner first started."""
        return datetime.fromtimestamp(self.wall_s + (at_s - self.at_s) / self.speed, ZoneInfo(self.time_zone))


@dataclass(frozen=True, slots=True)
class Moment:
    """Values that the overview picture shows for one time. Times are simulated seconds.

    Attributes:
        at_s: Time since the planner first started.
        ready: Number of ready replicas by role.
        gpus: GPUs of existing workers, draining ones included.
        gpu_s: Cumulative GPU-seconds since the process started.
        arrivals_per_s: Mean arrival rate since the previous time that is shown, requests/s; None if unknown.
        oldest_wait_s: Longest wait in the routers' queues since the previous time that is shown, seconds; None if
            unknown.
        scheduled: Active entries of the schedule, as text.
    """

    at_s: float
    ready: dict[str, int]
    gpus: int
    gpu_s: float
    arrivals_per_s: float | None
    oldest_wait_s: float | None
    scheduled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed replicas, as the overview picture shows it.

    Attributes:
        at_s: Time of the decision, simulated seconds since the planner first started.
        decision_id: Id of the decision.
        words: Sentences of the decision about the roles that changed.
    """

    at_s: float
    decision_id: str
    words: str


class History:
    """The last day of one planner's replicas, demand and changes, as shown in the dashboard's overview pictures."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=MOMENTS)
        self._changes: deque[Change] = deque(maxlen=CHANGES)
        self._demands: list[Demand] = []
        self._last_s: float | None = None
        self._gpu_s = 0.0

    def tick(self, view: PlannerView) -> bool:
        """Add the planner's state at a tick (metrics scrape) to this history, at most once every 10 simulated seconds (`MOMENT_S`).

        Returns whether it was added.
        """
        demand = None if view.pull is None else view.pull.demand
        return self._take(view.at_s - view.origin_s, view.pools, view.gpus, demand, view.scheduled)

    def pulled(self, pull: Pull, origin_s: float, gpus: int) -> None:
        """Add a metrics scrape of an earlier run of the planner to this history, so that the overview picture shows that run too.

        Args:
            pull: The metrics scrape, as in the ledger (the decision log).
            origin_s: Time at which the planner first started, simulated seconds on the clock of the scrape.
            gpus: GPUs of existing workers at the time of the scrape.
        """
        self._take(pull.at_s - origin_s, pull.pools, gpus, pull.demand, ())

    def _take(
        self,
        at_s: float,
        pools: Mapping[Role, PoolCounts],
        gpus: int,
        demand: Demand | None,
        scheduled: tuple[str, ...],
    ) -> bool:
        if self._last_s is not None:
            self._gpu_s += gpus * max(0.0, at_s - self._last_s)
        self._last_s = at_s
        if demand is not None:
            self._demands.append(demand)
        if not pools or (self._moments and at_s - self._moments[-1].at_s < MOMENT_S):
            return False
        demands, self._demands = self._demands, []
        period_s = sum(each.period_s for each in demands)
        self._moments.append(
            Moment(
                at_s,
                {role.value: pool.ready for role, pool in pools.items()},
                gpus,
                self._gpu_s,
                sum(each.arrivals for each in demands) / period_s if period_s else None,
                max((each.oldest_wait_s or 0.0 for each in demands), default=None),
                scheduled,
            )
        )
        return True

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Add a decision to this history of the overview picture if it changes replicas; does nothing for other decisions.

        Args:
            decision: The decision.
            view: State of the planner at the newest tick (metrics scrape), whose time is used.
        """
        self.fill(decision, view.at_s - view.origin_s)

    def fill(self, decision: Decision, at_s: float) -> None:
        """Add a decision of an earlier time to this history of the overview picture, if it changes replicas.

        Args:
            decision: The decision.
            at_s: Time of the decision, simulated seconds since the planner first started.
        """
        words = [role.sentence for role in decision.roles if role.desired != role.current]
        if words:
            self._changes.append(Change(at_s, decision.id, "; ".join(words)))

    def of(self, last_s: float) -> tuple[list[Moment], list[Change]]:
        """Return the recorded values and replica changes of the last ``last_s`` simulated seconds.

        Returns:
            (values by time, decisions that changed replicas), both oldest first.
        """
        since_s = self._moments[-1].at_s - last_s if self._moments else 0.0
        return (
            [each for each in self._moments if each.at_s >= since_s],
            [each for each in self._changes if each.at_s >= since_s],
        )


def former_gap_s(age_s: float) -> float:
    """Return the minimum simulated seconds between two scrapes of earlier runs, for showing them in a picture.

    The scrapes are read from the ledger (the planner's decision log). Scrapes of the last hour are 10 s (`MOMENT_S`)
    apart, as those of the present run; scrapes of the rest of the day are a thousandth of a day apart, since reading
    more takes too long. Returns infinity for ages of a day or more, which are not read.

    Args:
        age_s: Age of the later of the two scrapes at the time of the newest record, in simulated seconds.
    """
    if age_s >= DAY_S:
        return inf
    return MOMENT_S if age_s < HOUR_S else DAY_S / 1000


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def picture(
    moments: Sequence[Moment], changes: Sequence[Change], title: str, clock: Clock, slo_s: float | None
) -> bytes:
    """Return a PNG that shows replicas, GPUs and demand over time, with the replica changes numbered.

    Args:
        moments: Values to show, one `Moment` for each time, oldest first; at least one.
        changes: Changes in the same time range, oldest first; the last 40 (`LISTED`) are listed below the picture.
        title: Title of the picture.
        clock: Converts simulated times to wall-clock times for the axis and the list of changes.
        slo_s: TTFT target in seconds, drawn as a line over the waits; None draws none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra, and 0.3 s
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    listed = list(changes)[-LISTED:]
    figure = Figure(figsize=(11, 7.2 + 0.22 * len(listed)), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    upper, middle, lower = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.4, 1.4])
    times: Dates = [clock.of(each.at_s) for each in moments]
    _draw_replicas(upper, times, moments)
    upper.set_title(title, loc="left", pad=32)
    _shade_schedule(upper, times, moments)
    _draw_waits(middle, times, moments, slo_s)
    lower.step(times, [each.gpus for each in moments], where="post", color="#333333")
    lower.fill_between(times, [each.gpus for each in moments], step="post", alpha=0.15, color="#333333")
    spent = (moments[-1].gpu_s - moments[0].gpu_s) / HOUR_S
    lower.set_ylabel("GPUs")
    lower.set_ylim(bottom=0)
    lower.set_title(f"{spent:.2f} GPU-hours", loc="right", fontsize=9)
    locator = AutoDateLocator(tz=times[0].tzinfo)  # type: ignore[no-untyped-call]
    lower.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, tz=times[0].tzinfo)  # type: ignore[no-untyped-call]
    lower.xaxis.set_major_formatter(formatter)
    pace = "" if clock.speed == 1 else f"; a minute on the clock is {clock.speed:g} simulated minutes"
    lower.set_xlabel(f"time, {clock.time_zone}{pace}")
    _number(upper, lower, listed, clock)
    _list(figure, listed, clock, left_out=len(changes) - len(listed))
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def _draw_replicas(axes: Axes, times: Dates, moments: Sequence[Moment]) -> None:
    for role in sorted({role for each in moments for role in each.ready}):
        counts = [each.ready.get(role, 0) for each in moments]
        axes.step(times, counts, where="post", label=f"{role}, ready", color=_COLOURS.get(role), linewidth=2)
    axes.set_ylabel("replicas")
    axes.set_ylim(bottom=0)
    demand = axes.twinx()
    rates = [float("nan") if each.arrivals_per_s is None else each.arrivals_per_s for each in moments]
    demand.fill_between(times, rates, color="#bbbbbb", alpha=0.5, label="requests/s", step="post")
    demand.set_ylabel("requests/s arriving")
    demand.set_ylim(bottom=0)
    axes.set_zorder(demand.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.legend(loc="upper left", fontsize=9)


def _shade_schedule(axes: Axes, times: Dates, moments: Sequence[Moment]) -> None:
    """Shade the times at which entries of the schedule were active, and annotate each with its entries."""
    for entries, group in groupby(range(len(moments)), key=lambda place: moments[place].scheduled):
        places = list(group)
        if entries:
            begin, end = times[places[0]], times[min(places[-1] + 1, len(times) - 1)]
            axes.axvspan(begin, end, color="#eeca3b", alpha=0.18, linewidth=0)
            words = "\n".join(_short(each, 60) for each in entries)
            axes.annotate(
                words, (begin, 0), xytext=(3, 3), textcoords="offset points", fontsize=7, va="bottom"
            )


def _draw_waits(axes: Axes, times: Dates, moments: Sequence[Moment], slo_s: float | None) -> None:
    waits = [float("nan") if each.oldest_wait_s is None else each.oldest_wait_s for each in moments]
    axes.step(times, waits, where="post", color="#b279a2")
    if slo_s is not None:
        axes.axhline(slo_s, color="#e45756", linestyle="--", linewidth=1)
        axes.annotate(f"TTFT target {slo_s:g} s", (times[0], slo_s), color="#e45756", fontsize=8, va="bottom")
    axes.set_ylabel("longest wait, s")
    axes.margins(y=0.2)  # Room for the target's label.
    axes.set_ylim(bottom=0)


def _number(upper: Axes, lower: Axes, listed: Sequence[Change], clock: Clock) -> None:
    top = upper.get_ylim()[1]
    for number, change in enumerate(listed, start=1):
        at: Any = clock.of(change.at_s)
        for axes in (upper, lower):
            axes.axvline(at, color="#999999", linewidth=0.6, linestyle=":")
        # The numbers of changes that are close together are drawn at different heights.
        upper.annotate(
            str(number),
            (at, top),
            xytext=(0, 9 * (number % 3)),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="bottom",
        )


def _list(figure: Figure, listed: Sequence[Change], clock: Clock, *, left_out: int) -> None:
    """Write the reason of each numbered change below the picture, after a line that counts earlier ones that are left out."""
    if listed:
        lines = [
            f"{number:2}  {clock.of(each.at_s):%H:%M:%S}  {each.decision_id}  {_short(each.words)}"
            for number, each in enumerate(listed, start=1)
        ]
        if left_out:
            lines.insert(0, f"{left_out} earlier changes are in the text tab")
        figure.supxlabel("\n".join(lines), fontsize=8, x=0.01, ha="left", family="monospace")


def _short(words: str, most: int = 120) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"
