"""Asks the servers during a replay how late they run against their own schedules, and keeps the worst.

A Penstock router lists its workers, and every Penstock process exports its lag; other servers answer
neither, and then there is nothing to say. Asked repeatedly, because a worker that is scaled down takes
its figure with it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import orjson

from penstock_core.errors import ObservationError, SaturatedError, UpstreamError
from penstock_core.exposition import parse_samples
from penstock_core.metric_names import SCHEDULE_LAG_P99
from penstock_wire.client import ConnectionPool, Response, Timeouts

_PERIOD_S = 5.0
"""Chosen: real seconds; a worker lives longer, and a few pages cost the measured machine nothing."""

_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=2.0, idle_s=2.0, total_s=3.0)


@dataclass(frozen=True, slots=True)
class ServerLag:
    """The worst lag that one process reported.

    Attributes:
        name: Worker's name; ``router`` or ``server`` for the process that the requests are sent to.
        role: Worker's role; for the other process its name.
        p99_s: Largest p99 seen, modelled seconds.
    """

    name: str
    role: str
    p99_s: float


class LagWatch:
    """Collects the lags of a server and of the workers that it lists; one per replay."""

    def __init__(self, pool: ConnectionPool, url: str) -> None:
        """Name the server; ``url`` has no path."""
        self._pool = pool
        self._url = url.rstrip("/")
        self._worst: dict[str, ServerLag] = {}

    @property
    def worst(self) -> tuple[ServerLag, ...]:
        """The worst lag of each process seen, by name."""
        return tuple(self._worst[name] for name in sorted(self._worst))

    async def run(self) -> None:
        """Ask again and again until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.ask()

    async def ask(self) -> None:
        """Ask every process once; one that does not answer is left out."""
        listed = await self._get(f"{self._url}/workers")
        own = "server" if listed is None else "router"
        await self._ask_one(own, own, self._url)
        for name, role, url in _workers(listed):
            await self._ask_one(name, role, url)

    async def _ask_one(self, name: str, role: str, url: str) -> None:
        page = await self._get(f"{url}/metrics")
        if page is None:
            return
        try:
            samples = parse_samples(page.body.decode("utf-8", "replace"), [SCHEDULE_LAG_P99])
        except ObservationError:
            return
        known = self._worst.get(name)
        for sample in samples:
            if math.isfinite(sample.value) and sample.value >= (known.p99_s if known is not None else 0.0):
                known = self._worst[name] = ServerLag(name, role, sample.value)

    async def _get(self, url: str) -> Response | None:
        try:
            response = await self._pool.request("GET", url, timeouts=_TIMEOUTS)
        except (UpstreamError, SaturatedError):
            return None
        return response if response.status == 200 else None


def _workers(listed: Response | None) -> list[tuple[str, str, str]]:
    if listed is None:
        return []
    try:
        workers = orjson.loads(listed.body)["workers"]
        return [(str(worker["name"]), str(worker["role"]), str(worker["url"])) for worker in workers]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []
