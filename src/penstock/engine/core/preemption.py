"""Rules of preemption by tier, and the cost of preempting and resuming a request; see docs/engine.md#tiers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.engine.core.latency import PrefillModel
from penstock.engine.core.requests import PreemptionKind, RequestState
from penstock.engine.core.transfer import LinkTerms, TransferLink

RESUME_HEADROOM_FRACTION = 0.05
"""Fraction of the KV blocks that must remain free in addition to those of a resumed request, so that the next blocks
of running requests do not preempt it again. Chosen."""


@dataclass(frozen=True, slots=True)
class PreemptionTerms:
    """Limits of preemption by tier. Times are simulated seconds.

    Attributes:
        max_per_request: Maximum number of preemptions of one request, at least 0. A request that has been preempted
            that often is admitted only if there is room for its full length, and is never preempted again.
        reserved_fraction: Fraction of the KV blocks that only premium and system requests can use, at least 0 and
            below 1.
        host_blocks: Number of KV blocks in host memory for swapping; 0 disables swapping.
        host_link: Bandwidth and latency between GPU memory and host memory in each direction, for all GPUs of the
            worker together.
        drop_above_s: Seconds of preempting and resuming above which a preempted request fails instead. None means that
            none fails.
    """

    max_per_request: int = 3
    reserved_fraction: float = 0.1
    host_blocks: int = 0
    host_link: LinkTerms = field(default_factory=lambda: LinkTerms(latency_s=0.001, bytes_per_s=25e9))
    drop_above_s: float | None = None

    def reserved_blocks(self, capacity: int) -> int:
        """Return the number of reserved blocks out of ``capacity``, rounded down."""
        return int(self.reserved_fraction * capacity)


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Computes the seconds that preempting and resuming a request takes, by kind of preemption.

    A swap transfers the request's KV twice; recomputing prefills its prompt and the tokens that it has generated.

    Attributes:
        kv_bytes_per_token: Bytes of KV per token.
        link: Bandwidth and latency between GPU memory and host memory.
        prefill: Prefill model of the worker.
    """

    kv_bytes_per_token: int
    link: LinkTerms
    prefill: PrefillModel

    def swap_s(self, tokens: int) -> float:
        """Return the seconds to copy ``tokens`` tokens of KV to host memory and back."""
        return 2 * (self.link.latency_s + tokens * self.kv_bytes_per_token / self.link.bytes_per_s)

    def cheapest(
        self, tokens: int, *, can_swap: bool, drop_above_s: float | None = None
    ) -> tuple[PreemptionKind, float]:
        """Return the cheapest kind of preemption and its cost in seconds.

        DROP is returned only if both swapping and recomputing cost more than ``drop_above_s``.

        Args:
            tokens: Number of tokens in the request's context.
            can_swap: Whether the request can be swapped.
            drop_above_s: Cost in seconds above which the request fails; None means that it never fails.
        """
        kind, cost_s = PreemptionKind.RECOMPUTE, self.prefill.ttft_s(tokens)
        if can_swap and (swap_s := self.swap_s(tokens)) < cost_s:
            kind, cost_s = PreemptionKind.SWAP, swap_s
        if drop_above_s is not None and cost_s > drop_above_s:
            kind = PreemptionKind.DROP
        return kind, cost_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that can be preempted.

    Attributes:
        state: The request.
        freed_blocks: Number of blocks that preempting it would free.
        remaining_tokens: Number of tokens that it still has to generate.
        restore_s: Seconds that preempting and resuming it takes.
    """

    state: RequestState
    freed_blocks: int
    remaining_tokens: int
    restore_s: float

    @property
    def rank(self) -> tuple[int, int, float, int]:
        """Sort key; requests with the lowest key are preempted first.

        The order is: lowest tier, fewest preemptions, lowest cost per freed block and remaining token, latest
        arrival.
        """
        gain = max(self.freed_blocks, 1) * self.remaining_tokens
        request = self.state.request
        return (-request.priority, self.state.preemptions, self.restore_s / gain, -self.state.index)


def choose_victims(candidates: Iterable[Candidate], *, blocks: int, places: int) -> list[Candidate]:
    """Return the requests to preempt so that at least ``blocks`` blocks and ``places`` batch slots become free, best first.

    Returns an empty list if that is impossible. Without any one of the returned requests, too little would become free.

    Args:
        candidates: Running requests of lower tiers.
        blocks: Number of blocks to free.
        places: Number of batch slots to free.
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
    """Counts the blocks used by requests that cannot use the reserve (those below premium).

    Attributes:
        held: Number of blocks that requests below premium use.
        limit: Maximum number of blocks that requests below premium can use.
    """

    def __init__(self, capacity: int, reserved: int) -> None:
        self._references = [0] * capacity
        self.held = 0
        self.limit = capacity - reserved

    @property
    def headroom(self) -> int:
        """Number of further blocks that requests below premium can use."""
        return self.limit - self.held

    def added(self, blocks: Sequence[int]) -> int:
        """Return how many of ``blocks`` no request below premium uses yet."""
        return sum(1 for block in blocks if not self._references[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """Record that a request below premium has allocated ``blocks``."""
        references = self._references
        for block in blocks:
            if not references[block]:
                self.held += 1
            references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Record that a request below premium has released ``blocks``."""
        references = self._references
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                self.held -= 1


class SwapSpace:
    """Blocks of host memory for the KV of swapped requests (preempted ones whose KV is kept there), and the copies in progress.

    Attributes:
        capacity: Number of blocks.
        used: Number of blocks in use.
        out: Copies from GPU to host memory in progress.
        back: Copies from host to GPU memory in progress.
    """

    def __init__(self, capacity: int, link: LinkTerms) -> None:
        self.capacity = capacity
        self.used = 0
        self.out = TransferLink(link)
        self.back = TransferLink(link)

    def fits(self, blocks: int) -> bool:
        """Return whether ``blocks`` more blocks fit."""
        return self.used + blocks <= self.capacity

    def take(self, state: RequestState, blocks: int) -> None:
        """Allocate ``blocks`` blocks for a request that is about to be copied to host memory."""
        self.used += blocks
        state.host_blocks = blocks

    def give_back(self, state: RequestState) -> None:
        """Release a request's blocks in host memory; does nothing if it has none."""
        self.used -= state.host_blocks
        state.host_blocks = 0

    def next_s(self) -> float | None:
        """Return the simulated time at which the next copy ends; None if there are no copies."""
        return min((at for at in (self.out.next_s(), self.back.next_s()) if at is not None), default=None)
