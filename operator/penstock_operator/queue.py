"""Which graphs to reconcile, and when: a queue of keys without duplicates, one worker per key at a time.

Handlers and informers `enqueue` a key; workers `take` it, reconcile the entire graph, and `done` it. A key that is
enqueued while it is worked on comes again afterwards, behind the waiting ones. A key that failed waits
longer each time. Holds no API objects and imports no client.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from penstock.core.backoff import Backoff
from penstock.core.errors import ClusterError, ConflictError
from penstock.core.logs import get_logger

Key = tuple[str, str]
"""Namespace and name of a GraphDeployment."""

MAX_WAITS: Final = 4096
"""Minimum number of waits remembered before the expired ones are dropped. Chosen: half a megabyte."""

Work = Callable[[Key], Awaitable[float | None]]
"""Reconciles one graph; returns seconds until it is requeued without being enqueued, or None."""

_FAILED: Final = "graph not reconciled"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How often one key is worked on; real seconds, chosen.

    Attributes:
        gap_s: Least time between two reconciles, so that a burst of events costs one; an urgent one skips it.
        first_backoff_s: Wait after the first failure; doubles with each further one, up to the longest.
        jitter: Fraction by which backoff is spread, so that a thousand keys do not come at once.
    """

    gap_s: float = 0.1
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    jitter: float = 0.2


class WorkQueue:
    """The dirty keys of one process; used from one event loop."""

    def __init__(
        self,
        limits: RateLimits = RateLimits(),
        *,
        now_s: Callable[[], float] = time.monotonic,
        spread: random.Random | None = None,
    ) -> None:
        self.limits = limits
        self._now_s = now_s
        self._random = spread or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0
        self._running: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._not_before: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    @property
    def depth(self) -> int:
        """Keys that are due now and wait for a worker."""
        now_s = self._now_s()
        return sum(due_s <= now_s for due_s in self._due.values())

    @property
    def running(self) -> int:
        """Keys that are worked on."""
        return len(self._running)

    def enqueue(self, key: Key, *, delay_s: float = 0.0, urgent: bool = False) -> None:
        """Enqueue ``key``, not before ``delay_s`` from now; an earlier time wins.

        A change that a user made is urgent: it skips gap and backoff.
        """
        due_s = self._now_s() + delay_s
        if urgent:
            self._not_before.pop(key, None)
        due_s = max(due_s, self._not_before.get(key, due_s))
        if key in self._running:
            self._again[key] = min(due_s, self._again.get(key, due_s))
            return
        if self._due.get(key, due_s + 1) <= due_s:
            return
        self._push(key, due_s)

    def pop(self) -> Key | None:
        """Return the key that has been due longest and count it as running; None if none is due."""
        now_s = self._now_s()
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due_s:
                del self._due[key]
                self._running.add(key)
                return key
        return None

    async def take(self) -> Key:
        """Wait for a key that is due and return it."""
        while True:
            self._wake.clear()
            key = self.pop()
            if key is not None:
                return key
            wait_s = None if not self._heap else max(0.0, self._heap[0][0] - self._now_s())
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def done(self, key: Key, *, requeue_after_s: float | None = None) -> None:
        """End the work on ``key`` with success; requeue it after this many seconds, None: once it is enqueued."""
        self._failures.pop(key, None)
        self._end(key, wait_s=self.limits.gap_s, requeue_after_s=requeue_after_s)

    def failed(self, key: Key, *, retry_after_s: float | None = None) -> float:
        """End the work on ``key`` without success; return the wait, no shorter than the server's Retry-After."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        wait_s = Backoff(self.limits.first_backoff_s, self.limits.max_backoff_s).pause_s(failures)
        wait_s = max(wait_s * self._random.uniform(1 - self.limits.jitter, 1), retry_after_s or 0.0)
        self._end(key, wait_s=wait_s, requeue_after_s=wait_s)
        return wait_s

    def _end(self, key: Key, *, wait_s: float, requeue_after_s: float | None) -> None:
        now_s = self._now_s()
        self._running.discard(key)
        self._not_before[key] = now_s + wait_s
        marked_s = self._again.pop(key, None)
        due = [] if marked_s is None else [max(marked_s, now_s + wait_s)]
        if requeue_after_s is not None:
            due.append(now_s + requeue_after_s)
        if due:
            self._push(key, min(due))
        if len(self._not_before) > MAX_WAITS:
            self._not_before = {each: at_s for each, at_s in self._not_before.items() if at_s > now_s}

    def _push(self, key: Key, due_s: float) -> None:
        self._due[key] = due_s
        self._order += 1
        heapq.heappush(self._heap, (due_s, self._order, key))
        self._wake.set()


async def serve(queue: WorkQueue, work: Work, *, workers: int) -> None:
    """Work on keys until cancelled, up to ``workers`` at once; a failure costs that key a wait, nothing else."""
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(_serve_one(queue, work))


async def _serve_one(queue: WorkQueue, work: Work) -> None:
    while True:
        key = await queue.take()
        try:
            # A task of its own: a TaskGroup that fails leaves, before Python 3.11.3, its cancellation on the
            # task that ran it, and the next expired timeout of this loop would end the worker for good.
            requeue_after_s = await asyncio.ensure_future(work(key))
        except ClusterError as exc:
            wait_s = queue.failed(key, retry_after_s=getattr(exc, "retry_after_s", None))
            # A conflict is normal: the next reconcile sees the other's write.
            report = log.info if isinstance(exc, ConflictError) else log.warning
            namespace, name = key
            report(_FAILED, namespace=namespace, name=name, error=str(exc), retry_s=round(wait_s, 1))
        except asyncio.CancelledError:
            queue.failed(key)
            raise
        except Exception:  # root of a worker: one graph's defect must not stop the others
            wait_s = queue.failed(key)
            log.exception(_FAILED, namespace=key[0], name=key[1], retry_s=round(wait_s, 1))
        else:
            queue.done(key, requeue_after_s=requeue_after_s)
