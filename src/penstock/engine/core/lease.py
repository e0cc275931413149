"""Prompts whose blocks a worker keeps for another to read, under leases: reads by rank, terms, heartbeats.

A lease is granted when a request ends, extended by heartbeats, ended by the read, and expires when neither comes in
time. Rules: vLLM 0.32, NixlConnector; ``duration * 2 // 3`` and ``duration // 6`` are its own arithmetic on whole
seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.engine.core.requests import EngineCounters, EngineRole, LeaseTerm, RequestState

MAX_RANKS = 1024
"""Maximum number of ranks of one worker, chosen: far above any tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Read:
    """One rank of the reading worker has read its share of a prompt from one rank of the other, as have ``readers`` in all."""

    request_id: str
    rank: int = 0
    reader: int = 0
    readers: int = 1


def reads_of(request_id: str, source_ranks: int, reader_ranks: int) -> Iterator[Read]:
    """Yield every read of one prompt; one degree of parallelism divides the other."""
    many = max(source_ranks, reader_ranks)
    readers = max(1, reader_ranks // source_ranks)
    for each in range(many):
        yield Read(request_id, each * source_ranks // many, each * reader_ranks // many, readers)


_SLACK = 64
"""Heap entries of ended leases that are kept whatever the number of leases. Chosen: a rebuild is worth it beyond."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Durations in simulated seconds; vLLM's ``kv_lease_duration`` and ``decoder_kv_blocks_ttl``."""

    duration_s: float = 30.0
    decoder_ttl_s: float = 480.0

    @property
    def extension_s(self) -> float:
        """Return the seconds that a heartbeat grants from its arrival on."""
        return self.duration_s * 2 // 3

    @property
    def heartbeat_interval_s(self) -> float:
        """Pause between heartbeats; below 6 s, where vLLM sends with every step, a sixth of the lease."""
        return self.duration_s // 6 or self.duration_s / 6


class LeaseTable:
    """Expiry times by request id, all in simulated seconds.

    The heap holds each lease once; an entry that comes up early is filed again under its lease's present end. Renewal of k
    leases costs O(k); grant, read and expiry cost O(log n), amortised.
    """

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def grant(self, request_id: str, until_s: float) -> None:
        """Start a lease, of an id that holds none, that ends at ``until_s`` unless it is renewed."""
        self._expiry[request_id] = until_s
        heapq.heappush(self._heap, (until_s, request_id))

    def extend(self, request_ids: Iterable[str], until_s: float) -> tuple[int, list[str]]:
        """Renew leases, never shortening one; return how many end later than before, and the ids that hold none."""
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
        """End a lease because its blocks were read; no effect without one."""
        self._expiry.pop(request_id, None)
        if len(self._heap) > 2 * len(self._expiry) + _SLACK:
            self._heap = [(until_s, each) for each, until_s in self._expiry.items()]
            heapq.heapify(self._heap)

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


class PinnedPrompts:
    """The prompts of one worker that others may read."""

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
        """KV blocks that are kept, each counted once."""
        return len(self._references)

    @property
    def oldest_s(self) -> float | None:
        """Return when the oldest of them was granted, simulated seconds; None without any."""
        state = next(iter(self._states.values()), None)
        return None if state is None else state.finished_s

    def keep(self, state: RequestState, now_s: float) -> None:
        """Keep the blocks of a request that has just ended."""
        request_id = state.request.request_id
        self._leases.grant(request_id, now_s + self._first_term_s)
        self._states[request_id] = state
        self._references.update(state.blocks)

    def renew(self, request_ids: Iterable[str], now_s: float) -> list[str]:
        """Take a heartbeat; return the ids without a lease, which are ignored."""
        moved, unknown = self._leases.extend(request_ids, now_s + self._terms.extension_s)
        self._counters.lease_renewals += moved
        return unknown

    def read(self, reads: Iterable[Read]) -> list[str]:
        """Take completed reads; return the ids without a lease. Blocks are free once every reader of every rank is done."""
        unknown: dict[str, None] = {}
        for read in reads:
            if read.request_id not in self._states:
                unknown[read.request_id] = None
            elif self._is_last(read):
                self._let_go(read.request_id)
        self._counters.notifications_after_expiry += len(unknown)
        return list(unknown)

    def expire(self, now_s: float) -> list[str]:
        """Free what was not read in time; return the ids, oldest expiry first."""
        expired = []
        for request_id, expiry_s in self._leases.expire(now_s):
            granted_s = self._states[request_id].finished_s or 0.0
            is_moved = expiry_s > granted_s + self._first_term_s
            self._counters.lease_expiries[LeaseTerm.EXTENSION if is_moved else self._first_term] += 1
            self._let_go(request_id)
            expired.append(request_id)
        return expired

    def next_expiry_s(self) -> float | None:
        """Return when the next lease ends unless it is renewed, or None without leases."""
        return self._leases.next_expiry_s()

    def expiry_s(self, request_id: str) -> float | None:
        """Return when a prompt is reclaimed, or None if it is not kept."""
        return self._leases.expiry_s(request_id)

    def blocks_of(self, request_id: str) -> list[int]:
        """Return the block numbers kept of a prompt; empty if none."""
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
