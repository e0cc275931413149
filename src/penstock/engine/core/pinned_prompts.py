"""Prompts whose blocks a worker keeps for another one to read, from the end of the request to its read or expiry.

The engine calls it. A prefill worker keeps a prompt under a lease that heartbeats renew; a decode worker keeps a
conversation for its next turn under a fixed time to live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from penstock.engine.core.counters import EngineCounters
from penstock.engine.core.lease import LeaseTable, LeaseTerm, LeaseTerms, Read, ReadProgress
from penstock.engine.core.requests import EngineRole, RequestState


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
        self._progress: dict[str, ReadProgress] = {}
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
        """When the oldest of them was granted, simulated seconds; None without any."""
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
        """Take completed reads; blocks are free as soon as every reader of every rank is done.

        Returns:
            The ids without a lease, once each: their blocks may have been reused before they were read.
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
        """Free what nobody came for by now; return the ids, oldest expiry first."""
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
        if self._ranks == 1 and read.readers == 1:
            return read.rank == 0
        progress = self._progress.get(read.request_id)
        if progress is None:
            progress = self._progress[read.request_id] = ReadProgress(self._ranks)
        return progress.note(read)

    def _let_go(self, request_id: str) -> None:
        state = self._states.pop(request_id)
        self._leases.end(request_id)
        self._progress.pop(request_id, None)
        for block in state.blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
        self._release(state)
