"""Estimates the API server's clock from this process's own clock.

Successive leaders continue each other's times, such as when a drain began or until when a grant is reserved. Clocks
of nodes can differ by minutes, and a leader whose clock is ahead would cut short the drains that its predecessor
began.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient

MEASURE_S: Final = 300.0
"""Seconds between two readings of the server's clock. Chosen: a clock that is corrected meanwhile is noticed within
one drain."""

EXACT_S: Final = 3.0
"""Difference in seconds below which the own clock is used. Chosen: the server's Date header has whole seconds, and
its answer takes a moment."""

log = get_logger(__name__)


class ServerClock:
    """Unix time by the API server's clock; before the first `measure`, by this process's clock."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """Return the API server's Unix time in seconds."""
        return time.time() - self._ahead_s

    async def run(self) -> None:
        """Measure the server's clock every 5 minutes (`MEASURE_S`), the first time after 5 minutes, until cancelled."""
        while True:
            await asyncio.sleep(MEASURE_S)
            await self.measure()

    async def measure(self) -> None:
        """Measure how far this process's clock is ahead of the server's; keep the last difference if the server does not answer."""
        before_s = time.time()
        try:
            server_s = await self._client.server_time_s()
        except ClusterError as exc:
            log.debug("server's clock not read", error=str(exc))
            return
        ahead_s = (before_s + time.time()) / 2 - (server_s + 0.5)
        ahead_s = ahead_s if abs(ahead_s) >= EXACT_S else 0.0
        if abs(ahead_s - self._ahead_s) >= EXACT_S:
            log.warning("clock differs from the API server's, whose time is used", ahead_s=round(ahead_s))
        self._ahead_s = ahead_s
