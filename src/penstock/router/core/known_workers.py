"""The workers that a dispatch queue assigns requests to, those that may come back, and what is known of each. Pure."""

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
"""Chosen: a cache's size in keys follows the prompts' mean length, which moves a little with each."""


class KnownWorkers(Generic[T]):
    """One role's workers, with their queues.

    Attributes:
        eligible: By name, in the order in which policies see them; always the same mapping.
        inactive: Those that take nothing now, and are known because they may come back or still compute something.
        central: Requests that were assigned to none: of all, or, under a policy that assigns on arrival, what arrived while
            there was no worker.
        density: Of the keys of recent prompts.
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
        """Return a worker that is eligible or inactive; None: it is not known."""
        return self.eligible.get(name) or self.inactive.get(name)

    def set_tiers(self, tiers: TiersConfig) -> None:
        """Share by other settings from now on, where tiers were on before."""
        self._tiers = tiers
        for line in self._tier_queues():
            line.configure(tiers)

    def hold(self, tiers: frozenset[Tier]) -> bool:
        """Serve nothing of these tiers from now on; return whether that is a change."""
        is_change = tiers != self._held
        if is_change:
            self._held = tiers
            for line in self._tier_queues():
                line.held = tiers
        return is_change

    def change(self, loads: Iterable[WorkerLoad], now_s: float) -> tuple[list[WorkerQueue[T]], list[str]]:
        """Set the eligible workers; return those that have left, and the names of those that have joined."""
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
        """Forget the inactive workers at which nothing runs, but those that will come back unchanged."""
        for name in [n for n, each in self.inactive.items() if not each.running and n not in quarantined]:
            del self.inactive[name]

    def adopt(self, load: WorkerLoad, now_s: float) -> WorkerQueue[T]:
        """Return a worker that is known from now on, whether it takes requests or not."""
        worker = self.get(load.name)
        if worker is None:
            worker = self.inactive[load.name] = self._new_worker(load, now_s)
        return worker

    def restarted(self, name: str) -> None:
        """Forget a worker's cache: its process is a new one."""
        worker = self.get(name)
        if worker is not None:
            worker.index.clear()

    def index_of(self, name: str) -> PrefixIndex | None:
        """Return the assumed contents of a worker's cache, to be corrected by its events; None: it is ineligible."""
        worker = self.eligible.get(name)
        return None if worker is None else worker.index

    def fit_cache(self, name: str) -> None:
        """Set a worker's KV cache capacity from its metrics; as configured while they do not report it."""
        worker = self.eligible.get(name)
        capacity = None if worker is None else worker.load.kv_capacity_tokens
        if worker is None or not capacity:
            return
        keys = self.density.keys(capacity)
        if abs(keys - worker.index.capacity) > worker.index.capacity * _CACHE_SLACK:
            worker.index.resize(keys)

    def set_peer_load(self, name: str, tokens: int, tokens_per_s: float | None = None) -> None:
        """Set the uncached tokens that other routers have at a worker, and the throughput that the picker has measured."""
        worker = self.eligible.get(name)
        if worker is None:
            return
        worker.peer_tokens = tokens
        if tokens_per_s is not None:
            worker.throughput = PrefillThroughput(tokens_per_s)
            self.estimates.throughput.learn_other(tokens_per_s)

    def peer_tokens(self, name: str) -> int:
        """Return the tokens that other routers have in flight at a worker, as last reported."""
        worker = self.eligible.get(name)
        return 0 if worker is None else worker.peer_tokens

    def load_of(self, name: str, now_s: float) -> tuple[int, float | None]:
        """Return the load at a worker that a router picking alongside this one should count: tokens >= 0, and its tokens/s.

        Where requests are assigned on arrival: uncached tokens that wait, and those dispatched that should not be computed
        yet. Else the tokens in flight.
        """
        worker = self.eligible.get(name)
        if worker is None:
            return 0, None
        if self._assigns is AssignTime.WHEN_FREE:
            return worker.load.inflight_tokens, worker.throughput.tokens_per_s
        self.estimates.now_s = now_s
        return self.estimates.pending_tokens(worker), worker.throughput.tokens_per_s

    def queued_tokens(self, name: str) -> int:
        """Return the uncached tokens that wait for one worker."""
        worker = self.eligible.get(name)
        return 0 if worker is None else worker.queued_tokens

    def _new_worker(self, load: WorkerLoad, now_s: float) -> WorkerQueue[T]:
        # Under a policy that assigns when a worker is free the central queue has shared already.
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
