"""The words that a simulated model says: one token each, chosen by a salt, the same for the same salt. Pure.

A text repeats itself after 256 tokens, so that stops are found without writing it all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.simulated_tokens import BYTES_PER_TOKEN, token_ids

WORDS: tuple[bytes, ...] = tuple(
    f" {first}{vowel}{last}".encode() for first in "bdfgklmp" for vowel in "aeio" for last in "lmnrstkd"
)
"""The simulated vocabulary: 256 words of 4 ASCII bytes, one token each."""
_STRIDE: Final = 37
"""Odd, so that all words come before one comes again."""
_IDS: Final = tuple(token_ids(word)[0] for word in WORDS)
_INDEX: Final = {word: index for index, word in enumerate(WORDS)}


def words(salt: int, start: int, stop: int) -> list[bytes]:
    """Return the output tokens [start, stop) of the request with ``salt``."""
    return [WORDS[(salt + position * _STRIDE) & 255] for position in range(start, stop)]


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a text is stopped."""

    tokens: int
    text_bytes: int
    reason: str | int


def find_stop(
    salt: int, strings: Sequence[str], ids: Collection[int], *, min_tokens: int, is_shown: bool
) -> Stop | None:
    """Return the first stop of an endless text, or None where it holds none."""
    found = [
        *_by_string(salt, strings, min_tokens=min_tokens, is_shown=is_shown),
        *_by_token(salt, ids, min_tokens=min_tokens, is_shown=is_shown),
    ]
    # Of two that end with the same token, the string that begins first cuts the text.
    return min(found, key=lambda stop: (stop.tokens, stop.text_bytes), default=None)


def _by_string(salt: int, strings: Sequence[str], *, min_tokens: int, is_shown: bool) -> list[Stop]:
    if not strings:
        return []
    encoded = [(string, string.encode("utf-8", "surrogatepass")) for string in strings]
    longest = max(len(each) for _, each in encoded)
    # A stop counts by the token that completes it, which may be the first that counts.
    start = max(0, max(0, min_tokens - 1) * BYTES_PER_TOKEN - longest + 1)
    first = start // BYTES_PER_TOKEN
    tokens = len(WORDS) + 2 * (longest // BYTES_PER_TOKEN + 1)
    said = b"".join(words(salt, first, first + tokens))
    found = []
    for string, each in encoded:
        at = said.find(each)
        while at >= 0 and _tokens(first, at + len(each)) < min_tokens:
            at = said.find(each, at + 1)
        if at >= 0:
            end = at + len(each)
            shown = end if is_shown else at
            found.append(Stop(_tokens(first, end), first * BYTES_PER_TOKEN + shown, string))
    return found


def _tokens(first: int, end_bytes: int) -> int:
    return first + -(-end_bytes // BYTES_PER_TOKEN)


def _by_token(salt: int, ids: Collection[int], *, min_tokens: int, is_shown: bool) -> list[Stop]:
    if not ids:
        return []
    first = max(0, min_tokens - 1)
    for position in range(first, first + len(WORDS)):
        token = _IDS[(salt + position * _STRIDE) & 255]
        if token in ids:
            tokens = position + 1
            return [Stop(tokens, (tokens if is_shown else position) * BYTES_PER_TOKEN, token)]
    return []


def alternatives(word: bytes, count: int) -> list[tuple[bytes, float]]:
    """Return the ``count`` most likely tokens in place of ``word`` and their log probabilities, itself first.

    The simulated distribution gives the chosen word 1/2, the next of the vocabulary 1/4, and so on.
    """
    index = _INDEX.get(word, 0)
    others = [(WORDS[(index + rank) & 255], (rank + 1) * LOG_HALF) for rank in range(1, count)]
    return [(word, LOG_HALF), *others][:count]


LOG_HALF: Final = math.log(0.5)
