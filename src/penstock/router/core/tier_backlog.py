"""What each tier has in the first stage, and whose requests may enter it while its workers are busy. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from penstock.api import Tier
from penstock.router.policy.tiers import TierSettings

T = TypeVar("T")

_ROUNDS = 8
"""Chosen: of prompts that a worker may have to compute at least, all tiers together. With 4, of the requests of a premium
tier that asks for 85% of its share one in 200 finds its part full by chance alone, with 8 none of 1,800."""


class TierBacklog(Generic[T]):
    """Requests and their expected uncached tokens, by tier.

    Attributes:
        tokens: Of those within.
    """

    __slots__ = ("_items", "tokens")

    def __init__(self) -> None:
        """Begin empty."""
        self._items: dict[T, tuple[Tier, int]] = {}
        self.tokens: Counter[Tier] = Counter()

    def enter(self, item: T, tier: Tier, tokens: int) -> None:
        """Count a request in."""
        self._items[item] = (tier, tokens)
        self.tokens[tier] += tokens

    def leave(self, item: T) -> None:
        """Count a request out; does nothing when it is not within."""
        tier, tokens = self._items.pop(item, (Tier.SYSTEM, 0))
        self.tokens[tier] -= tokens

    def has_others(self, tier: Tier) -> bool:
        """Return whether requests of another tier are within."""
        return self.tokens.total() > self.tokens[tier]


def line_tokens(settings: TierSettings, tier: Tier, limit_tokens: float) -> float:
    """Return the prompt tokens that a tier may have at each worker of the first stage, however busy that is.

    It is the tier's share of the threshold: what lower tiers have there is no reason to reject the tier's requests. So a
    worker has at most twice its threshold to compute, and a request of each tier.

    Args:
        settings: Shares and round.
        tier: Not system, which has no bound.
        limit_tokens: Prompt tokens above which a worker is busy; 0 where none are.
    """
    return max(limit_tokens, _ROUNDS * settings.round_tokens) * settings.quantum(tier) / settings.round_tokens
