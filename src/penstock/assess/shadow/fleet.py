"""The shadow fleet: the replicas that would exist if the planner's decisions had been carried out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.targets.base import Endpoint


@dataclass(frozen=True, slots=True)
class ShadowFleet:
    """Replicas by role, each as the time at which it is ready. Times are simulated seconds.

    A removed replica is gone at once, as kube-state-metrics counts it: neither fleet counts replicas that drain.

    Attributes:
        startup_s: Time from the decision that adds a replica until it is ready.
        gpus: GPUs of one replica, by role.
        ready_s: Times at which the replicas are ready, in rising order, by role.
    """

    startup_s: float
    gpus: Mapping[Role, int]
    ready_s: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)

    def begun(self, watched: Mapping[Role, PoolCounts], now_s: float) -> ShadowFleet:
        """Return the fleet with the replicas that the watched fleet has now."""
        return replace(
            self,
            ready_s={
                role: (now_s,) * pool.ready + (now_s + self.startup_s,) * pool.starting
                for role, pool in watched.items()
            },
        )

    def scaled(self, role: Role, desired: int, now_s: float) -> ShadowFleet:
        """Return the fleet with ``desired`` replicas of a role; of too many, those that are ready last are removed."""
        kept = self.ready_s[role][:desired]
        added = (now_s + self.startup_s,) * (desired - len(kept))
        return replace(self, ready_s={**self.ready_s, role: kept + added})

    def pools(self, now_s: float) -> dict[Role, PoolCounts]:
        """Return the counts of ready and starting replicas by role."""
        found = {}
        for role, times in self.ready_s.items():
            ready = sum(at_s <= now_s for at_s in times)
            found[role] = PoolCounts(ready, len(times) - ready, gpus=self.gpus[role])
        return found

    def endpoints(self, now_s: float) -> tuple[Endpoint, ...]:
        """Return one endpoint for each ready replica, which no process has; metrics are assigned to it by name."""
        return tuple(
            Endpoint(f"shadow-{role.value}-{place}", role, "")
            for role, pool in self.pools(now_s).items()
            for place in range(pool.ready)
        )


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that wait, and their uncached prompt tokens."""

    requests: float = 0.0
    tokens: float = 0.0


def shadow_queue(
    before: Queue, watched: Queue, *, arrived: Queue, computed: Queue, shadow_ready: int, watched_ready: int
) -> Queue:
    """Return the queue that the shadow fleet would have.

    With at most as many ready workers as the watched fleet it is the watched fleet's queue. With more it shrinks by what
    the additional workers would have computed, at the rate per worker that was measured while the queue existed.

    Args:
        before: Queue of the shadow fleet at the previous reading.
        watched: Queue of the watched fleet now.
        arrived: What arrived at the watched fleet since the previous reading.
        computed: What it computed since then.
        shadow_ready: Ready workers of the shadow fleet.
        watched_ready: Ready workers of the watched fleet.
    """
    if shadow_ready <= watched_ready or watched_ready == 0:
        return watched
    more = shadow_ready / watched_ready

    def left(held: float, new: float, done: float, bound: float) -> float:
        return max(0.0, min(bound, held + new - done * more))

    return Queue(
        left(before.requests, arrived.requests, computed.requests, watched.requests),
        left(before.tokens, arrived.tokens, computed.tokens, watched.tokens),
    )
