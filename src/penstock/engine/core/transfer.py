"""Durations of KV transfers: one incoming link per decode worker, first come, first served; used by the engine.

Each transfer occupies the link for bytes / bandwidth; the fixed latency of one overlaps with the bytes of the next.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from penstock.engine.core.requests import RequestState


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """Properties of a simulated link.

    Attributes:
        latency_s: Fixed time of each transfer (handshake, posting, notification), in simulated seconds.
        bytes_per_s: Bandwidth in bytes per simulated second.
    """

    latency_s: float = 0.005
    bytes_per_s: float = 25e9


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of a request's KV; times are simulated seconds.

    Attributes:
        state: The request.
        epoch: Value of `RequestState.epoch` at the start of the transfer; if that has changed since, the request has
            ended meanwhile.
        bytes: Number of bytes to transfer.
        started_s: Time at which the transfer was queued.
        done_s: Time at which the transfer ends.
    """

    state: RequestState
    epoch: int
    bytes: int
    started_s: float
    done_s: float


class TransferLink:
    """Transfers in progress on one link, in order of their end."""

    def __init__(self, terms: LinkTerms) -> None:
        self._terms = terms
        self._free_s = 0.0
        self._heap: list[tuple[float, int, Transfer]] = []

    def start(self, state: RequestState, size: int, now_s: float) -> Transfer:
        """Queue a transfer on the link, and return it with the time at which it ends.

        Args:
            state: Request whose KV is transferred.
            size: Number of bytes.
            now_s: Simulated time in seconds.
        """
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + size / self._terms.bytes_per_s
        transfer = Transfer(state, state.epoch, size, now_s, self._free_s + self._terms.latency_s)
        heapq.heappush(self._heap, (transfer.done_s, state.index, transfer))
        return transfer

    def finish(self, now_s: float) -> list[Transfer]:
        """Remove and return the transfers that ended at or before ``now_s``, in order of their end."""
        done = []
        while self._heap and self._heap[0][0] <= now_s:
            done.append(heapq.heappop(self._heap)[2])
        return done

    def next_s(self) -> float | None:
        """Return the time at which the next transfer ends; None if no transfer is in progress."""
        return self._heap[0][0] if self._heap else None
