"""KV cache: how many workers' worth is in use or waited for, and how it follows demand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from penstock.api import Role
from penstock.planner.decide.adaptive import trend
from penstock.planner.decide.adaptive.memory import KvLoad
from penstock.planner.decide.adaptive.trend import Forecast
from penstock.planner.decide.observation import Pull

FULL = 0.9
"""KV usage above which a worker counts as full: the planner document's threshold for growing."""

LOAD_TAU_S = 30.0
"""Chosen: KV usage is a sum over many requests, so half a minute is smooth enough."""

SPENT_TAU_S = 120.0
"""Chosen: two minutes weigh in the KV that a token costs."""

SLOWDOWN = 3.0
"""By how much longer a worker with a full KV cache takes for a token than an idle one, against the idle one's time: 2.9,
3.3 and 7.3 in the shipped profiles of H100 70B, A100 8B and H200 8B. Without it ten times the load held thirty times
the KV, and a flash crowd found its decode workers a start-up late."""

LOAD_MOST = 2.0
"""Chosen: an overloaded worker counts as two full ones at most; beyond that the excess is unknown."""

WAITING_SHARE = 0.02
"""KV of a waiting request where running ones give no figure: the planner document's own figure."""


def light_of(usage: float) -> float:
    """Return the KV usage that a worker's answers would have if it stayed as fast as an idle one, below 1 / `SLOWDOWN`.

    This, not usage, adds up over workers: of two at 0.22 one alone would be more than full.
    """
    return usage / (1.0 + SLOWDOWN * usage)


class Decoding(Protocol):
    """Expected answers, and what they hold of a pool's KV cache."""

    def load_on(self, workers: int) -> float:
        """Return the KV load of that many workers, in workers' worth; all of it where there are none."""
        ...


@dataclass(frozen=True, slots=True)
class LightDecoding:
    """Answers that hold as much KV per token as the last minutes' did.

    Attributes:
        light: KV load on workers that stay as fast as idle ones, in workers' worth.
    """

    light: float

    def load_on(self, workers: int) -> float:
        """Return the KV load on ``workers``, at most `LOAD_MOST` of each.

        A worker at usage u decodes `SLOWDOWN` x u longer than an idle one, and holds the KV as much longer:
        u = h (1 + s u), where h is what it would hold if it stayed fast. Hence u = h / (1 - s h).
        """
        if workers < 1:
            return self.light
        share = self.light / workers
        left = 1.0 - SLOWDOWN * share
        return workers * (LOAD_MOST if share > LOAD_MOST * left else share / left)


@dataclass(frozen=True, slots=True)
class KvView:
    """What is known of KV usage at a decision.

    Attributes:
        load: Workers' worth of KV in use or waited for, now and when a new replica could be ready.
        decoding: What holds the KV of the arrivals expected then.
    """

    load: Forecast
    decoding: Decoding

    def moved(self, ready: int, workers: int) -> float:
        """Return the load that what ``ready`` workers hold, now or ahead, would be on ``workers``."""
        load = max(self.load.now, self.load.ahead)
        return LightDecoding(ready * light_of(load / ready)).load_on(workers) if ready else load

    def demanded(self, workers: int) -> float:
        """Return the KV load of ``workers`` that serve the expected arrivals, at most `LOAD_MOST` of each."""
        return self.decoding.load_on(workers)


def load_of(pull: Pull, role: Role) -> float | None:
    """Return the pull's KV load in workers' worth, unknown workers counted as empty; None when nothing is known.

    A waiting request weighs what a running one holds on average, and `WAITING_SHARE` where nothing runs.
    """
    if not pull.kv.fresh:
        return None
    waiting = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    in_flight = pull.demand.in_flight.get(role, 0.0) if pull.demand is not None else 0.0
    running = in_flight - waiting
    share = pull.kv.total / running if running > 0 and pull.kv.total > 0 else WAITING_SHARE
    return pull.kv.total + waiting * min(share, 1.0)


def followed(kv: KvLoad, load: float, tokens: float, *, ready: int, dt_s: float) -> KvLoad:
    """Return the KV load after one pull.

    Args:
        kv: Before.
        load: Of the pull, held for ``dt_s``.
        tokens: Uncached tokens whose prefill ended meanwhile.
        ready: Workers that hold it.
        dt_s: Since the pull before, > 0.
    """
    kept = math.exp(-dt_s / SPENT_TAU_S)
    usage = min(1.0, load / ready) if ready else 1.0
    return KvLoad(
        load=trend.followed(kv.load, load, dt_s, LOAD_TAU_S),
        light_s=kv.light_s * kept + load * dt_s / (1.0 + SLOWDOWN * usage),
        done_tokens=kv.done_tokens * kept + tokens,
    )
