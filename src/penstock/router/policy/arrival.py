"""A request as routing policies see it and as it waits, the line that it waits in, and a queue's token counts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import InitVar, dataclass, field
from typing import Final, Generic, TypeVar

from penstock.api import Role, Tier
from penstock.router.policy.prefixes import BLOCK_TOKENS, Prefix

_RANKS: Final = {tier: rank for rank, tier in enumerate(Tier)}


@dataclass(slots=True)
class Arrival:
    """A request to place; never changed, and not frozen because a frozen one takes three times as long to make.

    Attributes:
        chain: Chained prefix keys, one per begun block.
        tokens: Prompt tokens, known or estimated, >= 0.
        avoid: Workers that have failed it or are busy; taken only if there is no other.
        block_tokens: Prompt tokens that one block stands for, > 0. 512 where keys are made of token ids or traces;
            keys made of bytes stand for ``BLOCK_BYTES`` over the prompt's bytes per token.
        sub_block_keys: Keys that stand for the first block together, >= 1; each later key is a block.
        session: Whatever the client says ties requests together; empty for none.
        is_non_streaming: Its answer comes in one piece, so nothing shows when its prompt was computed.
        tenant: Whose it is; empty: no tenant's.
        is_rest: Its client has the beginning of the answer, so that it waits for room where others are refused.
        alone_at: Roles on whose workers it may only run alone, because it may have killed some.
        packed: The chain as bytes, where it came so; else it is packed here.
        rank: The tier's place, 0 is the highest.
    """

    chain: tuple[int, ...]
    tokens: int
    avoid: frozenset[str] = frozenset()
    block_tokens: float = BLOCK_TOKENS
    sub_block_keys: int = 1
    session: str = ""
    is_non_streaming: bool = False
    tier: Tier = Tier.STANDARD
    tenant: str = ""
    is_rest: bool = False
    alone_at: tuple[Role, ...] = ()
    packed: InitVar[bytes | None] = None
    prefix: Prefix = field(init=False, repr=False, compare=False)
    rank: int = field(init=False, repr=False, compare=False)

    def __post_init__(self, packed: bytes | None) -> None:
        self.prefix = Prefix(self.chain, packed)
        self.rank = _RANKS[self.tier]

    def avoiding(self, names: frozenset[str]) -> Arrival:
        """Return the same request that avoids further workers; its keys are not packed once more."""
        other = copy(self)
        other.avoid = self.avoid | names
        return other

    def uncached(self, held: int) -> int:
        """Return the tokens to compute where ``held`` keys are held; at least 1 of any prompt."""
        tokens = self.tokens
        # Most workers of a large fleet hold nothing of a prompt.
        if not held:
            return tokens
        parts = self.sub_block_keys
        blocks = held - parts + 1 if held >= parts else held / parts
        rest = tokens - int(blocks * self.block_tokens)
        return rest if rest > 0 else min(tokens, 1)


T = TypeVar("T")


@dataclass(slots=True)
class QueuedRequest(Generic[T]):
    """A request with its place.

    Attributes:
        since_s: When it was first queued.
        worker: Where it waits or runs.
        held: Blocks of it that the worker held before.
        other: The pair's other worker, empty without one.
        other_uncached: Tokens expected to be computed there.
        started_s: When it was dispatched; None while it waits.
        weight: ``uncached`` when it was submitted, wherever it goes afterwards; see `PromptTokenCounts`.
        is_prefilled: Its prompt is computed and it still weighs at its worker.
        is_adopted: Another router dispatched it, which counts it, and knows when its prompt was begun.
        is_retry: It was at a worker before.
    """

    item: T
    arrival: Arrival
    since_s: float
    worker: str = ""
    uncached: int = 0
    held: int = 0
    other: str = ""
    other_uncached: int = 0
    started_s: float | None = None
    reason: str = ""
    weight: int = 0
    is_prefilled: bool = False
    is_adopted: bool = False
    is_retry: bool = False

    @property
    def tokens(self) -> int:
        """Prompt tokens; >= 0."""
        return self.arrival.tokens


_LATE_TURN = 10
"""Chosen: late requests get at least every tenth turn, so that they end, and leave the others 90% of a worker."""

IsLate = Callable[[QueuedRequest[T]], bool]
"""Returns whether a request can no longer be in time."""


class Lane(Generic[T]):
    """Requests of one tier and tenant, or all of them where there are no tiers.

    Begun streams wait apart, the one that has waited longest first, and take turns with the others: a worker's death may bring
    hundreds of them at once, which must neither hold up every new request nor wait behind all of them.

    Attributes:
        begun: Begun streams that wait.
        late: Requests that wait and were found unable to be in time.
        late_tokens: Uncached tokens of the late ones.
    """

    __slots__ = ("_late_turns", "_was_begun", "begun", "late", "late_tokens", "queue")
    has_tiers = False

    def __init__(self) -> None:
        self.queue: dict[T, QueuedRequest[T]] = {}
        self.begun: dict[T, QueuedRequest[T]] = {}
        self._was_begun = False
        self.late: dict[T, QueuedRequest[T]] = {}
        self.late_tokens = 0
        self._late_turns = 0

    def lower_tokens(self, rank: int) -> int:  # noqa: ARG002 - one lane has no tiers
        """Return 0: all are of one tier."""
        return 0

    def __bool__(self) -> bool:
        return bool(self.queue or self.late or self.begun)

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        yield from self.begun.values()
        yield from self.late.values()
        yield from self.queue.values()

    @property
    def oldest_s(self) -> float | None:
        """Return when the request that has waited longest was queued; None when none waits."""
        firsts = [next(iter(each.values())).since_s for each in (self.begun, self.late, self.queue) if each]
        return min(firsts, default=None)

    def put(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        """Add a request, behind or before all others; a begun stream behind the other ones."""
        if queued.arrival.is_rest:
            self.begun[queued.item] = queued
        elif is_first:
            self.queue = {queued.item: queued, **self.queue}
        else:
            self.queue[queued.item] = queued

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Take a request out."""
        if queued.arrival.is_rest:
            del self.begun[queued.item]
        elif self.queue.pop(queued.item, None) is None:
            del self.late[queued.item]
            self.late_tokens -= queued.uncached

    def charge(self, queued: QueuedRequest[T]) -> None:
        """Count whose turn it was; a single lane shares tokens with no other."""
        self._was_begun = queued.arrival.is_rest

    def in_order(self, *, hit_first: bool) -> Iterator[QueuedRequest[T]]:
        """Iterate over the queue in the order in which it is served; begun streams and late ones are left out."""
        queue = self.queue.values()
        return iter(sorted(queue, key=_hit_order) if hit_first else queue)

    def next_up(
        self,
        now_s: float,  # noqa: ARG002 - a lane has no ages to compare
        *,
        hit_first: bool = False,
        is_late: IsLate[T] | None = None,
        urgent: bool = False,  # noqa: ARG002 - where there are no tiers a worker has room for all or for none
        begun: bool = False,  # noqa: ARG002 - likewise
    ) -> QueuedRequest[T] | None:
        """Return the request to be served next; None when none waits.

        Args:
            now_s: Simulated seconds.
            hit_first: The largest number of cached tokens first, then arrival, instead of arrival alone.
            is_late: Late requests let all others of their lane go first, except each `_LATE_TURN`-th time.
            urgent: Of system and premium alone; see `TierQueue.next_up`.
            begun: Likewise, begun streams besides.
        """
        if self.begun and not (self._was_begun and (self.queue or self.late)):
            return next(iter(self.begun.values()))
        while (queued := self._first(hit_first=hit_first)) is not None:
            if is_late is None or not is_late(queued):
                break
            del self.queue[queued.item]
            self.late[queued.item] = queued
            self.late_tokens += queued.uncached
        if self.late:
            self._late_turns += 1
            if queued is None or self._late_turns >= _LATE_TURN:
                self._late_turns = 0
                return next(iter(self.late.values()))
        return queued

    def _first(self, *, hit_first: bool) -> QueuedRequest[T] | None:
        if not hit_first:
            return next(iter(self.queue.values()), None)
        return min(self.queue.values(), key=_hit_order, default=None)


def _hit_order(queued: QueuedRequest[T]) -> int:
    return queued.uncached - queued.arrival.tokens


@dataclass(slots=True)
class PromptTokenCounts:
    """Counts of one queue and of the workers that it gives requests to.

    A request weighs the same in every count: the tokens that routing expected to be computed when it was admitted.
    So what was admitted is what was computed, waits, is pending, or has left before it was computed.

    Attributes:
        pending: Given to a worker and not computed there yet, by worker; absent means 0.
        routed: Prompt tokens of all requests admitted so far, cached ones included; a retry does not count again.
    """

    waiting: int = 0
    pending: dict[str, int] = field(default_factory=dict)
    routed: int = 0
    admitted: int = 0
    computed: int = 0

    def expected(self, tokens: int) -> float:
        """Return the tokens to compute of a prompt of this many, as far as those admitted so far tell."""
        return tokens * self.admitted / self.routed if self.routed else tokens

    def give(self, worker: str, weight: int) -> None:
        """Count a request as pending at a worker."""
        self.pending[worker] = self.pending.get(worker, 0) + weight

    def take_back(self, worker: str, weight: int) -> None:
        """End what `give` began."""
        left = self.pending[worker] - weight
        if left:
            self.pending[worker] = left
        else:
            del self.pending[worker]


_DECAY = 0.999
"""Chosen: sums over about the last thousand prompts, so that a cache's size in keys hardly moves."""


class KeyDensity:
    """Keys over tokens of recent prompts, both decaying; a key to 512 tokens while there was none."""

    def __init__(self) -> None:
        self._keys = 1.0
        self._tokens = float(BLOCK_TOKENS)

    def learn(self, keys: int, tokens: int) -> None:
        """Add a prompt; one without keys or tokens changes nothing."""
        if keys and tokens:
            self._keys = self._keys * _DECAY + keys
            self._tokens = self._tokens * _DECAY + tokens

    def keys(self, tokens: int) -> int:
        """Return how many keys a cache of ``tokens`` holds, >= 2."""
        return max(2, int(tokens * self._keys / self._tokens))
