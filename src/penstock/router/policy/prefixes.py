"""Prefixes of prompts: one chained key per block, and the index of those that a worker holds, as far as is known. Pure.

Keys are made of bytes, or of token ids where a tokenizer is at hand, and equal exactly where prompts share everything so
far. What one prompt added is a *run* that is only ever entered at its first block, its *head*: a lookup costs one probe and
one memory comparison per run, not one probe per block. Runs are forgotten in order of use and from their ends, so that a
block never outlives the block before it. A run is a number, and the equally numbered items of flat arrays; 0 is not a run. A
dict would be a little quicker, at some 100 bytes an entry, which is what a block costs where every prompt brings one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
    """The chained keys of one prompt, one per begun block, also packed into 8 bytes each for comparing many at once."""

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
        prompt: As rendered; a conversation that grows keeps its beginning, and so its keys.
        block_bytes: >= 1.
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
        block_tokens: Per key, >= 1.
        engine_block_tokens: Tokens per engine block, a divisor of ``block_tokens``: chained over those, so that
            `kv_events` can make the same keys from the engine's events. None: without events.
        seed: From `space_seed`.

    Raises:
        OverflowError, TypeError: what is not a token id.
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
    """Return the first `MAX_BYTES` that stand for a chat: appending messages never changes what was rendered before.

    This is not a model's template; it only has to change where that would. Tools come first, as in the templates of models
    that have them. Anything that is not plain text counts by its JSON.
    """
    parts = [] if not tools else [b"tools\n", orjson.dumps(tools), b"\0"]
    left = MAX_BYTES - sum(map(len, parts))
    for message in messages:
        if left <= 0:
            break
        content = message.get("content")
        extra = {key: value for key, value in message.items() if key not in _PLAIN}
        rendered = [_text(str(message.get("role"))), b"\n"]
        if extra:
            rendered += [orjson.dumps(extra), b"\n"]
        rendered += [_text(content[:left]) if isinstance(content, str) else orjson.dumps(content), b"\0"]
        parts += rendered
        left -= sum(map(len, rendered))
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


_SLACK = 32
"""Chosen: when full, 1/32 of the capacity is forgotten at once, since finding the oldest looks at all."""
_ONE_BLOCK = b""
"""A run of one block: its head is all there is to know."""
_PARTS = 256
"""Chosen: parts of an empty index's table, a power of two; a worker without a request costs next to nothing."""
_NEVER = (1 << 64) - 1
"""When a number was used that stands for no run: after all others."""


class PrefixIndex:
    """The blocks of one worker, at most ``capacity`` of them, in [1, 2**31].

    Attributes:
        anywhere: Blocks that the worker holds in any memory, to be loaded where this index has them not; None: none are
            known to be held elsewhere. Forgotten by `clear`.
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
        "anywhere",
        "capacity",
        "count",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def resize(self, capacity: int) -> None:
        """Learn how many blocks the worker's cache holds; what is too much is forgotten."""
        self.capacity = capacity
        if self.count > capacity:
            self._forget(self.count - capacity)

    def clear(self) -> None:
        """Forget everything."""
        # A head's lowest bits -> the first run of those whose heads have them, chained by `_next`.
        self._table = array("I", bytes(4 * _PARTS))
        self._mask = _PARTS - 1
        self._next = array("I", (0,))
        self._heads = array("Q", (0,))
        # A run's keys packed, its head's included.
        self._runs = [_ONE_BLOCK]
        # The clock at a run's last use. It counts uses, and would last for ages.
        self._used = array("Q", (_NEVER,))
        self._clock = 0
        # The first number that is free again, chained likewise.
        self._free = 0
        self.count = 0
        self.anywhere: PrefixIndex | None = None

    def held(self, prefix: Prefix) -> int:
        """Return how many leading blocks of a prompt the worker holds."""
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
        """Remember that the worker computes, or has just read, all blocks of a prompt; return how many it held."""
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
        # Ancestors last: they must be younger than what builds on them.
        used = self._used
        self._clock = clock = self._clock + len(passed)
        for number in passed:
            used[number] = clock
            clock -= 1
        if self.count > self.capacity:
            self._forget(self.count - self.capacity + self.capacity // _SLACK)
        return place

    def limit(self, prefix: Prefix, blocks: int) -> None:
        """Learn that the worker holds at most the first ``blocks`` >= 0 blocks of a prompt, nor do others beyond them."""
        keys, runs = prefix.keys, self._runs
        total = len(keys)
        # Most often a run begins right there: what this prompt had brought.
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
        """Take in a run as the youngest; none begins with its head yet. Its blocks are not counted."""
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
        """Let what follows ``blocks`` blocks of a run age by itself: another prompt continues differently there."""
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
        """Forget the least recently used blocks, in [1, ``count``]."""
        used = np.array(self._used)
        # As many runs as blocks at most; what is free or no run comes last, and is never reached.
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
