"""Queue of the graphs to reconcile: keys without duplicates, at most one worker per key at a time.

Handlers and informers `enqueue` a key. Workers `take` it, reconcile the entire graph, and mark it `done` or `failed`.
A key that is enqueued while a worker reconciles it is queued again afterwards, after the keys that are already
waiting. A key that fails repeatedly waits longer each time. The queue contains no API objects and imports no client.
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
"""Namespace and name of a GraphDeployment or ProfileRequest."""

MAX_WAITS: Final = 4096
"""Number of remembered waits above which expired ones are dropped. Chosen: half a megabyte."""

Work = Callable[[Key], Awaitable[float | None]]
"""Function that reconciles one key. Returns the seconds until the key is requeued even if nothing enqueues it, or
None for never."""

_FAILED: Final = "graph not reconciled"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits on how often the object with one key (namespace and name) is reconciled; wall-clock seconds.

    Attributes:
        gap_s: Minimum seconds between two reconciles of a key, so that a burst of events costs one reconcile; an urgent
            enqueue skips it.
        first_backoff_s: Seconds to wait after the first failure; doubles with each further one.
        max_backoff_s: Maximum seconds to wait after a failure.
        jitter: Maximum fraction by which a backoff is shortened at random, so that many keys are not retried at the
            same moment.
    """

    gap_s: float = 0.1
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    jitter: float = 0.2


class WorkQueue:
    """Keys (namespace and name) of the objects that wait to be reconciled or are being reconciled.

    Use it from one event loop only. Times are wall-clock seconds.
    """

    def __init__(
        self,
        limits: RateLimits = RateLimits(),
        *,
        now_s: Callable[[], float] = time.monotonic,
        spread: random.Random | None = None,
    ) -> None:
        self.limits = limits
        self._now_s = now_s
        self._random = spread or random.Random()  # noqa: S311 - jitter, not security
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0
        self._running: set[Key] = set()
        self._requeued: dict[Key, float] = {}
        self._not_before: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    @property
    def depth(self) -> int:
        """Number of keys (objects to reconcile) whose time has come and that wait for a reconcile worker."""
        now_s = self._now_s()
        return sum(due_s <= now_s for due_s in self._due.values())

    @property
    def running(self) -> int:
        """Number of keys (objects) that are being reconciled now."""
        return len(self._running)

    def enqueue(self, key: Key, *, delay_s: float = 0.0, urgent: bool = False) -> None:
        """Queue ``key`` for a reconcile in ``delay_s`` wall-clock seconds or later; if it is queued already, the earlier time applies.

        Args:
            key: Namespace and name of the object.
            delay_s: Minimum seconds until the reconcile.
            urgent: Whether a user made the change, so that minimum gap and backoff are skipped.
        """
        due_s = self._now_s() + delay_s
        if urgent:
            self._not_before.pop(key, None)
        due_s = max(due_s, self._not_before.get(key, due_s))
        if key in self._running:
            self._requeued[key] = min(due_s, self._requeued.get(key, due_s))
            return
        if self._due.get(key, due_s + 1) <= due_s:
            return
        self._push(key, due_s)

    def pop(self) -> Key | None:
        """Return the key (namespace and name) whose time came first, and count it as being reconciled; None if none can be reconciled now."""
        now_s = self._now_s()
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due_s:
                del self._due[key]
                self._running.add(key)
                return key
        return None

    async def take(self) -> Key:
        """Wait until an object can be reconciled; return its key (namespace and name), counted as being reconciled until `done` or `failed`."""
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
        """Report that the reconcile of ``key`` (namespace and name) succeeded.

        Args:
            key: Key from `take` or `pop`.
            requeue_after_s: Seconds until the key is queued again; None if only `enqueue` queues it again.
        """
        self._failures.pop(key, None)
        self._end(key, wait_s=self.limits.gap_s, requeue_after_s=requeue_after_s)

    def failed(self, key: Key, *, retry_after_s: float | None = None) -> float:
        """Report that the reconcile of ``key`` (namespace and name) failed, and queue it again after a backoff.

        Args:
            key: Key from `take` or `pop`.
            retry_after_s: Minimum backoff in seconds, from the server's Retry-After; None if there is none.

        Returns:
            The backoff in wall-clock seconds.
        """
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
        marked_s = self._requeued.pop(key, None)
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
    """Reconcile the objects whose keys are in the queue until cancelled, up to ``workers`` at the same time.

    A failure or exception is logged and delays only the key that failed; the others continue.

    Args:
        queue: Queue of keys.
        work: Reconciles the object with one key, and returns the seconds until it is queued again, or None.
        workers: Maximum number of concurrent reconciles.
    """
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(_serve_one(queue, work))


async def _serve_one(queue: WorkQueue, work: Work) -> None:
    while True:
        key = await queue.take()
        try:
            # Run in a separate task: a TaskGroup that fails leaves, before Python 3.11.3, its cancellation on the
            # task that ran it, and the next expired timeout of this loop would end the worker for good.
            requeue_after_s = await asyncio.ensure_future(work(key))
        except ClusterError as exc:
            wait_s = queue.failed(key, retry_after_s=getattr(exc, "retry_after_s", None))
            # A conflict is normal: the next reconcile sees the other writer's change.
            report = log.info if isinstance(exc, ConflictError) else log.warning
            namespace, name = key
            report(_FAILED, namespace=namespace, name=name, error=str(exc), retry_s=round(wait_s, 1))
        except asyncio.CancelledError:
            queue.failed(key)
            raise
        except Exception:  # a defect of one graph must not stop the reconciles of others
            wait_s = queue.failed(key)
            log.exception(_FAILED, namespace=key[0], name=key[1], retry_s=round(wait_s, 1))
        else:
            queue.done(key, requeue_after_s=requeue_after_s)
