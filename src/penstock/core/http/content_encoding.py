"""Decompresses request bodies in steps, so that the caller can limit the size of the result. It has no socket and no clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

GZIP: Final = frozenset({b"gzip", b"x-gzip"})
"""Values of ``content-encoding`` that `gunzip` can decompress; RFC 9110, section 8.4.1.3, defines them as equivalent."""

_GZIP_FORMAT: Final = 16 + zlib.MAX_WBITS
"""Window size parameter that selects the gzip format with its header and checksum; source: zlib's manual,
``inflateInit2``."""
_READ_BYTES: Final = 1 << 16
"""Number of compressed bytes passed to zlib at a time. Chosen: zlib copies the bytes that it has not consumed, so
each piece should be small."""
_STEP_BYTES: Final = 1 << 18
"""Maximum size of a decompressed piece. Chosen: it takes about half a millisecond, and little is wasted if the body
is then refused."""


class MalformedBodyError(ValueError):
    """The body does not have the format that its content-encoding names."""


def gunzip(body: bytes) -> Iterator[bytes]:
    """Yield the decompressed body in pieces of at most 256 KiB; to limit the memory, the caller can stop at any piece.

    Raises:
        MalformedBodyError: The body is not exactly one complete gzip member.
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
        # zlib may still have output that did not fit into the last piece.
        piece = inflating.decompress(b"", _STEP_BYTES)
        if not piece:
            raise MalformedBodyError("its gzip data is incomplete")
        yield piece
