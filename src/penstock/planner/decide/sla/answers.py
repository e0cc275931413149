"""Answers under way, by the profile: how many requests decode at once, the KV that they hold, and their ITL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.performance.profile import DecodeRow
from penstock.planner.decide.adaptive.kv import LOAD_MOST

KV_SIGMAS = 1.1
"""Chosen: with the sixth of the cache that growing leaves free (`Stabilization.kv_ahead`), a cache of forty requests is full one time
in sixty. With 0.75 a gap in the metrics was borne badly (scoreboard, fault-metrics-gap, seed 0: 92% in time, not 99.9%)."""


@dataclass(frozen=True, slots=True)
class ProfiledAnswers:
    """Expected answers on the workers of the profile.

    Attributes:
        tokens_per_s: Answer tokens/s expected at the horizon, >= 0.
        running: Requests in flight over the last seconds.
        row: The profile at their context.
        variability: Ca2 + Cs2: by how much more their tokens vary than a constant number each would.
        factor: By which the observed ITL exceeds the profile's.
        sigmas: Standard deviations of the requests in flight that are counted in, from the attainment.
        target_s: ITL to hold; infinite where there is none.
    """

    tokens_per_s: float
    running: float
    row: DecodeRow
    variability: float
    factor: float
    sigmas: float
    target_s: float

    def concurrency(self, workers: int) -> float | None:
        """Return the requests in flight at one of so many workers; None: they cannot keep up."""
        expected = self.row.concurrency_at(self.tokens_per_s * self.factor / workers)
        return None if expected is None else max(expected, self.running / workers)

    def load_on(self, workers: int) -> float:
        """Return the KV load that the answers bring ``workers`` to, at most `LOAD_MOST` of each."""
        share = self.row.context / self.row.kv_tokens
        if workers < 1:
            return self.tokens_per_s * self.row.itl_s[0] * share
        each = self.concurrency(workers)
        if each is None:
            return workers * LOAD_MOST
        crowded = each + KV_SIGMAS * math.sqrt(each * self.variability / workers)
        return workers * min(LOAD_MOST, crowded * share)

    def itl_with(self, workers: int) -> float:
        """Return the ITL while as many requests are in flight as the attainment has to bear.

        Requests in flight are Poisson where arrivals are, and the router spreads them over the workers.
        """
        each = self.concurrency(workers) if workers >= 1 else None
        if each is None:
            return math.inf
        crowded = each + self.sigmas * math.sqrt(each / workers)
        return self.row.itl_of(crowded) * self.factor
