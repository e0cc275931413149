"""KV events of an engine, fed to the prefix index: what a worker really holds, instead of what it should hold. Pure.

Engines that publish events (vLLM over ZMQ) number them and name blocks by hashes of their own, each with its parent and its
token ids. From those this makes the router's exact keys, as `prefixes.token_keys` does with the engine's block size as its
unit. A gap in the numbers means that removals may be lost: everything is forgotten then, since a block believed held sends
requests to the wrong place, one not known only costs a prefill. vLLM wrote events as arrays up to 0.23 and as maps since
(its pull request 42892); both are read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from penstock.router.policy.prefixes import BLOCK_TOKENS, ROOT, Prefix, PrefixIndex, token_keys

MAX_BLOCKS: Final = 1 << 20
"""Engine blocks known per worker. Chosen: 16 M tokens of 16-token blocks; beyond it events are a fault."""
ANYWHERE_BLOCKS: Final = 1 << 15
"""Maximum blocks that the router counts as held in any memory of one worker. Chosen: as many tokens as `MAX_BLOCKS` of 16."""
NAME_BYTES: Final = 128
"""Longest name of a block; `MAX_BLOCKS` of them are kept. Chosen: twice a SHA-512; vLLM's are SHA-256 or 64 bits."""
_GPU, _ELSEWHERE = 1, 2
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""The first fields of each event in the order of an array."""
_SGLANG_NAMESPACES: Final = ("cache_salt", "lora_id")
"""By which SGLang 0.5.23 says that a block is of a salt or an adapter, where vLLM has ``extra_keys``."""
_MEDIA: Final = {None, "GPU"}
"""Names of the GPU's memory; any other is an offloading connector's, whose blocks come and go by themselves."""


@dataclass(slots=True)
class _Block:
    """One engine block.

    Attributes:
        key: Chained key of everything up to its end.
        depth: Engine blocks up to its end, >= 1.
        corner: Hash of the last block before it that ends a router's block; None: there is none.
        homes: Where it is held: `_GPU`, `_ELSEWHERE` or both.
    """

    key: int
    depth: int
    corner: Hashable | None
    homes: int


class KvEvents:
    """The events of one worker; ``expected`` is the number of the next batch, None before the first."""

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
        """Return the engine blocks known."""
        return len(self._blocks)

    def numbered(self, sequence: int) -> bool:
        """Record a batch's number before it is applied; return whether there was a gap.

        Any other than the expected one forgets everything first: a larger one means lost batches; a smaller one a
        restarted engine, whose first batches may be lost, because messages never overtake each other.
        """
        is_gap = self.expected is not None and sequence != self.expected
        if is_gap:
            self.cleared()
        self.expected = sequence + 1
        return is_gap

    def apply(self, event: Any) -> bool:
        """Learn from an event as it was decoded; return whether it is one that is known.

        Blocks that a plain prompt cannot hit, of a salt, an adapter or an image, teach nothing: tokens alone do not
        distinguish them from a plain prompt's. Of other memory an engine may send neither tokens nor a block size.
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
        """Learn that blocks are held.

        Args:
            hashes: The engine's names of consecutive blocks.
            parent: Name of the block before them; None: they begin a prompt. An unknown one, whose own event was
                lost, makes all that follows it useless.
            tokens: Their ids, ``engine_block_tokens`` each; more blocks than ids, or ids out of range, are ignored.
            is_offloaded: In other memory than the GPU's, from which they would have to be loaded.
        """
        if parent is None:
            key, depth, corner = ROOT, 0, None
        elif (before := self._blocks.get(parent)) is not None:
            key, depth = before.key, before.depth
            corner = parent if depth % self._per_key == 0 else before.corner
        else:
            return
        unit, last, home = self._unit_tokens, None, _ELSEWHERE if is_offloaded else _GPU
        if len(self._blocks) + len(hashes) > MAX_BLOCKS or len(tokens) < unit * len(hashes):
            return
        try:
            keys = token_keys(tokens[: unit * len(hashes)], block_tokens=unit, seed=key)
        except (OverflowError, TypeError):
            return
        for name, key in zip(hashes, keys, strict=False):
            depth += 1
            before = self._blocks.get(name)
            homes = home if before is None else before.homes | home
            self._blocks[name] = _Block(key, depth, corner, homes)
            if depth % self._per_key == 0:
                corner = last = name
        if last is not None:
            index = self._anywhere() if is_offloaded else self._index
            index.use(Prefix(self._chain(last)))

    def copied(self, hashes: Sequence[Hashable]) -> None:
        """Learn that known blocks are held in other memory, too; what is not known is ignored."""
        for name in hashes:
            block = self._blocks.get(name)
            if block is not None:
                block.homes |= _ELSEWHERE
                if block.depth % self._per_key == 0:
                    self._anywhere().use(Prefix(self._chain(name)))

    def removed(self, hashes: Sequence[Hashable], *, is_offloaded: bool = False) -> None:
        """Learn that blocks are no longer held on the GPU, or in other memory; unknown ones are ignored."""
        home = _ELSEWHERE if is_offloaded else _GPU
        for name in hashes:
            block = self._blocks.get(name)
            if block is None or not block.homes & home:
                continue
            block.homes &= ~home
            # Engines free prompts from their ends, so a router's block loses the unit that ends it first.
            if block.depth % self._per_key == 0:
                prefix = Prefix(self._chain(name))
                if not is_offloaded:
                    self._index.limit(prefix, len(prefix.keys) - 1)
                if not block.homes and self._index.anywhere is not None:
                    self._index.anywhere.limit(prefix, len(prefix.keys) - 1)
            if not block.homes:
                del self._blocks[name]

    def _anywhere(self) -> PrefixIndex:
        """Return the index of what is held in any memory, which begins with the first block elsewhere."""
        if self._index.anywhere is None:
            self._index.anywhere = PrefixIndex(ANYWHERE_BLOCKS)
        return self._index.anywhere

    def cleared(self) -> None:
        """Learn that nothing is held."""
        self._blocks.clear()
        self._index.clear()

    def _chain(self, name: Hashable) -> tuple[int, ...]:
        """Return the keys of a prompt up to a block that ends a router's block, as far back as they are known."""
        keys = []
        at: Hashable | None = name
        depth = inf
        # A name given twice may stand for a later block by now, so that the way back would have no end.
        while at is not None and (block := self._blocks.get(at)) is not None and block.depth < depth:
            keys.append(block.key)
            at, depth = block.corner, block.depth
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
