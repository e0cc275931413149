"""The words of a simulated model: which ones answer a prompt, where they end, and where stop strings cut them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from penstock.core.simulated_tokens import BYTES_PER_TOKEN

WORDS: tuple[bytes, ...] = tuple(
    f" {first}{vowel}{last}".encode() for first in "bdfgklmp" for vowel in "aeio" for last in "lmnrstkd"
)
"""The simulated vocabulary: 256 words of 4 ASCII bytes, one token each."""
_STRIDE: Final = 37
"""Distance in the vocabulary between two consecutive words of a response. It is odd, so that all words occur before one repeats."""


def words(salt: int, start: int, stop: int) -> list[bytes]:
    """Return the output tokens from ``start`` (inclusive) to ``stop`` (exclusive) of a request as words.

    ``salt`` is the number that selects the words (`EngineCall.salt`).
    """
    return [WORDS[(salt + position * _STRIDE) & 255] for position in range(start, stop)]


_NUMBERS: Final = {word: number for number, word in enumerate(WORDS)}


def said_before(prompt: bytes, salt_of: Callable[[bytes], int]) -> int:
    """Return how many words at the end of a prompt are the first words of the response to the text before them.

    So a prompt that is sent again with the first part of its response continues where that part ended, as a real
    model does at temperature 0.

    Args:
        prompt: The prompt as bytes.
        salt_of: Function that returns the salt of a prompt, the number that selects the words of its response.
    """
    most, expected = 0, None
    for end in range(len(prompt), BYTES_PER_TOKEN - 1, -BYTES_PER_TOKEN):
        number = _NUMBERS.get(prompt[end - BYTES_PER_TOKEN : end])
        if number is None or expected not in {None, number}:
            break
        most, expected = most + 1, (number - _STRIDE) & 255
    for said in range(most, 0, -1):
        begin = len(prompt) - said * BYTES_PER_TOKEN
        first = _NUMBERS[prompt[begin : begin + BYTES_PER_TOKEN]]
        if begin and salt_of(prompt[:begin]) & 255 == first:
            return said
    return 0


def adapter_seed(adapter: str | None, seed: int = 0) -> int:
    """Return the seed from which the KV keys and the words of a LoRA adapter follow; for None, the base model, return ``seed``."""
    return seed if adapter is None else xxhash.xxh3_64_intdigest(adapter.encode(), seed)


def find_stop(
    salt: int, strings: Sequence[str], tokens: int, *, min_tokens: int, said: int = 0
) -> tuple[int, int, str] | None:
    """Find the first stop string in the text of a response.

    The text repeats after 256 tokens, so only that much of it is searched. A stop string counts from the token that
    completes it, which can be the first one after ``min_tokens``.

    Args:
        salt: Salt of the request.
        strings: Stop strings.
        tokens: Maximum number of output tokens.
        min_tokens: Minimum number of output tokens.
        said: Number of the response's first words that are in the prompt already; the search starts after them.

    Returns:
        Number of tokens up to the end of the stop string, number of bytes of text before the stop string, and the stop
        string; None if no stop string occurs.
    """
    longest = max(len(string.encode()) for string in strings)
    most = min(tokens, min_tokens + len(WORDS) + longest // BYTES_PER_TOKEN + 2)
    text = b"".join(words(salt, said, said + most))
    found = []
    for string in strings:
        encoded = string.encode()
        at = text.find(encoded, max(0, (min_tokens - 1) * BYTES_PER_TOKEN + 1 - len(encoded)))
        if at >= 0:
            found.append((-(-(at + len(encoded)) // BYTES_PER_TOKEN), at, string))
    # If two strings end with the same token, the one that begins first cuts the text.
    return min(found, default=None)


def salt_of_prompt(prompt: bytes, *, worker_seed: int, seed: int, choice: int) -> int:
    """Return the number that selects the words of a response.

    Args:
        prompt: The prompt as bytes.
        worker_seed: Seed of the worker, or of the request's adapter.
        seed: Seed of the request.
        choice: Index of the choice.
    """
    # A prompt that was sent as token IDs has zero bytes at its end if its last token is incomplete.
    salt = xxhash.xxh3_64_intdigest(prompt.rstrip(b"\0"), worker_seed)
    return xxhash.xxh3_64_intdigest(f"{salt} {seed} {choice}".encode()) if seed or choice else salt


def natural_length(salt: int, mean_tokens: float) -> int:
    """Return the length at which the simulated model ends by itself: geometrically distributed, and fixed by prompt and seed."""
    uniform = (xxhash.xxh3_64_intdigest(salt.to_bytes(8, "little")) + 1) / 2**64
    return max(1, math.ceil(-mean_tokens * math.log(uniform)))
