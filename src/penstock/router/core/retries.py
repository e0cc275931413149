"""Whether a request that failed before its first byte is tried again, and what its failures prove. Pure.

A retry that leaves a failing worker for a sound one adds no load where there is none to spare, so it takes nothing
out of the budget: the budget protects a pool that fails as a whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from penstock.router.core.assignment import Assignment
from penstock.router.core.transfers import KvTransfer
from penstock.router.core.worker import Worker
from penstock.router.core.worker_pool import WorkerPool

_WINDOW_S = 10.0
"""Chosen: the floor may be saved up over this many simulated seconds, Finagle's window for its budgets."""
_REMEMBERED_REQUESTS = 1000
"""Chosen: a worker that dies with a full batch (max_num_seqs is 256 by default) can be retried elsewhere
at a fraction of 0.2-0.3, and traffic of the past buys no more than this many requests' worth."""


class RetryBudget:
    """Two token buckets: every request pays a fraction of a retry in, and every second a floor.

    Over a long time retries are at most ``fraction`` of the requests plus ``min_per_s`` a second.
    """

    __slots__ = ("_earned", "_floor", "_fraction", "_min_per_s", "_seen_s")

    def __init__(self, *, fraction: float, min_per_s: float, now_s: float) -> None:
        """Start with the floor full.

        Args:
            fraction: Retries per request, 0-1.
            min_per_s: Retries per simulated second whatever the traffic, >= 0.
            now_s: Simulated seconds.
        """
        self._fraction = fraction
        self._min_per_s = min_per_s
        self._earned = 0.0
        self._floor = min_per_s * _WINDOW_S
        self._seen_s = now_s

    def request_arrived(self) -> None:
        """Pay in for one request (not for its retries)."""
        self._earned = min(self._earned + self._fraction, self._fraction * _REMEMBERED_REQUESTS)

    def take(self, now_s: float) -> bool:
        """Take one retry out; False when there is none."""
        saved = self._floor + max(0.0, now_s - self._seen_s) * self._min_per_s
        self._floor = min(saved, self._min_per_s * _WINDOW_S)
        self._seen_s = now_s
        if self._earned >= 1:
            self._earned -= 1
            return True
        if self._floor >= 1:
            self._floor -= 1
            return True
        return False


class RetryScope(Enum):
    """Where a request that failed before its first byte may be tried again."""

    NOWHERE = auto()
    """The failure is the client's doing, or there is no time left."""
    ELSEWHERE = auto()
    """The same worker would say the same; another one tells whose fault it is."""
    ANYWHERE = auto()
    """The worker is leaving, restarting or out of reach: it may answer the next time."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """One failed try of a request.

    Attributes:
        reason: Bounded word for metrics.
        scope: Where trying again makes sense.
        workers: Which failed; none when it was no worker, two when either end of a KV transfer may have.
        is_timeout: A time-out after connecting: tried again at most once.
        unproven: A failure that counts against the worker only if another one serves the request.
    """

    reason: str
    scope: RetryScope
    workers: tuple[Worker, ...] = ()
    is_timeout: bool = False
    unproven: Assignment[Any] | None = None


class RequestTries:
    """What the tries of one request have shown so far.

    Attributes:
        retries: Retries so far.
        timeouts: Time-outs among the failures so far.
        avoid: Names of workers that have failed it.
        unproven: Failures that count against their workers only if another one serves the request.
        lost_transfers: Of its KV, oldest first.
    """

    __slots__ = ("avoid", "lost_transfers", "retries", "timeouts", "unproven")

    def __init__(self) -> None:
        self.retries = 0
        self.timeouts = 0
        self.avoid: frozenset[str] = frozenset()
        self.unproven: tuple[Assignment[Any], ...] = ()
        self.lost_transfers: tuple[KvTransfer, ...] = ()


class RetryRules:
    """Allows retries and settles unproven failures, for all requests of one router."""

    def __init__(self, pool: WorkerPool, budget: RetryBudget, *, max_per_request: int) -> None:
        """Tie the parts.

        Args:
            pool: The workers.
            budget: Allows retries that add load.
            max_per_request: Most retries of one request, >= 0.
        """
        self._pool = pool
        self._budget = budget
        self._max_per_request = max_per_request

    def arrived(self) -> None:
        """Take note of a new request, which pays for retries."""
        self._budget.request_arrived()

    def retry(self, tries: RequestTries, failure: FailedTry, now_s: float, *, left_s: float) -> int | None:
        """Return how many back-off pauses to wait before the next try; None: the failure is final.

        Args:
            tries: The request's; changed.
            failure: Of its last try, before its first byte.
            now_s: Simulated seconds.
            left_s: What is left of its time, simulated seconds.

        Returns:
            0 where another worker can take it, else the number of retries including the next one.
        """
        tries.timeouts += failure.is_timeout
        if failure.unproven is not None:
            tries.unproven = (*tries.unproven, failure.unproven)
        avoid = tries.avoid | _to_avoid(tries, failure)
        has_others = any(self._others(each, avoid, now_s) for each in failure.workers)
        if (
            failure.scope is RetryScope.NOWHERE
            or (failure.scope is RetryScope.ELSEWHERE and not has_others)
            or tries.retries >= self._max_per_request
            or (failure.is_timeout and tries.timeouts > 1)
            or left_s <= 0
            or not (self._leaves_the_failing(failure, avoid, now_s) or self._budget.take(now_s))
        ):
            return None
        tries.retries += 1
        tries.avoid = avoid
        return tries.retries if failure.workers and not has_others else 0

    def served(self, tries: RequestTries, worker: Worker, now_s: float) -> None:
        """Prove the failures that other workers of a role had with a request: this one has served it."""
        if not tries.unproven:
            return
        rest = []
        for each in tries.unproven:
            if each.role is not worker.spec.role:
                rest.append(each)
            elif each.worker is not worker:
                each.convict(now_s)
        tries.unproven = tuple(rest)

    def settle(self, tries: RequestTries, now_s: float) -> tuple[str, ...]:
        """Take back what is unproven at the end of a request; returns the workers if it failed on several."""
        unproven, tries.unproven = tries.unproven, ()
        if not unproven:
            return ()
        for each in unproven:
            each.pardon(now_s)
        names = sorted({each.worker.name for each in unproven})
        return tuple(names) if len(names) > 1 else ()

    def _others(self, worker: Worker, avoid: Collection[str], now_s: float) -> list[Worker]:
        routable = self._pool.routable(worker.spec.role, now_s)
        return [each for each in routable if each is not worker and each.name not in avoid]

    def _leaves_the_failing(self, failure: FailedTry, avoid: Collection[str], now_s: float) -> bool:
        """Return whether a retry goes from a worker that fails request after request, or is gone, to one that does not."""
        return any(
            (each.is_failing or not each.takes_requests)
            and not all(other.is_failing for other in self._others(each, avoid, now_s))
            for each in failure.workers
        )


def _to_avoid(tries: RequestTries, failure: FailedTry) -> set[str]:
    """Return the names of workers that the next try passes over.

    Of a lost KV transfer that is the decode worker at first: over the same prefill worker, which has the prompt
    in its cache, the next try tells which of them is at fault.
    """
    passed_over = failure.workers if len(tries.lost_transfers) > 1 else failure.workers[:1]
    return {each.name for each in passed_over}
