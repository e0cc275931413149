"""The tokens of simulated workers: pieces of 4 bytes. Pure.

The engine counts and caches by them, and a router with ``tokenizer: simulated`` makes its keys of them.
"""

from __future__ import annotations

from array import array
from typing import Final

SIMULATED: Final = "simulated"
"""Name of this tokenizer where a setting takes a tokenizer."""
BYTES_PER_TOKEN: Final = 4
"""Chosen, about the mean of English text under the Llama tokenizer."""


def token_ids(prompt: bytes) -> array[int]:
    """Return one id in [0, 2**32) for each piece, zero bytes filling up a last partial one.

    Packed again, complete pieces are the prompt's own bytes, so that text and its ids are the same prompt.
    """
    return array("I", prompt + bytes(-len(prompt) % BYTES_PER_TOKEN))
