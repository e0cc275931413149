"""Whether a hand-over was read while the prefill worker still held its blocks.

A vLLM 0.32 decode worker does not notice that it reads blocks after their lease: it answers 200 with text
made from whatever the blocks hold by then. The lease runs on the prefill worker, whose answer does not say
until when (``remote_blocks_expiry_time`` is null in pull mode); but that worker counts leases that ran out.
So: a first token within the lease is trusted; a later one only if that count has not grown since the prefill.
What decode has cached of the others is kept from later requests by `handover.decode_body`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock_core.clock import ModelClock
from penstock_core.errors import ObservationError, UpstreamError
from penstock_core.logs import get_logger
from penstock_router.discovery.page import read_page
from penstock_router.fleet import Worker
from penstock_router.proxy.failures import StageFailed
from penstock_wire.client import ConnectionPool, Timeouts

log = get_logger(__name__)

TRUSTED_FRACTION: Final = 0.8
"""Chosen: the lease begins before the prefill's answer has come here; a fifth of it covers that way."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The hold on one hand-over's blocks.

    Attributes:
        worker: The prefill worker.
        granted_s: When its answer came, modelled seconds.
        expired_before: Its count of expired leases by then; None when it was not known.
    """

    worker: Worker
    granted_s: float
    expired_before: float | None


class LeaseGuard:
    """Confirms hand-overs before their text goes to the client."""

    def __init__(
        self, pool: ConnectionPool, clock: ModelClock, *, lease_s: float, timeout_real_s: float
    ) -> None:
        """Fix the terms.

        Args:
            pool: For the prefill workers' metrics.
            clock: Modelled time.
            lease_s: The first lease that prefill workers grant, modelled seconds.
            timeout_real_s: Longest wait for a page, real seconds.
        """
        self._pool = pool
        self._clock = clock
        self._trusted_s = TRUSTED_FRACTION * lease_s
        limit_s = timeout_real_s
        self._timeouts = Timeouts(connect_s=limit_s, first_byte_s=limit_s, idle_s=limit_s, total_s=limit_s)

    def granted(self, worker: Worker) -> Lease:
        """Note a prefill that was just answered."""
        return Lease(worker, self._clock.now_s(), worker.expired_leases)

    async def confirm(self, lease: Lease) -> None:
        """Return if the blocks were held when they were read; called once decode has shown a token.

        Raises:
            StageFailed: they may not have been; the prompt has to be prefilled again.
        """
        age_s = self._clock.now_s() - lease.granted_s
        if age_s < self._trusted_s:
            return
        expired = await self._expired_leases(lease.worker)
        if expired is not None and expired == lease.expired_before:
            return
        log.warning(
            "hand-over distrusted: leases of its prefill worker have expired since",
            prefill_worker=lease.worker.name,
            age_s=round(age_s, 3),
            expired_before=lease.expired_before,
            expired=expired,
        )
        raise StageFailed("lease_expired", worker="", may_retry=True)

    async def _expired_leases(self, worker: Worker) -> float | None:
        try:
            worker.expired_leases = (
                await read_page(self._pool, worker.spec.url, self._timeouts)
            ).expired_leases
        except (UpstreamError, ObservationError) as exc:
            log.debug("metrics not readable", worker=worker.name, problem=str(exc))
            worker.expired_leases = None
        return worker.expired_leases
