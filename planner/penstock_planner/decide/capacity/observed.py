"""Assumptions about what a graph's workers can do, without a profile: observed throughput and fractions chosen by experiment."""

from __future__ import annotations

from typing import Final

from penstock.api import Role
from penstock_planner.decide.capacity.decoding import Decoding, ObservedDecoding
from penstock_planner.decide.capacity.worker_model import ItlView, Stabilization
from penstock_planner.decide.demand.load import FULL, KvLoad, Work, actual_usage, idle_speed_usage
from penstock_planner.decide.demand.trend import TrendForecast

BUSY_MOST = FULL
"""Fraction of a prefill pool's throughput that demand can fill before the pool (the workers of one role) grows: 0.9.

It is the threshold that the NVIDIA Dynamo planner's documentation has for KV usage. The workers of a prefill pool share
one queue in the router, so that three workers at 0.9 still answer log-normal prompts within seconds."""

BUSY_AFTER = 0.75
"""Chosen: fraction of the remaining throughput that demand can fill after a worker is removed.

Of 0.7, 0.75 and 0.8 it had the fewest reversals on the cases poisson, day and sine of the scoreboard (the planner's
benchmark)."""

SHARES = {Role.AGGREGATED: 0.7}
"""Chosen: fraction of its throughput that a worker of this role can use; 1 for roles that are absent.

An aggregated worker uses less because requests wait in each worker separately and decoding steps interrupt prompts.
Prefill workers share one queue and use all of it. At 0.8 the benchmark aggregated-sine was left to three workers with
96.5% of requests on time, at 0.7 to four with 100%. It applies to simulated workers (see `shadow_fleets`) until they have
been compared with what was really served, and to the fractions `BUSY_MOST` and `BUSY_AFTER`."""

AHEAD_SIGMAS = 0.5
"""Chosen: number of standard errors that are added to the demand forecast, both for growing and for shrinking.

One replica too many costs its GPUs for a minute, one too few makes the arrivals of a start-up time late. With
-0.5 sine was 98.5% on time, with 0.5 99.9% for 1% more GPU-hours."""


KV_MOST = 0.7
"""Chosen: mean KV usage fraction of a decode pool above which it grows. At this usage a worker can still take a tenth
more."""

OBSERVED_RESTRAINT = Stabilization(
    sigmas=AHEAD_SIGMAS,
    kv_ahead=KV_MOST,
    kv=actual_usage(idle_speed_usage(KV_MOST) * BUSY_AFTER / BUSY_MOST),
)
"""Conditions of mode adaptive. After a scale-down, KV usage must be below its growing threshold by the same factor as
a prefill pool's utilisation: about 0.43."""


class ObservedWorkers:
    """Throughput, KV usage and permitted utilisation of a graph's workers, as learned from observations: a `WorkerModel`."""

    @property
    def uses_learned_floor(self) -> bool:
        """Whether a learned floor decides how many replicas to keep; otherwise only a maximum utilisation does (`busy_most`).

        The floor is the minimum number of replicas that was cheapest in a simulation of fleets with different floors.
        """
        return True

    @property
    def follows_trend(self) -> bool:
        """Whether demand is forecast along its slope; otherwise it is assumed to stay constant."""
        return True

    @property
    def sigmas_ahead(self) -> float:
        """Return the number of standard errors that are added to the demand forecast before a role grows."""
        return AHEAD_SIGMAS

    @property
    def restraint(self) -> Stabilization:
        """Return the limits by which a pool (the workers of one role) grows or shrinks: KV usage fractions and a margin for errors.

        The margin is a number of standard errors that is added to the demand forecast before the pool shrinks.
        """
        return OBSERVED_RESTRAINT

    def tokens_per_s(self, work: Work) -> float | None:
        """Return the prompt tokens that one worker computes per second; None until it has been observed for long enough.

        Args:
            work: Observed prefill work.
        """
        return work.tokens_per_s

    def arriving(self, along: TrendForecast) -> TrendForecast:
        """Return the forecast of arriving requests/s to use: the forecast along the trend, unchanged.

        In mode sla, with a performance profile, the mean rate can be returned instead.

        Args:
            along: Forecast of requests/s along the trend.
        """
        return along

    def decoding(self, kv: KvLoad, tokens_per_s: float) -> Decoding:
        """Return the model of the KV usage of the answers that will be decoded: as much KV per prompt token as observed.

        Args:
            kv: Observed KV usage of the workers.
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed, so that their answers must
                be decoded.
        """
        held_s = kv.light_s / kv.done_tokens if kv.done_tokens > 0 else 0.0
        return ObservedDecoding(held_s * tokens_per_s)

    def itl(self, tokens_per_s: float) -> ItlView | None:
        """Return the expected ITL of the answers, or None if there is no ITL target. Without a performance profile it is always None.

        Args:
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed, so that their answers must
                be decoded.
        """
        del tokens_per_s  # without a profile it is unknown how much another worker would lower the ITL
        return None

    def busy_most(self, role: Role, workers: int) -> float:
        """Return the fraction of a pool's throughput that demand can fill before the pool grows, in (0, 1].

        A pool is the workers of one role.

        Args:
            role: Role of the pool.
            workers: Number of workers of the pool.
        """
        del workers
        return BUSY_MOST * SHARES.get(role, 1.0)

    def busy_after(self, role: Role, workers: int) -> float:
        """Return the fraction of the remaining workers' throughput that demand may fill for one worker to be removed, in (0, 1].

        A pool (the workers of one role) does not shrink if demand would fill more than this fraction afterwards.

        Args:
            role: Role of the pool.
            workers: Number of workers that remain.
        """
        del workers
        return BUSY_AFTER * SHARES.get(role, 1.0)


OBSERVED: Final = ObservedWorkers()
"""The model without a profile. It has no state of its own: everything that it learns is in `Work` and `KvLoad`."""
