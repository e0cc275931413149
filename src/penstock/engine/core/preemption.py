"""The rules of preemption by tier, and the cost of preempting and resuming a request; docs/engine.md#tiers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.engine.core.latency import PrefillModel
from penstock.engine.core.requests import PreemptionKind, RequestState
from penstock.engine.core.transfer import LinkTerms, TransferLink

RESUME_HEADROOM_FRACTION = 0.05
"""Chosen: share of the KV blocks that must stay free beyond a resumed request's own, so that the next blocks
that running requests need do not throw it out again."""


@dataclass(frozen=True, slots=True)
class PreemptionTerms:
    """Bounds of preemption by tier.

    Attributes:
        max_per_request: Most preemptions of one request, >= 0; one that has had as many is admitted only with room for its
            full length, and never is a victim.
        reserved_fraction: Share of the KV blocks that only premium and system requests may hold, 0 to below 1.
        host_blocks: KV blocks that host memory holds for swapping; 0: no request is swapped.
        host_link: The link between GPU memory and host memory, each way; all GPUs of the worker together.
        drop_above_s: Fail a preempted request if resuming it would take longer than this; None: never.
    """

    max_per_request: int = 3
    reserved_fraction: float = 0.1
    host_blocks: int = 0
    host_link: LinkTerms = field(default_factory=lambda: LinkTerms(latency_s=0.001, bytes_per_s=25e9))
    drop_above_s: float | None = None

    def reserved_blocks(self, capacity: int) -> int:
        """Return the reserved part of ``capacity`` blocks, rounded down."""
        return int(self.reserved_fraction * capacity)


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Seconds that a victim's way out and back takes, by kind; ``link`` joins GPU and host memory.

    A swap moves its KV over the link twice; recomputing prefills its prompt and what it has generated.
    """

    kv_bytes_per_token: int
    link: LinkTerms
    prefill: PrefillModel

    def swap_s(self, tokens: int) -> float:
        """Return twice the fixed latency and the bytes of ``tokens`` cached tokens."""
        return 2 * (self.link.latency_s + tokens * self.kv_bytes_per_token / self.link.bytes_per_s)

    def cheapest(
        self, tokens: int, *, can_swap: bool, drop_above_s: float | None = None
    ) -> tuple[PreemptionKind, float]:
        """Return the kind with the lowest cost, and that cost in seconds.

        Dropping never is cheapest by itself: it happens where both other ways cost more than ``drop_above_s``.
        """
        kind, cost_s = PreemptionKind.RECOMPUTE, self.prefill.ttft_s(tokens)
        if can_swap and (swap_s := self.swap_s(tokens)) < cost_s:
            kind, cost_s = PreemptionKind.SWAP, swap_s
        if drop_above_s is not None and cost_s > drop_above_s:
            kind = PreemptionKind.DROP
        return kind, cost_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that may be thrown out; ``restore_s`` is the cost of its way out and back."""

    state: RequestState
    freed_blocks: int
    remaining_tokens: int
    restore_s: float

    @property
    def rank(self) -> tuple[int, int, float, int]:
        """Lowest first: tier, preemptions so far, seconds of restoring per block and token, latest arrival."""
        gain = max(self.freed_blocks, 1) * self.remaining_tokens
        request = self.state.request
        return (-request.priority, self.state.preemptions, self.restore_s / gain, -self.state.index)


def choose_victims(candidates: Iterable[Candidate], *, blocks: int, places: int) -> list[Candidate]:
    """Return the victims, of lower tiers, that free ``blocks`` and ``places``, the best first; none when that is impossible.

    None of them could be spared.
    """
    ordered = sorted(candidates, key=lambda each: each.rank)
    chosen: list[Candidate] = []
    freed = 0
    for candidate in ordered:
        if freed >= blocks and len(chosen) >= places:
            break
        if candidate.freed_blocks or blocks <= freed:
            chosen.append(candidate)
            freed += candidate.freed_blocks
    if freed < blocks or len(chosen) < places:
        return []
    for candidate in tuple(reversed(chosen)):
        if freed - candidate.freed_blocks >= blocks and len(chosen) > places:
            chosen.remove(candidate)
            freed -= candidate.freed_blocks
    return chosen


class Reservation:
    """Counts the blocks held by requests that may not use the reserve."""

    def __init__(self, capacity: int, reserved: int) -> None:
        self._references = [0] * capacity
        self.held = 0
        self.limit = capacity - reserved

    @property
    def headroom(self) -> int:
        """Further blocks that they may take."""
        return self.limit - self.held

    def added(self, blocks: Sequence[int]) -> int:
        """Return how many of ``blocks`` none of them holds yet."""
        return sum(1 for block in blocks if not self._references[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """Note that one of them took these blocks."""
        references = self._references
        for block in blocks:
            if not references[block]:
                self.held += 1
            references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Note that one of them gave these blocks back."""
        references = self._references
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                self.held -= 1


class SwapSpace:
    """The blocks of host memory and the requests being copied."""

    def __init__(self, capacity: int, link: LinkTerms) -> None:
        self.capacity = capacity
        self.used = 0
        self.out = TransferLink(link)
        self.back = TransferLink(link)

    def fits(self, blocks: int) -> bool:
        """Whether this many more blocks fit."""
        return self.used + blocks <= self.capacity

    def take(self, state: RequestState, blocks: int) -> None:
        """Keep ``blocks`` for a request that is about to be copied out."""
        self.used += blocks
        state.host_blocks = blocks

    def give_back(self, state: RequestState) -> None:
        """Free a request's blocks here, if any."""
        self.used -= state.host_blocks
        state.host_blocks = 0

    def next_s(self) -> float | None:
        """Return when the next copy ends, or None."""
        return min((at for at in (self.out.next_s(), self.back.next_s()) if at is not None), default=None)
