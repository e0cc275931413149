"""Leases on KV blocks that one worker keeps for another to read: their reads by rank, their terms, their heartbeats.

A lease is granted when a request ends, extended by heartbeats, ended by the read, and expires when neither comes in
time. Rules: vLLM 0.32, NixlConnector; ``duration * 2 // 3`` and ``duration // 6`` are its own arithmetic on whole
seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


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
    """Yield every read of one prompt."""
    many, few = max(source_ranks, reader_ranks), min(source_ranks, reader_ranks)
    if many % few:
        raise ValueError(f"tensor parallelism {source_ranks} and {reader_ranks}: one must divide the other")
    readers = max(1, reader_ranks // source_ranks)
    for each in range(many):
        yield Read(request_id, each * source_ranks // many, each * reader_ranks // many, readers)


class ReadProgress:
    """Which ranks of one prompt's holder have been read by whom."""

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


_SLACK = 64
"""Heap entries of ended leases that are kept whatever the number of leases. Chosen: a rebuild is worth it beyond."""


class LeaseTerm(StrEnum):
    """Which of its terms a lease ran out of.

    ``initial``: nobody had moved its end yet; ``extension``: heartbeats had, and then stopped; ``decoder_ttl``: the
    fixed life of blocks that a decode worker keeps for the conversation's next turn.
    """

    INITIAL = "initial"
    EXTENSION = "extension"
    DECODER_TTL = "decoder_ttl"


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Durations that follow from two settings.

    Attributes:
        duration_s: First lease, simulated seconds, > 0 (vLLM's ``kv_lease_duration``, default 30).
        decoder_ttl_s: Life of blocks kept on a decode worker, simulated seconds, > 0 (``decoder_kv_blocks_ttl``).
    """

    duration_s: float = 30.0
    decoder_ttl_s: float = 480.0

    @property
    def extension_s(self) -> float:
        """What a heartbeat grants from its arrival on."""
        return self.duration_s * 2 // 3

    @property
    def heartbeat_interval_s(self) -> float:
        """Pause between heartbeats; below 6 s, where vLLM sends with every step, a sixth of the lease."""
        return self.duration_s // 6 or self.duration_s / 6


class LeaseTable:
    """Expiry times by request id, all in simulated seconds.

    The heap holds each lease once, under an expiry that heartbeats may have moved since: a renewal is one assignment,
    and an entry that comes up early is filed again under its lease's present end. So the order of renewals cannot
    strand an expired lease behind one that lives. Renewal of k leases costs O(k); grant, read and expiry cost
    O(log n), amortised.
    """

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._expiry)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._expiry

    def grant(self, request_id: str, until_s: float) -> None:
        """Start a lease that ends at ``until_s`` unless it is renewed."""
        if request_id in self._expiry:
            raise ValueError(f"{request_id}: holds a lease")
        self._expiry[request_id] = until_s
        heapq.heappush(self._heap, (until_s, request_id))

    def extend(self, request_ids: Iterable[str], until_s: float) -> tuple[int, list[str]]:
        """Renew leases: expiry = max(old, ``until_s``), so a heartbeat never shortens one.

        Returns:
            How many leases end later than before, and the ids that hold none; these change nothing.
        """
        expiry, moved, unknown = self._expiry, 0, []
        for request_id in request_ids:
            old_s = expiry.get(request_id)
            if old_s is None:
                unknown.append(request_id)
            elif until_s > old_s:
                expiry[request_id] = until_s
                moved += 1
        return moved, unknown

    def end(self, request_id: str) -> bool:
        """End a lease because its blocks were read; False if there is none."""
        if self._expiry.pop(request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._expiry) + _SLACK:
            self._heap = [(until_s, each) for each, until_s in self._expiry.items()]
            heapq.heapify(self._heap)
        return True

    def expire(self, now_s: float) -> list[tuple[str, float]]:
        """End and return every lease whose expiry is at or before ``now_s``, with that expiry, oldest first."""
        expired = []
        while (next_s := self.next_expiry_s()) is not None and next_s <= now_s:
            _, request_id = heapq.heappop(self._heap)
            expired.append((request_id, self._expiry.pop(request_id)))
        return expired

    def next_expiry_s(self) -> float | None:
        """Return when the next lease ends unless it is renewed, or None without leases."""
        heap, expiry = self._heap, self._expiry
        while heap:
            filed_s, request_id = heap[0]
            until_s = expiry.get(request_id)
            if until_s == filed_s:
                return filed_s
            if until_s is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (until_s, request_id))
        return None

    def expiry_s(self, request_id: str) -> float | None:
        """Return a lease's end, or None if it holds none."""
        return self._expiry.get(request_id)


class HeartbeatSchedule:
    """Batches heartbeats per remote engine; times in simulated seconds."""

    def __init__(self, interval_s: float) -> None:
        """Set the pause between two rounds of messages, > 0."""
        self._interval_s = interval_s
        self._tracked: dict[str, dict[str, None]] = {}
        self._sent_s = -math.inf

    def track(self, engine_id: str, remote_request_id: str) -> None:
        """Renew this request's lease from now on."""
        self._tracked.setdefault(engine_id, {})[remote_request_id] = None

    def untrack(self, engine_id: str, remote_request_id: str) -> None:
        """Stop renewing; unknown ids are ignored."""
        requests = self._tracked.get(engine_id)
        if requests is not None:
            requests.pop(remote_request_id, None)
            if not requests:
                del self._tracked[engine_id]

    def due(self, now_s: float) -> dict[str, list[str]]:
        """Return the messages to send now, remote request ids by engine, and count them as sent."""
        due_s = self.next_s()
        if due_s is None or now_s < due_s:
            return {}
        self._sent_s = now_s
        return {engine_id: list(requests) for engine_id, requests in self._tracked.items()}

    def next_s(self) -> float | None:
        """Return when the next messages are due (in the past: at once), or None if nothing is tracked."""
        return self._sent_s + self._interval_s if self._tracked else None
