"""Leases on prompts whose KV blocks a worker keeps for another worker to read: reads by rank, durations, heartbeats.

A lease is granted when a request ends, extended by heartbeats, and ended by the read. If neither arrives in time, the
lease expires. Rules: vLLM 0.32, NixlConnector; ``duration * 2 // 3`` and ``duration // 6`` are its own integer
arithmetic on seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.engine.core.requests import EngineCounters, EngineRole, LeaseTerm, RequestState

MAX_RANKS = 1024
"""Maximum number of ranks of one worker. Chosen: far above any tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Read:
    """Notification that one rank of the reading worker has read its part of a prompt from one rank of the keeping worker.

    Attributes:
        request_id: ID of the request at the keeping worker.
        rank: Rank (GPU) of the keeping worker whose part was read.
        reader: Rank (GPU) of the reading worker that has read it.
        readers: Number of ranks of the reading worker that read from ``rank`` in total.
    """

    request_id: str
    rank: int = 0
    reader: int = 0
    readers: int = 1


def reads_of(request_id: str, source_ranks: int, reader_ranks: int) -> Iterator[Read]:
    """Yield every read of one prompt.

    Args:
        request_id: ID of the request at the keeping worker.
        source_ranks: Number of ranks of the keeping worker.
        reader_ranks: Number of ranks of the reading worker. The larger of the two numbers must be a multiple of the
            smaller.
    """
    many = max(source_ranks, reader_ranks)
    readers = max(1, reader_ranks // source_ranks)
    for each in range(many):
        yield Read(request_id, each * source_ranks // many, each * reader_ranks // many, readers)


_SLACK = 64
"""Number of heap entries of ended leases above which the heap is rebuilt, in addition to twice the number of leases.
Chosen."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Durations of leases in simulated seconds.

    Attributes:
        duration_s: Duration of a lease that a prefill worker grants, until a heartbeat extends it; vLLM's
            ``kv_lease_duration``.
        decoder_ttl_s: Duration of a lease that a decode worker grants, until a heartbeat extends it; vLLM's
            ``decoder_kv_blocks_ttl``.
    """

    duration_s: float = 30.0
    decoder_ttl_s: float = 480.0

    @property
    def extension_s(self) -> float:
        """Seconds from a heartbeat's arrival until which it extends a lease: two thirds of ``duration_s``, rounded down to whole seconds."""
        return self.duration_s * 2 // 3

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between heartbeats: a sixth of ``duration_s``, rounded down to whole seconds.

        It is not rounded for leases below 6 s, for which vLLM sends a heartbeat with every step.
        """
        return self.duration_s // 6 or self.duration_s / 6


class LeaseTable:
    """Expiry times of leases by request ID, in simulated seconds.

    The heap contains each lease once; an entry that reaches the top too early is reinserted with the lease's current
    expiry. Renewing k leases costs O(k); grant, read and expiry cost O(log n), amortised.
    """

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def grant(self, request_id: str, until_s: float) -> None:
        """Start a lease that expires at ``until_s`` unless it is extended; ``request_id`` must not have a lease."""
        self._expiry[request_id] = until_s
        heapq.heappush(self._heap, (until_s, request_id))

    def extend(self, request_ids: Iterable[str], until_s: float) -> tuple[int, list[str]]:
        """Extend leases to ``until_s``; leases that last longer are not changed.

        Returns:
            The number of leases that were extended, and the IDs in ``request_ids`` that have no lease.
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

    def end(self, request_id: str) -> None:
        """End the lease of ``request_id``, because its blocks were read; does nothing if the ID has no lease."""
        self._expiry.pop(request_id, None)
        if len(self._heap) > 2 * len(self._expiry) + _SLACK:
            self._heap = [(until_s, each) for each, until_s in self._expiry.items()]
            heapq.heapify(self._heap)

    def expire(self, now_s: float) -> list[tuple[str, float]]:
        """End all leases that expire at or before ``now_s``; return their IDs and expiry times, the earliest expiry first."""
        expired = []
        while (next_s := self.next_expiry_s()) is not None and next_s <= now_s:
            _, request_id = heapq.heappop(self._heap)
            expired.append((request_id, self._expiry.pop(request_id)))
        return expired

    def next_expiry_s(self) -> float | None:
        """Return the time at which the next lease expires unless it is renewed; None if there are no leases."""
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
        """Return the time at which the lease of ``request_id`` expires; None if the ID has no lease."""
        return self._expiry.get(request_id)


class HeartbeatSchedule:
    """Schedules heartbeats, which extend the leases on KV at other engines, as one message per engine. Times are simulated seconds."""

    def __init__(self, interval_s: float) -> None:
        """Create an empty schedule.

        Args:
            interval_s: Seconds between two rounds of messages, above 0.
        """
        self._interval_s = interval_s
        self._tracked: dict[str, dict[str, None]] = {}
        self._sent_s = -math.inf

    def track(self, engine_id: str, remote_request_id: str) -> None:
        """Start to send heartbeats for a request of a remote engine."""
        self._tracked.setdefault(engine_id, {})[remote_request_id] = None

    def untrack(self, engine_id: str, remote_request_id: str) -> None:
        """Stop sending heartbeats for a request; does nothing if it is unknown."""
        requests = self._tracked.get(engine_id)
        if requests is not None:
            requests.pop(remote_request_id, None)
            if not requests:
                del self._tracked[engine_id]

    def due(self, now_s: float) -> dict[str, list[str]]:
        """Return the messages to send at ``now_s``, as remote request IDs by engine ID, and record them as sent; empty if none are due."""
        due_s = self.next_s()
        if due_s is None or now_s < due_s:
            return {}
        self._sent_s = now_s
        return {engine_id: list(requests) for engine_id, requests in self._tracked.items()}

    def next_s(self) -> float | None:
        """Return the time at which the next messages must be sent; None if no request is tracked. If the time is past, send them at once."""
        return self._sent_s + self._interval_s if self._tracked else None


class PinnedPrompts:
    """Prompts whose KV blocks one worker keeps for other workers to read. Times are simulated seconds.

    Each prompt has a lease, the time after which its blocks are released even if no worker has read them.
    """

    def __init__(
        self,
        terms: LeaseTerms,
        role: EngineRole,
        *,
        ranks: int,
        counters: EngineCounters,
        release: Callable[[RequestState], None],
    ) -> None:
        is_decode = role is EngineRole.DECODE
        self._terms = terms
        self._first_term = LeaseTerm.DECODER_TTL if is_decode else LeaseTerm.INITIAL
        self._first_term_s = terms.decoder_ttl_s if is_decode else terms.duration_s
        self._ranks = ranks
        self._counters = counters
        self._release = release
        self._leases = LeaseTable()
        self._states: dict[str, RequestState] = {}
        self._seen: dict[str, set[tuple[int, int]]] = {}
        self._references: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    @property
    def blocks(self) -> int:
        """Number of KV blocks that are kept; blocks of several prompts count once."""
        return len(self._references)

    @property
    def oldest_s(self) -> float | None:
        """Time at which the oldest lease was granted; None if there are no leases."""
        state = next(iter(self._states.values()), None)
        return None if state is None else state.finished_s

    def keep(self, state: RequestState, now_s: float) -> None:
        """Keep the blocks of a request that has just ended, under a new lease."""
        request_id = state.request.request_id
        self._leases.grant(request_id, now_s + self._first_term_s)
        self._states[request_id] = state
        self._references.update(state.blocks)

    def renew(self, request_ids: Iterable[str], now_s: float) -> list[str]:
        """Process a heartbeat: extend the leases of these requests; return the IDs that have no lease, which are otherwise ignored."""
        moved, unknown = self._leases.extend(request_ids, now_s + self._terms.extension_s)
        self._counters.lease_renewals += moved
        return unknown

    def read(self, reads: Iterable[Read]) -> list[str]:
        """Process completed reads; return the IDs of requests that have no lease.

        The blocks of a prompt are released when all readers of all ranks are done.
        """
        unknown: dict[str, None] = {}
        for read in reads:
            if read.request_id not in self._states:
                unknown[read.request_id] = None
            elif self._is_last(read):
                self._let_go(read.request_id)
        self._counters.notifications_after_expiry += len(unknown)
        return list(unknown)

    def expire(self, now_s: float) -> list[str]:
        """Release the blocks whose lease expires at or before ``now_s``; return their request IDs, the earliest expiry first."""
        expired = []
        for request_id, expiry_s in self._leases.expire(now_s):
            granted_s = self._states[request_id].finished_s or 0.0
            is_moved = expiry_s > granted_s + self._first_term_s
            self._counters.lease_expiries[LeaseTerm.EXTENSION if is_moved else self._first_term] += 1
            self._let_go(request_id)
            expired.append(request_id)
        return expired

    def next_expiry_s(self) -> float | None:
        """Return the time at which the next lease expires unless it is renewed; None if there are none."""
        return self._leases.next_expiry_s()

    def expiry_s(self, request_id: str) -> float | None:
        """Return the time at which a prompt's lease expires; None if the prompt's blocks are not kept."""
        return self._leases.expiry_s(request_id)

    def blocks_of(self, request_id: str) -> list[int]:
        """Return the numbers of the blocks that are kept for a prompt; empty if none are."""
        state = self._states.get(request_id)
        return [] if state is None else state.blocks

    def _is_last(self, read: Read) -> bool:
        seen = self._seen.setdefault(read.request_id, set())
        seen.add((read.rank, read.reader))
        readers = Counter(rank for rank, _ in seen)
        return all(readers[rank] >= read.readers for rank in range(self._ranks))

    def _let_go(self, request_id: str) -> None:
        state = self._states.pop(request_id)
        self._leases.end(request_id)
        self._seen.pop(request_id, None)
        for block in state.blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
        self._release(state)
