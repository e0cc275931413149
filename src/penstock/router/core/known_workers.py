"""The workers to which a dispatch queue assigns requests, the workers that may return, and what is known of each. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

from penstock.api import Tier, TiersConfig
from penstock.router.policy.arrival import KeyDensity, Lane
from penstock.router.policy.prefixes import PrefixIndex
from penstock.router.policy.routing_policy import (
    AssignTime,
    Estimates,
    PrefillThroughput,
    WaitingLine,
    WorkerLoad,
    WorkerQueue,
)
from penstock.router.policy.tiers import TierQueue

T = TypeVar("T")

_CACHE_SLACK = 0.02
"""Relative change of a cache's size in keys below which the index is not resized. Chosen: the size follows the mean length of the
prompts, which moves a little with each prompt."""


class KnownWorkers(Generic[T]):
    """The workers of one role, each with the requests that wait for it or run on it, and with its assumed cache contents.

    A worker is eligible if it can be sent requests now, so that a routing policy can choose it.

    Attributes:
        eligible: Workers that can be chosen, by name, in the order in which policies see them. It is always the same
            mapping object.
        inactive: Workers that take no requests now, by name; they are kept because they may return, or because requests
            still run there.
        central: Requests that are assigned to no worker. Under a policy that assigns on arrival, these are the requests
            that arrived while there was no worker; otherwise all waiting requests.
        estimates: Prefill throughput of all workers together, and the durations estimated from it, for the policy.
        density: Number of prefix keys per prompt token, over about the last thousand prompts, by which the capacity of a KV
            cache is converted from tokens to keys.
    """

    def __init__(self, assigns: AssignTime, tiers: TiersConfig | None) -> None:
        self._assigns = assigns
        self._tiers = tiers
        self._held: frozenset[Tier] = frozenset()
        self.eligible: dict[str, WorkerQueue[T]] = {}
        self.inactive: dict[str, WorkerQueue[T]] = {}
        self.central = self._new_line()
        self.estimates = Estimates()
        self.density = KeyDensity()

    def get(self, name: str) -> WorkerQueue[T] | None:
        """Return the queue of a worker by the worker's name, whether the worker takes requests now or not; None if it is unknown."""
        return self.eligible.get(name) or self.inactive.get(name)

    def set_tiers(self, tiers: TiersConfig) -> None:
        """Replace the tier settings, also for the requests that wait already; tiers must have been enabled at creation."""
        self._tiers = tiers
        for line in self._tier_queues():
            line.configure(tiers)

    def set_held_tiers(self, tiers: frozenset[Tier]) -> bool:
        """Dispatch no request of these tiers until the next call; return whether the set of tiers differs from the previous one."""
        is_change = tiers != self._held
        if is_change:
            self._held = tiers
            for line in self._tier_queues():
                line.held = tiers
        return is_change

    def change(self, loads: Iterable[WorkerLoad], now_s: float) -> tuple[list[WorkerQueue[T]], list[str]]:
        """Set the workers that can be sent requests now (eligible) to those of ``loads`` (one load per worker), in this order.

        Other workers become inactive: they get no requests, and are kept while requests run there or they may return.
        Returns the queues of the workers that are no longer eligible, and the names of those that have become eligible.
        """
        eligible, inactive = self.eligible, self.inactive
        wanted = {each.name: each for each in loads}
        left = [eligible.pop(name) for name in [name for name in eligible if name not in wanted]]
        for worker in left:
            inactive[worker.name] = worker
            worker.peer_tokens = 0
        joined = [name for name in wanted if name not in eligible]
        for name in joined:
            eligible[name] = inactive.pop(name) if name in inactive else self._new_worker(wanted[name], now_s)
        in_order = {name: eligible[name] for name in wanted}
        eligible.clear()
        eligible.update(in_order)
        for name, load in wanted.items():
            eligible[name].load = load
        return left, joined

    def forget_idle(self, quarantined: Collection[str]) -> None:
        """Delete the workers that take no requests now and at which nothing runs, except those named in ``quarantined``.

        Workers named there will return with the same cache contents.
        """
        for name in [n for n, each in self.inactive.items() if not each.running and n not in quarantined]:
            del self.inactive[name]

    def adopt(self, load: WorkerLoad, now_s: float) -> WorkerQueue[T]:
        """Return the queue of the worker that ``load`` names; if there is none, one that takes no requests is added and returned."""
        worker = self.get(load.name)
        if worker is None:
            worker = self.inactive[load.name] = self._new_worker(load, now_s)
        return worker

    def restarted(self, name: str) -> None:
        """Clear the prefix index (assumed cache contents) of a worker with a new process; does nothing if the worker is unknown."""
        worker = self.get(name)
        if worker is not None:
            worker.index.clear()

    def index_of(self, name: str) -> PrefixIndex | None:
        """Return the prefix index of a worker (the assumed contents of its cache), which KV events may correct.

        Returns None if the worker cannot be sent requests now.
        """
        worker = self.eligible.get(name)
        return None if worker is None else worker.index

    def fit_cache(self, name: str) -> None:
        """Set the size of a worker's prefix index to the KV cache capacity in the worker's metrics.

        The prefix index contains the worker's assumed cache contents. Does nothing if the metrics contain no capacity, or
        if the worker is unknown.
        """
        worker = self.eligible.get(name)
        capacity = None if worker is None else worker.load.kv_capacity_tokens
        if worker is None or not capacity:
            return
        keys = self.density.keys(capacity)
        if abs(keys - worker.index.capacity) > worker.index.capacity * _CACHE_SLACK:
            worker.index.resize(keys)

    def set_peer_load(self, name: str, tokens: int, tokens_per_s: float | None = None) -> None:
        """Set the load that other routers have put on a worker; does nothing if the worker cannot be sent requests now.

        Args:
            name: Name of the worker.
            tokens: Uncached tokens that other routers have in flight there; the value replaces the previous one.
            tokens_per_s: The worker's prefill throughput as the picker (the router that chooses workers for all) has
                measured it, in tokens/s; None keeps the present estimate.
        """
        worker = self.eligible.get(name)
        if worker is None:
            return
        worker.peer_tokens = tokens
        if tokens_per_s is not None:
            worker.throughput = PrefillThroughput(tokens_per_s)
            self.estimates.throughput.learn_other(tokens_per_s)

    def peer_tokens(self, name: str) -> int:
        """Return the tokens that other routers have in flight at the worker ``name``, as last reported.

        Returns 0 if the worker cannot be sent requests now.
        """
        worker = self.eligible.get(name)
        return 0 if worker is None else worker.peer_tokens

    def load_of(self, name: str, now_s: float) -> tuple[int, float | None]:
        """Return this router's load at a worker: the number of tokens (>= 0), and the worker's prefill throughput.

        Other routers of the graph add the tokens to their own, to know the total load of the worker.

        If requests are assigned on arrival, the tokens are the uncached ones that are queued for the worker or dispatched
        and probably not computed yet; otherwise they are the tokens in flight. Returns (0, None) if the worker cannot be
        sent requests now. The throughput is in tokens per simulated second; None if unknown.
        """
        worker = self.eligible.get(name)
        if worker is None:
            return 0, None
        if self._assigns is AssignTime.WHEN_FREE:
            return worker.load.inflight_tokens, worker.throughput.tokens_per_s
        self.estimates.now_s = now_s
        return self.estimates.pending_tokens(worker), worker.throughput.tokens_per_s

    def queued_tokens(self, name: str) -> int:
        """Return the uncached tokens of the requests queued for a worker; 0 if it cannot be sent requests now."""
        worker = self.eligible.get(name)
        return 0 if worker is None else worker.queued_tokens

    def _new_worker(self, load: WorkerLoad, now_s: float) -> WorkerQueue[T]:
        # Under a policy that assigns when a worker is free, the central queue already orders the requests by tier.
        line = self._new_line() if self._assigns is AssignTime.ON_ARRIVAL else None
        return WorkerQueue(load, now_s=now_s, line=line)

    def _tier_queues(self) -> Iterator[TierQueue[T]]:
        for line in (
            self.central,
            *(each.line for each in (*self.eligible.values(), *self.inactive.values())),
        ):
            if isinstance(line, TierQueue):
                yield line

    def _new_line(self) -> WaitingLine[T]:
        if self._tiers is None:
            return Lane()
        line: TierQueue[T] = TierQueue(self._tiers)
        line.held = self._held
        return line
