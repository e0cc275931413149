"""Keeps the workers' states up to date: checks every worker's health and scrapes its metrics page.

There is one task per worker, all owned by `WorkerWatch`, so that a worker that hangs does not delay the checks of others.
"""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import orjson

from penstock.api import Role
from penstock.core import metric_names as names
from penstock.core.errors import (
    ObservationError,
    PenstockError,
    SaturatedError,
    UpstreamConnectError,
    UpstreamTimeout,
)
from penstock.core.exposition import Sample
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.logs import get_logger
from penstock.core.worker_metrics import (
    PROGRESS_NAMES,
    WAITING_NAMES,
    EngineReading,
    OwnNames,
    read_engine,
    waiting_by_engine,
    worker_samples,
)
from penstock.router.context import RouterContext
from penstock.router.core.worker import Worker
from penstock.runtimes.kv_transfer import KvSource

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,11}")
_EXPIRED: Final = names.VLLM_NIXL_EXPIRED + names.COUNTER_SUFFIX
_WANTED: Final = (names.VLLM_CACHE_CONFIG_INFO, _EXPIRED, *WAITING_NAMES, *PROGRESS_NAMES)


@dataclass(frozen=True, slots=True)
class WorkerPage:
    """Values of one scrape of a worker's metrics page; None, and no ranks, if the page does not contain them.

    Attributes:
        expired_leases: Cumulative number of prompts whose KV lease expired before they were read, since the worker's start.
        waiting_requests: Number of requests that wait in the engine.
        engine: Progress counters of the engine.
        kv_ranks: Fraction of KV blocks in use on each data-parallel rank, 0-1.
        kv_total_blocks: Number of KV blocks of all ranks together.
        kv_capacity_tokens: Number of tokens for which these blocks have room.
    """

    expired_leases: float | None
    waiting_requests: float | None
    engine: EngineReading
    kv_ranks: tuple[float, ...]
    kv_total_blocks: int | None
    kv_capacity_tokens: int | None

    @property
    def kv_usage_fraction(self) -> float | None:
        """Mean fraction of KV blocks in use over the ranks, 0-1; None if unknown."""
        return sum(self.kv_ranks) / len(self.kv_ranks) if self.kv_ranks else None


async def read_page(pool: ConnectionPool, url: str, timeouts: Timeouts, *, own_names: OwnNames) -> WorkerPage:
    """Fetch the metrics page of a worker at ``url`` through the connections ``pool``, and return the values in it.

    ``own_names`` are the runtime's names of metrics where they differ from vLLM's.

    Raises:
        UpstreamError: no complete response came.
        ObservationError: the page is not served, or cannot be parsed.
    """
    response = await pool.request("GET", url, timeouts=timeouts)
    if response.status != 200:
        raise ObservationError(f"{url} answered {response.status}; a page needs 200")
    return parse_page(response.body.decode("utf-8", "replace"), own_names)


def parse_page(text: str, own_names: OwnNames) -> WorkerPage:
    """Parse the text of a worker's metrics page; ``own_names`` are the runtime's names of metrics where they differ from vLLM's.

    Raises:
        ObservationError: it cannot be parsed.
    """
    samples = worker_samples(text, _WANTED, own_names)
    usage = [sample.value for sample in samples if sample.name == names.VLLM_KV_USAGE]
    expired = [sample.value for sample in samples if sample.name == _EXPIRED]
    waiting = waiting_by_engine(samples)
    # NaN, infinities and values outside 0-1 are a fault of the page; the values of some ranks alone are not used.
    ranks = tuple(usage) if _are_within(usage, 1.0) else ()
    return WorkerPage(
        sum(expired) if expired else None,
        sum(waiting) if waiting and _are_within(waiting) else None,
        read_engine(samples),
        ranks,
        *_kv_size(samples, ranks=max(1, len(ranks))),
    )


def _are_within(values: list[float], highest: float = math.inf) -> bool:
    return all(math.isfinite(value) and 0 <= value <= highest for value in values)


def _kv_size(samples: list[Sample], *, ranks: int) -> tuple[int | None, int | None]:
    """Return a worker's number of KV blocks and of the tokens that they store; (None, None) unless every rank reports them."""
    blocks = tokens = reported = 0
    for sample in samples:
        if sample.name != names.VLLM_CACHE_CONFIG_INFO:
            continue
        count, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
        if _NUMBER.fullmatch(count) and _NUMBER.fullmatch(size):
            reported += 1
            blocks += int(count)
            tokens += int(count) * int(size)
    return (blocks, tokens) if reported == ranks else (None, None)


log = get_logger(__name__)

_FLOOR_REAL_S: Final = 0.1
"""Minimum pause between checks in real seconds: with a large time factor a simulated second would be too many calls."""


class WorkerWatch:
    """Health checks and metric scrapes of all workers, in one task per worker."""

    def __init__(self, context: RouterContext) -> None:
        self._admission = context.admission
        self._pool = context.probes
        self._requests = context.pool
        self._config = context.settings.config.health
        self._stall_real_s = context.settings.stall_real_s
        self._pairs_by_version = context.settings.pairs_by_version
        self._kv_transfer = context.settings.kv_transfer
        self._own_names = context.settings.metric_names
        self._metrics_path = context.settings.metrics_path
        self._health_path = context.settings.health_path
        self._clock = context.clock
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._period_real_s = max(_FLOOR_REAL_S, self._clock.to_real_s(self._config.interval_seconds))
        self._timeouts = Timeouts.each(self._config.timeout_real_seconds)

    def _now_s(self) -> float:
        """Return the event loop's time minus the time for which it was blocked: a worker is not silent while this process is blocked."""
        return asyncio.get_running_loop().time() - self._pool.lag_s

    def sync(self) -> None:
        """Start a task of checks for each new worker, and end the tasks of workers that were removed and have no requests any more.

        Called after each change of the workers.
        """
        pool = self._admission.core.pool
        current = {*pool, *pool.leaving}
        for worker in [worker for worker in self._tasks if worker not in current]:
            self._tasks.pop(worker).cancel()
        for worker in current - self._tasks.keys():
            self._tasks[worker] = asyncio.create_task(self._watch(worker), name=f"watch {worker.name}")

    async def close(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while self._is_known(worker) or worker.inflight_requests:
            try:
                await self.check(worker)
            except Exception:  # root of the worker's task: without checks it would stay as it was last seen
                log.exception("health check failed unexpectedly", worker=worker.name)
            due_s = max(due_s + self._period_real_s, loop.time() + _FLOOR_REAL_S / 2)
            await asyncio.sleep(due_s - loop.time())

    async def check(self, worker: Worker) -> None:
        """Check the health of one worker once, scrape its metrics if it is healthy, and record the results in ``worker``."""
        failures = worker.failures
        try:
            problem = await self._health_problem(worker)
        except SaturatedError as exc:
            # The router itself lacks connections; this is not the worker's fault.
            log.warning("health check left out", worker=worker.name, problem=str(exc))
            return
        self._end_requests_of_unreachable(worker)
        if not self._is_known(worker):
            return
        was = worker.health_problem
        if problem is None and worker.failures == failures:
            worker.confirm_alive()
        if problem is None:
            worker.failed_checks = 0
            if self._pairs_by_version and not worker.is_version_read:
                await self._read_version(worker)
            if worker.kv_engine is None and worker.spec.role is Role.PREFILL:
                await self._read_introduction(worker)
            await self._scrape(worker)
            worker.health_problem = self._stall_problem(worker)
        else:
            worker.failed_checks += 1
            worker.is_version_read = False
            worker.kv_engine = None
            if worker.failed_checks >= self._config.unhealthy_after:
                worker.health_problem = problem
        if (was is None) is not (worker.health_problem is None):
            log.info("worker health changed", worker=worker.name, problem=worker.health_problem)
            self._admission.workers_changed()

    async def _health_problem(self, worker: Worker) -> str | None:
        url = worker.spec.url + self._health_path
        began_s = self._now_s()
        try:
            response = await self._pool.request("GET", url, timeouts=self._timeouts)
        except SaturatedError:
            raise
        except PenstockError as exc:
            log.debug("health check failed", worker=worker.name, problem=str(exc))
            waited_s = min(self._now_s() - began_s, self._config.timeout_real_seconds)
            worker.silent_real_s += max(waited_s, self._period_real_s)
            return f"health check failed: {_in_short(exc)}"
        worker.silent_real_s = 0.0
        return None if response.status == 200 else f"health check answered {response.status}"

    async def _read_version(self, worker: Worker) -> None:
        try:
            response = await self._pool.request("GET", worker.spec.url + "/version", timeouts=self._timeouts)
            said = orjson.loads(response.body) if response.status == 200 else None
        except (PenstockError, orjson.JSONDecodeError) as exc:
            log.debug("version not readable", worker=worker.name, problem=str(exc))
            return
        version = said.get("version") if isinstance(said, dict) else None
        pool = self._admission.core.pool
        pool.learn_version(worker, version if isinstance(version, str) else None)
        if pool.versions_differ:
            log.info(
                "workers of several versions: KV is transferred within one",
                worker=worker.name,
                version=worker.version,
            )

    async def _read_introduction(self, worker: Worker) -> None:
        """Request the engine's identifier for KV transfers from the worker's side channel, if the KV transfer needs it."""
        path, port = self._kv_transfer.introduction_path, worker.spec.side_channel_port
        if path is None or port is None:
            return
        host = urlsplit(worker.spec.url).hostname or ""
        url = f"http://{KvSource(host, port, 0).address}{path}"
        try:
            response = await self._pool.request("GET", url, timeouts=self._timeouts)
            said = orjson.loads(response.body) if response.status == 200 else None
        except (PenstockError, orjson.JSONDecodeError) as exc:
            log.debug("introduction not readable", worker=worker.name, problem=str(exc))
            return
        worker.kv_engine = self._kv_transfer.engine_of(said)

    def _is_known(self, worker: Worker) -> bool:
        return self._admission.core.pool.get(worker.name) is worker

    def _end_requests_of_unreachable(self, worker: Worker) -> None:
        """End the requests at a worker that has been silent for too long, because a lost node closes no connection."""
        bound_s = self._config.unreachable_real_seconds
        if worker.silent_real_s < bound_s or not worker.inflight_requests:
            return
        problem = f"no answer and no byte for {bound_s:g} s (real)"
        if broken := self._requests.cut(worker.spec.url, problem, silent_s=bound_s):
            worker.suspect(problem)
            log.warning(
                "worker unreachable: its requests end", worker=worker.name, requests=broken, problem=problem
            )

    def _stall_problem(self, worker: Worker) -> str | None:
        """Return what is wrong with a worker whose engine hangs, and end its requests as if it had died; None if it does not hang."""
        problem = worker.progress.problem(self._stall_real_s)
        if problem is not None and worker.inflight_requests:
            self._requests.cut(worker.spec.url, problem)
        return problem

    async def _scrape(self, worker: Worker) -> None:
        try:
            page = await read_page(
                self._pool,
                worker.spec.url + self._metrics_path,
                self._timeouts,
                own_names=self._own_names,
            )
        except (PenstockError, ObservationError) as exc:
            # The last values are kept; their age shows how reliable they are.
            log.debug("metrics not readable", worker=worker.name, problem=str(exc))
            return
        worker.progress = worker.progress.after(
            page.engine,
            self._now_s(),
            inflight_requests=worker.inflight_requests,
            limit_s=self._stall_real_s,
        )
        worker.waiting_requests = page.waiting_requests
        worker.expired_leases = page.expired_leases
        core = self._admission.core
        now_s = self._clock.now_s()
        worker.record_scrape(
            page.kv_usage_fraction,
            tokens=core.inflight_tokens(worker),
            uncomputed_tokens=core.uncomputed_tokens(worker, now_s),
            now_s=now_s,
        )
        worker.kv_ranks = page.kv_ranks
        worker.kv_total_blocks, worker.kv_capacity_tokens = page.kv_total_blocks, page.kv_capacity_tokens
        self._admission.load_read(worker)


def _in_short(error: PenstockError) -> str:
    """Return why a check failed, without the worker's address, because /ready and /workers show it to all clients."""
    if isinstance(error, UpstreamConnectError):
        return "no connection"
    if isinstance(error, UpstreamTimeout):
        return f"no answer in time ({error.phase})"
    return "its answer broke off"
