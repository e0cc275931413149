"""Queues of requests placed on instances: one body for the live router's gate and for the simulator.

The caller owns time and acts: it tells who serves, what arrives, what was computed or lost, and takes what may
be handed over now. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_graph.models import QueueOrder
from penstock_router.policy.instance import Instance, Placed
from penstock_router.policy.placer import Arrival, Placer, View
from penstock_router.policy.prefix_index import PrefixIndex
from penstock_router.policy.rebalance import Aim, decode_delay_s, plan_moves

T = TypeVar("T")

CACHE_BLOCKS = 8192
"""Keys remembered per instance where nothing else is said. Chosen: 4M tokens of 512-token blocks, or 500,000 of
prompts so short that their first block's parts are all they have; 90 KiB of memory where prompts bring 24 new keys,
at most 512."""


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """How queues behave, whatever the policy.

    Attributes:
        slot_tokens: Uncached tokens handed to one instance at a time; None is unbounded. An idle instance always
            takes one request, however long.
        slot_requests: Requests handed to one instance at a time; None is unbounded.
        max_requests: Most waiting requests; None is unbounded.
        max_wait_s: Longest wait, modelled seconds; None is unbounded.
        order: Who is next in a queue.
        cache_blocks: Prefix blocks that one instance's cache holds.
        slo_s: TTFT that rebalancing and the order in-time-first aim for, modelled seconds.
        bottleneck_s: See `decode_delay_s`.
        tokens_per_s: Prefill pace assumed until one is measured; None: none.
    """

    slot_tokens: int | None = None
    slot_requests: int | None = None
    max_requests: int | None = None
    max_wait_s: float | None = None
    order: QueueOrder = QueueOrder.ARRIVAL
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
        waiting: Requests that wait.
        waiting_tokens: Their prompt tokens.
    """

    def __init__(self, placer: Placer, settings: PlacementSettings) -> None:
        self._placer = placer
        self._settings = settings
        self._view = View(settings.tokens_per_s)
        self._instances: dict[str, Instance[T]] = {}
        # Instances that take nothing, and are known because they may come back or still compute something.
        self._away: dict[str, Instance[T]] = {}
        self._homeless: dict[T, Placed[T]] = {}
        self._placed: dict[T, Placed[T]] = {}
        # Silent ones that run, with the time at which their prompts should be computed.
        self._silent: dict[T, float] = {}
        # Computed and not ended: where, and how many prompt tokens.
        self._decoding: dict[T, tuple[Instance[T], int]] = {}
        # Names whose queue or room has changed since they were last looked at by `take`.
        self._stirred: dict[str, None] = {}
        self.moved = 0
        self.waiting = 0
        self.waiting_tokens = 0

    # ------------------------------------------------------------------ who serves

    def set_instances(self, names: Iterable[str], now_s: float, *, resting: Collection[str] = ()) -> None:
        """Say who may be given requests; what waits for others is placed anew, what runs there goes on.

        When an instance joins, everything that waits is placed anew: a backlog would not reach it otherwise.

        Args:
            names: Those that may.
            now_s: Modelled seconds.
            resting: Those that may not now and will come back as they were: what is known of them is kept.
        """
        wanted = dict.fromkeys(names)
        strays: list[Placed[T]] = []
        for name in [name for name in self._instances if name not in wanted]:
            strays += self._let_go(name)
        joining = [name for name in wanted if name not in self._instances]
        if joining:
            for instance in self._instances.values():
                strays += self._unplace(instance)
        for name in joining:
            known = self._away.pop(name, None)
            cache_blocks = self._settings.cache_blocks
            self._instances[name] = known or Instance(name, cache_blocks=cache_blocks, now_s=now_s)
            self._placer.joined(name)
        for name in [name for name, each in self._away.items() if not each.running and name not in resting]:
            del self._away[name]
        if self._instances:
            strays += self._homeless.values()
            self._homeless = {}
        for placed in sorted(strays, key=lambda placed: placed.since_s):
            self._place(placed, now_s)

    def restarted(self, name: str) -> None:
        """Forget an instance's cache: its process is a new one."""
        instance = self._instances.get(name) or self._away.get(name)
        if instance is not None:
            instance.index.clear()

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
            again: It was admitted before: it meets no bound, and waits before all others.
        """
        bound = self._settings.max_requests
        if bound is not None and not again and self.waiting >= bound:
            return False
        self.waiting += 1
        self.waiting_tokens += arrival.tokens
        self._place(Placed(item, arrival, now_s), now_s, is_first=again)
        return True

    def take(self, now_s: float, may_start: Callable[[str], bool] | None = None) -> list[Handed[T]]:
        """Return, and count as running, what goes to its instance now.

        Args:
            now_s: Modelled seconds.
            may_start: Whether an instance may be given anything at this moment; absent: all may.
        """
        if not self._stirred:
            return []
        taken = []
        stirred, self._stirred = self._stirred, {}
        for name in stirred:
            instance = self._instances.get(name)
            while instance is not None and instance.has_waiting and self._has_room(instance):
                if may_start is not None and not may_start(name):
                    self._stirred[name] = None
                    break
                placed = self._next_up(instance, now_s)
                assert placed is not None  # noqa: S101 - the queue is not empty
                instance.start(placed, now_s)
                self._waits_no_more(placed)
                if placed.arrival.is_silent:
                    due_s = self._view.seconds(instance, instance.running_tokens)
                    self._silent[placed.item] = now_s + (due_s or 0.0)
                taken.append(Handed(placed.item, name, placed.reason))
        return taken

    def computed(
        self, item: T, now_s: float, *, cached_tokens: int | None = None, measured: bool = True
    ) -> None:
        """Note that a request's prompt was computed: its instance has room again.

        Args:
            item: The request.
            now_s: Modelled seconds.
            cached_tokens: What the worker says it need not compute; None: it does not say.
            measured: Whether it was noticed at once; else the time since says nothing about the pace.
        """
        ended = self._end(item, now_s)
        if ended is None:
            return
        instance, placed, took_s = ended
        self._decoding[item] = (instance, placed.tokens)
        instance.decoding_tokens += placed.tokens
        instance.progress_s = now_s
        if not measured:
            return
        uncached = placed.uncached if cached_tokens is None else max(1, placed.tokens - cached_tokens)
        instance.pace.learn(uncached, took_s)
        self._view.pace.learn(uncached, took_s)
        instance.slowness = self._view.slowness(instance)

    def presume(self, now_s: float) -> None:
        """Take the prompts of silent requests for computed when they should be: the room is needed for others."""
        for item in [item for item, due_s in self._silent.items() if due_s <= now_s]:
            self.computed(item, now_s, measured=False)

    def left(self, item: T, now_s: float) -> None:
        """Note that a request left its instance, computed or not."""
        decoding = self._decoding.pop(item, None)
        if decoding is not None:
            decoding[0].decoding_tokens -= decoding[1]
            return
        ended = self._end(item, now_s)
        if ended is not None:
            instance, placed, _ = ended
            instance.forget(placed)

    def withdraw(self, item: T) -> None:
        """Take a request out that nobody waits for any more; does nothing when it does not wait."""
        placed = self._homeless.pop(item, None)
        if placed is not None:
            self._waits_no_more(placed)
            return
        placed = self._placed.get(item)
        if placed is not None and placed.started_s is None:
            instance = self._instances[placed.instance]
            instance.pull(placed)
            instance.forget(placed)
            del self._placed[item]
            self._waits_no_more(placed)

    def expired(self, now_s: float) -> list[T]:
        """Take out and return the requests that have waited as long as may be."""
        bound = self._settings.max_wait_s
        if bound is None:
            return []
        late = [placed.item for placed in self._waiting_ones() if now_s - placed.since_s >= bound]
        for item in late:
            self.withdraw(item)
        return late

    def rebalance(self, now_s: float, names: Iterable[str] | None = None) -> int:
        """Move what should not wait where it does; return how many moved.

        Args:
            now_s: Modelled seconds.
            names: Instances to relieve; absent: those that are decode-bound.
        """
        settings = self._settings
        if names is None:
            names = [
                each.name
                for each in self._instances.values()
                if each.queue and decode_delay_s(each, self._view, now_s, settings.bottleneck_s)
            ]
        aim = Aim(settings.slo_s, settings.bottleneck_s, now_s, settings.order is QueueOrder.HIT_FIRST)
        count = 0
        for name in names:
            source, reason = self._instances[name], f"sooner than at {name}: moved"
            for move in plan_moves(source, self._instances, self._view, aim):
                self._move(move.placed, source, self._instances[move.to])
                move.placed.reason = reason
                count += 1
        self.moved += count
        return count

    # ------------------------------------------------------------------ to look at

    def index_of(self, name: str) -> PrefixIndex | None:
        """Return what is known of an instance's cache, to be corrected by its own events; None: it takes nothing."""
        instance = self._instances.get(name)
        return None if instance is None else instance.index

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, modelled seconds; 0 when nothing waits."""
        return max((now_s - placed.since_s for placed in self._waiting_ones()), default=0.0)

    def queued_tokens(self, name: str) -> int:
        """Return the uncached tokens that wait for one instance."""
        instance = self._instances.get(name)
        return 0 if instance is None else instance.queued_tokens

    def pending_tokens(self, name: str) -> int:
        """Return what others should count here: uncached tokens in time that wait, and those handed over."""
        instance = self._instances.get(name)
        return 0 if instance is None else instance.pending_tokens - instance.others_tokens

    # ------------------------------------------------------------------ within

    def _waiting_ones(self) -> list[Placed[T]]:
        return [*self._homeless.values(), *(each for each in self._placed.values() if each.started_s is None)]

    def _place(self, placed: Placed[T], now_s: float, *, is_first: bool = False) -> None:
        if not self._instances:
            self._homeless[placed.item] = placed
            return
        place = self._placer.place(placed.arrival, self._instances, self._view)
        target = self._instances[place.name]
        placed.reason = place.reason
        placed.other = place.other
        if place.other:
            known = place.other_uncached
            other = self._instances[place.other]
            placed.other_uncached = other.uncached(placed.arrival) if known is None else known
        self._placed[placed.item] = placed
        target.put(placed, place.uncached, is_first=is_first)
        self._stirred[place.name] = None
        if place.is_hot:
            self.rebalance(now_s, (place.name, place.other))

    def _move(self, placed: Placed[T], source: Instance[T], target: Instance[T]) -> None:
        source.pull(placed)
        source.forget(placed)
        placed.other, placed.other_uncached = source.name, placed.uncached
        # Not what it was at arrival: others of its prefix may have moved there before it.
        target.put(placed)
        self._stirred[target.name] = None

    def _let_go(self, name: str) -> list[Placed[T]]:
        """Give nothing more to an instance; return what waited for it."""
        instance = self._instances.pop(name)
        self._away[name] = instance
        self._placer.left(name)
        return self._unplace(instance)

    def _unplace(self, instance: Instance[T]) -> list[Placed[T]]:
        """Take out and return all that waits for an instance."""
        strays = [*instance.late.values(), *instance.queue.values()]
        for placed in strays:
            instance.pull(placed)
            instance.forget(placed)
            del self._placed[placed.item]
        return strays

    def _next_up(self, instance: Instance[T], now_s: float) -> Placed[T] | None:
        order, slo_s = self._settings.order, self._settings.slo_s
        token_s = self._view.seconds(instance, 1) if order is QueueOrder.IN_TIME_FIRST else None
        if token_s is None:
            return instance.next_up(hit_first=order is QueueOrder.HIT_FIRST)
        ahead = instance.running_tokens + instance.others_tokens

        def is_late(placed: Placed[T]) -> bool:
            return now_s - placed.since_s + (ahead + placed.uncached) * token_s > slo_s

        return instance.next_up(is_late=is_late)

    def _has_room(self, instance: Instance[T]) -> bool:
        settings = self._settings
        running = len(instance.running)
        if settings.slot_requests is not None and running >= settings.slot_requests:
            return False
        return running == 0 or settings.slot_tokens is None or instance.running_tokens < settings.slot_tokens

    def _end(self, item: T, now_s: float) -> tuple[Instance[T], Placed[T], float] | None:
        """Take a request from where it runs; None when it runs nowhere."""
        placed = self._placed.get(item)
        if placed is None or placed.started_s is None:
            return None
        del self._placed[item]
        self._silent.pop(item, None)
        instance = self._instances.get(placed.instance)
        if instance is None or item not in instance.running:
            instance = self._away[placed.instance]
        self._stirred[placed.instance] = None
        return instance, placed, instance.end(placed, now_s)

    def _waits_no_more(self, placed: Placed[T]) -> None:
        self.waiting -= 1
        self.waiting_tokens -= placed.tokens
