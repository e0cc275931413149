"""What the workers of a graph are taken to be able to do, without a profile: as observed, with shares that were chosen by trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.api import Role
from penstock_planner.decide.adaptive.signals import (
    FULL,
    Decoding,
    KvLoad,
    LightDecoding,
    TrendForecast,
    Work,
    light_of,
    usage_of,
)

BUSY_MOST = FULL
"""Demand may fill this share of a prefill pool's throughput before it grows, as the planner document has it
for KV. Its workers share one queue in the router, so that three at 0.9 still answer log-normal prompts within
seconds."""

BUSY_AFTER = 0.75
"""Chosen: it may fill this share of the rest after a worker left; of 0.7, 0.75 and 0.8 the one with fewest
reversals on the scoreboard's poisson, day and sine."""

SHARES = {Role.AGGREGATED: 0.7}
"""Chosen: of its throughput what a worker does of which requests wait in each, and decoding steps come
between prompts; prefill workers share one queue and do all of it. At 0.8 aggregated-sine was left to three
workers, 96.5% in time, at 0.7 to four, 100%. Of shadow workers until they are seen, and of the shares
above."""

AHEAD_SIGMAS = 0.5
"""Chosen: demand counts with this many of its standard errors, where a pool is to grow and where it is to
shrink. A replica too many costs its GPUs for a minute, one too few makes a start-up's arrivals late: at -0.5
sine was 98.5% in time, at 0.5 99.9% for 1% more GPU-hours."""


@dataclass(frozen=True, slots=True)
class Stabilization:
    """When KV grows a pool, and what else must hold before it shrinks by one.

    Attributes:
        sigmas: Standard errors that demand counts with before a pool shrinks.
        kv_ahead: Mean KV usage, at the horizon, above which the pool grows; what does not fit preempts streams.
        kv: Mean KV usage that one fewer may have, its slower decoding counted.
    """

    sigmas: float
    kv_ahead: float
    kv: float


KV_MOST = 0.7
"""Chosen: mean KV usage of a decode pool, above which it grows; at it a worker can take a tenth more."""

OBSERVED_RESTRAINT = Stabilization(
    sigmas=AHEAD_SIGMAS,
    kv_ahead=KV_MOST,
    kv=usage_of(light_of(KV_MOST) * BUSY_AFTER / BUSY_MOST),
)
"""One fewer may have as much less KV, some 0.43, as a prefill pool may be less busy."""


class GapsView(Protocol):
    """Gaps between tokens at the horizon."""

    @property
    def target_s(self) -> float:
        """Return the ITL to hold, seconds."""
        ...

    @property
    def after_s(self) -> float:
        """Return the ITL that one worker fewer may reach, below the target, seconds."""
        ...

    def itl_with(self, workers: int) -> float:
        """Return the ITL that the slowest request within the targeted share sees; infinite where they cannot keep up."""
        ...


class ObservedWorkers:
    """What workers show.

    Mode ``sla`` has them by a profile.
    """

    @property
    def has_shadows(self) -> bool:
        """Whether hindsight decides which floor to keep; else `busy_most` alone decides."""
        return True

    @property
    def follows_trend(self) -> bool:
        """Whether demand is expected to continue along its slope; else it stays as it is."""
        return True

    @property
    def sigmas_ahead(self) -> float:
        """Return the standard errors that predicted demand counts with before a pool grows."""
        return AHEAD_SIGMAS

    @property
    def restraint(self) -> Stabilization:
        """Return what else must hold before a pool shrinks."""
        return OBSERVED_RESTRAINT

    def tokens_per_s(self, work: Work) -> float | None:
        """Return the prompt tokens that one worker computes per second; None: not known yet."""
        return work.tokens_per_s

    def arriving(self, along: TrendForecast) -> TrendForecast:
        """Return the requests/s expected, given those along the trend."""
        return along

    def decoding(self, kv: KvLoad, tokens_per_s: float) -> Decoding:
        """Return what holds the KV of prompts that end at this many uncached tokens/s: as much per token as was seen."""
        held_s = kv.light_s / kv.done_tokens if kv.done_tokens > 0 else 0.0
        return LightDecoding(held_s * tokens_per_s)

    def gaps(self, tokens_per_s: float) -> GapsView | None:
        """Return the gaps between tokens of answers to prompts that end at this many uncached tokens/s; None: no target."""
        del tokens_per_s  # without a profile the gain of another worker is unknown
        return None

    def busy_most(self, role: Role, workers: int) -> float:
        """Return the share of its throughput that demand may fill before a pool grows, in (0, 1]."""
        del workers
        return BUSY_MOST * SHARES.get(role, 1.0)

    def busy_after(self, role: Role, workers: int) -> float:
        """Return the share that it may fill of the ``workers`` that stay after one went, in (0, 1]."""
        del workers
        return BUSY_AFTER * SHARES.get(role, 1.0)
