"""What every source gives: one reading per decode worker and one for the prefill queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from penstock_core.errors import ObservationError, PenstockError
from penstock_graph.models import Role
from penstock_planner.decide.reading import Reading
from penstock_planner.targets.base import Endpoint
from penstock_wire.client import ConnectionPool, Timeouts

PULL_TIMEOUT_S = 1.0
"""Real seconds for one page. Chosen: the pull interval at real time; a page takes milliseconds."""

Buckets = tuple[tuple[float, float], ...]
"""Cumulative histogram: (upper bound in modelled seconds, count), bounds rising, the last infinite."""


@dataclass(frozen=True, slots=True)
class Query:
    """What to read.

    Attributes:
        endpoints: Ready workers.
        max_age_s: Oldest fresh age in modelled seconds.
    """

    endpoints: tuple[Endpoint, ...]
    max_age_s: float

    @property
    def kv_workers(self) -> tuple[Endpoint, ...]:
        """Return the workers whose KV usage counts: aggregated and decode ones."""
        return tuple(e for e in self.endpoints if e.role in (Role.DECODE, Role.AGGREGATED))

    @property
    def prefill_workers(self) -> tuple[Endpoint, ...]:
        """Return the prefill workers."""
        return tuple(e for e in self.endpoints if e.role is Role.PREFILL)


@dataclass(frozen=True, slots=True)
class Readings:
    """What one source said.

    Attributes:
        kv: KV usage fraction by worker name; exactly the query's KV workers.
        queue: Requests waiting for prefill.
        queue_is_whole: The queue includes what a router holds back; a source that asks only the workers
            cannot know.
        latency: Histograms since the source's start: ``ttft`` and ``itl``; for the dashboard only.
    """

    kv: Mapping[str, Reading]
    queue: Reading
    queue_is_whole: bool = True
    latency: Mapping[str, Buckets] = field(default_factory=dict)


class Source(Protocol):
    """One place to read metrics from."""

    @property
    def name(self) -> str:
        """Return the word that readings carry."""
        ...

    async def read(self, query: Query) -> Readings:
        """Return one reading for everything asked.

        Raises:
            ObservationError: the source as a whole gave nothing.
        """
        ...


async def fetch_page(pool: ConnectionPool, url: str) -> str:
    """Return a metrics page.

    Raises:
        ObservationError: no answer within `PULL_TIMEOUT_S`, a broken one, or a status other than 200.
    """
    limits = Timeouts(
        connect_s=PULL_TIMEOUT_S, first_byte_s=PULL_TIMEOUT_S, idle_s=PULL_TIMEOUT_S, total_s=PULL_TIMEOUT_S
    )
    try:
        response = await pool.request("GET", url, timeouts=limits)
    except PenstockError as exc:
        raise ObservationError(f"{url}: {exc}") from exc
    if response.status != 200:
        raise ObservationError(f"{url}: answered {response.status}")
    return response.body.decode("utf-8", errors="replace")


def address(url: str) -> str:
    """Return ``host:port`` of a URL, Prometheus' ``instance``."""
    return urlsplit(url).netloc


def in_short(exc: PenstockError) -> str:
    """Return an error's first line, bounded, for a reading's ``why``."""
    lines = str(exc).splitlines()
    return lines[0][:160] if lines else type(exc).__name__
