"""Confirms KV transfers before their text goes to the client; `core.transfers` says when that is needed.

What decode has cached of transfers that cannot be trusted is kept from later requests by `kv_transfer.decode_body`.
"""

from __future__ import annotations

from typing import Final

from penstock.core.clock import SimulatedClock
from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.logs import get_logger
from penstock.router.core.retries import FailedTry, RetryScope
from penstock.router.core.transfers import TRUSTED_FRACTION, KvLease
from penstock.router.core.worker import Worker
from penstock.router.discovery.page import read_page
from penstock.router.proxy.failures import StageFailed

log = get_logger(__name__)

PATIENCE_REAL_S: Final = 10.0
"""Chosen: a busy vLLM takes seconds for its page, and without it the prompt would be computed once more."""


class LeaseGuard:
    """Confirms KV transfers before their text goes to the client."""

    def __init__(
        self, pool: ConnectionPool, clock: SimulatedClock, *, lease_s: float, timeout_real_s: float
    ) -> None:
        """Fix the terms.

        Args:
            pool: For the prefill workers' metrics.
            clock: Simulated time.
            lease_s: The first lease that prefill workers grant, simulated seconds.
            timeout_real_s: Longest wait for a page, real seconds; no less than `PATIENCE_REAL_S`.
        """
        self._pool = pool
        self._clock = clock
        self._lease_s = lease_s
        self._timeouts = Timeouts.each(max(timeout_real_s, PATIENCE_REAL_S))

    def check_wait(self, queued_s: float) -> None:
        """Return if a request may still be handed over that has waited for a decode worker here.

        Nobody renews its lease before a decode worker has it.

        Args:
            queued_s: How long it waited, simulated seconds.

        Raises:
            StageFailed: the lease may be over; the prompt has to be prefilled again.
        """
        if queued_s >= TRUSTED_FRACTION * self._lease_s:
            raise StageFailed(FailedTry("lease_expired", RetryScope.ANYWHERE))

    async def confirm(self, lease: KvLease) -> None:
        """Return if the blocks were held when they were read; called once decode has shown a token.

        Raises:
            StageFailed: they may not have been; the prompt has to be prefilled again.
        """
        now_s = self._clock.now_s()
        if lease.is_within(self._lease_s, now_s):
            return
        expired = await self._expired_leases(lease.worker)
        if lease.is_intact(expired):
            return
        log.warning(
            "KV transfer distrusted: leases of its prefill worker have expired since",
            prefill_worker=lease.worker.name,
            age_s=round(now_s - lease.granted_s, 3),
            expired_before=lease.expired_before,
            expired=expired,
        )
        raise StageFailed(FailedTry("lease_expired", RetryScope.ANYWHERE))

    async def _expired_leases(self, worker: Worker) -> float | None:
        try:
            worker.expired_leases = (
                await read_page(self._pool, worker.spec.url, self._timeouts)
            ).expired_leases
        except PenstockError as exc:
            log.debug("metrics not readable", worker=worker.name, problem=str(exc))
            worker.expired_leases = None
        return worker.expired_leases
