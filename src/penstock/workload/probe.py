"""What servers say of themselves: checked before a replay, and during it their lag behind their own schedules."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

import orjson

from penstock.core.errors import (
    ConfigError,
    NoEndpointsError,
    ObservationError,
    SaturatedError,
    UpstreamConnectError,
    UpstreamError,
)
from penstock.core.exposition import Sample, parse_samples
from penstock.core.http.client import ConnectionPool, Response, Timeouts, parse_http_url
from penstock.core.http.messages import Headers
from penstock.core.metric_names import ROUTER_CONTINUATIONS, ROUTER_LOST_STREAMS, SCHEDULE_LAG_P99, TIME_SCALE
from penstock.workload.exchange import Destination

_TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=10.0, idle_s=10.0, total_s=15.0)
"""Chosen: real seconds; a server that lists its models slower than this serves nothing."""


class ServerPages:
    """The pages of one server and of the workers that it lists."""

    def __init__(
        self,
        pool: ConnectionPool,
        url: str,
        *,
        timeouts: Timeouts = _TIMEOUTS,
        admin_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._pool = pool
        self._timeouts = timeouts
        self._headers = () if admin_key is None else ((b"authorization", b"Bearer " + admin_key.encode()),)

    async def workers(self) -> tuple[float | None, dict[str, tuple[str, str]]] | None:
        """Return a router's speed, and by name role and URL of the workers that it shows; None if it is not a router.

        It shows addresses to admins only.
        """
        page = await self._get(f"{self.url}/workers", self._headers)
        if page is None:
            return None
        try:
            listed = orjson.loads(page.body)
            shown = {
                str(each["name"]): (str(each["role"]), str(each["url"]))
                for each in listed["workers"]
                if "url" in each
            }
            speed = listed.get("speed")
            return None if speed is None else float(speed), shown
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            return None

    async def samples(self, url: str, metric: str) -> list[Sample]:
        """Return a metric's samples on the ``/metrics`` of the process at ``url``; empty where it has none."""
        page = await self._get(f"{url}/metrics")
        if page is None:
            return []
        try:
            return parse_samples(page.body.decode("utf-8", "replace"), [metric])
        except ObservationError:
            return []

    async def _get(self, url: str, headers: Headers = ()) -> Response | None:
        try:
            answer = await self._pool.request("GET", url, headers=headers, timeouts=self._timeouts)
        except (UpstreamError, SaturatedError):
            return None
        return answer if answer.status == 200 else None


_PERIOD_S = 5.0
"""Chosen: real seconds; a worker lives longer, and a few pages cost the measured machine nothing."""

_POLL_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=2.0, idle_s=2.0, total_s=3.0)


@dataclass(frozen=True, slots=True)
class ServerLag:
    """The worst lag that one process reported."""

    name: str
    role: str
    p99_s: float


@dataclass(frozen=True, slots=True)
class BrokenStreams:
    """What became of streams whose worker broke off, of all clients of a router.

    Attributes:
        continued: Continued on another worker.
        lost: Ended in an error.
    """

    continued: int
    lost: int


class BrokenStreamCount:
    """Counts the streams that broke off at a router's workers from `begin` to `end`; clients do not see those that continued."""

    def __init__(self, pool: ConnectionPool, url: str) -> None:
        self._pages = ServerPages(pool, url, timeouts=_POLL_TIMEOUTS)
        self._before: tuple[float, float] | None = None
        self.found: BrokenStreams | None = None

    async def begin(self) -> None:
        """Read the counters."""
        self._before = await self._read()

    async def end(self) -> None:
        """Read them again; nothing is found of a server that is not a router, or one that was replaced meanwhile."""
        before, after = self._before, await self._read()
        if before is not None and after is not None:
            continued, lost = (round(late - early) for late, early in zip(after, before, strict=True))
            self.found = BrokenStreams(continued, lost) if min(continued, lost) >= 0 else None

    async def _read(self) -> tuple[float, float] | None:
        """Return both counters; None where the server is not a router. One that has counted nothing yet shows no sample."""
        if await self._pages.workers() is None:
            return None
        url = self._pages.url
        continued, lost = [
            await self._pages.samples(url, f"{name}_total")
            for name in (ROUTER_CONTINUATIONS, ROUTER_LOST_STREAMS)
        ]
        return sum(each.value for each in continued), sum(each.value for each in lost)


class LagWatch:
    """Collects the lags of a server and of the workers that it lists; one per replay."""

    def __init__(self, pool: ConnectionPool, url: str, *, admin_key: str | None = None) -> None:
        self._pages = ServerPages(pool, url, timeouts=_POLL_TIMEOUTS, admin_key=admin_key)
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
        _, workers = listed or (None, {})
        for name, (role, url) in {own: (own, self._pages.url), **workers}.items():
            await self._poll_one(name, role, url)

    async def _poll_one(self, name: str, role: str, url: str) -> None:
        known = self._worst.get(name)
        for sample in await self._pages.samples(url, SCHEDULE_LAG_P99):
            if math.isfinite(sample.value) and sample.value >= (known.p99_s if known is not None else 0.0):
                known = self._worst[name] = ServerLag(name, role, sample.value)


async def check_speed(pool: ConnectionPool, destination: Destination, *, speed: float) -> None:
    """Refuse to measure a Penstock graph or worker by another time than its own.

    Asks the router, every worker whose address it lists, or the simulated worker that answers at the address
    itself. Other servers run in real time and do not say so: they are not checked.
    """
    url = destination.url
    pages = ServerPages(pool, url, admin_key=destination.admin_key or destination.api_key)
    router_speed, workers = await pages.workers() or (None, {"the server": ("", pages.url)})
    found = [("the graph", url, router_speed)]
    for name, (_, at) in workers.items():
        samples = await pages.samples(at, TIME_SCALE)
        found.append((name, at, samples[0].value if samples else None))
    for name, at, served in found:
        if served is not None and served != speed:
            raise ConfigError(
                f"--speed: {speed:g}, but {name} at {at} runs at {served:g}, so every time"
                f" measured would be wrong; give --speed {served:g}, or start what runs at another speed again"
            )


async def find_model(pool: ConnectionPool, destination: Destination) -> Destination:
    """Return the destination with the model to ask for, once the server has shown that it can serve it.

    Raises:
        ConfigError: not a URL, or the server does not list ``model``.
        UpstreamError: nothing answers there, or not as an OpenAI server does.
        NoEndpointsError: a Penstock router that has no worker to send to.
    """
    url, model, key = destination.url, destination.model, destination.api_key
    base = url.rstrip("/")
    parse_http_url(base)
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    try:
        listed = await pool.request("GET", f"{base}/v1/models", headers=headers, timeouts=_TIMEOUTS)
        ready = await pool.request("GET", f"{base}/ready", headers=headers, timeouts=_TIMEOUTS)
    except UpstreamError as exc:
        raise UpstreamConnectError(
            f"--url {url}: no answer ({exc}); start a graph with `penstock up`, or give the address it printed"
        ) from exc
    names = _names(url, listed)
    if ready.status == 503:
        reasons = ready.body[:500].decode("utf-8", "replace")
        raise NoEndpointsError(f"--url {url}: the router is not ready to serve: {reasons}")
    if model is not None and model not in names:
        raise ConfigError(f"--model {model!r}: {url} serves {', '.join(names)}")
    return replace(destination, model=model or names[0])


def _names(url: str, listed: Response) -> list[str]:
    if listed.status in {401, 403}:
        raise ConfigError(
            f"--api-key-file, PENSTOCK_API_KEY: {url} refuses the key (status {listed.status}); give the right one"
        )
    try:
        names = [str(model["id"]) for model in orjson.loads(listed.body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as exc:
        raise UpstreamConnectError(
            f"--url {url}: GET /v1/models answers {listed.status}, not a list of models; is it an OpenAI server?"
        ) from exc
    if not names:
        raise NoEndpointsError(f"--url {url}: the server lists no model; wait until a worker is ready")
    return names
