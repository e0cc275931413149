"""Reads what a Penstock server says of itself: a router's ``/workers`` and any process's ``/metrics``.

Other servers have neither page; then, and when a page cannot be read, there is nothing to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from penstock.core.errors import ObservationError, SaturatedError, UpstreamError
from penstock.core.exposition import Sample, parse_samples
from penstock.core.http.client import ConnectionPool, Response, Timeouts
from penstock.core.http.messages import Headers


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One worker of a router's list.

    Attributes:
        url: Its address without a path.
    """

    name: str
    role: str
    url: str


@dataclass(frozen=True, slots=True)
class WorkerList:
    """A router's ``/workers``.

    Attributes:
        speed: The graph's time scale; None: it does not say.
        workers: Those whose addresses it shows; it shows them to admins only.
    """

    speed: float | None
    workers: tuple[ListedWorker, ...]


class ServerPages:
    """The pages of one server and of the workers that it lists."""

    def __init__(
        self, pool: ConnectionPool, url: str, timeouts: Timeouts, *, admin_key: str | None = None
    ) -> None:
        """Name the server.

        Args:
            pool: Connections; the caller closes it.
            url: Its address without a path.
            timeouts: Of each page, real seconds.
            admin_key: Sent to it, and to no worker: a router shows the workers' addresses to admins only.
        """
        self.url = url.rstrip("/")
        self._pool = pool
        self._timeouts = timeouts
        self._headers = () if admin_key is None else ((b"authorization", b"Bearer " + admin_key.encode()),)

    async def workers(self) -> WorkerList | None:
        """Return the server's workers; None where it is no router."""
        page = await self._get(f"{self.url}/workers", self._headers)
        if page is None:
            return None
        try:
            listed = orjson.loads(page.body)
            shown = tuple(
                ListedWorker(str(each["name"]), str(each["role"]), str(each["url"]))
                for each in listed["workers"]
                if "url" in each
            )
            speed = listed.get("speed")
            return WorkerList(None if speed is None else float(speed), shown)
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
