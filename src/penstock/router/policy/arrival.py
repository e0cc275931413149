"""A request as placing policies see it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.api import Tier
from penstock.router.policy.keys import BLOCK_TOKENS, Prefix

_RANKS: Final = {tier: rank for rank, tier in enumerate(Tier)}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to place.

    Attributes:
        chain: Chained prefix keys, one per begun block.
        tokens: Prompt tokens, known or estimated, >= 0.
        avoid: Workers that have failed it or are busy; taken only if there is no other.
        block_tokens: Prompt tokens that one block stands for, > 0. 512 where keys are made of token ids or traces;
            keys made of bytes stand for ``BLOCK_BYTES`` over the prompt's bytes per token.
        sub_block_keys: Keys that stand for the first block together, >= 1; each later key is a block.
        session: Whatever the client says ties requests together; empty for none.
        is_non_streaming: Its answer comes whole, so that nothing tells when its prompt was computed.
        tier: Its priority class; read where tiers are on.
        tenant: Whose it is; empty: nobody's in particular.
        prefix: The chain, packed; derived.
        rank: The tier's place, 0 is the highest; derived, because every worker is asked by it.
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
    prefix: Prefix = field(init=False, repr=False, compare=False)
    rank: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Pack the chain once, for all the indexes that it is looked up in."""
        object.__setattr__(self, "prefix", Prefix(self.chain))
        object.__setattr__(self, "rank", _RANKS[self.tier])

    def avoiding(self, names: frozenset[str]) -> Arrival:
        """Return the same request that avoids further workers; its keys are not packed once more."""
        other = object.__new__(Arrival)
        for name in self.__slots__:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "avoid", self.avoid | names)
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
