"""Gives back the KV of prompts that no decode worker was asked to fetch, so that it need not wait for its lease's end.

A client may leave, or every decode worker refuse, between prefill and decode. Prefill workers take no such message from
a router; a decode worker does: a request that is refused before it reaches the engine makes it tell the prefill worker
that nobody will come (vLLM 0.32, ``notify_kv_transfer_request_rejected``; simulated workers do the same). So any decode
worker is sent the prompt's parameters in a request for a model that nobody serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import orjson

from penstock.api import Role
from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.logs import get_logger
from penstock.router.core.worker_pool import WorkerPool
from penstock.router.metrics import RouterMetrics

log = get_logger(__name__)

REFUSED_MODEL: Final = "penstock-kv-release"
"""Served by nobody."""

TIMEOUTS: Final = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=5.0)
"""Real seconds; chosen: a refusal needs no engine step, and the lease ends by itself soon after."""

Headers = tuple[tuple[bytes, bytes], ...]


class KvTransferState:
    """One prompt's way from prefill to decode.

    Attributes:
        is_taken: A decode worker was asked to fetch it, so it answers for the blocks from here on.
    """

    __slots__ = ("is_taken",)

    def __init__(self) -> None:
        self.is_taken = False


class KvReleases:
    """Releases prompts beside requests; a release that fails costs one lease and nothing more."""

    def __init__(
        self, client: ConnectionPool, workers: WorkerPool, metrics: RouterMetrics, now_s: Callable[[], float]
    ) -> None:
        """Tie the parts.

        Args:
            client: Connections to workers.
            workers: Of which a decode worker is asked.
            metrics: Counts.
            now_s: Tells simulated seconds.
        """
        self._client = client
        self._workers = workers
        self._metrics = metrics
        self._now_s = now_s
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def unless_taken(self, params: dict[str, Any] | None, headers: Headers) -> Iterator[KvTransferState]:
        """Release a prompt if the block ends, however it does, before a decode worker was asked for it.

        Args:
            params: The prefill worker's ``kv_transfer_params``; None: it kept nothing.
            headers: Of the request, for workers that ask for a key.
        """
        hand_over = KvTransferState()
        try:
            yield hand_over
        finally:
            if params is not None and not hand_over.is_taken:
                task = asyncio.create_task(self._release(params, headers), name="KV release")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the releases under way; each is bounded."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _release(self, params: dict[str, Any], headers: Headers) -> None:
        # One that takes no requests now may still be able to pass a message on.
        candidates = self._workers.routable(Role.DECODE, self._now_s()) or [
            each for each in self._workers if each.spec.role is Role.DECODE
        ]
        if not candidates:
            self._metrics.kv_releases["no_worker"] += 1
            return
        # An idle vLLM that never met the prefill worker passes the message on with its next request only.
        worker = min(candidates, key=lambda each: (each.inflight_requests == 0, each.inflight_requests))
        body = orjson.dumps(
            {"model": REFUSED_MODEL, "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        )
        try:
            answer = await self._client.request(
                "POST", f"{worker.spec.url}/v1/completions", body=body, headers=headers, timeouts=TIMEOUTS
            )
        except PenstockError as exc:
            self._metrics.kv_releases["failed"] += 1
            log.warning("KV of an abandoned request not released", worker=worker.name, problem=str(exc))
            return
        is_released = answer.status == 404
        self._metrics.kv_releases["released" if is_released else "failed"] += 1
        if not is_released:
            log.warning("KV of an abandoned request not released", worker=worker.name, status=answer.status)
