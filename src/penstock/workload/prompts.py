"""Turns a trace's hash ids into text: equal ids give equal text, and lengths come out exactly. Pure.

The simulated tokenizer counts one token per 4 bytes, so one 512-token id is 2,048 bytes: base64 of SHAKE-128, which needs
no escaping in JSON.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import lru_cache, partial
from typing import Final

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.workload.traces import BLOCK_TOKENS, TraceRequest

DEFAULT_CACHED_BLOCKS: Final = 8192
"""Chosen: 16 MiB of block texts; a block is reused soon after it was used or hardly ever."""

_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


def _text(name: bytes, tokens: int) -> bytes:
    # 3 bytes become 4 letters of base64, which is exactly one token
    return b64encode(hashlib.shake_128(name).digest(tokens * 3))


def block_text(seed: int, block_id: int) -> bytes:
    """Return the 2,048 ASCII bytes that stand for a hash id under a seed."""
    return _text(b"block %d %d" % (seed, block_id), BLOCK_TOKENS)


def unique_text(seed: int, line: int, tokens: int) -> bytes:
    """Return the ``4 * tokens`` ASCII bytes of a unique text; a shorter one of the same line is its prefix."""
    return _text(b"unique %d %d" % (seed, line), tokens)


class PromptMaker:
    """Makes prompts, keeping the newest block texts; one per replay."""

    def __init__(self, seed: int = 0, *, cached_blocks: int = DEFAULT_CACHED_BLOCKS) -> None:
        self.seed = seed
        self._block = lru_cache(maxsize=cached_blocks)(partial(block_text, seed))

    def make(self, request: TraceRequest) -> bytes:
        """Return the prompt: exactly ``4 * input_tokens`` bytes of ASCII that JSON needs not escape.

        Requests without ids get a text of their own, by seed and line.
        """
        if request.block_ids is None:
            return unique_text(self.seed, request.line, request.input_tokens)
        blocks = [self._block(block_id) for block_id in request.block_ids]
        last_bytes = request.input_tokens * BYTES_PER_TOKEN - _BLOCK_BYTES * (len(blocks) - 1)
        blocks[-1] = blocks[-1][:last_bytes]
        return b"".join(blocks)
