"""Which running requests make room for a waiting one. Pure; `TieredBatcher` calls it.

The caller offers only requests of lower tiers that are below their preemption limit. Among those the lowest
tier goes first, then who was preempted least, then who gives the most room for what its return costs: blocks
freed times the tokens for which it would have held them, per second of restoring it. A request about to end
is therefore kept: it gives its blocks back by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.core.requests import RequestState


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that may be thrown out.

    Attributes:
        freed_blocks: Blocks that nobody else references, >= 0.
        remaining_tokens: Outputs it still has to generate, >= 1.
        restore_s: Cost of its way out and back, seconds, > 0.
    """

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
    """Return the victims that free ``blocks`` and ``places``, or none at all when they cannot.

    Args:
        candidates: Of lower tiers than the request that needs room.
        blocks: KV blocks missing; <= 0: none.
        places: Places in the batch missing; <= 0: none.

    Returns:
        The best first; no victim could be spared: without any one of them the room would not do.
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
