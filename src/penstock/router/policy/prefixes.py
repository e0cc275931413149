"""Prefixes of prompts: one chained key per block, and an index of the prefixes that a worker is assumed to have cached. Pure.

Keys are made from bytes, or from token ids if a tokenizer is available; two keys are equal exactly if the prompts are equal
up to the end of that block. The blocks that one prompt added to the index are stored as a *run*, which can only be entered at
its first block, its *head*: a lookup costs one probe and one memory comparison per run, instead of one probe per block. Runs
are deleted in order of their last use and from their ends, so that a block is never kept without the block before it. A run
is a number, and the items with that number in flat arrays; 0 is not a run. A dict would be a little faster, at about 100
bytes per entry, which is per block if every prompt adds one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import xxhash

BLOCK_TOKENS = 512
"""Number of tokens per key. Source: DualMap's artefact and Mooncake's traces."""
BLOCK_BYTES = 2048
"""Number of bytes per key: 512 tokens at 4 bytes each. It is fixed although the ratio differs between tokenizers, because keys must
stay comparable while an estimate of the ratio changes: one byte more per block would make all cached prefixes unknown. The ratio
only changes how many tokens such a block counts for (`Arrival.block_tokens`)."""
SUB_BLOCK_KEYS = 8
"""Number of keys of the first block: a chat that grows within it still shares its first keys. Chosen: 64 tokens each; engines share
caches in blocks of 16, so that such a key saves that much prefill."""
MAX_BLOCKS = 512
"""Maximum number of blocks of a prompt from which keys are made. Chosen: 262,144 tokens; what follows cannot change the routing."""
MAX_TOKENS = MAX_BLOCKS * BLOCK_TOKENS
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES
"""Maximum number of bytes of a prompt from which keys are made."""
KEY_BYTES = 8

ROOT = 0x50E570C4
"""Seed of the key chain of a prompt that may share its cache with all others. Chosen freely; fixed, because several routers must
make the same keys."""


class Prefix:
    """The chained keys of one prompt, also packed into 8 bytes each, to compare many keys at once.

    Attributes:
        keys: Keys as integers, one per block of the prompt (the first block can have several); each depends on all of the
            prompt before its end.
        packed: The same keys as bytes, 8 bytes per key in native byte order.
    """

    __slots__ = ("keys", "packed")

    def __init__(self, keys: tuple[int, ...], packed: bytes | None = None) -> None:
        self.keys = keys
        self.packed = array("Q", keys).tobytes() if packed is None else packed


def space_seed(*parts: str) -> int:
    """Return the seed of a key space: prompts share prefix keys only if they have equal ``parts``, such as a cache salt or adapter.

    Returns the fixed seed `ROOT` if all parts are empty: such prompts share keys with each other. The seed is the first
    value of the chain of hashes from which keys are made.
    """
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode(), ROOT) if any(parts) else ROOT


def prompt_keys(
    prompt: bytes | memoryview,
    *,
    block_bytes: int = BLOCK_BYTES,
    sub_block_keys: int = SUB_BLOCK_KEYS,
    seed: int = ROOT,
) -> tuple[int, ...]:
    """Return the prefix keys (hashes) of a prompt's bytes: first those of the parts of the first block, then one per further block.

    Each key depends on all of the prompt before its end. A partial part or block at the end has a key as well.

    Args:
        prompt: The prompt as rendered. A conversation that grows keeps its first part, and so its first keys.
        block_bytes: Number of bytes per block, >= 1.
        sub_block_keys: Number of parts of the first block, a divisor of ``block_bytes``.
        seed: Seed of the key space, from `space_seed`.
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
    """Return the prefix keys (hashes) of a prompt's token ids: one per block, including a partial last block.

    Used for prompts that arrive as token ids or are tokenized by the router.

    Args:
        tokens: Token ids in [0, 2**32).
        block_tokens: Number of tokens per key, >= 1.
        engine_block_tokens: Number of tokens per block of the engine, a divisor of ``block_tokens``. The keys are then
            chained over these blocks, so that the same keys can be made from the KV events in which the engine reports its
            cached blocks. None if there are no events.
        seed: Seed of the key space, from `space_seed`.

    Raises:
        OverflowError, TypeError: an element is not a token id.
    """
    packed = array("I", tokens[:MAX_TOKENS]).tobytes()
    if engine_block_tokens is None:
        return tuple(_chained(memoryview(packed), 4 * block_tokens, seed))
    units = _chained(memoryview(packed), 4 * engine_block_tokens, seed)
    per_key = block_tokens // engine_block_tokens
    keys = units[per_key - 1 :: per_key]
    return tuple(keys) if len(units) % per_key == 0 else (*keys, units[-1])


_CACHE_MARK = "cache_control"
"""Key by which Anthropic's clients mark where a provider should cache. They move it with each turn, and engines ignore it."""
_PLAIN = frozenset({"role", "content", _CACHE_MARK})
_TEXTS = frozenset({"text", "input_text", "output_text"})
"""Types of content parts that are only text, in the three APIs."""
_NO_MEDIA = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "refusal", "reasoning"})
"""Types of content parts that are text for the model, although none is under the key ``text``."""


MEDIA_BYTES = 2048
"""Number of bytes that represent an image, audio, video or file, whatever its size. Chosen: one key, which counts for 512 tokens; engines
spend between 250 and 1,500 on a picture."""
_SHORT_CHARACTERS = 256
"""Maximum length of a text within a part of a message that is represented by itself: a longer one is data, or is hashed like data."""


def render_chat(
    messages: Sequence[Mapping[str, Any]], tools: Any = None, options: Mapping[str, Any] | None = None
) -> bytes:
    """Return at most 1 MiB (`MAX_BYTES`) of bytes that represent a chat, from which prefix keys are made by `prompt_keys`.

    Appending messages never changes the bytes before them, so that a chat that grows keeps its first keys. This is not a
    model's chat template; it only has to differ where the template's output differs. Options and tools come first, as in the
    templates of models that have tools. Each image, or other data, is represented by 2,048 bytes (`MEDIA_BYTES`) made from
    the hash of its content, so that equal texts with different images differ.

    Args:
        messages: Messages of the chat, as JSON objects.
        tools: Definitions of tools; None or empty if there are none.
        options: Further fields of the request that change the template's output; None or empty if there are none.
    """
    parts = [b"options\n", orjson.dumps(options, option=orjson.OPT_SORT_KEYS), b"\0"] if options else []
    parts += [b"tools\n", orjson.dumps(tools), b"\0"] if tools else []
    left = MAX_BYTES - sum(map(len, parts))
    for message in messages:
        if left <= 0:
            break
        content = message.get("content")
        extra = {key: value for key, value in message.items() if key not in _PLAIN}
        rendered = [_text(str(message.get("role"))), b"\n"]
        if extra:
            rendered += [orjson.dumps(extra), b"\n"]
        if isinstance(content, list) and len(content) == 1 and _is_text(content[0]):
            # As engines do, whether the model's template takes texts or lists of parts.
            content = content[0]["text"]
        if isinstance(content, str):
            rendered += [_text(content[:left]), b"\0"]
        elif isinstance(content, list):
            rendered += [*map(_part, content), b"\0"]
        else:
            rendered += [orjson.dumps(content), b"\0"]
        parts += rendered
        left -= sum(map(len, rendered))
    return b"".join(parts)[:MAX_BYTES]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type") in _TEXTS


def _part(part: Any) -> bytes:
    """Return the bytes that represent a part of a message's content."""
    if isinstance(part, dict) and _CACHE_MARK in part:
        part = {key: value for key, value in part.items() if key != _CACHE_MARK}
    if not isinstance(part, dict) or isinstance(part.get("text"), str):
        return orjson.dumps(part)
    if part.get("type") in _NO_MEDIA:
        return orjson.dumps(part)
    hashes: list[bytes] = []
    short = orjson.dumps(_without_data(part, hashes))
    digest = xxhash.xxh3_128_digest(b"".join([short, *hashes]))
    return digest * (MEDIA_BYTES // len(digest))


def _without_data(value: Any, hashes: list[bytes]) -> Any:
    """Return a value without its long texts, whose hashes are added to ``hashes`` in order."""
    if isinstance(value, str) and len(value) > _SHORT_CHARACTERS:
        hashes.append(xxhash.xxh3_128_digest(_text(value)))
        return None
    if isinstance(value, dict):
        return {key: _without_data(each, hashes) for key, each in value.items()}
    return [_without_data(each, hashes) for each in value] if isinstance(value, list) else value


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


_SLACK = 32
"""Chosen: when the index is full, 1/32 of its capacity is deleted at once, because finding the oldest blocks scans all of them."""
_ONE_BLOCK = b""
"""Marks a run of one block, whose only key is its head."""
_PARTS = 256
"""Chosen: size of an empty index's table, a power of two; the index of a worker without requests takes almost no memory."""
_NEVER = (1 << 64) - 1
"""Last use of a number that represents no run: after all others."""


class PrefixIndex:
    """The blocks that one worker is assumed to have cached.

    Attributes:
        capacity: Maximum number of blocks, in [1, 2**31]; above it, the least recently used blocks are deleted.
        count: Present number of blocks.
        any_memory: Index of the blocks that the worker has in any memory, from which it loads blocks that are missing in this
            index. None if no blocks in other memory than the GPU's are known; `clear` sets it to None.
    """

    __slots__ = (
        "_clock",
        "_free",
        "_heads",
        "_mask",
        "_next",
        "_runs",
        "_table",
        "_used",
        "any_memory",
        "capacity",
        "count",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def resize(self, capacity: int) -> None:
        """Set the maximum number of blocks to ``capacity``; if more are stored, now or later, the least recently used ones are deleted."""
        self.capacity = capacity
        if self.count > capacity:
            self._forget(self.count - capacity)

    def clear(self) -> None:
        """Delete all blocks, because the worker's cache is empty or its contents are unknown."""
        # Maps a head's lowest bits to the first run whose head has these bits; `_next` chains the further ones.
        self._table = array("I", bytes(4 * _PARTS))
        self._mask = _PARTS - 1
        self._next = array("I", (0,))
        self._heads = array("Q", (0,))
        # Each run's packed keys, including its head.
        self._runs = [_ONE_BLOCK]
        # The clock at each run's last use. The clock counts uses, and cannot overflow in practice.
        self._used = array("Q", (_NEVER,))
        self._clock = 0
        # The first free number; `_next` chains the further ones.
        self._free = 0
        self.count = 0
        self.any_memory: PrefixIndex | None = None

    def held(self, prefix: Prefix) -> int:
        """Return how many of the first blocks of the prompt with the keys ``prefix`` the worker is assumed to have cached."""
        keys, table, mask = prefix.keys, self._table, self._mask
        place, total = 0, len(keys)
        while place < total:
            key = keys[place]
            number = table[key & mask]
            while number and self._heads[number] != key:
                number = self._next[number]
            if not number:
                break
            run = self._runs[number]
            place += _common(run, prefix.packed, place) if run else 1
        return place

    def use(self, prefix: Prefix) -> int:
        """Record that the worker has all blocks of the prompt with the keys ``prefix`` from now on, as the most recently used ones.

        Returns how many of the prompt's first blocks were in the index before.
        """
        keys, packed, heads, runs = prefix.keys, prefix.packed, self._heads, self._runs
        place, total = 0, len(keys)
        passed = []
        while place < total:
            key = keys[place]
            number = self._table[key & self._mask]
            while number and heads[number] != key:
                number = self._next[number]
            if not number:
                break
            passed.append(number)
            run = runs[number]
            if not run:
                place += 1
                continue
            length = _common(run, packed, place)
            place += length
            if length * KEY_BYTES < len(run) and place < total:
                self._split(number, length)
        if place < total:
            self._add(keys[place], packed[place * KEY_BYTES :] if total - place > 1 else _ONE_BLOCK)
            self.count += total - place
        # Earlier blocks get a later time of use, because they must be deleted after the blocks that follow them.
        used = self._used
        self._clock = clock = self._clock + len(passed)
        for number in passed:
            used[number] = clock
            clock -= 1
        if self.count > self.capacity:
            self._forget(self.count - self.capacity + self.capacity // _SLACK)
        return place

    def truncate(self, prefix: Prefix, blocks: int) -> None:
        """Record that the worker has at most the first ``blocks`` blocks (>= 0) of the prompt with the keys ``prefix``.

        The prompt's later blocks are deleted from the index.
        """
        keys, runs = prefix.keys, self._runs
        total = len(keys)
        # Usually a run starts at this block, because this prompt has added it.
        place, number = blocks, self._find(keys[blocks]) if blocks < total else 0
        if not number and total:
            place, number = 0, self._find(keys[0])
        while number:
            run = runs[number]
            length = _common(run, prefix.packed, place) if run else 1
            if place + length > blocks:
                self._cut(number, max(0, blocks - place))
            place += length
            number = self._find(keys[place]) if place < total else 0

    def _find(self, head: int) -> int:
        number = self._table[head & self._mask]
        while number and self._heads[number] != head:
            number = self._next[number]
        return number

    def _add(self, head: int, run: bytes) -> None:
        """Add a run as the most recently used one; no run may have this head yet. `count` is not changed."""
        runs, after = self._runs, self._next
        self._clock = clock = self._clock + 1
        number = self._free
        if not number and len(runs) > self._mask:
            self._widen()
        table, part = self._table, head & self._mask
        if number:
            self._free = after[number]
            runs[number] = run
            self._heads[number] = head
            self._used[number] = clock
            after[number] = table[part]
        else:
            number = len(runs)
            runs.append(run)
            self._heads.append(head)
            self._used.append(clock)
            after.append(table[part])
        table[part] = number

    def _widen(self) -> None:
        parts = 2 * len(self._table)
        self._table = table = array("I", bytes(4 * parts))
        self._mask = mask = parts - 1
        after = self._next
        for number in range(1, len(after)):
            part = self._heads[number] & mask
            after[number] = table[part]
            table[part] = number

    def _split(self, number: int, blocks: int) -> None:
        """Split a run after ``blocks`` blocks, because another prompt continues differently there, so that both parts age separately."""
        run, at = self._runs[number], blocks * KEY_BYTES
        self._runs[number] = run[:at] if blocks > 1 else _ONE_BLOCK
        rest = run[at:]
        head = int.from_bytes(rest[:KEY_BYTES], "little")
        if self._find(head):
            self.count -= len(rest) // KEY_BYTES
        else:
            self._add(head, rest if len(rest) > KEY_BYTES else _ONE_BLOCK)

    def _cut(self, number: int, blocks: int) -> None:
        run = self._runs[number]
        length = len(run) // KEY_BYTES or 1
        if blocks >= length:
            return
        self.count -= length - blocks
        if blocks == 0:
            self._remove(number)
        else:
            self._runs[number] = run[: blocks * KEY_BYTES] if blocks > 1 else _ONE_BLOCK

    def _remove(self, number: int) -> None:
        after, table = self._next, self._table
        part = self._heads[number] & self._mask
        at = table[part]
        if at == number:
            table[part] = after[number]
        else:
            while (following := after[at]) != number:
                at = following
            after[at] = after[number]
        self._runs[number] = _ONE_BLOCK
        self._used[number] = _NEVER
        after[number] = self._free
        self._free = number

    def _forget(self, blocks: int) -> None:
        """Delete the ``blocks`` least recently used blocks, in [1, `count`]."""
        used = np.array(self._used)
        # At most as many runs as blocks are needed; numbers that are free or not a run are sorted last and never reached.
        oldest = np.argpartition(used, min(blocks, len(used)) - 1)[:blocks]
        for number in oldest[np.argsort(used[oldest])].tolist():
            length = len(self._runs[number]) // KEY_BYTES or 1
            self._cut(number, max(0, length - blocks))
            blocks -= length
            if blocks <= 0:
                return


def _common(run: bytes, packed: bytes, place: int) -> int:
    """Return how many keys a run shares with a prompt from ``place`` on; the first is known to agree."""
    start = place * KEY_BYTES
    if packed.startswith(run, start):
        return len(run) // KEY_BYTES
    both = packed[start : start + len(run)]
    # Of two big-endian numbers, the highest bit in which they differ is in the first byte that differs.
    differing = int.from_bytes(run[: len(both)], "big") ^ int.from_bytes(both, "big")
    return (8 * len(both) - differing.bit_length()) // (8 * KEY_BYTES)
