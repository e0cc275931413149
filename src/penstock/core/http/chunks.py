"""Recognises reads that are exactly one chunk, so that a relay can pass them on as they came. Pure.

The parser remains the judge of every message; it is only spared the chunks in the middle of a body that
have the one form every server sends: size line in lower-case hex, body, CR LF, alone in one read.
"""

from __future__ import annotations

from typing import Final

# Chosen: several times the longest event of a stream without logprobs; the table takes 200 kB.
_LONGEST: Final = 4096
# A size line has at most 16 digits (64 bits), and CR LF.
_SIZE_LINE_BYTES: Final = 18

UNKNOWN: Final = -1
"""Where the next chunk begins is not known."""


def _size_lines() -> tuple[bytes, ...]:
    never = bytes(_LONGEST)  # longer than every read that it is compared with
    lines = [never] * _LONGEST
    for size in range(1, _LONGEST):
        line = b"%x\r\n" % size
        length = len(line) + size + 2
        if length < _LONGEST:
            lines[length] = line
    return tuple(lines)


SIZE_LINES: Final = _size_lines()
"""Size line by the length of a whole chunk; where no chunk has that length, bytes longer than any read."""


def next_chunk_at(data: bytes, at: int) -> int:
    """Return where the first chunk behind ``data`` begins, counted from the end of ``data``.

    Args:
        data: One read that the parser has accepted.
        at: Where in it, or behind it, a chunk begins.

    Returns:
        0 when ``data`` ends with a whole chunk, more when a chunk's rest is to come, ``UNKNOWN`` when a
        size line is cut, has an extension, or is the last one.
    """
    end = len(data)
    while at < end:
        line_end = data.find(b"\r\n", at, at + _SIZE_LINE_BYTES)
        if line_end < 0:
            return UNKNOWN
        try:
            size = int(data[at:line_end], 16)
        except ValueError:
            return UNKNOWN
        if size == 0:
            return UNKNOWN
        at = line_end + 2 + size + 2
    return at - end
