"""Turns a prompt into the keys of its full KV blocks; the server calls it once per request.

One simulated token is 4 bytes of the prompt, so a block of `block_size` tokens is a slice of bytes, and its
key is the hash of that slice seeded with the key before it: equal keys mean equal prefixes.
"""

from __future__ import annotations

import xxhash

from penstock.core.simulated_tokens import BYTES_PER_TOKEN


def count_tokens(prompt: bytes) -> int:
    """Return the number of simulated tokens in ``prompt``; a partial last token counts as one."""
    return -(-len(prompt) // BYTES_PER_TOKEN)


def prefix_keys(prompt: bytes, block_size: int) -> list[int]:
    """Return one chained 64-bit key per full block of ``prompt``."""
    width = block_size * BYTES_PER_TOKEN
    digest = xxhash.xxh3_64_intdigest
    keys = []
    key = 0
    for start in range(0, count_tokens(prompt) // block_size * width, width):
        key = digest(prompt[start : start + width], key)
        keys.append(key)
    return keys
