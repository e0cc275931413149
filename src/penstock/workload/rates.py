"""Arrival rates that change with time, and the arrivals that they give.

Pure: the random generator is an argument. Called by `synthetic`, which names the processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

Rate = Callable[[float], float]
"""Requests/s at a time in seconds."""


def sine(rate: float, *, amplitude: float, period_s: float) -> Rate:
    """Return a rate that swings about ``rate`` by ``amplitude`` of it."""
    turn = 2 * math.pi / period_s
    return lambda at_s: rate * (1 + amplitude * math.sin(turn * at_s))


def step(rate: float, *, peak: float, start_s: float, length_s: float) -> Rate:
    """Return ``rate``, and ``rate * peak`` in [start_s, start_s + length_s)."""
    end_s = start_s + length_s
    return lambda at_s: rate * (peak if start_s <= at_s < end_s else 1.0)


def ramp(rate: float, *, peak: float, start_s: float, length_s: float) -> Rate:
    """Return ``rate`` until start_s, then a straight line to ``rate * peak`` within length_s, which lasts."""
    return lambda at_s: rate * (1 + (peak - 1) * _share(at_s, start_s, length_s))


def stairs(rate: float, *, peak: float, steps: int, length_s: float) -> Rate:
    """Return a rate that climbs to ``rate * peak`` in equal steps, comes down again, and starts over.

    Example: peak 3, 2 steps: 1, 2, 3, 2, 1, 2, ... times ``rate``, each for length_s.
    """

    def at(at_s: float) -> float:
        place = int(at_s // length_s) % (2 * steps)
        level = min(place, 2 * steps - place)
        return rate * (1 + (peak - 1) * level / steps)

    return at


def day(rate: float, *, peak: float, period_s: float, length_s: float) -> Rate:
    """Return a night at ``rate`` and a day at ``rate * peak``, half the period each.

    Morning and evening are half cosines of length_s; the morning begins a quarter of the period after the
    night does, so that day and night are equally long.
    """

    def at(at_s: float) -> float:
        phase_s = at_s % period_s
        morning = _share(phase_s, period_s / 4, length_s)
        evening = _share(phase_s, period_s * 3 / 4, length_s)
        return rate * (1 + (peak - 1) * (_smooth(morning) - _smooth(evening)))

    return at


def thinned(rate: Rate, top: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the arrivals of a Poisson process of changing rate: candidates at ``top``, kept at rate / top.

    Args:
        rate: Never above ``top``.
        top: The largest rate, requests/s.
        rng: Drawn from for every candidate.
    """
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1 / top))
        if rng.random() * top < rate(at_s):
            yield at_s


def bursts(rate: float, *, peak: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the arrivals of an interrupted Poisson process: on at ``rate * peak``, off without any.

    On and off times are exponential. The share of time on is p = 1 / peak, and with the switching rates' sum
    s the gaps have CV^2 = 1 + 2 * rate * peak * (1 - p) / s, which gives s. Source: Heffes and Lucantoni's
    moments of an interrupted Poisson process.

    Example: rate 2, peak 10, CV 13: bursts of 20/s for 5.2 s on average, every 52 s.

    Args:
        rate: Mean arrivals, requests/s.
        peak: Factor on the rate while on, > 1.
        cv: Coefficient of variation of the gaps, > 1.
        rng: Drawn from for every gap and switch.
    """
    share_on = 1 / peak
    switching = 2 * rate * peak * (1 - share_on) / (cv**2 - 1)
    on_s, off_s = 1 / (switching * (1 - share_on)), 1 / (switching * share_on)
    start_s = 0.0
    while True:
        end_s = start_s + float(rng.exponential(on_s))
        at_s = start_s + float(rng.exponential(1 / (rate * peak)))
        while at_s < end_s:
            yield at_s
            at_s += float(rng.exponential(1 / (rate * peak)))
        start_s = end_s + float(rng.exponential(off_s))


def _share(at_s: float, start_s: float, length_s: float) -> float:
    return min(1.0, max(0.0, (at_s - start_s) / length_s))


def _smooth(share: float) -> float:
    return (1 - math.cos(math.pi * share)) / 2
