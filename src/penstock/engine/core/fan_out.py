"""Who reads what from whom where prefill and decode differ in tensor parallelism, and when all have; pure.

Of two degrees one divides the other. With more prefill ranks each is read by one decode rank, which reads several;
with more decode ranks each prefill rank is read by several. A prefill rank is done when all its readers are.
Source: vLLM 0.32, NixlConnector: a read's notification goes to each rank read and tells how many readers it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Read:
    """One rank of the reading worker has read its share of a prompt from one rank of the other.

    Attributes:
        request_id: The prompt's, as the worker that was read from calls it.
        rank: Rank read from, >= 0.
        reader: Rank that read, >= 0.
        readers: How many ranks read from ``rank``, >= 1.
    """

    request_id: str
    rank: int = 0
    reader: int = 0
    readers: int = 1


def reads_of(request_id: str, source_ranks: int, reader_ranks: int) -> Iterator[Read]:
    """Yield every read of one prompt.

    Args:
        request_id: The prompt's.
        source_ranks: Tensor parallelism of the worker that is read from, >= 1.
        reader_ranks: That of the reading worker, >= 1.

    Raises:
        ValueError: neither divides the other.
    """
    many, few = max(source_ranks, reader_ranks), min(source_ranks, reader_ranks)
    if many % few:
        raise ValueError(f"tensor parallelism {source_ranks} and {reader_ranks}: one must divide the other")
    readers = max(1, reader_ranks // source_ranks)
    for each in range(many):
        yield Read(request_id, each * source_ranks // many, each * reader_ranks // many, readers)


class ReadProgress:
    """Which ranks of one prompt's holder have been read by whom."""

    __slots__ = ("_seen", "_unread")

    def __init__(self, ranks: int) -> None:
        """Begin with every one of ``ranks`` unread, >= 1."""
        self._unread = set(range(ranks))
        self._seen: dict[int, set[int]] = {}

    def note(self, read: Read) -> bool:
        """Take note of a read, which may come twice; return whether it was the last one of all ranks."""
        if read.rank in self._unread:
            seen = self._seen.setdefault(read.rank, set())
            seen.add(read.reader)
            if len(seen) >= read.readers:
                self._unread.discard(read.rank)
                del self._seen[read.rank]
        return not self._unread
