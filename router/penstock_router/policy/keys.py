"""Prefix keys: one chained hash per block of a prompt, equal exactly where prompts share everything so far.

Called by the router with bytes, or with token ids where a tokenizer is at hand. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

BLOCK_TOKENS = 512
"""Tokens per key. Source: DualMap's artefact and Mooncake's traces."""
BLOCK_BYTES = 2048
"""Bytes per key: 512 tokens at 4 bytes each. Fixed although the ratio differs between tokenizers, because keys
must stay comparable while an estimate of the ratio drifts; what shifts is only how long a block is."""
MAX_BLOCKS = 512
"""Blocks hashed of one prompt. Chosen: 262,144 tokens; what follows cannot change where a request goes."""

_ROOT = 0x50E570C4


def prompt_keys(prompt: bytes, *, block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Return one key per begun block of a prompt, each depending on all before it.

    Args:
        prompt: The prompt as rendered; a conversation that grows keeps its beginning, and so its keys.
        block_bytes: Bytes per block, >= 1.
    """
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(prompt)[: MAX_BLOCKS * block_bytes]
    key = _ROOT
    keys = []
    for start in range(0, len(view), block_bytes):
        key = digest(view[start : start + block_bytes], key)
        keys.append(key)
    return tuple(keys)


def token_keys(tokens: Sequence[int], *, block_tokens: int = BLOCK_TOKENS) -> tuple[int, ...]:
    """Return one key per begun block of token ids; the exact mode, for prompts that come as ids.

    Args:
        tokens: Ids in [0, 2**32).
        block_tokens: Tokens per block, >= 1.
    """
    return prompt_keys(array("I", tokens).tobytes(), block_bytes=4 * block_tokens)
