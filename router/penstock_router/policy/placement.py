"""Queues of requests placed on instances: one body for the live router's gate and for the simulator.

The caller owns time and acts: it tells who serves, what arrives, what was computed or lost, and takes what may
be handed over now. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_router.policy.instance import Instance, Placed
from penstock_router.policy.placer import Arrival, Placer, View
from penstock_router.policy.rebalance import decode_delay_s, plan_moves

T = TypeVar("T")

CACHE_BLOCKS = 4096
"""Blocks remembered per instance where nothing else is said. Chosen: 2M tokens of 512-token blocks, more than any
worker of today caches; 128 KiB of memory at most."""


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """How queues behave, whatever the policy.

    Attributes:
        slot_tokens: Uncached tokens handed to one instance at a time; None is unbounded. An idle instance always
            takes one request, however long.
        slot_requests: Requests handed to one instance at a time; None is unbounded.
        max_requests: Most waiting requests; None is unbounded.
        max_wait_s: Longest wait, modelled seconds; None is unbounded.
        hit_first: The largest cached share first instead of arrival order.
        cache_blocks: Prefix blocks that one instance's cache holds.
        slo_s: TTFT that rebalancing aims for, modelled seconds.
        bottleneck_s: See `decode_delay_s`.
        tokens_per_s: Prefill pace assumed until one is measured; None: none.
    """

    slot_tokens: int | None = None
    slot_requests: int | None = None
    max_requests: int | None = None
    max_wait_s: float | None = None
    hit_first: bool = False
    cache_blocks: int = CACHE_BLOCKS
    slo_s: float = 5.0
    bottleneck_s: float = 3.0
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Handed(Generic[T]):
    """One request that goes to its instance now."""

    item: T
    instance: str
    reason: str


class Placement(Generic[T]):
    """Per-instance queues under one policy. ``T`` is hashable and unique per request.

    Attributes:
        moved: Requests that rebalancing has moved so far.
    """

    def __init__(self, placer: Placer, settings: PlacementSettings) -> None:
        self._placer = placer
        self._settings = settings
        self._view = View(settings.tokens_per_s)
        self._instances: dict[str, Instance[T]] = {}
        self._homeless: dict[T, tuple[Placed[T], frozenset[str]]] = {}
        self._placed: dict[T, Placed[T]] = {}
        self._leaving: dict[str, Instance[T]] = {}
        self.moved = 0

    # ------------------------------------------------------------------ who serves

    def set_instances(self, names: Iterable[str], now_s: float) -> None:
        """Say who may be given requests; what waits for others is placed anew, what runs there goes on."""
        wanted = dict.fromkeys(names)
        gone = [name for name in self._instances if name not in wanted]
        strays: list[Placed[T]] = []
        for name in gone:
            instance = self._instances.pop(name)
            self._placer.left(name)
            strays += list(instance.queue.values())
            for placed in strays:
                instance.queue.pop(placed.item, None)
            instance.queued_tokens = 0
            if instance.running:
                self._leaving[name] = instance
        for name in wanted:
            if name not in self._instances:
                known = self._leaving.pop(name) if name in self._leaving else None
                self._instances[name] = known or Instance(
                    name, cache_blocks=self._settings.cache_blocks, now_s=now_s
                )
                self._placer.joined(name)
        for placed in strays:
            self._place(placed, frozenset(), now_s)
        if self._instances:
            homeless, self._homeless = list(self._homeless.values()), {}
            for placed, avoid in homeless:
                self._place(placed, avoid, now_s)

    def restarted(self, name: str) -> None:
        """Forget an instance's cache: its process is a new one."""
        if name in self._instances:
            self._instances[name].index.clear()

    def heard(self, name: str, others_tokens: int) -> None:
        """Take news of the uncached tokens that other routers have at an instance."""
        if name in self._instances:
            self._instances[name].others_tokens = others_tokens

    # ------------------------------------------------------------------ a request's way

    def submit(self, item: T, arrival: Arrival, now_s: float, *, again: bool = False) -> bool:
        """Place a request; False, and nothing done, when too many wait already.

        Args:
            item: The request.
            arrival: What the policy may know.
            now_s: Modelled seconds.
            again: It was admitted before, and meets no bound.
        """
        bound = self._settings.max_requests
        if bound is not None and not again and self.waiting >= bound:
            return False
        self._place(Placed(item, arrival.chain, arrival.tokens, now_s), arrival.avoid, now_s)
        return True

    def take(self, now_s: float, may_start: Callable[[str], bool] | None = None) -> list[Handed[T]]:
        """Return, and count as running, what goes to its instance now.

        Args:
            now_s: Modelled seconds.
            may_start: Whether an instance may be given anything at this moment; absent: all may.
        """
        taken = []
        for instance in self._instances.values():
            if not instance.queue or (may_start is not None and not may_start(instance.name)):
                continue
            for placed in list(instance.in_order(hit_first=self._settings.hit_first)):
                if not self._has_room(instance):
                    break
                instance.start(placed, now_s)
                taken.append(Handed(placed.item, instance.name, placed.reason))
        return taken

    def computed(self, item: T, now_s: float, *, cached_tokens: int | None = None) -> None:
        """Note that a request's prompt was computed: its instance has room again.

        Args:
            item: The request.
            now_s: Modelled seconds.
            cached_tokens: As the instance's usage says. The pace is learnt from what was really computed:
                where the estimate of hits is wrong, an instance would seem faster than it is, draw more
                requests, and never recover. None: not told, the estimate stands.
        """
        placed = self._placed.get(item)
        if placed is not None:
            computed = placed.uncached if cached_tokens is None else max(0, placed.tokens - cached_tokens)
            self._end(item, now_s, computed=computed)

    def lost(self, item: T, now_s: float) -> None:
        """Note that a request left its instance without having been computed."""
        self._end(item, now_s, computed=None)

    def withdraw(self, item: T) -> None:
        """Take a request out that nobody waits for any more; does nothing when it does not wait."""
        self._homeless.pop(item, None)
        placed = self._placed.get(item)
        if placed is not None and placed.started_s is None:
            self._drop(placed)

    def expired(self, now_s: float) -> list[T]:
        """Take out and return the requests that have waited as long as may be."""
        bound = self._settings.max_wait_s
        if bound is None:
            return []
        late = [placed for placed in self._waiting_ones() if now_s - placed.since_s >= bound]
        for placed in late:
            self.withdraw(placed.item)
        return [placed.item for placed in late]

    def rebalance(self, now_s: float, names: Iterable[str] | None = None) -> int:
        """Move what should not wait where it does; return how many moved.

        Args:
            now_s: Modelled seconds.
            names: Instances to relieve; absent: those that are decode-bound.
        """
        delay_s = {
            each.name: delay
            for each in self._instances.values()
            if (delay := decode_delay_s(each, self._view, now_s, self._settings.bottleneck_s))
        }
        count = 0
        for name in delay_s if names is None else names:
            source = self._instances[name]
            moves = plan_moves(
                source,
                self._instances,
                self._view,
                slo_s=self._settings.slo_s,
                delay_s=delay_s,
                hit_first=self._settings.hit_first,
            )
            for move in moves:
                placed = move.placed
                source.pull(placed)
                placed.other, placed.uncached, placed.other_uncached = (
                    name,
                    placed.other_uncached,
                    placed.uncached,
                )
                self._instances[move.to].put(placed)
                placed.reason = f"moved from {name}: {move.benefit_s:.2f} s sooner"
            count += len(moves)
        self.moved += count
        return count

    # ------------------------------------------------------------------ to look at

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._homeless) + sum(len(each.queue) for each in self._instances.values())

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return sum(placed.tokens for placed in self._waiting_ones())

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, modelled seconds; 0 when nothing waits."""
        return max((now_s - placed.since_s for placed in self._waiting_ones()), default=0.0)

    def queued_tokens(self, name: str) -> int:
        """Return the uncached tokens that wait for one instance."""
        instance = self._instances.get(name)
        return 0 if instance is None else instance.queued_tokens

    def pending_tokens(self, name: str) -> int:
        """Return the uncached tokens that wait for one instance or were handed to it by this router."""
        instance = self._instances.get(name)
        return 0 if instance is None else instance.queued_tokens + instance.running_tokens

    # ------------------------------------------------------------------ within

    def _waiting_ones(self) -> list[Placed[T]]:
        homeless = [placed for placed, _ in self._homeless.values()]
        return homeless + [placed for each in self._instances.values() for placed in each.queue.values()]

    def _place(self, placed: Placed[T], avoid: frozenset[str], now_s: float) -> None:
        if not self._instances:
            self._placed.pop(placed.item, None)
            self._homeless[placed.item] = (placed, avoid)
            return
        arrival = Arrival(placed.chain, placed.tokens, avoid)
        place = self._placer.place(arrival, self._instances, self._view)
        target = self._instances[place.name]
        placed.uncached = target.uncached(placed.chain, placed.tokens)
        placed.other = place.other
        if place.other:
            placed.other_uncached = self._instances[place.other].uncached(placed.chain, placed.tokens)
        self._placed[placed.item] = placed
        placed.reason = place.reason
        target.put(placed)
        if place.is_hot:
            self.rebalance(now_s, (place.name, place.other))

    def _has_room(self, instance: Instance[T]) -> bool:
        settings = self._settings
        running = len(instance.running)
        if settings.slot_requests is not None and running >= settings.slot_requests:
            return False
        return running == 0 or settings.slot_tokens is None or instance.running_tokens < settings.slot_tokens

    def _end(self, item: T, now_s: float, *, computed: int | None) -> None:
        placed = self._placed.pop(item, None)
        if placed is None:
            return
        instance = self._instances.get(placed.instance)
        if instance is None or item not in instance.running:
            instance = self._leaving.get(placed.instance)
        if instance is None or item not in instance.running:
            return
        took_s = instance.end(placed, now_s, computed=computed)
        if took_s is not None and computed is not None:
            self._view.pace.learn(computed, took_s)
        if not instance.running:
            self._leaving.pop(placed.instance, None)

    def _drop(self, placed: Placed[T]) -> None:
        self._instances[placed.instance].pull(placed)
        del self._placed[placed.item]
