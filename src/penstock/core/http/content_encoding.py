"""Compressed request bodies, decompressed in steps, so that the caller can bound what comes out. No socket, no clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

GZIP: Final = frozenset({b"gzip", b"x-gzip"})
"""Values of ``content-encoding`` that `gunzip` reads; RFC 9110, section 8.4.1.3, has them be equivalent."""

_GZIP_FORMAT: Final = 16 + zlib.MAX_WBITS
"""With gzip's header and check sum; source: zlib's manual, ``inflateInit2``."""
_READ_BYTES: Final = 1 << 16
"""Compressed bytes given to zlib at a time. Chosen: zlib copies what it has not consumed, so that it gets little."""
_STEP_BYTES: Final = 1 << 18
"""Largest piece. Chosen: about half a millisecond, and little of a body that is refused after it."""


class MalformedBodyError(ValueError):
    """A body is not what its content-encoding says."""


def gunzip(body: bytes) -> Iterator[bytes]:
    """Yield a body's pieces, none larger than 256 KiB; memory is bounded as long as the caller stops.

    Raises:
        MalformedBodyError: it is not one complete gzip member.
    """
    inflating = zlib.decompressobj(_GZIP_FORMAT)
    for start in range(0, len(body), _READ_BYTES):
        left = body[start : start + _READ_BYTES]
        while left:
            try:
                piece = inflating.decompress(left, _STEP_BYTES)
            except zlib.error as exc:
                raise MalformedBodyError(f"not gzip: {exc}") from exc
            if piece:
                yield piece
            if inflating.eof and (inflating.unused_data or start + _READ_BYTES < len(body)):
                raise MalformedBodyError("more follows the end of its gzip data; send one gzip member")
            left = inflating.unconsumed_tail
    while not inflating.eof:
        # What zlib holds back of a full piece.
        piece = inflating.decompress(b"", _STEP_BYTES)
        if not piece:
            raise MalformedBodyError("its gzip data is incomplete")
        yield piece
