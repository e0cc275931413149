"""How many prefix keys stand for a token of the prompts that come: it sizes what is remembered of a cache. Pure.

A key is a block of 512 tokens or a part of a prompt's first block, so short chats have eight times as many keys to a token as
long prompts, and a cache known in tokens holds that many more of them.
"""

from __future__ import annotations

from penstock.router.policy.keys import BLOCK_TOKENS

_DECAY = 0.999
"""Chosen: sums over about the last thousand prompts, so that a cache's size in keys hardly moves."""


class KeyDensity:
    """Keys over tokens of recent prompts, both decaying; a key to 512 tokens while there was none."""

    __slots__ = ("_keys", "_tokens")

    def __init__(self) -> None:
        self._keys = 1.0
        self._tokens = float(BLOCK_TOKENS)

    def learn(self, keys: int, tokens: int) -> None:
        """Take a prompt in; one without keys or tokens says nothing."""
        if keys and tokens:
            self._keys = self._keys * _DECAY + keys
            self._tokens = self._tokens * _DECAY + tokens

    def keys(self, tokens: int) -> int:
        """Return how many keys a cache of ``tokens`` holds, >= 2."""
        return max(2, int(tokens * self._keys / self._tokens))
