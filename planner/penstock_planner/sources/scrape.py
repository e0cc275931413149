"""Fetches metrics pages, and reads each worker's own page, by vLLM's metric names or the runtime's own.

A page that timed out is not fetched again until its backoff ends, so that it does not delay every read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core import metric_names as names
from penstock.core.errors import ObservationError, PenstockError, UpstreamTimeout
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.worker_metrics import (
    METRICS_PATH,
    NOT_ON_PAGE,
    WAITING_NAMES,
    OwnNames,
    waiting_by_engine,
    worker_samples,
)
from penstock_planner.decide.demand.reading import Reading, assess, missing
from penstock_planner.sources.base import PAUSES, PullBackoff, Query, Readings, first_line, total_of
from penstock_planner.targets.base import Endpoint

PageT = TypeVar("PageT")

PULL_TIMEOUT_S = 1.0
"""Timeout for one page, real seconds. Chosen: the scrape interval in real time; a page takes milliseconds."""

MAX_CONCURRENT = 64
"""Maximum number of pages (64) fetched concurrently. Chosen: a thousand workers take 16 rounds of a few milliseconds."""


class MetricsPages:
    """Fetches the metrics pages of processes, by URL.

    A read waits for all pages, so one process that accepts connections and never answers would extend each read to the
    timeout. After a timeout, a page therefore counts as failed, without a request, for 1, 2, 4 ... 30 real seconds. A
    refused connection fails immediately, and so it is retried at every read.
    """

    def __init__(self, pool: ConnectionPool, *, real_now_s: Callable[[], float]) -> None:
        """Create a reader.

        Args:
            pool: HTTP connections.
            real_now_s: Monotonic clock in real seconds, for the backoff.
        """
        self._pool = pool
        self._real_now_s = real_now_s
        self._hung: dict[str, PullBackoff] = {}

    async def fetch(self, base_url: str, path: str = METRICS_PATH) -> str:
        """Return the text of the metrics page at ``base_url`` + ``path``.

        Args:
            base_url: Base URL of the process, without a trailing slash.
            path: Path of the page, with a leading slash.

        Raises:
            ObservationError: the process did not answer within a real second (`PULL_TIMEOUT_S`), the pause after its
                earlier failures has not ended, the answer is incomplete, or its status is not 200.
        """
        url = base_url + path
        hung = self._hung.get(url)
        if hung is not None and hung.is_pausing(self._real_now_s()):
            raise ObservationError(hung.why)
        try:
            text = await self._get(url)
        except UpstreamTimeout as exc:
            self._count_time_out(url, first_line(exc))
            raise ObservationError(f"{url}: {exc}") from exc
        except PenstockError as exc:
            self._hung.pop(url, None)
            raise ObservationError(f"{url}: {exc}") from exc
        self._hung.pop(url, None)
        return text

    async def fetch_all(
        self, urls: Sequence[str], read: Callable[[str, str], PageT]
    ) -> tuple[dict[str, PageT], list[ObservationError]]:
        """Fetch and parse the metrics pages of all URLs concurrently.

        Args:
            urls: Base URLs.
            read: Function that parses a page, called with the URL and the text; it can raise ObservationError.

        Returns:
            The parsed pages by URL, and the errors of the URLs that could not be read.
        """

        async def page(url: str) -> PageT | ObservationError:
            try:
                return read(url, await self.fetch(url))
            except ObservationError as exc:
                return exc

        answers = dict(zip(urls, await asyncio.gather(*map(page, urls)), strict=True))
        flaws = [each for each in answers.values() if isinstance(each, ObservationError)]
        return {url: each for url, each in answers.items() if not isinstance(each, ObservationError)}, flaws

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
        for other in [each for each, hung in self._hung.items() if now_s > hung.retry_at_s + PAUSES.limit_s]:
            # The process is gone: the time since its last request exceeds the longest pause.
            del self._hung[other]
        self._hung.setdefault(url, PullBackoff()).failed(f"{url}: {why}", now_s)


def unknown_queue(read: int, flaws: Sequence[ObservationError], *, kind: str, source: str) -> Reading | None:
    """Return a reading that says that the queue length is unknown, if some processes cannot be read; None if all could be read.

    Args:
        read: Number of processes that could be read.
        flaws: Errors of the processes that could not be read.
        kind: Name of the kind of process, such as router, for messages.
        source: Name of the source that the reading carries.

    Raises:
        ObservationError: there is no process of the kind, or none could be read.
    """
    if not read:
        raise flaws[0] if flaws else ObservationError(f"no ready {kind}")
    if not flaws:
        return None
    why = f"{len(flaws)} of {len(flaws) + read} {kind}s cannot be read: {first_line(flaws[0])}"
    return missing(why, source=source)


class ScrapeSource:
    """Metrics source that reads the metrics pages of the workers themselves."""

    name = "scrape"
    counts_demand = False

    def __init__(self, pages: MetricsPages) -> None:
        self._pages = pages
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._own_names: OwnNames = {}
        self._path = METRICS_PATH

    def of_runtime(self, own_names: OwnNames, path: str = METRICS_PATH) -> ScrapeSource:
        """Return a metrics source for a graph whose workers use other metric names than vLLM's.

        It shares the limit on concurrent fetches with this source.

        Args:
            own_names: Metric names of the runtime (the serving software of the workers), by vLLM's name for the same
                metric.
            path: Path of the workers' metrics page.
        """
        made = ScrapeSource(self._pages)
        made._slots, made._own_names, made._path = self._slots, own_names, path
        return made

    async def read(self, query: Query) -> Readings:
        """Return the workers' values; those of a worker that does not answer are marked as missing, with the reason.

        The number of requests that wait for prefill is known only if every prefill worker reports it. The demand at the
        routers is not provided, since workers see neither the requests that wait in the router nor those that it
        refuses.
        """
        workers = (*query.kv_workers, *query.prefill_workers)
        found = dict(
            zip(
                (worker.name for worker in workers),
                await asyncio.gather(*(self._read(worker, query.max_age_s) for worker in workers)),
                strict=True,
            )
        )
        queues = {worker.name: found[worker.name][1] for worker in query.prefill_workers}
        unknown = [f"{name}: {reading.why}" for name, reading in queues.items() if not reading.is_known]
        if unknown or not queues:
            queue = missing("; ".join(unknown[:3]) or "no ready prefill worker", source=self.name)
        else:
            queue = total_of(list(queues.values()))
        return Readings(
            {worker.name: found[worker.name][0] for worker in query.kv_workers},
            queue,
            queue_is_complete=False,
            worker_waiting={worker.name: found[worker.name][1] for worker in query.kv_workers},
        )

    async def _read(self, worker: Endpoint, max_age_s: float) -> tuple[Reading, Reading]:
        """Return the KV usage and the number of waiting requests of one worker."""
        try:
            async with self._slots:
                page = await self._pages.fetch(worker.url, self._path)
            samples = worker_samples(page, [names.VLLM_KV_USAGE, *WAITING_NAMES], self._own_names)
        except ObservationError as exc:
            gone = missing(first_line(exc), source=self.name)
            return gone, gone
        # One page holds one series per engine of a data-parallel worker.
        usage = [sample.value for sample in samples if sample.name == names.VLLM_KV_USAGE]
        waiting = waiting_by_engine(samples)
        kv = (
            assess(sum(usage) / len(usage), age_s=0.0, max_age_s=max_age_s, source=self.name, upper=1.0)
            if usage
            else missing(NOT_ON_PAGE, source=self.name)
        )
        if not waiting:
            return kv, missing(f"{names.VLLM_WAITING} not reported", source=self.name)
        return kv, assess(sum(waiting), age_s=0.0, max_age_s=max_age_s, source=self.name)
