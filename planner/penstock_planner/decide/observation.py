"""What was seen: one pull of all metrics, its summary, and the pulls of one adjustment interval.

A pull is summarised once when it arrives, so that deciding costs the same for one worker and for a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock_graph.models import Role
from penstock_planner.decide.reading import Quality, Reading, missing

SHOWN_REASONS = 3
"""Chosen: how many workers' reasons a summary names; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Replicas of one role at a pull; fields as in the target's PoolState.

    Attributes:
        ready: Serving.
        starting: Asked for or restarting, not serving yet.
        draining: Leaving; they still hold GPUs.
        gpus: GPUs per replica as the backend reports them, 0 when it does not know.
    """

    ready: int
    starting: int = 0
    draining: int = 0
    gpus: int = 0

    @property
    def replicas(self) -> int:
        """Return ready + starting, the number that scaling changes."""
        return self.ready + self.starting

    @property
    def existing(self) -> int:
        """Return every replica that holds GPUs, draining ones included."""
        return self.ready + self.starting + self.draining


@dataclass(frozen=True, slots=True)
class Observation:
    """One pull in full.

    Attributes:
        at_s: Modelled seconds.
        pools: By role; either prefill and decode, or aggregated.
        kv: KV usage fraction 0-1 of every ready decode (or aggregated) worker, by worker name.
        queue: Requests waiting for prefill, the whole graph's; None in aggregated graphs.
    """

    at_s: float
    pools: Mapping[Role, PoolCounts]
    kv: Mapping[str, Reading]
    queue: Reading | None


@dataclass(frozen=True, slots=True)
class KvSummary:
    """The KV readings of one pull, summed.

    Attributes:
        total: Sum of the fresh fractions.
        fresh: How many workers gave one.
        unknown: How many ready workers did not.
        age_s: Oldest fresh age in modelled seconds; None without any.
        source: Who gave them.
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
        """Return the mean of the fresh fractions; None without any."""
        return self.total / self.fresh if self.fresh else None


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull as decisions see it and as the ledger keeps it.

    Attributes:
        at_s: Modelled seconds.
        pools: By role.
        kv: Sums over the decode (or aggregated) workers.
        queue: Requests waiting for prefill; None in aggregated graphs.
    """

    at_s: float
    pools: Mapping[Role, PoolCounts]
    kv: KvSummary
    queue: Reading | None

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
        start_s: Modelled seconds when the interval began.
        end_s: Modelled seconds when it is decided.
        pulls: May be empty when nothing could be observed.
    """

    start_s: float
    end_s: float
    pulls: tuple[Pull, ...]


def kv_role(pools: Mapping[Role, PoolCounts]) -> Role:
    """Return the role that KV usage governs: aggregated where there is such a pool, decode otherwise."""
    return Role.AGGREGATED if Role.AGGREGATED in pools else Role.DECODE


def summarise(observation: Observation) -> Pull:
    """Return the pull's sums; a ready worker without a reading counts as unknown.

    Cost is one pass over the workers; called once a pull, not once a decision.
    """
    total = 0.0
    fresh = 0
    oldest: float | None = None
    sources: set[str] = set()
    reasons: list[str] = []
    unknown = 0
    for name, reading in observation.kv.items():
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
    role = kv_role(observation.pools)
    ready = observation.pools[role].ready if role in observation.pools else 0
    unlisted = max(0, ready - len(observation.kv))
    if unlisted:
        reasons.append(f"{unlisted} without a reading")
    kv = KvSummary(total, fresh, unknown + unlisted, oldest, "+".join(sorted(sources)), "; ".join(reasons))
    queue = observation.queue
    if queue is None and Role.PREFILL in observation.pools:
        queue = missing("not reported", source="none")
    return Pull(observation.at_s, dict(observation.pools), kv, queue)
