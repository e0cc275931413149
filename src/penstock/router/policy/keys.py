"""Prefix keys: one chained hash per block of a prompt, equal exactly where prompts share everything so far.

Called by the router with bytes, or with token ids where a tokenizer is at hand. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import xxhash

BLOCK_TOKENS = 512
"""Tokens per key. Source: DualMap's artefact and Mooncake's traces."""
BLOCK_BYTES = 2048
"""Bytes per key: 512 tokens at 4 bytes each. Fixed although the ratio differs between tokenizers, because keys
must stay comparable while an estimate of the ratio drifts: one changed byte per block would turn all caches into
strangers. What the ratio does change is how many tokens such a block counts for (`Arrival.block_tokens`)."""
SUB_BLOCK_KEYS = 8
"""Keys of the first block: a chat that grows within it keeps its beginning. Chosen: 64 tokens each; engines share
caches by 16, so that such a key is worth its prefill."""
MAX_BLOCKS = 512
"""Blocks hashed of one prompt. Chosen: 262,144 tokens; what follows cannot change where a request goes."""
MAX_TOKENS = MAX_BLOCKS * BLOCK_TOKENS
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES
"""Bytes of a prompt that any key is made of."""
KEY_BYTES = 8

ROOT = 0x50E570C4
"""Seed of the chain of a prompt that shares its cache with everybody. Chosen freely; fixed, because routers side by
side must agree."""


class Prefix:
    """The chained keys of one prompt, also packed into bytes for comparing many at once.

    Attributes:
        keys: One key per begun block, each in [0, 2**64).
        packed: The same, 8 bytes each.
    """

    __slots__ = ("keys", "packed")

    def __init__(self, keys: tuple[int, ...], packed: bytes | None = None) -> None:
        self.keys = keys
        self.packed = array("Q", keys).tobytes() if packed is None else packed


def space_seed(*parts: str) -> int:
    """Return the seed of a key space: prompts share keys only with prompts of equal ``parts``."""
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode(), ROOT) if any(parts) else ROOT


def prompt_keys(
    prompt: bytes | memoryview,
    *,
    block_bytes: int = BLOCK_BYTES,
    sub_block_keys: int = SUB_BLOCK_KEYS,
    seed: int = ROOT,
) -> tuple[int, ...]:
    """Return the keys of a prompt, each depending on all before it: of parts of the first block, then of blocks.

    Args:
        prompt: The prompt as rendered; a conversation that grows keeps its beginning, and so its keys.
        block_bytes: Bytes per block, >= 1.
        sub_block_keys: Parts of the first block, a divisor of ``block_bytes``; begun ones count.
        seed: From `space_seed`.
    """
    keys = _chained(prompt[:block_bytes], block_bytes // sub_block_keys, seed)
    if len(prompt) > block_bytes:
        rest = memoryview(prompt)[block_bytes : MAX_BLOCKS * block_bytes]
        keys += _chained(rest, block_bytes, keys[-1])
    return tuple(keys)


def token_keys(
    tokens: Sequence[int],
    *,
    block_tokens: int = BLOCK_TOKENS,
    engine_block_tokens: int | None = None,
    seed: int = ROOT,
) -> tuple[int, ...]:
    """Return one key per begun block of token ids; for prompts that come as ids, or are tokenized here.

    Args:
        tokens: Ids in [0, 2**32).
        block_tokens: Tokens per key, >= 1.
        engine_block_tokens: Tokens per engine block, a divisor of ``block_tokens``: chained over those, so that
            `kv_events` can make the same keys from the engine's events. None: without events.
        seed: From `space_seed`.

    Raises:
        OverflowError, TypeError: what is no token id.
    """
    packed = array("I", tokens[:MAX_TOKENS]).tobytes()
    if engine_block_tokens is None:
        return tuple(_chained(memoryview(packed), 4 * block_tokens, seed))
    units = _chained(memoryview(packed), 4 * engine_block_tokens, seed)
    per_key = block_tokens // engine_block_tokens
    keys = units[per_key - 1 :: per_key]
    return tuple(keys) if len(units) % per_key == 0 else (*keys, units[-1])


_PLAIN = frozenset({"role", "content"})


def render_chat(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> bytes:
    """Return the bytes that stand for a chat: appending messages never changes what was rendered before.

    Messages are rendered until there are `MAX_BYTES`: the rest can change no key. This is no model's template; it only
    has to change where that would. Tools come first, as in the templates of models that have them. Anything that is not
    plain text counts by its JSON.

    Args:
        messages: As sent, each an object.
        tools: The request's ``tools``, or None.
    """
    parts = [] if not tools else [b"tools\n", orjson.dumps(tools), b"\0"]
    room = MAX_BYTES - sum(map(len, parts))
    for message in messages:
        if room <= 0:
            break
        content = message.get("content")
        extra = {key: value for key, value in message.items() if key not in _PLAIN}
        rendered = [_text(str(message.get("role"))), b"\n"]
        if extra:
            rendered += [orjson.dumps(extra), b"\n"]
        rendered += [_text(content[:room]) if isinstance(content, str) else orjson.dumps(content), b"\0"]
        parts += rendered
        room -= sum(map(len, rendered))
    return b"".join(parts)[:MAX_BYTES]


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _chained(data: bytes | memoryview, width: int, seed: int) -> list[int]:
    digest = xxhash.xxh3_64_intdigest
    key = seed
    keys = []
    for start in range(0, len(data), width):
        key = digest(data[start : start + width], key)
        keys.append(key)
    return keys
