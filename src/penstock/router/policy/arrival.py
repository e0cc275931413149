"""A request as routing policies see it and as it waits in a queue, the order of a queue, and a queue's token counts. Pure."""

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
    """A request to be routed. It is never changed; it is not a frozen dataclass because creating a frozen one takes three times as long.

    Attributes:
        chain: Chained prefix keys, each of which depends on all of the prompt before its end. The first block of the prompt
            has up to `sub_block_keys` keys (fewer if the prompt is shorter); each further block has one key, including a
            partial last block.
        tokens: Number of prompt tokens, known or estimated, >= 0.
        avoid: Names of workers that have failed the request or are busy; they are chosen only if there is no other worker.
        block_tokens: Number of prompt tokens per block, > 0. It is 512 if the keys are made from token ids or come from a
            trace. If they are made from bytes, it is 2,048 bytes (``BLOCK_BYTES``) divided by the mean number of bytes per
            token.
        sub_block_keys: Number of keys that together represent a complete first block, >= 1.
        session: Identifier by which the client groups requests into a session; empty if it gives none.
        is_non_streaming: Whether the response arrives in one piece, so that the end of the prefill cannot be observed.
        tier: Tier of the request.
        tenant: Identifier of the tenant to which the request belongs; empty if it belongs to none.
        is_continuation: Whether the request resumes a stream whose first part the client has received. It waits for capacity in cases
            in which a new request is rejected.
        alone_at: Roles on whose workers the request must run alone, because it is suspected of crashing workers; usually
            empty.
        packed: `chain` as bytes, 8 bytes per key in native byte order, if the caller has it already; None packs `chain` here.
        prefix: `chain` together with its packed form.
        rank: Position of the tier, 0 for the highest.
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
    is_continuation: bool = False
    alone_at: tuple[Role, ...] = ()
    packed: InitVar[bytes | None] = None
    prefix: Prefix = field(init=False, repr=False, compare=False)
    rank: int = field(init=False, repr=False, compare=False)

    def __post_init__(self, packed: bytes | None) -> None:
        self.prefix = Prefix(self.chain, packed)
        self.rank = _RANKS[self.tier]

    def avoiding(self, names: frozenset[str]) -> Arrival:
        """Return a copy of the request that avoids the workers ``names`` in addition to those that it avoids already."""
        other = copy(self)
        other.avoid = self.avoid | names
        return other

    def uncached(self, held: int) -> int:
        """Return the number of prompt tokens to compute if the blocks of the first ``held`` prefix keys are cached.

        The result is at least 1 unless the prompt is empty, because the last token is always computed.
        """
        tokens = self.tokens
        # In a large fleet most workers have nothing of a prompt in their cache.
        if not held:
            return tokens
        parts = self.sub_block_keys
        blocks = held - parts + 1 if held >= parts else held / parts
        rest = tokens - int(blocks * self.block_tokens)
        return rest if rest > 0 else min(tokens, 1)


T = TypeVar("T")


@dataclass(slots=True)
class QueuedRequest(Generic[T]):
    """A request in a dispatch queue: it waits until it is dispatched to a worker, and then runs.

    Attributes:
        item: The caller's identifier of the request.
        arrival: The request as the policy sees it.
        since_s: Time at which the request was first queued, in simulated seconds.
        worker: Name of the worker for which it waits or on which it runs; empty while it waits in the central queue.
        uncached: Number of prompt tokens expected to be computed on `worker`.
        cached_keys: Number of the prompt's leading prefix keys (one per block of the prompt) that the worker's prefix index
            contained before this request was queued there.
        other: Name of the other candidate worker, to which the request can be moved; empty if there is none.
        other_uncached: Number of prompt tokens expected to be computed on `other`.
        started_s: Time at which it was dispatched, in simulated seconds; None while it waits.
        reason: Why the policy chose the worker, for logs.
        weight: Value of `uncached` when the request was submitted, at least 1. It does not change if the request moves to
            another worker, so that what is added to the token counts of the queue (`PromptTokenCounts`) is later subtracted
            from them exactly.
        is_prefilled: Whether the prompt was computed already. The request can nevertheless count as running at its worker,
            because a policy that assigns when a worker is free counts it until it ends.
        is_adopted: Whether another router dispatched it. The other router counts the tokens of the request and measures the
            prefill.
        is_retry: Whether the request was dispatched to a worker before, so that its tokens do not count again as admitted.
    """

    item: T
    arrival: Arrival
    since_s: float
    worker: str = ""
    uncached: int = 0
    cached_keys: int = 0
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
        """Number of prompt tokens, cached ones included, >= 0."""
        return self.arrival.tokens


_LATE_TURN = 10
"""Chosen: late requests get at least every tenth turn, so that they are served in the end, and leave 90% of a worker to the
others."""

IsLate = Callable[[QueuedRequest[T]], bool]
"""Returns whether a request can no longer meet its TTFT target."""


class Lane(Generic[T]):
    """The waiting requests of one tier and tenant; all waiting requests if there are no tiers.

    Streams that are to be resumed wait in a queue of their own, the one that has waited longest first, and alternate with
    the other requests: the death of a worker can add hundreds of them at once, which must neither delay every new request
    nor wait for all of them.

    Attributes:
        queue: Waiting requests that are not streams to be resumed and not in `late`, by the caller's identifier
            (`QueuedRequest.item`), in order of arrival.
        resuming: Waiting streams that are to be resumed on another worker, by the same identifier.
        late: Waiting requests that were found to be unable to meet their TTFT target when it was their turn, by the same
            identifier; they are served after the others, except that every tenth turn is theirs.
        late_tokens: Number of uncached tokens of the requests in `late`.
    """

    __slots__ = ("_last_was_resuming", "_late_turns", "late", "late_tokens", "queue", "resuming")
    has_tiers = False

    def __init__(self) -> None:
        self.queue: dict[T, QueuedRequest[T]] = {}
        self.resuming: dict[T, QueuedRequest[T]] = {}
        self._last_was_resuming = False
        self.late: dict[T, QueuedRequest[T]] = {}
        self.late_tokens = 0
        self._late_turns = 0

    def lower_tokens(self, rank: int) -> int:  # noqa: ARG002 - one lane has no tiers
        """Return 0, the number of uncached tokens of waiting requests of lower tiers: without tiers, there are no such requests.

        ``rank`` is the rank of a tier (0 is the highest), and not used here.
        """
        return 0

    def __bool__(self) -> bool:
        return bool(self.queue or self.late or self.resuming)

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        yield from self.resuming.values()
        yield from self.late.values()
        yield from self.queue.values()

    @property
    def oldest_s(self) -> float | None:
        """Time at which the request that has waited longest began to wait, in simulated seconds; None if no request waits."""
        firsts = [
            next(iter(each.values())).since_s for each in (self.resuming, self.late, self.queue) if each
        ]
        return min(firsts, default=None)

    def put(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        """Add ``queued`` to the waiting requests, after the others, or before them (``is_first``).

        A stream that is to be resumed on another worker is put into a queue of its own (`resuming`). These streams are
        always served in the order in which they were added, whatever ``is_first`` is.
        """
        if queued.arrival.is_continuation:
            self.resuming[queued.item] = queued
        elif is_first:
            self.queue = {queued.item: queued, **self.queue}
        else:
            self.queue[queued.item] = queued

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Remove ``queued`` from the waiting requests, because it is dispatched, cancelled or moved.

        Raises:
            KeyError: the request does not wait in this lane.
        """
        if queued.arrival.is_continuation:
            del self.resuming[queued.item]
        elif self.queue.pop(queued.item, None) is None:
            del self.late[queued.item]
            self.late_tokens -= queued.uncached

    def charge(self, queued: QueuedRequest[T]) -> None:
        """Record that ``queued`` was dispatched: the next request to be served is then a new one if it was a stream to be resumed.

        In the same way, a stream to be resumed is next after a new request. So both are served in turn.
        """
        self._last_was_resuming = queued.arrival.is_continuation

    def in_order(self, *, hit_first: bool) -> Iterator[QueuedRequest[T]]:
        """Iterate over the waiting requests in the order in which they are served.

        Streams to be resumed, and requests that can no longer meet their TTFT target (late ones), are left out.
        ``hit_first`` orders by the number of cached tokens, the largest first, and then by arrival; otherwise by arrival
        alone.
        """
        queue = self.queue.values()
        return iter(sorted(queue, key=_hit_order) if hit_first else queue)

    def next_up(
        self,
        now_s: float,  # noqa: ARG002 - a lane has no ages to compare
        *,
        hit_first: bool = False,
        is_late: IsLate[T] | None = None,
        urgent: bool = False,  # noqa: ARG002 - where there are no tiers a worker has room for all or for none
        allow_resuming: bool = False,  # noqa: ARG002 - likewise
    ) -> QueuedRequest[T] | None:
        """Return the request to be served next, without removing it; None if no request waits.

        Args:
            now_s: Current time in simulated seconds; not used by a lane.
            hit_first: Whether to order by the number of cached tokens, the largest first, and then by arrival; otherwise
                by arrival alone.
            is_late: Returns whether a request can no longer meet its TTFT target. Such late requests are served after all
                others here, except that every tenth turn is theirs. None treats no request as late.
            urgent: Only used by `TierQueue.next_up`.
            allow_resuming: Only used by `TierQueue.next_up`.
        """
        if self.resuming and not (self._last_was_resuming and (self.queue or self.late)):
            return next(iter(self.resuming.values()))
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
    """Token counts of one queue and of the workers to which the queue dispatches.

    A request has the same weight in every count: the uncached tokens that were expected when it was admitted. So the
    admitted tokens equal the computed, waiting and pending ones plus those of requests that left before they were computed.

    Attributes:
        waiting: Tokens of the requests that wait now.
        pending: Tokens that were dispatched to a worker and are not computed yet, by worker name; workers without such
            tokens are absent.
        routed: Cumulative prompt tokens, cached ones included, of all admitted requests; a retry does not count again.
        admitted: Cumulative expected uncached tokens of all admitted requests; a retry does not count again.
        computed: Cumulative expected uncached tokens of the requests whose prompts were computed.
    """

    waiting: int = 0
    pending: dict[str, int] = field(default_factory=dict)
    routed: int = 0
    admitted: int = 0
    computed: int = 0

    def expected(self, tokens: int) -> float:
        """Return the expected number of uncached tokens of a prompt of ``tokens`` tokens.

        It is based on the fraction of uncached tokens of all requests admitted so far; without any, all tokens count as
        uncached.
        """
        return tokens * self.admitted / self.routed if self.routed else tokens

    def add_pending(self, worker: str, weight: int) -> None:
        """Count a request's ``weight`` (its expected uncached tokens) as dispatched to a worker and not computed yet."""
        self.pending[worker] = self.pending.get(worker, 0) + weight

    def remove_pending(self, worker: str, weight: int) -> None:
        """Subtract a request's ``weight``, which `add_pending` has added, because its prompt was computed or it has left the worker."""
        left = self.pending[worker] - weight
        if left:
            self.pending[worker] = left
        else:
            del self.pending[worker]


_DECAY = 0.999
"""Chosen: sums over about the last thousand prompts, so that a cache's size in keys hardly moves."""


class KeyDensity:
    """Mean number of prefix keys per prompt token, over about the last thousand prompts; converts KV cache sizes to keys.

    Before the first prompt it is 1 per 512 tokens. A prefix key is the hash of one block of a prompt and of all that
    precedes it.
    """

    def __init__(self) -> None:
        self._keys = 1.0
        self._tokens = float(BLOCK_TOKENS)

    def learn(self, keys: int, tokens: int) -> None:
        """Add one prompt to the mean: its number of prefix keys, and its number of tokens; does nothing if either is 0."""
        if keys and tokens:
            self._keys = self._keys * _DECAY + keys
            self._tokens = self._tokens * _DECAY + tokens

    def keys(self, tokens: int) -> int:
        """Return the number of prefix keys of the prompts that fit into a KV cache of ``tokens`` tokens, >= 2.

        It is ``tokens`` times the mean number of keys per token, and is used as the capacity of a worker's prefix index.
        """
        return max(2, int(tokens * self._keys / self._tokens))
