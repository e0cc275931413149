"""KV transfers: whose fault it is that one was lost, and whether one was read within its lease. Pure.

The error is decode's, and either end may be wrong: a prefill worker that is gone or whose KV port is shut, a decode
worker without a way there. The request tells, once it is served over other ends.

A vLLM 0.32 decode worker does not notice that it reads blocks after their lease: it answers 200 with text
made from whatever the blocks hold by then. The lease runs on the prefill worker, whose answer does not say
until when (``remote_blocks_expiry_time`` is null in pull mode); but that worker counts leases that ran out.
So: a first token within the lease is trusted; a later one only if that count has not grown since the prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.api.lease_rules import HAND_OVER_FRACTION
from penstock.router.core.worker import Worker


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The two ends of one KV transfer."""

    prefill: Worker
    decode: Worker

    def lost(self) -> None:
        """Take note that it did not arrive."""
        self.prefill.lost_transfers += 1
        self.decode.lost_transfers += 1

    def arrived(self, lost: Iterable[KvTransfer], now_s: float) -> None:
        """Take note that it arrived, and eject workers that are at fault for the request's earlier ones.

        Args:
            lost: The same request's earlier transfers, oldest first.
            now_s: Simulated seconds.
        """
        self.prefill.lost_transfers = self.decode.lost_transfers = 0
        for each in lost:
            worker = end_at_fault(each, self)
            if worker is not None and worker.loses_transfers:
                worker.eject(now_s, f"{worker.lost_transfers} KV transfers in a row were lost")


def end_at_fault(lost: KvTransfer, arrived: KvTransfer) -> Worker | None:
    """Return the end at which a transfer was lost, given that the same request's later one arrived.

    The end that the two do not share, as the shared one has just worked; of two such ends the one with more losses
    since something last arrived there, None for as many.
    """
    decode_differs, prefill_differs = lost.decode is not arrived.decode, lost.prefill is not arrived.prefill
    if decode_differs and prefill_differs:
        difference = lost.prefill.lost_transfers - lost.decode.lost_transfers
        if difference == 0:
            return None
        return lost.prefill if difference > 0 else lost.decode
    if decode_differs:
        return lost.decode
    return lost.prefill if prefill_differs else None


TRUSTED_FRACTION: Final = HAND_OVER_FRACTION
"""The lease begins before the prefill's answer has come here; what is left of it covers that way."""


@dataclass(frozen=True, slots=True)
class KvLease:
    """The hold on the blocks of one KV transfer.

    Attributes:
        worker: The prefill worker.
        granted_s: When its answer came, simulated seconds.
        expired_before: Its count of expired leases by then; None when it was not known.
    """

    worker: Worker
    granted_s: float
    expired_before: float | None

    def is_within(self, lease_s: float, now_s: float) -> bool:
        """Return whether blocks read by now were certainly held, given the length of a first lease."""
        return now_s - self.granted_s < TRUSTED_FRACTION * lease_s

    def is_intact(self, expired: float | None) -> bool:
        """Return whether no lease has expired since, given the worker's newest count; None: not known."""
        return expired is not None and expired == self.expired_before


def grant(worker: Worker, now_s: float) -> KvLease:
    """Return the lease of a prefill that was just answered."""
    return KvLease(worker, now_s, worker.expired_leases)
