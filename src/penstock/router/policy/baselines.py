"""The policies without a design of their own: round-robin, least-loaded, and the baselines of DualMap.

Sources: the DualMap paper's baselines; Preble; Dynamo's router documentation for the KV cost. Among equals the
worker that remembers the fewest blocks is taken, so that idle workers fill their caches evenly. Pure.
"""

from __future__ import annotations

from typing import Any

from penstock.router.policy.hotness import HotnessTree
from penstock.router.policy.rings import HashRing
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    WorkerQueues,
    eligible,
)
from penstock.router.policy.worker_queue import WorkerQueue

_PREBLE_SHARE = 0.5
"""Share of a prompt that must be cached for affinity. Source: Preble, as the DualMap paper states it."""


_NOISE = 0.05
"""Chosen: estimates that differ by less are equal, since measured throughputs of equal GPUs do."""


class _Memoryless:
    """A policy that does not track which workers join and leave."""

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def worker_joined(self, name: str) -> None:
        """Take no note."""

    def worker_left(self, name: str) -> None:
        """Take no note."""


class CacheAffinity:
    """One ring: equal prefixes always go to the same worker, however busy."""

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self) -> None:
        self._ring = HashRing(seed=1)
        self._hotness = HotnessTree()

    def worker_joined(self, name: str) -> None:
        """Put a worker on the ring."""
        self._ring.add(name)

    def worker_left(self, name: str) -> None:
        """Take a worker off the ring."""
        self._ring.remove(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the key's worker."""
        name = self._ring.find(self._hotness.key(arrival.chain, len(workers)))
        if name is None or name in arrival.avoid:
            return RoutingDecision(
                _emptiest(eligible(workers, arrival.avoid), arrival, estimates).name,
                "its worker has failed it",
            )
        return RoutingDecision(name, "prefix's worker on the ring")


class LeastPending(_Memoryless):
    """The fewest uncached tokens pending, whatever is cached where: the paper's Least Loaded."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the least loaded worker."""
        return RoutingDecision(
            _emptiest(eligible(workers, arrival.avoid), arrival, estimates).name, "fewest pending tokens"
        )


class RoundRobin(_Memoryless):
    """Each worker with room in turn, in the order given."""

    assigns = AssignTime.WHEN_FREE

    def __init__(self) -> None:
        self._turn = 0

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:  # noqa: ARG002 - the next in turn, whatever comes
        """Return the next worker."""
        names = list(workers)
        name = names[self._turn % len(names)]
        self._turn += 1
        return RoutingDecision(name, "next in turn")


class LeastLoaded(_Memoryless):
    """The emptiest worker: least KV in use where every worker's is known, then fewest tokens in flight.

    Prefill and aggregated workers without a KV reading are compared by tokens alone. Equals take turns, so
    that an idle pool does not send everything to its first worker.
    """

    assigns = AssignTime.WHEN_FREE
    reads_usage = True

    def __init__(self) -> None:
        self._turn = 0

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:  # noqa: ARG002 - loads decide, not prompts
        """Return the least loaded worker."""
        turn = self._turn
        self._turn += 1
        pool = list(workers.values())
        count = len(pool)
        if count == 1:
            return RoutingDecision(pool[0].name, "only candidate")
        # One unknown reading makes the comparison unfair either way, so tokens decide for all.
        known: list[float] = []
        for each in pool:
            usage = each.projected_kv_usage(estimates.now_s)
            if usage is None:
                break
            known.append(usage)
        by_kv = len(known) == count
        best, best_load = pool[0], (2.0, 0, 0, 0)
        for index, each in enumerate(pool):
            load = (
                known[index] if by_kv else 0.0,
                each.inflight_tokens,
                each.load.inflight_requests,
                (index - turn) % count,
            )
            if index == 0 or load < best_load:
                best, best_load = each, load
        if by_kv:
            reason = f"least KV in use: {best_load[0]:.3f}, {best_load[1]} tokens in flight"
        else:
            reason = f"fewest tokens in flight: {best_load[1]}"
        return RoutingDecision(best.name, reason)


class MinTtft(_Memoryless):
    """The smallest estimated TTFT over all workers."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the smallest estimate; by tokens alone while no throughput is known."""
        pool = eligible(workers, arrival.avoid)
        costs = [
            (estimates.pending_tokens(each, arrival) + each.uncached(arrival))
            / (estimates.tokens_per_s(each) or 1.0)
            for each in pool
        ]
        as_good = min(costs) * (1 + _NOISE)
        best = min(
            (each for each, cost in zip(pool, costs, strict=True) if cost <= as_good),
            key=lambda each: each.index.count,
        )
        return RoutingDecision(best.name, "smallest estimated TTFT")


class Preble(_Memoryless):
    """Affinity when more than half of the prompt is cached somewhere, else load."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the largest hit, or the least loaded one."""
        pool = eligible(workers, arrival.avoid)
        uncached, _, at = min(
            (each.uncached(arrival), estimates.pending_tokens(each, arrival), at)
            for at, each in enumerate(pool)
        )
        if uncached < (1 - _PREBLE_SHARE) * arrival.tokens:
            return RoutingDecision(pool[at].name, "more than half is cached there")
        return RoutingDecision(
            _emptiest(pool, arrival, estimates).name, "little is cached anywhere: least loaded"
        )


class KvCost(_Memoryless):
    """Dynamo's cost in blocks: pending and own uncached prefill, plus all blocks that requests there occupy.

    ``prefill_load_scale`` and the overlap credit are 1, and the weight of a request 0: its defaults. Blocks
    of decoding requests are counted from handing over to the computed prompt, all that a router in front of
    prefill workers sees of them.
    """

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker of lowest cost; what the request itself will occupy is the same everywhere."""
        pool = eligible(workers, arrival.avoid)
        _, _, at = min(
            (
                estimates.pending_tokens(each, arrival) + each.uncached(arrival) + each.running_prompt_tokens,
                each.index.count,
                at,
            )
            for at, each in enumerate(pool)
        )
        return RoutingDecision(pool[at].name, "lowest KV cost")


def _emptiest(pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> WorkerQueue[Any]:
    """Return the worker with the fewest pending tokens; among equals, the one that remembers least."""
    return min(pool, key=lambda each: (estimates.pending_tokens(each, arrival), each.index.count))
