"""Request counters of the simulated routers for the planner; they mirror the counters of the live routers, in virtual time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from penstock.api import Role
from penstock.router.core.retries import RefusalReason
from penstock.simulator.jobs import Job
from penstock_planner.decide.demand.observation import Demand

_BINS_PER_E = 100.0


class GapHistogram:
    """Histogram of the gaps between output tokens, in simulated seconds,  with logarithmic bins.

    A percentile is accurate to half a percent of its value.

    Attributes:
        total: Number of gaps.
        late: Number of gaps above ``slo_s``, the target for the time between two output tokens (ITL); 0 without a target.
        sum_s: Sum of the gaps, seconds; ``sum_s / total`` is their mean.
    """

    def __init__(self, slo_s: float | None = None) -> None:
        """Start with no gaps.

        Args:
            slo_s: ITL target: gaps above this many seconds count as late. None counts no gap as late.
        """
        self._counts: dict[int, int] = {}
        self._slo_s = math.inf if slo_s is None else slo_s
        self.total = 0
        self.late = 0
        self.sum_s = 0.0

    def add(self, gap_s: float, count: int) -> None:
        """Add ``count`` gaps between output tokens, of ``gap_s`` simulated seconds each. Does nothing if ``gap_s`` is 0 or less."""
        if gap_s > 0:
            place = round(math.log(gap_s) * _BINS_PER_E)
            self._counts[place] = self._counts.get(place, 0) + count
            self.total += count
            self.late += count if gap_s > self._slo_s else 0
            self.sum_s += gap_s * count

    def percentile(self, share: float) -> float | None:
        """Return a percentile (nearest rank) of the gaps between output tokens, in seconds; None if there are no gaps.

        ``share`` is the percentile as a fraction, 0-1.
        """
        wanted = math.ceil(share * self.total)
        seen = 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= wanted:
                return math.exp(place / _BINS_PER_E)
        return None


class FrontendCounters:
    """Counters of one simulation, summed over all routers. Times are simulated seconds.

    `collect` returns the increase of the counters since the last call. A job is a request of the simulation.

    In sums of uncached tokens, each request counts with the number of prompt tokens that the router, at the request's arrival, expected not
    to find in a cache.
    """

    def __init__(self, gaps: GapHistogram, slo_s: float) -> None:
        """Start all counters at 0, at time 0.

        Args:
            gaps: Inter-token gaps of the simulation.
            slo_s: TTFT target, in seconds.
        """
        self._gaps, self._slo_s = gaps, slo_s
        self._at_s = 0.0
        self._weights: dict[int, int] = {}
        # Indices of the jobs whose prompt was computed.
        self._computed: set[int] = set()
        # Arrival times of queued jobs, and the workers of dispatched jobs whose prompt is not computed yet.
        self._waiting: dict[int, float] = {}
        self._dispatched: dict[int, str] = {}
        self._prefilling: dict[str, int] = {}
        self._gap_count, self._gap_late, self._gap_sum_s = 0, 0, 0.0
        self._turned_away: Mapping[Role, float] = {}
        # Counts by field name of `Demand`.
        self._counts = defaultdict[str, float](int)

    def arrived(self, job: Job, uncached_tokens: int) -> None:
        """Add the arrival of a request (``job``), and its tokens, to the counts that `collect` returns.

        A request that is refused later counts too. ``uncached_tokens`` is the number of its prompt tokens that are not expected in
        a worker's cache.
        """
        self._counts["arrivals"] += 1
        self._counts["prompt_tokens"] += job.request.input_tokens
        self._counts["uncached_tokens"] += uncached_tokens
        self._weights[job.index] = uncached_tokens

    def queued(self, job: Job) -> None:
        """Record that a request (``job``) waits in a router for a worker from now on, on arrival or after its worker died.

        Until it is dispatched or refused, it is among the waiting requests that `collect` returns.

        If its prompt had been computed before, its uncached tokens (prompt tokens that are not found in a cache) are counted again,
        since they must be computed once more.
        """
        if job.index in self._computed:
            self._computed.remove(job.index)
            self._counts["uncached_tokens"] += self._weights[job.index]
        self._waiting[job.index] = job.request.arrival_s

    def rejected(self, job: Job, reason: RefusalReason) -> None:
        """Add a request (``job``) that got no worker to the counts of refused or timed-out requests, and stop tracking it.

        ``reason`` says why it got no worker; a timeout of its wait is counted separately.
        """
        if reason is RefusalReason.QUEUE_TIMEOUT:
            self._counts["timed_out"] += 1
        else:
            self._counts["refused"] += 1
        self.forget(job)

    def forget(self, job: Job) -> None:
        """Stop tracking a request (``job``) that no longer waits for a worker and whose prompt will not be computed."""
        self._waiting.pop(job.index, None)
        self._weights.pop(job.index, None)
        self._computed.discard(job.index)

    def dispatched(self, job: Job, worker: str) -> None:
        """Record that a router sent a request (``job``) to the worker named ``worker``.

        The request no longer waits; until it leaves the worker or its prompt is computed, the worker counts as computing prompts.
        """
        self._waiting.pop(job.index, None)
        self._dispatched[job.index] = worker
        self._prefilling[worker] = self._prefilling.get(worker, 0) + 1

    def prefilled(self, job: Job) -> None:
        """Add the uncached prompt tokens of a request (``job``), now computed, to the counts that `collect` returns.

        Does nothing if its prompt has been counted already.
        """
        if self.left_worker(job):
            self._counts["prefilled_tokens"] += self._weights.get(job.index, 0)
            self._computed.add(job.index)

    def left_worker(self, job: Job) -> bool:
        """Record that a request (``job``) left its worker, and return whether its prompt was still being computed there.

        Returns False if the request had no worker.
        """
        worker = self._dispatched.pop(job.index, None)
        if worker is None:
            return False
        left = self._prefilling[worker] - 1
        if left:
            self._prefilling[worker] = left
        else:
            del self._prefilling[worker]
        return True

    def first_token(self, job: Job, now_s: float) -> None:
        """Add the TTFT of a request (``job``), whose first output token comes now, to the counts that `collect` returns.

        Its prompt counts as computed. ``now_s`` is the current simulated time in seconds.
        """
        self.prefilled(job)
        ttft_s = now_s - job.request.arrival_s
        self._counts["ttft_sum_s"] += ttft_s
        self._counts["ttft_late"] += ttft_s > self._slo_s
        self._counts["dispatched_late"] += now_s - (job.dispatched_s or 0.0) > self._slo_s
        self._counts["ttft_count"] += 1

    def completed(self, job: Job) -> None:
        """Add a request (``job``) whose answer is complete, and its output tokens, to the counts that `collect` returns."""
        self._counts["completed"] += 1
        self._counts["output_tokens"] += job.request.output_tokens
        self._weights.pop(job.index, None)
        self._computed.discard(job.index)

    def collect(
        self, now_s: float, in_flight: dict[Role, float], turned_away: Mapping[Role, float]
    ) -> Demand | None:
        """Return what the planner reads about the requests: counts since the last call and current numbers.

        The counts start at 0 again.

        Args:
            now_s: Current simulated time, seconds.
            in_flight: Number of requests at workers now, by role.
            turned_away: Cumulative number of requests refused for lack of a worker, by role.

        Returns:
            The counts of requests, tokens and late first tokens with the numbers in the arguments, or None if no time has passed
            since the last call.
        """
        period_s = now_s - self._at_s
        if period_s <= 0:
            return None
        weights, gaps = self._weights, self._gaps
        demand = Demand(
            period_s=period_s,
            unserved={role: n - self._turned_away.get(role, 0) for role, n in turned_away.items()},
            itl_sum_s=gaps.sum_s - self._gap_sum_s,
            itl_count=gaps.total - self._gap_count,
            itl_late=gaps.late - self._gap_late,
            waiting=len(self._waiting),
            waiting_tokens=sum(weights[index] for index in self._waiting),
            oldest_wait_s=now_s - min(self._waiting.values()) if self._waiting else None,
            in_flight=in_flight,
            in_flight_tokens=sum(weights[index] for index in self._dispatched),
            prefilling_workers=len(self._prefilling),
            **{"ttft_late": 0.0, "dispatched_late": 0.0, **self._counts},
        )
        self._at_s, self._turned_away = now_s, turned_away
        self._gap_count, self._gap_late, self._gap_sum_s = gaps.total, gaps.late, gaps.sum_s
        self._counts.clear()
        return demand
