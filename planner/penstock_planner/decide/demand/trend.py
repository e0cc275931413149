"""Trend of a measured value: its level, slope and noise, and the forecast that follows from them. Pure.

Used for arriving requests/s and for KV usage. The forecast is one of three: `week` remembers demand by time of the day
and of the week, and `recurrence` the period after which demand returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STARTUP_S = 30.0
"""Chosen: start-up time in seconds that is assumed until one has been observed.

It is that of a process that loads its model from a local disk. It is also the shortest time that can be prepared for."""

SPAN_S = 300.0
"""Chosen: 5 minutes, in seconds, over which persistent effects are distinguished from momentary ones.

It is the time constant of averages of late requests and of noise, and the length of the parts of a quarter of an hour
whose peak is recorded. With ten minutes for late requests *drifting-prompts* was 95.9% on time, with five 97.8%. Noise
needs this long because a variance needs more samples than a mean."""

CHANCE_SIGMAS = 2.0
"""Chosen: number of standard errors (2) up to which a deviation counts as chance and starts no replica.

Used for a jump of arrivals within seconds (with it *step* went from 86 to 98% on time and *poisson* did not change),
and for late requests compared with the allowed fraction."""


@dataclass(frozen=True, slots=True)
class TrendForecast:
    """Forecast of a value along its trend; all three attributes have the unit of the value.

    Attributes:
        now: Present value. The averages lag behind a rising or falling value; this is the value without that lag.
        ahead: Predicted value at a later time (the horizon), along the slope; at least 0.
        error: Standard error of ``ahead``, estimated from the noise of the samples.
    """

    now: float
    ahead: float
    error: float

    def times(self, factor: float) -> TrendForecast:
        """Return the forecast with the present value, the predicted value and the standard error each multiplied by ``factor``."""
        return TrendForecast(self.now * factor, self.ahead * factor, self.error * factor)


@dataclass(frozen=True, slots=True)
class Trend:
    """Level, slope and noise of a value, from samples at irregular times, by Brown's double exponential smoothing.

    The level is ``2 first - second``, and the slope per second is ``(first - second)`` divided by the time constant.

    Attributes:
        first: Exponential average of the values.
        second: Exponential average of ``first``.
        noise: Average over the samples of the squared deviation from ``first`` times the sample's duration in seconds,
            from which the standard error of a forecast follows.
        seen_s: Simulated seconds observed so far, limited to a hundred time constants.
    """

    first: float = 0.0
    second: float = 0.0
    noise: float = 0.0
    seen_s: float = 0.0

    def followed(self, value: float, dt_s: float, tau_s: float, *, lasts_s: float = 0.0) -> Trend:
        """Return the trend (level, slope and noise of a value) after one more sample.

        Until ``tau_s`` has passed the averages are plain means, so that the first values do not dominate.

        Args:
            value: Value of the sample.
            dt_s: Duration for which the value was measured, in simulated seconds.
            tau_s: Time constant of the averages, in simulated seconds.
            lasts_s: For a sum of things that each last this many seconds, such as requests in flight: samples within
                twice this time are correlated and count as one sample for the noise. 0 if samples are independent.
        """
        seen_s = self.seen_s + dt_s
        weight = max(dt_s / seen_s, 1.0 - math.exp(-dt_s / tau_s))
        deviation = value - self.first
        noise_weight = max(dt_s / seen_s, 1.0 - math.exp(-dt_s / SPAN_S))
        noise = self.noise
        if self.seen_s > 0:
            noise += noise_weight * (deviation * deviation * max(dt_s, 2.0 * lasts_s) - noise)
        first = self.first + weight * deviation
        second = self.second + weight * (first - self.second)
        return Trend(first, second, noise, min(seen_s, 100.0 * tau_s))

    def forecast(self, horizon_s: float, tau_s: float) -> TrendForecast:
        """Return the forecast: the present value, the predicted value, and the standard error of the predicted value.

        Both values are at least 0.

        The slope is extrapolated at most over ``tau_s`` and at most over the time observed so far; after that the
        prediction stays constant. When it was extrapolated over six times ``tau_s``, a sine of ten minutes requested
        workers that became ready only after its peak: 99.6% on time for 2.86 instead of 2.56 GPU-hours.

        With a = 1/tau and k = horizon/tau the prediction weighs a sample of age t by a ((2 + k) exp(-a t) - (1 + k) a t
        exp(-a t)), so for white noise of density S its variance is S a ((2 + k)^2 / 2 - (2 + k)(1 + k) / 2 + (1 + k)^2
        / 4). If the prediction is 0, the error is that of the present value, because a slope that ends at 0 goes no
        further.

        Example: tau 60 s, horizon 30 s, 2.4 requests/s of 8,000 +- 8,000 tokens: S = 2.4 x 2 x 8,000^2 = 3.07e8, error
        3,045 tokens/s on a mean of 19,200.

        Args:
            horizon_s: Simulated seconds from now to the predicted time.
            tau_s: Time constant of the averages, in simulated seconds; the same one with which the samples were
                averaged.
        """
        k = min(horizon_s, self.seen_s, tau_s) / tau_s
        slope = (self.first - self.second) / tau_s
        now = 2.0 * self.first - self.second
        ahead = max(0.0, now + slope * k * tau_s)
        k = k if ahead > 0 else 0.0
        factor = (2.0 + k) ** 2 / 2.0 - (2.0 + k) * (1.0 + k) / 2.0 + (1.0 + k) ** 2 / 4.0
        error = math.sqrt(self.noise * factor / tau_s)
        return TrendForecast(max(0.0, now), ahead, error)


RATE_TAU_S = 40.0
"""Chosen: time constant of the averages of requests/s, of KV usage, and of a worker's throughput, in seconds.

A longer one lags behind a rise of ten minutes, and a shorter one follows noise; at 2 requests/s the
prediction's error is about 15%. KV usage is a sum over many requests, and throughput is averaged over computing time.
Neither 30 nor 60 s was better by half a percentage point (TRIED.md)."""
