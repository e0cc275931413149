"""Whether mode ``sla`` plans by its predictor's forecast, or by its own trend and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.api import Predictor
from penstock.planner.decide.decision import Step
from penstock.planner.decide.demand_forecast import DemandForecast

STALE_S = 60.0
"""Chosen: a forecast is made every ten seconds; older than this, its predictor has failed or hangs."""

PEAK_MOST = 3.0
"""Chosen: more than three times the last minutes' peak is a fit gone astray sooner than demand."""


@dataclass(frozen=True, slots=True)
class ExpectedRate:
    """Requests/s that are expected.

    Attributes:
        at_s: Of the decision, simulated seconds.
        forecast: To plan by; None: the trend.
        most_per_s: What is believed at most.
    """

    at_s: float = 0.0
    forecast: DemandForecast | None = None
    most_per_s: float = math.inf

    def per_s(self, ahead_s: float) -> float | None:
        """Return the requests/s so far ahead of the decision; None: the trend says."""
        if self.forecast is None:
            return None
        return min(self.most_per_s, self.forecast.at(self.at_s - self.forecast.made_s + ahead_s))


TREND = ExpectedRate()
"""The trend says."""


def judged(
    forecast: DemandForecast | None, predictor: Predictor, *, at_s: float, horizon_s: float, peak_per_s: float
) -> tuple[ExpectedRate, Step | None]:
    """Return what to plan by, and the step that says so; no step where nothing is fitted.

    Args:
        forecast: The newest; None before the first.
        predictor: The one that is asked for.
        at_s: Of the decision, simulated seconds.
        horizon_s: Furthest that a pool which grows looks ahead.
        peak_per_s: Highest requests/s of the last minutes.
    """
    if not predictor.is_fitted:
        return TREND, None
    most = PEAK_MOST * peak_per_s
    found, why = None, _unusable(forecast, predictor, at_s)
    if forecast is not None and not why:
        found = ExpectedRate(at_s, forecast).per_s(horizon_s)
        if found is not None and found > most:
            why = f"{found:.2f} requests/s are more than {PEAK_MOST:g} times the peak of {peak_per_s:.2f}"
    inputs = {
        "predictor": predictor.value,
        "age_s": None if forecast is None else at_s - forecast.made_s,
        "horizon_s": horizon_s,
        "requests_per_s_ahead": found,
    }
    step = Step("forecast", inputs, most, f"trend: {why}" if why else predictor.value)
    return (TREND if why else ExpectedRate(at_s, forecast, most)), step


def _unusable(forecast: DemandForecast | None, predictor: Predictor, at_s: float) -> str:
    """Return why a forecast cannot be planned by, empty if it can."""
    if forecast is None:
        return "no forecast yet"
    if forecast.predictor is not predictor:
        return f"the newest forecast is {forecast.predictor.value}'s"
    age_s = at_s - forecast.made_s
    if not 0 <= age_s <= STALE_S:
        return f"the newest forecast is {age_s:.0f} s old, which must be 0 to {STALE_S:g}"
    return forecast.why or _malformed(forecast.points)


def _malformed(points: tuple[tuple[float, float], ...]) -> str:
    leads = [lead_s for lead_s, _ in points]
    if not points or leads != sorted(set(leads)) or not all(map(math.isfinite, leads)):
        return "the fit gave no times that rise"
    if not all(math.isfinite(rate) and rate >= 0 for _, rate in points):
        return "the fit gave rates that are none"
    return ""
