"""Polls the servers during a replay for how late they run against their own schedules, and keeps the worst.

A Penstock router lists its workers, and every Penstock process exports its lag; other servers answer
neither, and then there is nothing to say. Polled, because a worker that is scaled down takes
its figure with it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.metric_names import SCHEDULE_LAG_P99
from penstock.workload.server_pages import ServerPages

_PERIOD_S = 5.0
"""Chosen: real seconds; a worker lives longer, and a few pages cost the measured machine nothing."""

_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=2.0, idle_s=2.0, total_s=3.0)


@dataclass(frozen=True, slots=True)
class ServerLag:
    """The worst lag that one process reported.

    Attributes:
        name: Worker's name; ``router`` or ``server`` for the process that the requests are sent to.
        role: Worker's role; for the other process its name.
        p99_s: Largest p99 seen, simulated seconds.
    """

    name: str
    role: str
    p99_s: float


class LagWatch:
    """Collects the lags of a server and of the workers that it lists; one per replay."""

    def __init__(self, pool: ConnectionPool, url: str, *, admin_key: str | None = None) -> None:
        """Name the server.

        Args:
            pool: Connections.
            url: Its address without a path.
            admin_key: Sent to it, and to no worker: a router shows the workers' addresses to admins only.
        """
        self._pages = ServerPages(pool, url, _TIMEOUTS, admin_key=admin_key)
        self._worst: dict[str, ServerLag] = {}

    @property
    def worst(self) -> tuple[ServerLag, ...]:
        """The worst lag of each process seen, by name."""
        return tuple(self._worst[name] for name in sorted(self._worst))

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.poll()

    async def poll(self) -> None:
        """Read every process's lag once; one that does not answer is left out."""
        listed = await self._pages.workers()
        own = "server" if listed is None else "router"
        await self._poll_one(own, own, self._pages.url)
        for each in listed.workers if listed is not None else ():
            await self._poll_one(each.name, each.role, each.url)

    async def _poll_one(self, name: str, role: str, url: str) -> None:
        known = self._worst.get(name)
        for sample in await self._pages.samples(url, SCHEDULE_LAG_P99):
            if math.isfinite(sample.value) and sample.value >= (known.p99_s if known is not None else 0.0):
                known = self._worst[name] = ServerLag(name, role, sample.value)
