"""One round trip to one worker: its result, its failure, and what both mean for the worker's circuit."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn

from penstock.core.clock import SimulatedClock
from penstock.core.errors import UpstreamConnectError, UpstreamError, WrongAnswer
from penstock.core.http.client import ConnectionPool, StreamingResponse
from penstock.core.http.messages import Headers
from penstock.router.admission import LiveAssignment
from penstock.router.core.retries import FailedTry, RetryScope
from penstock.router.core.transfers import KvLease, KvTransfer
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.failures import AT_CAPACITY, StageFailed, failed_stage
from penstock.router.proxy.stream_preamble import ErrorEvent
from penstock.router.proxy.worker_answer import ErrorReply, error_answer, retry_scope_of
from penstock.router.settings import RouterSettings

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Chosen: a whole answer with logprobs of 100,000 tokens stays below; a runaway worker is cut off."""
_MAX_ERROR_BYTES = 1024 * 1024


class UpstreamClient:
    """Calls workers within the limits and keeps their circuits informed."""

    def __init__(self, pool: ConnectionPool, settings: RouterSettings, clock: SimulatedClock) -> None:
        """Tie the parts.

        Args:
            pool: Connections to workers.
            settings: Limits of a request.
            clock: Simulated time.
        """
        self._pool = pool
        self._settings = settings
        self._clock = clock
        self._request_s = settings.config.limits.request_timeout_seconds

    def left_s(self, call: CompletionCall) -> float:
        """Return what is left of a request's time, simulated seconds; may be negative."""
        return self._request_s - self._clock.to_model_s(call.age_real_s())

    def open(
        self, call: CompletionCall, assignment: LiveAssignment, body: bytes, *, lease: KvLease | None = None
    ) -> RoundTrip:
        """Return what sends ``body`` to a worker and gives a block its response, of status 200.

        Whatever way the block is left, an unfinished response is aborted; the worker's counters are the
        caller's to give back. The block reports the round trip's success by ``assignment.succeeded()``, and lets
        upstream errors and error events out.

        Args:
            call: The request.
            assignment: Its share of the worker.
            body: What the worker gets.
            lease: On the KV that the worker is to fetch; an error may then mean that it could not.

        Raises:
            StageFailed: the worker cannot be reached, broke off, or gave another answer than asked for.
        """
        return RoundTrip(self, call, assignment, body, lease)

    async def send(self, call: CompletionCall, assignment: LiveAssignment, body: bytes) -> StreamingResponse:
        """Return a worker's response, whatever its status.

        Raises:
            UpstreamError: there is none.
        """
        timeouts = self._settings.upstream_timeouts(self._clock, left_s=self.left_s(call))
        url = assignment.worker.spec.url + call.request.path
        headers: Headers = call.upstream_headers
        if call.trace is not None:
            headers = call.trace.sent(assignment, headers, retries=call.tries.retries)
        return await self._pool.stream("POST", url, body=body, headers=headers, timeouts=timeouts)

    def broken(self, assignment: LiveAssignment, error: UpstreamError) -> StageFailed:
        """Return the failure for an answer that did not come whole, and take note of it."""
        worker = assignment.worker
        if isinstance(error, UpstreamConnectError):
            worker.suspect("refused a connection")
        assignment.failed(self._clock.now_s(), str(error))
        return failed_stage(error, worker)

    async def refused(
        self,
        call: CompletionCall,
        response: StreamingResponse,
        assignment: LiveAssignment,
        lease: KvLease | None,
    ) -> NoReturn:
        """Raise the failure for an answer other than 200.

        Raises:
            StageFailed: an error answer.
            WrongAnswer: neither success nor error.
        """
        status = response.status
        if not 400 <= status < 600:
            raise WrongAnswer(
                f"{assignment.worker.name} answered {status}, which is neither success nor error"
            )
        content = await response.read(limit_bytes=_MAX_ERROR_BYTES)
        reply = ErrorReply(status, content, response.headers.get(b"retry-after"))
        raise self.error(call, assignment, lease, reply)

    def error(
        self, call: CompletionCall, assignment: LiveAssignment, lease: KvLease | None, reply: ErrorReply
    ) -> StageFailed:
        """Return the failure for an error answer, and take note of what it means for the worker."""
        worker, status = assignment.worker, reply.status
        answer, is_error_object = error_answer(reply)
        if lease is not None and reply.is_kv_lost:
            transfer = KvTransfer(lease.worker, worker)
            transfer.lost()
            call.tries.lost_transfers = (*call.tries.lost_transfers, transfer)
            return StageFailed(
                FailedTry("kv_lost", RetryScope.ANYWHERE, (worker, lease.worker)), answer=answer
            )
        if reply.is_at_capacity:
            return StageFailed(FailedTry(AT_CAPACITY, RetryScope.ELSEWHERE, (worker,)), answer=answer)
        sent_credentials = any(name == b"authorization" for name, _ in call.upstream_headers)
        scope = retry_scope_of(
            status,
            endpoint=call.request.endpoint,
            is_error_object=is_error_object,
            sent_credentials=sent_credentials,
        )
        reason = "upstream_5xx" if status >= 500 else "upstream_4xx"
        if scope is RetryScope.NOWHERE:
            assignment.succeeded()
            return StageFailed(FailedTry(reason, scope, (worker,)), answer=answer)
        shown = "" if is_error_object else " without an error object"
        assignment.failed(self._clock.now_s(), f"answered {status}{shown}", proven=False)
        return StageFailed(FailedTry(reason, scope, (worker,), unproven=assignment), answer=answer)


class RoundTrip:
    """One call of a worker, as an async context manager; a generator's would cost ten times as much."""

    __slots__ = ("_assignment", "_body", "_call", "_client", "_lease", "_response")

    def __init__(
        self,
        client: UpstreamClient,
        call: CompletionCall,
        assignment: LiveAssignment,
        body: bytes,
        lease: KvLease | None,
    ) -> None:
        """Take what `UpstreamClient.open` takes."""
        self._client = client
        self._call = call
        self._assignment = assignment
        self._body = body
        self._lease = lease
        self._response: StreamingResponse | None = None

    async def __aenter__(self) -> StreamingResponse:
        """Send the request; return the response if it is a 200."""
        try:
            response = self._response = await self._client.send(self._call, self._assignment, self._body)
            if response.status != 200:
                await self._client.refused(self._call, response, self._assignment, self._lease)
        except BaseException as exc:
            self._end(exc)
            raise
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it, and say what an error of the block means for the worker."""
        self._end(exc)

    def _end(self, exc: BaseException | None) -> None:
        if self._response is not None:
            self._response.abort()
        if self._call.trace is not None:
            self._call.trace.answered(exc)
        if isinstance(exc, ErrorEvent):
            raise self._client.error(self._call, self._assignment, self._lease, exc.reply) from exc
        if isinstance(exc, UpstreamError):
            raise self._client.broken(self._assignment, exc) from exc


async def read_complete(response: StreamingResponse) -> bytes:
    """Return the body of a 200.

    Raises:
        UpstreamError: the body did not come whole.
    """
    return await response.read(limit_bytes=MAX_ANSWER_BYTES)
