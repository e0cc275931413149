"""What the router keeps of one instance to place requests: its queue, its cache, its pace. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_router.policy.prefix_index import PrefixIndex

T = TypeVar("T")

_PACE_KEPT = 0.95
"""Chosen: about the last twenty prefills count, so that a slower GPU shows within seconds."""


class Pace:
    """Prefill tokens per second, learnt from what was computed; unknown before the first.

    Tokens over seconds of the last prefills together, not the mean of their ratios: a short prompt's fixed
    overhead, or one wrong token count, would otherwise weigh as much as a long prompt.

    Attributes:
        tokens_per_s: The estimate, or None.
    """

    __slots__ = ("_seconds", "_tokens", "tokens_per_s")

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self.tokens_per_s = tokens_per_s
        self._tokens = 0.0
        self._seconds = 0.0

    def learn(self, tokens: int, took_s: float) -> None:
        """Take one measurement in; what took no time, or computed nothing, says nothing."""
        if tokens <= 0 or took_s <= 0:
            return
        self._tokens = self._tokens * _PACE_KEPT + tokens
        self._seconds = self._seconds * _PACE_KEPT + took_s
        self.tokens_per_s = self._tokens / self._seconds


@dataclass(slots=True)
class Placed(Generic[T]):
    """A request with its place.

    Attributes:
        item: What the caller queued.
        chain: Chained prefix keys.
        tokens: Prompt tokens, >= 0.
        since_s: When it was first placed.
        instance: Where it waits or runs.
        uncached: Tokens expected to be computed there.
        other: The pair's other instance, empty without one.
        other_uncached: Tokens expected to be computed there.
        started_s: When it was handed over; None while it waits.
        reason: Why it stands there, one short phrase.
    """

    item: T
    chain: tuple[int, ...]
    tokens: int
    since_s: float
    instance: str = ""
    uncached: int = 0
    other: str = ""
    other_uncached: int = 0
    started_s: float | None = None
    reason: str = ""


class Instance(Generic[T]):
    """One instance.

    Attributes:
        name: Unique.
        index: Blocks that it holds, as far as known.
        pace: How fast it computes.
        queue: Requests that wait for it, in order of arrival.
        queued_tokens: Their uncached tokens.
        running: Requests handed over and not computed yet.
        running_tokens: Their uncached tokens.
        running_prompt_tokens: Their prompt tokens, cached or not.
        others_tokens: Uncached tokens that other routers have there, as last heard.
        progress_s: When it last computed a prompt, or had nothing to compute.
    """

    __slots__ = (
        "index",
        "name",
        "others_tokens",
        "pace",
        "progress_s",
        "queue",
        "queued_tokens",
        "running",
        "running_prompt_tokens",
        "running_tokens",
    )

    def __init__(self, name: str, *, cache_blocks: int, now_s: float) -> None:
        self.name = name
        self.index = PrefixIndex(cache_blocks)
        self.pace = Pace()
        self.queue: dict[T, Placed[T]] = {}
        self.queued_tokens = 0
        self.running: dict[T, Placed[T]] = {}
        self.running_tokens = 0
        self.running_prompt_tokens = 0
        self.others_tokens = 0
        self.progress_s = now_s

    @property
    def pending_tokens(self) -> int:
        """Return the uncached tokens to compute before a request that comes now."""
        return self.queued_tokens + self.running_tokens + self.others_tokens

    def uncached(self, chain: tuple[int, ...], tokens: int) -> int:
        """Return how many of a prompt's tokens would have to be computed here; at least 1 of any.

        A prompt is never wholly cached: its last token is computed for the first answer.
        """
        if not chain:
            return tokens
        return max(min(1, tokens), tokens - tokens * self.index.held(chain) // len(chain))

    def put(self, placed: Placed[T]) -> None:
        """Queue a request here."""
        placed.instance = self.name
        self.queue[placed.item] = placed
        self.queued_tokens += placed.uncached
        self.index.use(placed.chain)

    def pull(self, placed: Placed[T]) -> None:
        """Take a request out of the queue."""
        del self.queue[placed.item]
        self.queued_tokens -= placed.uncached

    def start(self, placed: Placed[T], now_s: float) -> None:
        """Hand a request over."""
        self.pull(placed)
        placed.started_s = now_s
        if not self.running:
            self.progress_s = now_s
        self.running[placed.item] = placed
        self.running_tokens += placed.uncached
        self.running_prompt_tokens += placed.tokens

    def end(self, placed: Placed[T], now_s: float, *, computed: int | None) -> float | None:
        """Take back a request.

        Args:
            placed: The request.
            now_s: Modelled seconds.
            computed: Tokens that were computed; None: it was lost.

        Returns:
            The seconds that its uncached tokens took, modelled; None when it was lost.
        """
        del self.running[placed.item]
        self.running_tokens -= placed.uncached
        self.running_prompt_tokens -= placed.tokens
        if computed is None:
            return None
        started_s = now_s if placed.started_s is None else placed.started_s
        took_s = now_s - max(started_s, self.progress_s)
        self.progress_s = now_s
        self.pace.learn(computed, took_s)
        return took_s

    def in_order(self, *, hit_first: bool) -> Iterator[Placed[T]]:
        """Iterate over the queue in the order in which it is served.

        Args:
            hit_first: The largest cached share first, then arrival, instead of arrival alone.
        """
        if not hit_first:
            return iter(self.queue.values())
        return iter(sorted(self.queue.values(), key=lambda placed: placed.uncached - placed.tokens))
