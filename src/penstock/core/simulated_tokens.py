"""Tokenizer of simulated workers: every 4 bytes are one token. Pure.

The simulated engine counts and caches such tokens, and a router with ``tokenizer: simulated`` computes its prefix
keys from them.
"""

from __future__ import annotations

from array import array
from typing import Final

SIMULATED: Final = "simulated"
"""Name of this tokenizer in settings."""
BYTES_PER_TOKEN: Final = 4
"""Bytes per token. Chosen: about the mean of English text with the Llama tokenizer."""


def token_ids(prompt: bytes) -> array[int]:
    """Return the token IDs of a prompt, each in [0, 2**32); an incomplete last token is padded with zero bytes.

    The IDs are the prompt's own bytes, so that a text and its token IDs are the same prompt.
    """
    return array("I", prompt + bytes(-len(prompt) % BYTES_PER_TOKEN))
