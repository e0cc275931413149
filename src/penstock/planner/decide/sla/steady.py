"""Whether arrivals change, or only chance does: a trend counts where it differs from the mean by more than its error.

A trend that follows a rise within its slope's time follows chance as well: Poisson arrivals of 3/s swing its prediction by
13%, and a pool that follows them stands at the swings' crest. The mean of some minutes swings by a quarter of that.
"""

from __future__ import annotations

import math

from penstock.planner.decide.adaptive.trend import Forecast
from penstock.planner.decide.observation import Demand
from penstock.planner.decide.sla.memory import SteadyRate

STEADY_TAU_S = 120.0
"""Chosen: three times the trend's, so that the mean is steadier than the trend, and known within some minutes."""

CHANCE_SIGMAS = 1.5
"""Chosen: chance seldom goes further, and a swing of minutes soon does."""


def followed(rate: SteadyRate, demand: Demand) -> SteadyRate:
    """Return the rate after a pull's arrivals."""
    kept = math.exp(-demand.period_s / STEADY_TAU_S)
    return SteadyRate(rate.requests * kept + demand.arrivals, rate.seen_s * kept + demand.period_s)


def steadied(along: Forecast, rate: SteadyRate) -> Forecast:
    """Return the mean where the trend, now and ahead, is within chance of it; else the trend.

    Args:
        along: Requests/s along the trend, with the standard error of its prediction.
        rate: Of the last minutes.
    """
    if rate.seen_s <= 0:
        return along
    mean = rate.requests / rate.seen_s
    apart = max(abs(along.now - mean), abs(along.ahead - mean))
    if apart > CHANCE_SIGMAS * along.error:
        return along
    # The span that an exponential average weighs is twice its constant; arrivals as random as Poisson's.
    error = math.sqrt(mean / min(2.0 * STEADY_TAU_S, rate.seen_s))
    return Forecast(mean, mean, min(error, along.error))
