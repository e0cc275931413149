"""The events of streams that another worker could continue, kept compressed and bounded over all streams. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BUFFERED_BYTES: Final = 64 * 1024 * 1024
"""Over all streams. Chosen: a thousand streams of 4,000 tokens, compressed."""

COUNTED: Final = 64
"""Reads of a stream between two counts of what is kept. Chosen: some 12 kB."""

_PIECE_BYTES: Final = 32 * 1024
"""Chosen: 150 events are compressed at once, to a twentieth, in 0.1 us each; shorter streams are never."""


@dataclass(slots=True)
class BufferedBytes:
    """Bytes in the buffers of all streams of a router."""

    kept_bytes: int = 0


class ReplayBuffer:
    """The events of one stream as they were relayed; a stream that would pass the bound of all keeps none.

    Attributes:
        append: Keeps one read, of complete events: their bytes, or one chunk with its framing. It costs a relay a few
            nanoseconds, so it counts nothing; `count` does, which is due every `COUNTED` reads.
    """

    __slots__ = ("_bound_bytes", "_kept_bytes", "_packed", "_pieces", "_total", "append", "is_lost")

    def __init__(self, total: BufferedBytes, *, bound_bytes: int = BUFFERED_BYTES) -> None:
        self._total = total
        self._bound_bytes = bound_bytes
        self._pieces: list[bytes] = []
        self._packed: list[bytes] = []
        self._kept_bytes = 0
        self.is_lost = False
        self.append: Callable[[bytes], object] = self._pieces.append

    def count(self) -> None:
        """Count what came since the last time, and compress it once it is large."""
        size = sum(map(len, self._pieces))
        if size > _PIECE_BYTES:
            packer = zlib.compressobj(1, zlib.DEFLATED, -12, 4)
            self._packed.append(packer.compress(b"".join(map(_unframed, self._pieces))) + packer.flush())
            self._pieces.clear()
            size = 0
        kept_bytes = size + sum(map(len, self._packed))
        self._total.kept_bytes += kept_bytes - self._kept_bytes
        self._kept_bytes = kept_bytes
        if self._total.kept_bytes > self._bound_bytes:
            self.drop()
            self.is_lost = True
            self.append = _forget

    def events(self) -> bytes:
        """Return everything that was kept."""
        packed = (zlib.decompress(each, -12) for each in self._packed)
        return b"".join((*packed, *map(_unframed, self._pieces)))

    def drop(self) -> None:
        """Forget it, at the end of the stream."""
        self._total.kept_bytes -= self._kept_bytes
        self._kept_bytes = 0
        self._pieces.clear()
        self._packed.clear()


def _forget(_read: bytes) -> None: ...


def _unframed(read: bytes) -> bytes:
    """Return the body of a chunk that is framed as HTTP/1.1 does; events begin with no hexadecimal line."""
    return read[read.index(b"\r\n") + 2 : -2] if _FRAME.match(read) else read


_FRAME: Final = re.compile(rb"[0-9A-Fa-f]+\r\n")
