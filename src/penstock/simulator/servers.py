"""What the world asks of a worker, and the simple server that the DualMap artefact models.

`engine_server` is the other kind: the engine core itself. Both are driven the same way: `add`, then `run`
whenever `next_s` says so.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from penstock.simulator.jobs import Job
from penstock.simulator.scenario import SimpleModel
from penstock.workload.traces import BLOCK_TOKENS


class ServiceStage(Enum):
    """What a worker reports of a job."""

    PREFILLED = auto()
    LOADED = auto()
    FIRST_TOKEN = auto()
    ENDED = auto()
    DROPPED = auto()


@dataclass(frozen=True, slots=True)
class StageReport:
    """One thing that happened to a job."""

    job: Job
    stage: ServiceStage
    at_s: float


class Server(Protocol):
    """A worker's inside."""

    def add(self, job: Job, now_s: float) -> None:
        """Take a job; it is considered when `run` is next called, at ``now_s`` at the earliest."""

    def next_s(self) -> float | None:
        """Return when `run` must be called, or None while nothing is due."""

    def run(self, now_s: float) -> list[StageReport]:
        """Do what is due at or before ``now_s`` and say what happened, in order."""

    def cached_tokens(self, job: Job) -> int:
        """Return how many of its prompt tokens are in the cache now."""

    def kv_usage_fraction(self, now_s: float) -> float:
        """Return the share of the cache that requests occupy now, 0-1."""

    @property
    def waiting(self) -> int:
        """Requests that wait inside for room in a batch or in the KV cache."""

    def is_idle(self, now_s: float) -> bool:
        """Return whether nothing runs, waits or is pinned for others."""


class TokenCache:
    """Which blocks of 512 tokens are kept: least recently used out first, a prompt's end before its start."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0

    def hit_tokens(self, job: Job) -> int:
        """Return the tokens of the job's longest kept prefix."""
        blocks = self._blocks
        hits = 0
        for key in job.chain:
            if key not in blocks:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, job.request.input_tokens)

    def keep(self, job: Job) -> None:
        """Note that the whole prompt is in memory now, and drop what no longer fits."""
        blocks = self._blocks
        last = len(job.chain) - 1
        for place in range(last, -1, -1):
            key = job.chain[place]
            if key in blocks:
                blocks.move_to_end(key)
            else:
                size = BLOCK_TOKENS if place < last else job.request.input_tokens - BLOCK_TOKENS * last
                blocks[key] = size
                self.tokens += size
        while self.tokens > self._capacity:
            _, size = blocks.popitem(last=False)
            self.tokens -= size


class SimpleServer:
    """Prefills one prompt at a time, in the order given: uncached tokens x a constant. Decode is not modelled.

    The last prompt token is always computed, as its output is what the prefill is for.
    """

    def __init__(self, model: SimpleModel) -> None:
        self._model = model
        self._cache = TokenCache(model.cache_tokens)
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._end_s = 0.0
        self._wake_s = 0.0

    def add(self, job: Job, now_s: float) -> None:
        """Queue a job."""
        self._queue.append(job)
        self._wake_s = now_s

    def next_s(self) -> float | None:
        """Return the running job's end, or the time of the last arrival on an idle server."""
        if self._running is not None:
            return self._end_s
        return self._wake_s if self._queue else None

    def run(self, now_s: float) -> list[StageReport]:
        """End the running job if it is due, and begin the next."""
        reports = []
        at_s = now_s
        if self._running is not None:
            if self._end_s > now_s:
                return []
            job, at_s = self._running, self._end_s
            self._running = None
            self._cache.keep(job)
            stages = (ServiceStage.PREFILLED, ServiceStage.FIRST_TOKEN, ServiceStage.ENDED)
            reports = [StageReport(job, stage, at_s) for stage in stages]
        if self._queue:
            job = self._queue.popleft()
            self._running = job
            job.cached_tokens = min(self._cache.hit_tokens(job), job.request.input_tokens - 1)
            work = job.request.input_tokens - job.cached_tokens
            self._end_s = at_s + work * self._model.prefill_s_per_token
        return reports

    def cached_tokens(self, job: Job) -> int:
        """Return the kept prefix."""
        return self._cache.hit_tokens(job)

    def kv_usage_fraction(self, now_s: float) -> float:  # noqa: ARG002 - the same at any time
        """Return the running prompt's share of the cache; idle content can be dropped at any time."""
        if self._running is None:
            return 0.0
        return min(1.0, self._running.request.input_tokens / self._model.cache_tokens)

    @property
    def waiting(self) -> int:
        """Jobs behind the running one."""
        return len(self._queue)

    def is_idle(self, now_s: float) -> bool:  # noqa: ARG002 - the same at any time
        """Return whether nothing runs or waits."""
        return self._running is None and not self._queue
