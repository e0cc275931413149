"""Applies an engine's KV events to the prefix index, so that it contains the blocks that a worker really has cached. Pure.

Engines that publish events (vLLM over ZMQ) number the batches and identify blocks by hashes of their own, each with its
parent's hash and its token ids. From these, this module makes the same keys as the router, as `prefixes.token_keys` does with
``engine_block_tokens``. A gap in the numbers means that removals may be lost. The index is then cleared, because a block that
is wrongly assumed to be cached sends requests to the wrong worker, while an unknown cached block only costs a prefill. vLLM
encoded events as arrays up to 0.23 and as maps since (its pull request 42892); both are read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from penstock.router.policy.prefixes import BLOCK_TOKENS, ROOT, Prefix, PrefixIndex, token_keys

MAX_BLOCKS: Final = 1 << 20
"""Maximum number of engine blocks known per worker. Chosen: 16 M tokens in blocks of 16; more indicates a fault of the events."""
ANY_MEMORY_BLOCKS: Final = 1 << 15
"""Maximum number of router blocks assumed in any memory of one worker. Chosen: the same number of tokens as `MAX_BLOCKS` of 16."""
NAME_BYTES: Final = 128
"""Maximum length of a block's hash; up to `MAX_BLOCKS` of them are stored. Chosen: twice a SHA-512; vLLM's are SHA-256 or 64
bits."""
_GPU, _ELSEWHERE = 1, 2
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""The first fields of each event, in the order in which an event that is an array has them."""
_SGLANG_NAMESPACES: Final = ("cache_salt", "lora_id")
"""Fields by which SGLang 0.5.23 marks blocks of a cache salt or an adapter, for which vLLM uses ``extra_keys``."""
_MEDIA: Final = {None, "GPU"}
"""Names of the GPU's memory; any other name is an offloading connector's, whose blocks are stored and removed independently."""


@dataclass(slots=True)
class _Block:
    """One block of the engine.

    Attributes:
        key: Chained key of the prompt up to the block's end.
        depth: Number of engine blocks of the prompt up to the block's end, >= 1.
        previous_router_block: Hash of the last earlier engine block that ends a router block; None if there is none.
        memories: Memories that contain the block: `_GPU`, `_ELSEWHERE` or both.
    """

    key: int
    depth: int
    previous_router_block: Hashable | None
    memories: int


class KvEvents:
    """Applies the KV events of one worker (blocks stored in and removed from its cache) to its prefix index.

    ``index`` is the prefix index: the blocks that the router assumes in the worker's cache. ``engine_block_tokens`` is
    the number of tokens per engine block, a divisor of ``block_tokens``, the number of tokens per key.

    Attributes:
        expected: Number of the next batch of events; None before the first batch.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        engine_block_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._index = index
        self._unit_tokens = engine_block_tokens
        self._per_key = block_tokens // engine_block_tokens
        self._blocks: dict[Hashable, _Block] = {}
        self.expected: int | None = None

    def __len__(self) -> int:
        """Return the number of engine blocks that the worker is known to have."""
        return len(self._blocks)

    def numbered(self, sequence: int) -> bool:
        """Record the number of a batch of KV events, before it is applied; return True if it does not follow the last number.

        ``sequence`` is the number. Any number other than that of the previous batch plus one clears the prefix index (the
        assumed contents of the cache) first. Returns False for the first batch. A larger number means that batches were
        lost. A smaller one means that the engine has restarted, and its first batches may be lost, because messages never
        overtake each other.
        """
        is_gap = self.expected is not None and sequence != self.expected
        if is_gap:
            self.cleared()
        self.expected = sequence + 1
        return is_gap

    def apply(self, event: Any) -> bool:
        """Apply one KV event of an engine (blocks stored, removed, or all cleared); return False if its type or fields are unknown.

        ``event`` is the event as decoded from MessagePack: an array whose first element is the type, or a map with the key
        ``type``.

        Blocks of a cache salt, an adapter or an image are ignored, because a plain prompt (without salt, adapter and image)
        cannot hit them, and their token ids look like those of a plain prompt. For blocks in other memory than the GPU's,
        an engine may send neither tokens nor a block size.
        """
        if isinstance(event, dict) and any(event.get(name) is not None for name in _SGLANG_NAMESPACES):
            return event.get("type") in _FIELDS
        match _as_array(event):
            case ["BlockStored", list(hashes), parent, list(tokens), int(unit), *rest] if _are_names(
                [*hashes, parent]
            ):
                medium, extra = _item(rest, 1), _item(rest, 3)
                if not _is_medium(medium):
                    return False
                is_offloaded = medium not in _MEDIA
                if isinstance(extra, list) and any(each is not None for each in extra):
                    return True
                if unit == self._unit_tokens:
                    self.stored(hashes, parent, tokens, is_offloaded=is_offloaded)
                elif is_offloaded:
                    self.copied(hashes)
                else:
                    return False
            case ["BlockRemoved", list(hashes), *rest] if _are_names(hashes) and _is_medium(_item(rest, 0)):
                self.removed(hashes, is_offloaded=_item(rest, 0) not in _MEDIA)
            case ["AllBlocksCleared", *_]:
                self.cleared()
            case _:
                return False
        return True

    def stored(
        self,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        *,
        is_offloaded: bool = False,
    ) -> None:
        """Record that the worker has stored blocks in its cache.

        Args:
            hashes: The engine's hashes of consecutive blocks.
            parent: Hash of the block before them; None if they start a prompt. If that block was never reported, because
                its own event was lost, the blocks are ignored.
            tokens: Token ids of the blocks, ``engine_block_tokens`` for each block. If there are too few, or ids are out
                of range, the blocks are ignored.
            is_offloaded: Whether the blocks are in other memory than the GPU's, from which they would have to be loaded.
        """
        if parent is None:
            key, depth, previous_router_block = ROOT, 0, None
        elif (before := self._blocks.get(parent)) is not None:
            key, depth = before.key, before.depth
            previous_router_block = parent if depth % self._per_key == 0 else before.previous_router_block
        else:
            return
        unit, last, memory = self._unit_tokens, None, _ELSEWHERE if is_offloaded else _GPU
        if len(self._blocks) + len(hashes) > MAX_BLOCKS or len(tokens) < unit * len(hashes):
            return
        try:
            keys = token_keys(tokens[: unit * len(hashes)], block_tokens=unit, seed=key)
        except (OverflowError, TypeError):
            return
        for name, key in zip(hashes, keys, strict=False):
            depth += 1
            before = self._blocks.get(name)
            memories = memory if before is None else before.memories | memory
            self._blocks[name] = _Block(key, depth, previous_router_block, memories)
            if depth % self._per_key == 0:
                previous_router_block = last = name
        if last is not None:
            index = self._any_memory() if is_offloaded else self._index
            index.use(Prefix(self._chain(last)))

    def copied(self, hashes: Sequence[Hashable]) -> None:
        """Record that blocks in the GPU's memory were copied to other memory, from which the worker can load them again later.

        ``hashes`` are the engine's hashes of the blocks; blocks that were never reported are ignored.
        """
        for name in hashes:
            block = self._blocks.get(name)
            if block is not None:
                block.memories |= _ELSEWHERE
                if block.depth % self._per_key == 0:
                    self._any_memory().use(Prefix(self._chain(name)))

    def removed(self, hashes: Sequence[Hashable], *, is_offloaded: bool = False) -> None:
        """Record that blocks were removed from the GPU's memory, or (``is_offloaded``) from other memory.

        ``hashes`` are the engine's hashes of the blocks; blocks that were never reported are ignored.
        """
        memory = _ELSEWHERE if is_offloaded else _GPU
        for name in hashes:
            block = self._blocks.get(name)
            if block is None or not block.memories & memory:
                continue
            block.memories &= ~memory
            # Engines free the blocks of a prompt from its end, so the first engine block that a router block loses is its
            # last one.
            if block.depth % self._per_key == 0:
                prefix = Prefix(self._chain(name))
                if not is_offloaded:
                    self._index.truncate(prefix, len(prefix.keys) - 1)
                if not block.memories and self._index.any_memory is not None:
                    self._index.any_memory.truncate(prefix, len(prefix.keys) - 1)
            if not block.memories:
                del self._blocks[name]

    def _any_memory(self) -> PrefixIndex:
        """Return the index of the blocks in any memory; it is created with the first block outside of the GPU."""
        if self._index.any_memory is None:
            self._index.any_memory = PrefixIndex(ANY_MEMORY_BLOCKS)
        return self._index.any_memory

    def cleared(self) -> None:
        """Delete all blocks from the prefix index (assumed cache contents), because the worker's cache was emptied."""
        self._blocks.clear()
        self._index.clear()

    def _chain(self, name: Hashable) -> tuple[int, ...]:
        """Return the keys of a prompt up to a block that ends a router block, as far back as the blocks are known."""
        keys = []
        at: Hashable | None = name
        depth = inf
        # A hash that was used twice may identify a later block now, so that following the parents would not end.
        while at is not None and (block := self._blocks.get(at)) is not None and block.depth < depth:
            keys.append(block.key)
            at, depth = block.previous_router_block, block.depth
        return tuple(reversed(keys))


def _as_array(event: Any) -> Any:
    if not isinstance(event, dict):
        return event
    kind = event.get("type")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    return None if fields is None else [kind, *(event.get(name) for name in fields)]


def _item(values: Sequence[Any], at: int) -> Any:
    return values[at] if at < len(values) else None


def _is_medium(medium: Any) -> bool:
    return medium is None or isinstance(medium, str)


def _are_names(names: Sequence[Any]) -> bool:
    return all(
        name is None or isinstance(name, int) or (isinstance(name, bytes | str) and len(name) <= NAME_BYTES)
        for name in names
    )
