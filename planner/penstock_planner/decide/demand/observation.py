"""Observations: one scrape of all metrics ("pull"), its summary over the workers, and the pulls of one adjustment interval.

A pull is summarised when it arrives, so that a decision costs the same for one worker and for a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.api import Role
from penstock_planner.decide.demand.reading import Quality, Reading, missing

SHOWN_REASONS = 3
"""Number of workers whose reasons a summary lists, chosen to fit a line. Further workers without a value are only counted."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Replica counts of one role (its "pool") at one pull (metrics scrape). `TargetState.pools` has the same counts.

    Attributes:
        ready: Number of replicas that serve requests.
        starting: Number of replicas that were requested or are restarting and do not serve yet.
        draining: Number of replicas that finish their requests before they stop.
        gpus: GPUs per replica as reported by the backend; 0 if the backend does not know.
        switching: Number of ``starting`` replicas that are changing from another role to this one. They finish the
            other role's requests and then serve this role at once, without loading a model.
    """

    ready: int
    starting: int = 0
    draining: int = 0
    gpus: int = 0
    switching: int = 0

    @property
    def loading(self) -> int:
        """Return the number of starting replicas that must load a model, so that they are ready only after a full start-up."""
        return self.starting - self.switching

    @property
    def replicas(self) -> int:
        """Return the number of ready and starting replicas, without draining ones; this is the number that a decision changes."""
        return self.ready + self.starting

    @property
    def existing(self) -> int:
        """Return the number of ready, starting and draining replicas, which hold GPUs."""
        return self.ready + self.starting + self.draining


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests at all routers: those that arrived between two pulls (metrics scrapes), and those waiting at the later pull.

    Counts are differences of counters over ``period_s``; gauges are values at the pull. A source that cannot provide
    one of the values returns no `Demand` at all, except for the fields that can be None. "Late" means over the latency
    target of the graph.

    Attributes:
        period_s: Simulated seconds that the counts cover, > 0.
        arrivals: Number of requests that reached the frontend, rejected and timed-out ones included.
        prompt_tokens: Prompt tokens of the arrivals.
        uncached_tokens: Prompt tokens of the arrivals that must be computed because no prefix cache holds them, as far
            as the router knows. Equals ``prompt_tokens`` if it knows of no cache.
        refused: Number of requests rejected at the frontend (429 or 503: queue full, workers busy).
        timed_out: Number of requests that left the queue because they waited longer than its time limit.
        unserved: ``refused`` plus ``timed_out``, by the role that had no worker for them. Empty if the role is unknown.
        completed: Number of requests whose response was completed.
        output_tokens: Number of tokens of those responses.
        prefilled_tokens: Prompt tokens of the requests whose prefill was completed, each counted with the same number
            as in ``uncached_tokens``. Hence arrivals = prefilled + waiting + in flight + refused, regardless of what
            the router knows about caches.
        ttft_sum_s: Sum of the TTFT of the requests whose first token was sent, in seconds.
        ttft_count: Number of those requests.
        ttft_late: Number of those requests whose TTFT exceeded the target. None if unknown.
        dispatched_late: Number of the ``ttft_late`` requests that exceeded the target even if their time is counted
            only from the last dispatch of the prompt to a worker. None if unknown.
        itl_sum_s: Sum of the gaps between successive tokens, in seconds.
        itl_count: Number of those gaps.
        itl_late: Number of those gaps that exceeded the ITL target. None if unknown, or if there is no target.
        waiting: Number of requests in the routers' queues at the pull, for any role.
        waiting_tokens: Prompt tokens of the requests in the routers' queues, counted as in ``uncached_tokens``.
        oldest_wait_s: Longest time that one of the requests in the routers' queues has waited, in seconds. None if none
            is waiting.
        in_flight: Number of requests assigned to workers at the pull, by role.
        in_flight_tokens: Prompt tokens of the requests that were dispatched and whose prefill is not completed, counted
            as in ``uncached_tokens``.
        prefilling_workers: Number of prefill (or aggregated) workers that have a request whose prefill is not
            completed, at the pull.
    """

    period_s: float
    arrivals: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    refused: float = 0.0
    timed_out: float = 0.0
    unserved: Mapping[Role, float] = field(default_factory=dict)
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
    """Values of one gauge at one pull (metrics scrape), summed over the decode (or aggregated) workers.

    Attributes:
        total: Sum of the fresh values: fractions for KV usage, numbers of requests for waiting requests.
        fresh: Number of workers with a fresh value.
        unknown: Number of ready workers without a fresh value.
        age_s: Age of the oldest fresh value, in simulated seconds; None if there is none.
        source: Names of the sources of the fresh values, joined by "+".
        unknown_reasons: Reasons why values are unknown, for the first 3 workers (`SHOWN_REASONS`).
    """

    total: float
    fresh: int
    unknown: int
    age_s: float | None
    source: str
    unknown_reasons: str = ""

    @property
    def mean(self) -> float | None:
        """Return the mean of the workers' fresh values (recent enough to be used), or None if there is none."""
        return self.total / self.fresh if self.fresh else None


NO_WORKERS = WorkerSummary(0.0, 0, 0, None, "", "")
"""Summary of the workers in a pull for which no metrics were read."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One scrape of all metrics, as decisions use it and as the ledger (the decision log) records it.

    Attributes:
        at_s: Time of the scrape, in simulated seconds.
        pools: Replica counts by role.
        kv: KV usage fraction of the decode (or aggregated) workers.
        queue: Number of requests waiting for prefill; None in aggregated graphs.
        demand: Requests at the frontend; None if unknown.
        worker_waiting: Number of requests that wait inside the decode (or aggregated) workers; None if no source
            reports it.
        wall_s: Unix time of the scrape, real seconds. None if the configuration needs no wall-clock times.
        watched: Replicas by role of the fleet that something else scales, in shadow mode, where ``pools`` are those
            that the planner would have. Decisions do not use it. None in other modes.
    """

    at_s: float
    pools: Mapping[Role, PoolCounts]
    kv: WorkerSummary
    queue: Reading | None
    demand: Demand | None = None
    worker_waiting: WorkerSummary | None = None
    wall_s: float | None = None
    watched: Mapping[Role, PoolCounts] | None = None

    @property
    def queue_per_worker(self) -> float | None:
        """Return the number of requests that wait for prefill, per ready prefill worker.

        Returns None if the queue is unknown or no worker is ready.
        """
        prefill = self.pools.get(Role.PREFILL)
        if self.queue is None or self.queue.value is None or not self.queue.is_known:
            return None
        return self.queue.value / prefill.ready if prefill is not None and prefill.ready else None


@dataclass(frozen=True, slots=True)
class Window:
    """Pulls (metrics scrapes) of one interval between two decisions, the half-open interval (start_s, end_s] in simulated seconds.

    Attributes:
        start_s: Start of the interval, exclusive.
        end_s: End of the interval, inclusive.
        pulls: Pulls in time order. Empty if nothing could be observed.
    """

    start_s: float
    end_s: float
    pulls: tuple[Pull, ...]


def kv_role(pools: Mapping[Role, PoolCounts]) -> Role:
    """Return the role whose replicas are scaled on KV usage: aggregated if the graph has that role, else decode."""
    return Role.AGGREGATED if Role.AGGREGATED in pools else Role.DECODE


def entry_role(pools: Mapping[Role, PoolCounts]) -> Role:
    """Return the role that requests reach first: aggregated if the graph has that role, else prefill."""
    return Role.AGGREGATED if Role.AGGREGATED in pools else Role.PREFILL


def unserved(pulls: Sequence[Pull], role: Role) -> float:
    """Return the number of requests that were rejected or timed out for lack of this role's workers, summed over the pulls.

    If a pull does not report the role, its requests are counted for the role that requests reach first (`entry_role`).

    Args:
        pulls: Pulls (metrics scrapes) of the interval.
        role: Role whose workers were missing.
    """
    total = 0.0
    for pull in pulls:
        demand = pull.demand
        if demand is not None and demand.unserved:
            total += demand.unserved.get(role, 0.0)
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
    """Return one pull (metrics scrape) with the workers' readings summed up. A ready worker without a reading counts as unknown.

    Called once per pull rather than once per decision, because it passes over all workers.

    Args:
        at_s: Time of the scrape, in simulated seconds.
        pools: Replica counts by role; the roles are either prefill and decode, or aggregated.
        kv: KV usage fraction (0 to 1) of each ready decode (or aggregated) worker, by worker name.
        queue: Number of requests in the graph that wait for prefill. None in an aggregated graph; None in a graph
            with prefill workers is replaced by a missing reading.
        demand: Requests at the frontend. None if unknown: no router is readable, or its counters have just been
            reset.
        worker_waiting: Value of ``num_requests_waiting`` of the same workers as in ``kv``. None if no source reports
            it.
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
