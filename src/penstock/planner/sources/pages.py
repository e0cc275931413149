"""Fetches metrics pages; one that hangs is left alone for a while, so that it does not slow every pull."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import ObservationError, PenstockError, UpstreamTimeout
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.planner.sources.base import LONGEST_PAUSE_S, PullBackoff, in_short

PULL_TIMEOUT_S = 1.0
"""Real seconds for one page. Chosen: the pull interval at real time; a page takes milliseconds."""


class MetricsPages:
    """The pages of one kind of process, by URL.

    All pages of a pull are waited for together, so one process that accepts connections and never answers
    would stretch each pull to the time-out. After a time-out a page counts as failed, without a request, for
    1, 2, 4 ... 30 real seconds. A refused connection costs nothing and is tried at every pull.
    """

    def __init__(self, pool: ConnectionPool, *, real_now_s: Callable[[], float]) -> None:
        self._pool = pool
        self._real_now_s = real_now_s
        self._hung: dict[str, PullBackoff] = {}

    async def fetch(self, base_url: str) -> str:
        """Return the page at ``base_url`` + ``/metrics``.

        Raises:
            ObservationError: no answer within `PULL_TIMEOUT_S` now or shortly before, a broken one, or a
                status other than 200.
        """
        url = base_url + "/metrics"
        hung = self._hung.get(url)
        if hung is not None and hung.is_pausing(self._real_now_s()):
            raise ObservationError(hung.why)
        try:
            text = await self._get(url)
        except UpstreamTimeout as exc:
            self._count_time_out(url, in_short(exc))
            raise ObservationError(f"{url}: {exc}") from exc
        except PenstockError as exc:
            self._hung.pop(url, None)
            raise ObservationError(f"{url}: {exc}") from exc
        self._hung.pop(url, None)
        return text

    async def _get(self, url: str) -> str:
        limits = Timeouts(
            connect_s=PULL_TIMEOUT_S,
            first_byte_s=PULL_TIMEOUT_S,
            idle_s=PULL_TIMEOUT_S,
            total_s=PULL_TIMEOUT_S,
        )
        response = await self._pool.request("GET", url, timeouts=limits)
        if response.status != 200:
            raise ObservationError(f"answered {response.status}")
        return response.body.decode("utf-8", errors="replace")

    def _count_time_out(self, url: str, why: str) -> None:
        now_s = self._real_now_s()
        for other in [each for each, hung in self._hung.items() if now_s > hung.retry_at_s + LONGEST_PAUSE_S]:
            # Of a process that has left: it has not been asked for longer than any pause.
            del self._hung[other]
        self._hung.setdefault(url, PullBackoff()).failed(f"{url}: {why}", now_s)
