"""What observers follow from tick to tick: forecasts until their time has come, and the share within the targets."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from penstock.planner.dashboard_points import attainment_points, forecast_in
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Decision
from penstock.planner.forecast import Forecast
from penstock.planner.histogram import gained
from penstock.planner.observers import View
from penstock.planner.sources.base import Buckets


class ExpectedDemand:
    """What decisions expected, each until the time that it was expected for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, float]] = []

    def decided(self, decision: Decision, at_s: float) -> Forecast | None:
        """Take and return a decision's forecast; None in a mode without."""
        forecast = forecast_in(decision)
        if forecast is not None:
            heapq.heappush(self._waiting, (at_s + forecast.horizon_s, forecast.tokens_per_s))
        return forecast

    def due(self, now_s: float) -> Iterator[tuple[float, float]]:
        """Yield, once, the times that have come and the uncached tokens/s that were expected for them."""
        while self._waiting and self._waiting[0][0] <= now_s:
            yield heapq.heappop(self._waiting)


class Attainment:
    """The share of first tokens, and of gaps between tokens, within the targets of mode sla.

    Attributes:
        latency: The source's histograms as last seen.
    """

    def __init__(self, config: DecideConfig) -> None:
        self.latency: dict[str, Buckets] = {}
        self._config = config
        self._before: dict[str, Buckets] = {}
        self._begun_s: float | None = None
        self._rejected = 0.0

    def tick(self, view: View) -> None:
        """Take the newest histograms, and count rejected requests."""
        if view.pull is not None and view.pull.demand is not None:
            self._rejected += view.pull.demand.refused + view.pull.demand.timed_out
        self.latency.update({key: buckets for key, buckets in view.latency.items() if buckets})

    def points(self, at_s: float) -> dict[str, float] | None:
        """Return ``attainment/ttft`` and ``attainment/itl`` since the last time, those with a sample; None: not yet.

        Once per adjustment interval: two seconds hold few requests.
        """
        if self._begun_s is not None and at_s - self._begun_s < self._config.adjustment_interval_s:
            return None
        fresh = {key: gained(self._before.get(key, ()), now) for key, now in self.latency.items()}
        is_first, rejected = self._begun_s is None, self._rejected
        self._before, self._begun_s, self._rejected = dict(self.latency), at_s, 0.0
        return None if is_first else attainment_points(fresh, self._config, rejected=rejected)
