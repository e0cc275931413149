"""What the rules of modes adaptive and sla ask about the workers of a graph, whether it was observed or is read from a profile. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.api import Role
from penstock_planner.decide.capacity.decoding import Decoding
from penstock_planner.decide.demand.load import KvLoad, Work
from penstock_planner.decide.demand.trend import TrendForecast


@dataclass(frozen=True, slots=True)
class Stabilization:
    """Limits of KV usage and forecast errors by which a pool (the workers of one role) grows, or shrinks by one replica.

    Attributes:
        sigmas: Number of standard errors added to the demand forecast before a pool shrinks.
        kv_ahead: Mean KV usage fraction (0 to 1), forecast for the time when a new replica could be ready, above which
            the pool grows. Requests that do not fit preempt running streams.
        kv: Maximum mean KV usage fraction after one replica is removed, taking into account that fuller workers decode
            more slowly.
    """

    sigmas: float
    kv_ahead: float
    kv: float


class ItlView(Protocol):
    """Expected ITL (time between two tokens of an answer) when a replica requested now could be ready."""

    @property
    def target_s(self) -> float:
        """Return the ITL target (time between two tokens of an answer), in seconds."""
        ...

    @property
    def after_s(self) -> float:
        """Return the highest ITL, in seconds, that may be expected after removing one worker; with a higher one, none is removed.

        ITL is the time between two tokens of an answer. The value is below the ITL target.
        """
        ...

    def itl_with(self, workers: int) -> float:
        """Return the ITL with ``workers`` workers, in seconds, that is expected when a replica requested now could be ready.

        It is the value at the SLO's percentile of requests, such as the 99th. Infinite if the workers cannot keep up.
        """
        ...


class WorkerModel(Protocol):
    """What the workers of a graph can do, and how far demand may fill them. The rules for growing and shrinking read it.

    `ObservedWorkers` learns it from observations; `ProfiledWorkers` reads it from a performance profile, corrected by
    observations.
    """

    @property
    def uses_learned_floor(self) -> bool:
        """Whether a learned floor decides how many replicas to keep; otherwise only a maximum utilisation does (`busy_most`).

        The floor is the minimum number of replicas that was cheapest in a simulation of fleets with different floors.
        """
        ...

    @property
    def follows_trend(self) -> bool:
        """Whether demand is forecast along its slope; otherwise it is assumed to stay constant."""
        ...

    @property
    def sigmas_ahead(self) -> float:
        """Return the number of standard errors that are added to the demand forecast before a role grows."""
        ...

    @property
    def restraint(self) -> Stabilization:
        """Return the limits by which a pool (the workers of one role) grows or shrinks: KV usage fractions and a margin for errors.

        The margin is a number of standard errors that is added to the demand forecast before the pool shrinks.
        """
        ...

    def tokens_per_s(self, work: Work) -> float | None:
        """Return the prompt tokens that one worker computes per second; None until it is known.

        Args:
            work: Observed prefill work.
        """
        ...

    def arriving(self, along: TrendForecast) -> TrendForecast:
        """Return the forecast of arriving requests/s to use, given the forecast along the trend."""
        ...

    def decoding(self, kv: KvLoad, tokens_per_s: float) -> Decoding:
        """Return the model of the KV usage of the answers that will be decoded.

        Args:
            kv: Observed KV usage of the workers.
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed, so that their answers must
                be decoded.
        """
        ...

    def itl(self, tokens_per_s: float) -> ItlView | None:
        """Return the expected ITL of the answers; None if there is no ITL target, or if nothing is known about it.

        Args:
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed, so that their answers must
                be decoded.
        """
        ...

    def busy_most(self, role: Role, workers: int) -> float:
        """Return the fraction of a pool's throughput that demand can fill before the pool grows, in (0, 1].

        A pool is the workers of one role.

        Args:
            role: Role of the pool.
            workers: Number of workers of the pool.
        """
        ...

    def busy_after(self, role: Role, workers: int) -> float:
        """Return the fraction of the remaining workers' throughput that demand may fill for one worker to be removed, in (0, 1].

        A pool (the workers of one role) does not shrink if demand would fill more than this fraction afterwards.

        Args:
            role: Role of the pool.
            workers: Number of workers that remain.
        """
        ...
