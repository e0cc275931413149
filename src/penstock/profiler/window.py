"""What a batch of streams shows while all of them decode: the time between the last first token and the first last one.

Pure. Before that time some prompts are still being read, after it the batch shrinks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LEAST_TOKENS = 12
"""Tokens that each stream must show in the window. Chosen: fewer give a mean that one late read can double."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Token times of one request.

    Attributes:
        first_s: When its first token came, seconds.
        gaps_s: Between successive token events.
        tokens: Output tokens in all.
    """

    first_s: float
    gaps_s: array[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Steady:
    """What the window shows.

    Attributes:
        itl_s: Mean over the streams of the time per token.
        tokens_per_s: Of all streams together.
    """

    itl_s: float
    tokens_per_s: float


def steady(streams: Sequence[Stream]) -> Steady | None:
    """Return what the streams do while all are in flight; None: they are not for long enough.

    Args:
        streams: One at least, each of two token events at least.
    """
    times = [list(accumulate(stream.gaps_s, initial=stream.first_s)) for stream in streams]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    itls = [_itl_s(stream, each, begin, end) for stream, each in zip(streams, times, strict=True)]
    known = [itl_s for itl_s in itls if itl_s is not None]
    if len(known) < len(streams):
        return None
    return Steady(sum(known) / len(known), sum(1 / itl_s for itl_s in known))


def _itl_s(stream: Stream, times: Sequence[float], begin: float, end: float) -> float | None:
    first, last = bisect_left(times, begin), bisect_right(times, end) - 1
    tokens = (last - first) * (stream.tokens - 1) / len(stream.gaps_s)
    if tokens < LEAST_TOKENS or times[last] <= times[first]:
        return None
    return (times[last] - times[first]) / tokens
