"""One exchange with one worker: its result, its failure, and what both mean for the worker's circuit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock_core.clock import ModelClock
from penstock_core.errors import StreamBroken, UpstreamConnectError, UpstreamError
from penstock_router.fleet import InFlight
from penstock_router.proxy.call import Call
from penstock_router.proxy.failures import (
    KV_LOST,
    RETRIED_STATUSES,
    StageFailed,
    WorkerAnswer,
    failed_stage,
)
from penstock_router.settings import RouterSettings
from penstock_wire.client import ConnectionPool, StreamingResponse

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Chosen: a whole answer with logprobs of 100,000 tokens stays below; a runaway worker is cut off."""
_MAX_ERROR_BYTES = 1024 * 1024


class Exchanger:
    """Calls workers within the limits and keeps their circuits informed."""

    def __init__(self, pool: ConnectionPool, settings: RouterSettings, clock: ModelClock) -> None:
        self._pool = pool
        self._settings = settings
        self._clock = clock
        self._request_s = settings.config.limits.request_timeout_seconds

    def left_s(self, call: Call) -> float:
        """Return what is left of a request's time, modelled seconds; may be negative."""
        return self._request_s - self._clock.to_model_s(call.age_real_s())

    @asynccontextmanager
    async def open(
        self, call: Call, inflight: InFlight, body: bytes, *, is_handed_over: bool = False
    ) -> AsyncIterator[StreamingResponse]:
        """Send ``body`` to a worker; yields a response of status 200.

        Whatever way the block is left, the worker's counters are given back and an unfinished response is
        aborted. The block reports the exchange's success by ``inflight.succeeded()``, and lets upstream
        errors out. With ``is_handed_over``, a 500 may mean that the prompt's KV could not be fetched.

        Raises:
            StageFailed: the worker cannot be reached, broke off, or answered with another status.
        """
        worker = inflight.worker
        url = worker.spec.url + call.request.path
        timeouts = self._settings.upstream_timeouts(self._clock, left_s=self.left_s(call))
        try:
            response = await self._pool.stream(
                "POST", url, body=body, headers=call.upstream_headers, timeouts=timeouts
            )
            async with response:
                if response.status != 200:
                    raise await self._refused(response, inflight, is_handed_over=is_handed_over)
                yield response
        except UpstreamError as exc:
            if isinstance(exc, UpstreamConnectError):
                worker.suspect("refused a connection")
            inflight.failed(self._clock.now_s())
            raise failed_stage(exc, worker.name) from exc
        finally:
            inflight.abandon()

    async def _refused(
        self, response: StreamingResponse, inflight: InFlight, *, is_handed_over: bool
    ) -> StageFailed:
        """Return the failure for an answer other than 200."""
        status, headers = response.status, response.headers
        content = await response.read(limit_bytes=_MAX_ERROR_BYTES)
        kv_lost = is_handed_over and status == 500 and any(mark in content for mark in KV_LOST)
        if status >= 500 and not kv_lost:
            inflight.failed(self._clock.now_s())
        else:
            inflight.succeeded()
        worker = inflight.worker.name
        if status < 400:
            error = StreamBroken(f"{worker} answered status {status}, which is neither success nor error")
            return StageFailed("upstream_broken", worker=worker, may_retry=False, error=error)
        answer = WorkerAnswer(
            status,
            headers.get(b"content-type", b"application/json").decode("latin-1"),
            content,
            headers.get(b"retry-after"),
        )
        if kv_lost:
            return StageFailed("kv_lost", worker="", may_retry=True, answer=answer)
        reason = "upstream_5xx" if status >= 500 else "upstream_4xx"
        return StageFailed(reason, worker=worker, may_retry=status in RETRIED_STATUSES, answer=answer)


async def read_whole(response: StreamingResponse) -> bytes:
    """Return the body of a 200.

    Raises:
        UpstreamError: the body did not come whole.
    """
    return await response.read(limit_bytes=MAX_ANSWER_BYTES)
