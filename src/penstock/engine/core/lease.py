"""Leases on KV blocks that one worker keeps for another to read; `pinned_prompts` calls it.

A lease is granted when a request ends, extended by heartbeats, ended by the read, and expires when neither comes in
time. Rules: vLLM 0.32, NixlConnector; ``duration * 2 // 3`` and ``duration // 6`` are its own arithmetic on whole
seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

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

    __slots__ = ("_expiry", "_heap")

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._expiry)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._expiry

    def grant(self, request_id: str, until_s: float) -> None:
        """Start a lease that ends at ``until_s`` unless it is renewed.

        Raises:
            ValueError: the id holds a lease.
        """
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
