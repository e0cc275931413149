"""Leases on KV blocks that a prefill worker keeps for a decode worker; the engine calls it.

A lease is granted when the prefill ends, extended by heartbeats, ended by the read, and counted as expired
when neither comes in time. Rules: vLLM's NIXL connector; ``duration * 2 // 3`` and ``duration // 6`` are its
own arithmetic on whole seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Durations that follow from one setting.

    Attributes:
        duration_s: Initial lease, simulated seconds, > 0 (vLLM's ``kv_lease_duration``, default 30).
    """

    duration_s: float = 30.0

    @property
    def extension_s(self) -> float:
        """What a heartbeat grants from its arrival on."""
        return self.duration_s * 2 // 3

    @property
    def heartbeat_interval_s(self) -> float:
        """Pause between heartbeats; below 6 s, where vLLM sends with every step, a sixth of the lease."""
        return self.duration_s // 6 or self.duration_s / 6


class LeaseTable:
    """Expiry times by request id, all in simulated seconds."""

    __slots__ = ("_expiry", "_heap", "_terms")

    def __init__(self, terms: LeaseTerms) -> None:
        self._terms = terms
        self._expiry: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._expiry)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._expiry

    def grant(self, request_id: str, now_s: float) -> float:
        """Start the initial lease; return its expiry."""
        return self._set(request_id, now_s + self._terms.duration_s)

    def extend(self, request_ids: Iterable[str], now_s: float) -> list[str]:
        """Renew leases: expiry = max(old, now + extension), so a heartbeat never shortens one.

        Returns:
            The ids that hold no lease; they change nothing.
        """
        unknown = []
        until_s = now_s + self._terms.extension_s
        for request_id in request_ids:
            old = self._expiry.get(request_id)
            if old is None:
                unknown.append(request_id)
            elif until_s > old:
                self._set(request_id, until_s)
        return unknown

    def end(self, request_id: str) -> bool:
        """End a lease because its blocks were read; False if there is none."""
        return self._expiry.pop(request_id, None) is not None

    def expire(self, now_s: float) -> list[str]:
        """End and return every lease whose expiry is at or before ``now_s``, oldest expiry first."""
        expired = []
        while (next_s := self.next_expiry_s()) is not None and next_s <= now_s:
            _, request_id = heapq.heappop(self._heap)
            del self._expiry[request_id]
            expired.append(request_id)
        return expired

    def next_expiry_s(self) -> float | None:
        """Return when the next lease ends unless it is renewed, or None without leases."""
        heap = self._heap
        while heap and self._expiry.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def expiry_s(self, request_id: str) -> float | None:
        """Return a lease's end, or None if it holds none."""
        return self._expiry.get(request_id)

    def _set(self, request_id: str, expiry_s: float) -> float:
        self._expiry[request_id] = expiry_s
        heapq.heappush(self._heap, (expiry_s, request_id))
        return expiry_s
