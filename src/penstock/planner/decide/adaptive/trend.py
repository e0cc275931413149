"""A level, a slope and their noise from irregular samples: Brown's double exponential smoothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.planner.decide.adaptive.memory import Trend

_NOISE_TAUS = 5.0
"""Chosen: noise is averaged over five times as long as the values; a variance needs more samples than a mean."""

SLOPE_TAUS = 1.5
"""Chosen: a slope is that of the last two spans of the average, and holds no further ahead than they reach. Followed for 6, a sine
of ten minutes asked for workers that came after its crest: 99.6% in time for 2.86 in place of 2.56 GPU-hours."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a trend predicts.

    Attributes:
        now: Value now, without the averages' lag.
        ahead: Value at the horizon, along the slope.
        error: Standard error of ``ahead``, from the noise of the samples.
    """

    now: float
    ahead: float
    error: float


def followed(trend: Trend, value: float, dt_s: float, tau_s: float) -> Trend:
    """Return the trend after a value that held for ``dt_s``, averaged over ``tau_s``.

    Until ``tau_s`` has passed the averages are plain ones, so that the first values do not linger.
    """
    seen_s = trend.seen_s + dt_s
    weight = max(dt_s / seen_s, 1.0 - math.exp(-dt_s / tau_s))
    deviation = value - trend.first
    noise_weight = max(dt_s / seen_s, 1.0 - math.exp(-dt_s / (_NOISE_TAUS * tau_s)))
    noise = trend.noise
    if trend.seen_s > 0:
        noise += noise_weight * (deviation * deviation * dt_s - noise)
    first = trend.first + weight * deviation
    second = trend.second + weight * (first - trend.second)
    return Trend(first, second, noise, min(seen_s, 100.0 * tau_s))


def forecast(trend: Trend, horizon_s: float, tau_s: float) -> Forecast:
    """Return value, prediction and its error; values are at least 0.

    The slope is followed for `SLOPE_TAUS` averages' spans and for as long as the values were, at most; then it stays.

    With a = 1/tau and k = horizon/tau the prediction weighs a sample of age t by
    a ((2 + k) exp(-a t) - (1 + k) a t exp(-a t)), so for white noise of density S its variance is
    S a ((2 + k)^2 / 2 - (2 + k)(1 + k) / 2 + (1 + k)^2 / 4). Of a prediction of nothing only the error of the present is
    left: a slope that ends at 0 goes nowhere.

    Example: tau 60 s, horizon 30 s, 2.4 requests/s of 8,000 +- 8,000 tokens: S = 2.4 x 2 x 8,000^2 = 3.07e8, error
    3,045 tokens/s on a mean of 19,200.
    """
    k = min(horizon_s, trend.seen_s, SLOPE_TAUS * tau_s) / tau_s
    slope = (trend.first - trend.second) / tau_s
    now = 2.0 * trend.first - trend.second
    ahead = max(0.0, now + slope * k * tau_s)
    k = k if ahead > 0 else 0.0
    factor = (2.0 + k) ** 2 / 2.0 - (2.0 + k) * (1.0 + k) / 2.0 + (1.0 + k) ** 2 / 4.0
    error = math.sqrt(trend.noise * factor / tau_s)
    return Forecast(max(0.0, now), ahead, error)
