"""The API server's clock, by this process's own.

Processes that lead one after the other continue each other's times: when a drain began, until when a grant is held.
Clocks of nodes may differ by minutes, and a leader whose clock is ahead would cut the drains that the last one began.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient

MEASURE_S: Final = 300.0
"""Between two looks at the server's clock. Chosen: a clock that is set right meanwhile is noticed within one drain."""

EXACT_S: Final = 3.0
"""Below this difference the own clock counts. Chosen: the server tells whole seconds, and its answer takes a moment."""

log = get_logger(__name__)


class ServerClock:
    """Seconds since the epoch as the API server counts them; until the first look, as this process does."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return time.time() - self._ahead_s

    async def run(self) -> None:
        """Follow the server's clock until cancelled."""
        while True:
            await asyncio.sleep(MEASURE_S)
            await self.measure()

    async def measure(self) -> None:
        """Look at the server's clock; what was known stays where it does not answer."""
        before_s = time.time()
        try:
            server_s = await self._client.server_time_s()
        except ClusterError as exc:
            log.debug("server's clock not read", error=str(exc))
            return
        ahead_s = (before_s + time.time()) / 2 - (server_s + 0.5)
        ahead_s = ahead_s if abs(ahead_s) >= EXACT_S else 0.0
        if abs(ahead_s - self._ahead_s) >= EXACT_S:
            log.warning("clock differs from the API server's, which counts", ahead_s=round(ahead_s))
        self._ahead_s = ahead_s
