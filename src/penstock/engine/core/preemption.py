"""What preemption by tier may do, and what it costs to take a request out and bring it back. Pure.

`TieredBatcher` calls it; docs/engine.md#tiers derives the formulas and their crossover.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from penstock.engine.core.latency import PrefillModel
from penstock.engine.core.transfer import LinkTerms

RESUME_HEADROOM_FRACTION = 0.05
"""Chosen: share of the KV blocks that must stay free beyond a resumed request's own, so that the next blocks
that running requests need do not throw it out again."""


class PreemptionKind(StrEnum):
    """What becomes of a victim's KV."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class PreemptionTerms:
    """Bounds of preemption by tier.

    Attributes:
        max_per_request: Most preemptions of one request, >= 0; a request that has had as many is admitted only
            with room for its whole length, and never is a victim.
        reserved_fraction: Share of the KV blocks that only premium and system requests may hold, 0 to below 1.
        host_blocks: KV blocks that host memory holds for swapping, >= 0; 0: no request is swapped.
        host_link: The link between GPU memory and host memory, each way; all GPUs of the worker together.
        drop_above_s: A victim whose return would cost more ends with an error; None: none does.
    """

    max_per_request: int = 3
    reserved_fraction: float = 0.3
    host_blocks: int = 0
    host_link: LinkTerms = field(default_factory=lambda: LinkTerms(latency_s=0.001, bytes_per_s=25e9))
    drop_above_s: float | None = None

    def reserved_blocks(self, capacity: int) -> int:
        """Return the reserved part of ``capacity`` blocks, rounded down."""
        return int(self.reserved_fraction * capacity)


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Seconds that a victim's way out and back takes, by kind.

    A swap moves its KV over the link twice; recomputing prefills its prompt and what it has generated. Both
    grow with its length, so where one overtakes the other follows from their units alone.

    Attributes:
        kv_bytes_per_token: All layers together.
        link: Between GPU and host memory, each way.
        prefill: Of the worker's profile; a constant rate is a `QuadraticPrefill` without square term.
    """

    kv_bytes_per_token: int
    link: LinkTerms
    prefill: PrefillModel

    def swap_s(self, tokens: int) -> float:
        """Return twice the fixed latency and the bytes of ``tokens`` cached tokens."""
        return 2 * (self.link.latency_s + tokens * self.kv_bytes_per_token / self.link.bytes_per_s)

    def recompute_s(self, tokens: int) -> float:
        """Return the prefill of ``tokens``: the prompt's and those generated."""
        return self.prefill.ttft_s(tokens)

    def cheapest(
        self, tokens: int, *, can_swap: bool, drop_above_s: float | None = None
    ) -> tuple[PreemptionKind, float]:
        """Return the kind with the lowest cost, and that cost in seconds.

        Dropping never is cheapest by itself: who asks again pays the same prefill and every output once more.
        It happens where both other ways cost more than ``drop_above_s``.
        """
        kind, cost_s = PreemptionKind.RECOMPUTE, self.recompute_s(tokens)
        if can_swap and (swap_s := self.swap_s(tokens)) < cost_s:
            kind, cost_s = PreemptionKind.SWAP, swap_s
        if drop_above_s is not None and cost_s > drop_above_s:
            kind = PreemptionKind.DROP
        return kind, cost_s
