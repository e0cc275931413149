"""Arrival rates that change with time, and the arrivals that they give.

Pure: the random generator is an argument. Called by `synthetic`, which names the processes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np

Rate = Callable[[float], float]
"""Requests/s at a time in seconds."""


def sine(rate: float, *, amplitude: float, period_s: float) -> Rate:
    """Return a rate that swings about ``rate`` by ``amplitude`` of it."""
    turn = 2 * math.pi / period_s
    return lambda at_s: rate * (1 + amplitude * math.sin(turn * at_s))


def step(rate: float, *, peak: float, start_s: float, length_s: float, every_s: float = math.inf) -> Rate:
    """Return ``rate``, and ``rate * peak`` in [start_s, start_s + length_s), again after each ``every_s``."""
    return lambda at_s: rate * (peak if at_s >= start_s and (at_s - start_s) % every_s < length_s else 1.0)


def ramp(rate: float, *, peak: float, start_s: float, length_s: float) -> Rate:
    """Return ``rate`` until start_s, then a straight line to ``rate * peak`` within length_s, which lasts."""
    return lambda at_s: rate * (1 + (peak - 1) * _share(at_s, start_s, length_s))


def regimes(rate: float, *, peak: float, hold_s: float, rng: np.random.Generator) -> Rate:
    """Return a rate that jumps to levels between ``rate`` and ``rate * peak``, each held for a random time.

    Args:
        rate: The lowest level, requests/s; the logarithm of the levels is uniform.
        peak: The largest factor on it, > 0.
        hold_s: Mean length of a level, exponential.
        rng: Drawn from twice for every level.
    """
    ends: list[float] = []
    levels: list[float] = []

    def at(at_s: float) -> float:
        while not ends or at_s >= ends[-1]:
            ends.append((ends[-1] if ends else 0.0) + float(rng.exponential(hold_s)))
            levels.append(rate * peak ** float(rng.random()))
        return levels[bisect_right(ends, at_s)]

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
    return _switched(
        rate * peak, lambda: float(rng.exponential(on_s)), lambda: float(rng.exponential(off_s)), rng
    )


def tenants(
    rate: float, *, number: int, peak: float, on_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """Yield the arrivals of tenants that are on and off for heavy-tailed times (Pareto of shape 1.5).

    Args:
        rate: Mean arrivals of all together, requests/s.
        number: Of tenants, each with an equal share.
        peak: Factor on a tenant's rate while it is on, > 1; it is on 1 / ``peak`` of the time.
        on_s: Mean length of a time on.
        rng: Each tenant gets a generator of its own from it.
    """

    def one(own: np.random.Generator) -> Iterator[float]:
        # The mean of 1 + pareto(a) is a / (a - 1), so 3 for the shape 1.5.
        def lasts(mean_s: float) -> float:
            return mean_s * (1 + float(own.pareto(1.5))) / 3

        off_s = on_s * (peak - 1)
        start_s = lasts(off_s) * float(own.random()) if own.random() * peak > 1 else 0.0
        return _switched(rate / number * peak, lambda: lasts(on_s), lambda: lasts(off_s), own, start_s)

    return heapq.merge(*(one(own) for own in rng.spawn(number)))


def _switched(
    rate: float,
    on_s: Callable[[], float],
    off_s: Callable[[], float],
    rng: np.random.Generator,
    start_s: float = 0.0,
) -> Iterator[float]:
    """Yield Poisson arrivals at ``rate`` while on; ``on_s`` and ``off_s`` draw how long each time lasts."""
    while True:
        end_s = start_s + on_s()
        at_s = start_s + float(rng.exponential(1 / rate))
        while at_s < end_s:
            yield at_s
            at_s += float(rng.exponential(1 / rate))
        start_s = end_s + off_s()


def _share(at_s: float, start_s: float, length_s: float) -> float:
    return min(1.0, max(0.0, (at_s - start_s) / length_s))


def _smooth(share: float) -> float:
    return (1 - math.cos(math.pi * share)) / 2
