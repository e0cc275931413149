"""HTTP requests to the graph's own processes: is one healthy or idle, and what does the frontend report.

The frontend is Penstock's router, or a runtime's own: a class that follows `Frontend`, registered as an entry point of
group ``penstock.frontends``. Nothing here raises for a process that is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, cast

from pydantic import TypeAdapter

from penstock.api.runtimes import all_metric_names, request_gauges
from penstock.core.errors import (
    ConfigError,
    ObservationError,
    SaturatedError,
    UpstreamConnectError,
    UpstreamError,
)
from penstock.core.exposition import Sample
from penstock.core.http.client import ConnectionPool, Response, Timeouts
from penstock.core.http.tls import UNVERIFIED
from penstock.core.kv_transfers import KvTransferCounts
from penstock.core.metric_names import VLLM_KV_USAGE, VLLM_RUNNING, VLLM_WAITING
from penstock.core.plugins import plugin
from penstock.core.worker_metrics import PROGRESS_NAMES, EngineReading, read_engine, worker_samples
from penstock.local.statefile import ProcessEntry, StateFile

_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=4.0, idle_s=4.0, total_s=5.0)
"""Real seconds. Chosen: loopback answers in milliseconds; an overloaded process may take seconds."""


_CLOSE_S = 2.0
"""Real seconds. Chosen: closing a connection of loopback takes none."""


class NoAnswer(Enum):
    """Why a process could not be probed."""

    NOT_LISTENING = "nothing listens there"
    SILENT = "it did not answer in time, or not in a form that can be read"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router reports it.

    Attributes:
        state: ready, unhealthy, circuit_open, draining or unregistered.
        inflight_tokens: Their tokens; None: only their number is known.
        slow: How far it is slower than its equals; None: it is not, or too little was seen.
    """

    state: str
    inflight_requests: int
    inflight_tokens: float | None
    kv_usage_fraction: float | None = None
    reason: str | None = None
    slow: str | None = None


@dataclass(frozen=True, slots=True)
class RouterQueue:
    """The router's queue of waiting prefills; ``oldest_s`` in simulated seconds."""

    requests: int = 0
    tokens: int = 0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What came to the router lately; simulated seconds.

    Attributes:
        period_s: How long ago the count begins, at most a minute.
        rejected: Requests that were refused or timed out in the queue, which may have come before.
        ttft_p50_s, ttft_p99_s: Of the streams that began; None without any.
    """

    period_s: float
    arrivals: int
    rejected: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_slo_s: float

    def __str__(self) -> str:
        """Return it as text, without the period."""
        rate = self.arrivals / self.period_s if self.period_s > 0 else 0.0
        words = f"{self.arrivals} requests ({rate:.2f}/s), {self.rejected} rejected"
        if self.ttft_p50_s is None or self.ttft_p99_s is None:
            return words
        return f"{words}, TTFT p50 {self.ttft_p50_s:.2f} s p99 {self.ttft_p99_s:.2f} s"


@dataclass(frozen=True, slots=True)
class RouterView:
    """What the router reports of itself and its workers."""

    workers: dict[str, WorkerView]
    queue: RouterQueue | None
    lag_p99_s: float | None = None
    traffic: Traffic | None = None
    kv_transfers: KvTransferCounts | None = None


class Probes:
    """Asks over one shared pool of connections."""

    def __init__(self) -> None:
        self._pool = ConnectionPool(tls=UNVERIFIED)

    async def close(self) -> None:
        """Close the kept connections; gives up on one that does not close."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._pool.close()

    def close_connections(self, url: str) -> None:
        """Keep no connection to a process that is to end."""
        with contextlib.suppress(ConfigError):  # an address that is none has no connections
            self._pool.close_idle(url)

    async def health(self, url: str) -> str | None:
        """Return what is wrong with the answer to ``GET url``; None: it is 200."""
        answer = await self.ask("GET", url)
        if answer is NoAnswer.NOT_LISTENING:
            return "nothing listens there"
        if isinstance(answer, Response) and answer.status == 200:
            return None
        return "its port accepts connections, but it answered late, or not with 200"

    async def get_text(self, url: str) -> str | NoAnswer:
        """Return the body of a 200, else why there is none."""
        answer = await self.ask("GET", url)
        if isinstance(answer, NoAnswer):
            return answer
        return answer.body.decode("utf-8", errors="replace") if answer.status == 200 else NoAnswer.SILENT

    async def get_json(self, url: str) -> object:
        """Return the parsed body of a 200, or a `NoAnswer`."""
        text = await self.get_text(url)
        if isinstance(text, NoAnswer):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return NoAnswer.SILENT

    async def engine(self, page_url: str) -> EngineReading | None:
        """Return what a worker's page reports of its engine, or None if there is no such page."""
        samples = await self.samples(page_url, PROGRESS_NAMES)
        return None if isinstance(samples, NoAnswer) else read_engine(samples)

    async def is_busy(self, page_url: str, *, keeps_leases: bool) -> bool | None:
        """Return whether a worker runs or waits for requests, by its own page, or None if that is unknown."""
        names = (VLLM_RUNNING, VLLM_WAITING, VLLM_KV_USAGE, *request_gauges())
        samples = await self.samples(page_url, names)
        if isinstance(samples, NoAnswer):
            return None
        requests = [sample.value for sample in samples if sample.name != VLLM_KV_USAGE]
        kept = [sample.value for sample in samples if keeps_leases and sample.name == VLLM_KV_USAGE]
        if not requests or not all(map(math.isfinite, (*requests, *kept))):
            return None
        return any(value > 0 for value in (*requests, *kept))

    async def samples(self, page_url: str, names: tuple[str, ...]) -> list[Sample] | NoAnswer:
        """Return the samples of some names on a worker's page, else why there are none."""
        page = await self.get_text(page_url)
        if isinstance(page, NoAnswer):
            return page
        try:
            return worker_samples(page, names, *all_metric_names())
        except ObservationError:
            return NoAnswer.SILENT

    async def ask(self, method: str, url: str) -> Response | NoAnswer:
        """Return the response of any status, or why there is none."""
        try:
            return await self._pool.request(method, url, timeouts=_TIMEOUTS)
        except (UpstreamConnectError, ConfigError):  # an address that is none has no listener
            return NoAnswer.NOT_LISTENING
        except (UpstreamError, SaturatedError):
            return NoAnswer.SILENT


GROUP: Final = "penstock.frontends"


class Frontend(Protocol):
    """Where requests come in.

    Attributes:
        settle_s: Real seconds after a drain has begun in which a request that was assigned before may still reach
            the worker.
    """

    settle_s: float

    async def readiness(self, entries: Mapping[str, ProcessEntry]) -> tuple[bool, str]:
        """Return whether a request would be served now, and why not."""
        ...

    async def drain(self, name: str, entry: ProcessEntry) -> bool | NoAnswer:
        """See to it that the worker is sent nothing new; True when that is certain."""
        ...

    async def view(self, entries: Mapping[str, ProcessEntry]) -> RouterView | NoAnswer:
        """Return what the frontend reports of workers."""
        ...


class RouterFrontend:
    """Penstock's router, which knows its workers."""

    settle_s = 0.0

    def __init__(self, probes: Probes, url: str) -> None:
        self._probes = probes
        self._url = url

    async def readiness(self, entries: Mapping[str, ProcessEntry]) -> tuple[bool, str]:  # noqa: ARG002 - the router counts them
        """Return the answer of its ``/ready``."""
        answer = await self._probes.ask("GET", f"{self._url}/ready")
        if isinstance(answer, NoAnswer):
            return False, "the router does not answer yet"
        return answer.status == 200, answer.body.decode("utf-8", errors="replace")

    async def drain(self, name: str, entry: ProcessEntry) -> bool | NoAnswer:  # noqa: ARG002 - it knows the name
        """Ask it to send nothing new; one that does not know the worker (404) sends it nothing either."""
        answer = await self._probes.ask("POST", f"{self._url}/workers/{name}/drain")
        return answer if isinstance(answer, NoAnswer) else answer.status in {200, 404}

    async def view(self, entries: Mapping[str, ProcessEntry]) -> RouterView | NoAnswer:  # noqa: ARG002 - it reads the file itself
        """Return the answer of its ``/workers``, of all."""
        answer = await self._probes.ask("GET", f"{self._url}/workers")
        if isinstance(answer, NoAnswer):
            return answer
        try:
            return _router_view(json.loads(answer.body))
        except (ValueError, KeyError, TypeError, AttributeError):  # ValueError: also what pydantic refuses
            return NoAnswer.SILENT


def frontend_of(state: StateFile, probes: Probes) -> Frontend:
    """Return the frontend of a graph."""
    factory = plugin(GROUP, state.arbiter.runtime)
    if factory is None:
        return RouterFrontend(probes, state.arbiter.router_url)
    return cast(Frontend, factory(probes, state.arbiter))


def _router_view(data: dict[str, Any]) -> RouterView:
    """Return the view that ``/workers`` gives; missing values have their defaults."""
    queue = data.get("prefill_queue") or {}
    return _VIEW.validate_python(
        {
            **data,
            "workers": {each["name"]: each for each in data["workers"]},
            "queue": {key: value for key, value in queue.items() if value is not None},
        }
    )


_VIEW: Final = TypeAdapter(RouterView)
