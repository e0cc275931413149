"""Observations: one pull of all metrics, its summary, and the pulls of one adjustment interval.

A pull is summarised once when it arrives, so that deciding costs the same for one worker and for a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.api import Role
from penstock_planner.decide.reading import Quality, Reading, missing

SHOWN_REASONS = 3
"""Chosen: how many workers' reasons a summary names; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Replicas of one role at a pull; fields as in the target's PoolState.

    Attributes:
        ready: Serving.
        starting: Asked for or restarting, not serving yet.
        gpus: GPUs per replica as the backend reports them, 0 when it does not know.
        switching: Of ``starting``, those that served the other role: they finish its requests, then serve this one at once.
    """

    ready: int
    starting: int = 0
    draining: int = 0
    gpus: int = 0
    switching: int = 0

    @property
    def begun(self) -> int:
        """Return the replicas that load a model: a start-up away from serving."""
        return self.starting - self.switching

    @property
    def replicas(self) -> int:
        """Return ready + starting, the number that scaling changes."""
        return self.ready + self.starting

    @property
    def existing(self) -> int:
        """Return every replica that holds GPUs, draining ones included."""
        return self.ready + self.starting + self.draining


@dataclass(frozen=True, slots=True)
class Demand:
    """What reached the frontend between the pull before and this one, and what waits now; all routers together.

    Counts are differences of counters over ``period_s``. Every value is known: a source that lacks one of
    them gives no `Demand` at all.

    Attributes:
        period_s: Simulated seconds that the counts cover, > 0.
        arrivals: Requests that reached the frontend, refused and timed-out ones included.
        uncached_tokens: Of the arrivals, as far as routing knows; equals ``prompt_tokens`` where it knows
            no cache.
        refused: Rejected at the frontend (429 or 503: queue full, workers busy).
        timed_out: Left the queue at its time limit.
        turned_away: Of both, by the role that had no worker for them; empty where the role is unknown.
        prefilled_tokens: Of the requests whose prefill ended, each counted as it was in ``uncached_tokens``, so
            that arrivals = prefilled + waiting + in flight + refused holds whatever routing knows of caches.
        ttft_sum_s: Sum of the TTFT of requests whose first token came.
        ttft_late: First tokens that came after the TTFT that counts as in time; None: unknown.
        dispatched_late: Of those, the ones that came after it even counted from when their prompt was handed to the
            worker that computes it, by the last try; None: unknown.
        itl_sum_s: Sum of the gaps between successive tokens.
        itl_late: Gaps above the ITL that counts as in time; None: unknown, or any does.
        waiting: Requests in the routers' queues now, for any role.
        waiting_tokens: Of those, counted as in ``uncached_tokens``.
        oldest_wait_s: Longest time that one of those has waited; None without any.
        in_flight: Requests assigned to workers now, by role.
        in_flight_tokens: Of the requests whose prefill has not ended on the worker that has it, counted as in
            ``uncached_tokens``.
        prefilling_workers: Prefill (or aggregated) workers that have such a request now.
    """

    period_s: float
    arrivals: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    refused: float = 0.0
    timed_out: float = 0.0
    turned_away: Mapping[Role, float] = field(default_factory=dict)
    completed: float = 0.0
    output_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    ttft_sum_s: float = 0.0
    ttft_count: float = 0.0
    itl_sum_s: float = 0.0
    itl_count: float = 0.0
    waiting: float = 0.0
    waiting_tokens: float = 0.0
    oldest_wait_s: float | None = None
    in_flight: Mapping[Role, float] = field(default_factory=dict)
    in_flight_tokens: float = 0.0
    prefilling_workers: float = 0.0
    ttft_late: float | None = None
    dispatched_late: float | None = None
    itl_late: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """One gauge's readings of one pull, summed over the decode (or aggregated) workers.

    Attributes:
        total: Sum of the fresh values: fractions for KV usage, requests for those waiting.
        why: Reasons of the unknown, the first few by worker.
    """

    total: float
    fresh: int
    unknown: int
    age_s: float | None
    source: str
    why: str = ""

    @property
    def mean(self) -> float | None:
        """Return the mean of the fresh values; None without any."""
        return self.total / self.fresh if self.fresh else None


NO_WORKERS = WorkerSummary(0.0, 0, 0, None, "", "")
"""The summary of a pull that read no metrics."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull as decisions see it and as the ledger keeps it.

    Attributes:
        queue: Requests waiting for prefill; None in aggregated graphs.
        demand: At the frontend; None when unknown.
        wall_s: Real seconds since 1970; None where nothing reads the calendar.
    """

    at_s: float
    pools: Mapping[Role, PoolCounts]
    kv: WorkerSummary
    queue: Reading | None
    demand: Demand | None = None
    worker_waiting: WorkerSummary | None = None
    wall_s: float | None = None

    @property
    def queue_per_worker(self) -> float | None:
        """Return queued requests per ready prefill worker; None without a known queue or a ready worker."""
        prefill = self.pools.get(Role.PREFILL)
        if self.queue is None or self.queue.value is None or not self.queue.is_known:
            return None
        return self.queue.value / prefill.ready if prefill is not None and prefill.ready else None


@dataclass(frozen=True, slots=True)
class Window:
    """One adjustment interval: half-open (start_s, end_s], pulls in time order.

    Attributes:
        pulls: May be empty when nothing could be observed.
    """

    start_s: float
    end_s: float
    pulls: tuple[Pull, ...]


def kv_role(pools: Mapping[Role, PoolCounts]) -> Role:
    """Return the role that KV usage governs: aggregated where there is such a pool, decode otherwise."""
    return Role.AGGREGATED if Role.AGGREGATED in pools else Role.DECODE


def entry_role(pools: Mapping[Role, PoolCounts]) -> Role:
    """Return the role that requests reach first: aggregated where there is such a pool, prefill otherwise."""
    return Role.AGGREGATED if Role.AGGREGATED in pools else Role.PREFILL


def turned_away(pulls: Sequence[Pull], role: Role) -> float:
    """Return the requests refused or timed out for lack of a role's workers; of the first role if it is unknown."""
    total = 0.0
    for pull in pulls:
        demand = pull.demand
        if demand is not None and demand.turned_away:
            total += demand.turned_away.get(role, 0.0)
        elif demand is not None and role is entry_role(pull.pools):
            total += demand.refused + demand.timed_out
    return total


def summarise(
    at_s: float,
    pools: Mapping[Role, PoolCounts],
    *,
    kv: Mapping[str, Reading],
    queue: Reading | None,
    demand: Demand | None = None,
    worker_waiting: Mapping[str, Reading] | None = None,
) -> Pull:
    """Return one pull; a ready worker without a reading counts as unknown.

    Cost is one pass over the workers; called once a pull, not once a decision.

    Args:
        at_s: Simulated seconds.
        pools: By role; either prefill and decode, or aggregated.
        kv: KV usage fraction 0-1 of every ready decode (or aggregated) worker, by worker name.
        queue: Requests waiting for prefill in the graph; None in aggregated graphs.
        demand: At the frontend; None when unknown (no router readable, or its counters have just been reset).
        worker_waiting: ``num_requests_waiting`` of the workers of ``kv``; None when no source reports it.
    """
    role = kv_role(pools)
    ready = pools[role].ready if role in pools else 0
    if queue is None and Role.PREFILL in pools:
        queue = missing("not reported", source="none")
    waiting = None if worker_waiting is None else _summed(worker_waiting, ready)
    return Pull(at_s, dict(pools), _summed(kv, ready), queue, demand, waiting)


def _summed(readings: Mapping[str, Reading], ready: int) -> WorkerSummary:
    total = 0.0
    fresh = 0
    oldest: float | None = None
    sources: set[str] = set()
    reasons: list[str] = []
    unknown = 0
    for name, reading in readings.items():
        if reading.quality is Quality.FRESH and reading.value is not None:
            total += reading.value
            fresh += 1
            sources.add(reading.source)
            age_s = reading.age_s or 0.0
            oldest = age_s if oldest is None or age_s > oldest else oldest
        else:
            unknown += 1
            if len(reasons) < SHOWN_REASONS:
                reasons.append(f"{name}: {reading.why}")
    unlisted = max(0, ready - len(readings))
    if unlisted:
        reasons.append(f"{unlisted} without a reading")
    return WorkerSummary(
        total, fresh, unknown + unlisted, oldest, "+".join(sorted(sources)), "; ".join(reasons)
    )
