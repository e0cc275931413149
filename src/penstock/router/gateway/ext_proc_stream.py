"""One request at a gateway: connects Envoy's messages to the router's application.

To the application it is a request like any other, whose response comes from the worker through Envoy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Final

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

from penstock.core.errors import StreamBroken, UpstreamError, UpstreamTimeout
from penstock.core.http.intake import FIELD_BYTES, Intake, IntakeRefusal
from penstock.core.http.limits import Timeouts
from penstock.core.http.messages import EVENT_STREAM, JSON, Headers, Request, Responder, error_body
from penstock.core.http.own_lag import PatientTimeout, PatientTimer
from penstock.core.http.streaming import StreamingResponse
from penstock.core.logs import get_logger
from penstock.router.gateway import messages

log = get_logger(__name__)

SUBSET: Final[ContextVar[frozenset[str] | None]] = ContextVar("gateway_subset", default=None)
"""Endpoints to which the present request may be sent; None allows all."""

_Handle = Callable[[Request, Responder], Awaitable[None]]


class GatewayStream:
    """Serves one stream of Envoy's external processing (ext_proc); each stream is one request of a client.

    Attributes:
        is_forwarded: Whether the request was sent to a worker, so that no other worker can be tried.
        is_broken: Whether the response to the client is incomplete.
        served: Endpoint (``host:port``) to which Envoy has sent the request; None if it has not reported it.
    """

    def __init__(self, intake: Intake) -> None:
        self.is_forwarded = False
        self.is_broken = False
        self.served: str | None = None
        self._intake = intake
        self._held_bytes = 0
        self._answers: asyncio.Queue[ProcessingResponse | None] = asyncio.Queue()
        self._answered: asyncio.Future[StreamingResponse] | None = None
        self._response: StreamingResponse | None = None
        self._responder: GatewayResponder | None = None
        self._has_request_trailers = False
        self._is_complete = False
        self._deadline: PatientTimer | None = None
        self._idle: PatientTimer | None = None
        self._idle_limit_s: float | None = None
        self._active_s = 0.0
        self._reads = asyncio.Event()
        self._reads.set()

    # ------------------------------------------------------------------ Envoy's side

    async def answers(self) -> AsyncIterator[ProcessingResponse]:
        """Yield the messages to Envoy, as they are put by `put`, until the request has ended."""
        while (answer := await self._answers.get()) is not None:
            yield answer

    async def run(
        self,
        requests: AsyncIterable[ProcessingRequest],
        handle: _Handle,
        wants_body: Callable[[Request], bool],
    ) -> None:
        """Process Envoy's messages until there are no more, while the application handles the request in a task.

        Args:
            requests: Messages from Envoy.
            handle: The application's request handler.
            wants_body: Returns whether the application reads a request's body.
        """
        task: asyncio.Task[None] | None = None
        try:
            stream = aiter(requests)
            request = await self._read_request(stream, wants_body)
            if request is not None:
                responder = self._responder = GatewayResponder(self, request)
                task = asyncio.create_task(_handle(handle, request, responder), name="gateway request")
                responder.task = task
                async for message in stream:
                    await self._reads.wait()
                    self._take_response(message)
        finally:
            self._left()
            for timer in (self._deadline, self._idle):
                if timer is not None:
                    timer.cancel()
            if task is not None:
                await asyncio.wait([task])
            self._intake.release(self._held_bytes)
            self._answers.put_nowait(None)

    async def _read_request(
        self, stream: AsyncIterator[ProcessingRequest], wants_body: Callable[[Request], bool]
    ) -> Request | None:
        """Return the request; None if it was answered already, or did not arrive completely."""
        first = await anext(stream, None)
        if first is None or first.WhichOneof("request") != "request_headers":
            return None
        SUBSET.set(messages.read_subset(first.metadata_context))
        request = _request(first.request_headers)
        problem = messages.unsupported_mode(first)
        if problem is not None:
            log.error("gateway misconfigured", problem=problem)
            self.answer(500, error_body(problem, kind="server_error", code="gateway_misconfigured"), JSON, ())
            return None
        head = first.request_headers.headers.headers
        head_bytes = sum(len(each.key) + len(each.raw_value or each.value) + FIELD_BYTES for each in head)
        refusal = self._intake.head_refusal(head_bytes, len(head))
        if refusal is not None:
            self._refuse(refusal)
            return None
        if first.request_headers.end_of_stream or not wants_body(request):
            return request
        refusal = self._intake.length_refusal(request.headers)
        if refusal is None:
            try:
                async with PatientTimeout(self._intake.limits.receive_timeout_s):
                    refusal = await self._read_body(stream, request)
            except TimeoutError:
                refusal = self._intake.late_refusal()
        if refusal is not None:
            self._refuse(refusal)
            return None
        return request if self._is_complete else None

    async def _read_body(
        self, stream: AsyncIterator[ProcessingRequest], request: Request
    ) -> IntakeRefusal | None:
        """Read the request's body, which may end before it is complete; return the rejection if a limit is exceeded, else None."""
        body, intake = bytearray(), self._intake
        async for message in stream:
            kind, part = message.WhichOneof("request"), message.request_body
            if kind not in {"request_body", "request_trailers"}:
                break  # an answer of Envoy's own, as to a client that is too slow
            self._has_request_trailers = kind == "request_trailers"
            body += part.body
            self._held_bytes += len(part.body)
            intake.hold(len(part.body))
            refusal = intake.body_refusal(len(body))
            if refusal is not None:
                return refusal
            if part.end_of_stream or self._has_request_trailers:
                request.body = bytes(body)
                self._is_complete = True
                break
        return None

    def _refuse(self, refusal: IntakeRefusal) -> None:
        self.answer(refusal.status, refusal.body, JSON, refusal.headers)

    def _take_response(self, message: ProcessingRequest) -> None:
        kind, response = message.WhichOneof("request"), self._response
        self._active_s = time.monotonic()
        if kind == "response_headers" and not self.is_forwarded:
            self._left()  # Envoy has answered by itself
            self.abort()
        elif kind == "response_headers":
            self.served = messages.read_served(message.metadata_context)
            self._begin(message.response_headers)
        elif response is None or response.ended:
            return
        elif kind == "response_body":
            if message.response_body.body:
                response.deliver(message.response_body.body)
            if message.response_body.end_of_stream:
                response.finish()
        elif kind == "response_trailers":
            if self._responder is not None:
                self._responder.has_trailers = True
            response.finish()

    def _begin(self, head: HttpHeaders) -> None:
        response = self._response = StreamingResponse(self)
        response.headers = messages.read_headers(head.headers)
        status = response.headers.get(b":status", b"")
        response.status = int(status) if status.isdigit() else 0
        if head.end_of_stream:
            response.finish()
        elif self._idle_limit_s is not None:
            self._idle = PatientTimer(self._idle_limit_s, self._check_idle_time)
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(response)

    def _check_idle_time(self) -> None:
        """End a response that was silent for the idle limit; a response whose reading is paused does not count as silent."""
        limit_s, response = self._idle_limit_s, self._response
        if limit_s is None or response is None or response.ended:
            return
        now_s = time.monotonic()
        if not self._reads.is_set():
            self._active_s = now_s
        left_s = self._active_s + limit_s - now_s
        if left_s > 0:
            self._idle = PatientTimer(left_s, self._check_idle_time)
        else:
            text = f"{self.served or 'the worker'} fell silent (idle limit {limit_s} s)"
            self._fail(UpstreamTimeout(text, phase="idle"))

    def _left(self) -> None:
        """Record that Envoy has closed the stream: the client has disconnected, or the worker has broken off."""
        if self._responder is not None:
            self._responder.connection_lost()
        self._fail(StreamBroken("the gateway closed the stream before the answer was complete"))

    def _fail(self, error: UpstreamError) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
        if self._response is not None and not self._response.ended:
            self._response.fail(error)

    # ------------------------------------------------------------------ the application's side

    async def forward(
        self, endpoint: str, headers: Headers, body: bytes, timeouts: Timeouts
    ) -> StreamingResponse:
        """Send the request through Envoy to a worker, and return the response, whatever its status.

        Args:
            endpoint: Endpoint (``host:port``) of the worker.
            headers: Headers to set.
            body: Body of the request.
            timeouts: Limits of the response.

        Raises:
            StreamBroken: Envoy closed the stream.
            UpstreamTimeout: no response came within the first-byte timeout. The idle and total timeouts can end the
                response later.
        """
        loop = asyncio.get_running_loop()
        self.is_forwarded = True
        self._answered = loop.create_future()
        self._idle_limit_s = timeouts.idle_s
        if timeouts.total_s is not None:
            text = f"{endpoint} did not finish (total limit {timeouts.total_s} s)"
            self._deadline = PatientTimer(
                timeouts.total_s, lambda: self._fail(UpstreamTimeout(text, phase="total"))
            )
        for each in messages.picked(endpoint, headers, body, has_trailers=self._has_request_trailers):
            self._answers.put_nowait(each)
        try:
            async with PatientTimeout(timeouts.first_byte_s):
                return await self._answered
        except TimeoutError as exc:
            text = f"{endpoint} sent no response (first_byte limit {timeouts.first_byte_s} s)"
            raise UpstreamTimeout(text, phase="first_byte") from exc

    def put(self, answer: ProcessingResponse) -> None:
        """Send the message ``answer`` to Envoy on the request's stream: `answers` yields it next."""
        self._answers.put_nowait(answer)

    def answer(self, status: int, body: bytes, content_type: str, headers: Headers) -> None:
        """Send a complete response of the router to the client, in place of the worker's response.

        Args:
            status: HTTP status.
            body: Body of the response.
            content_type: Value of the Content-Type header.
            headers: Further headers, as pairs of name and value.
        """
        self.put(messages.immediate(status, body, content_type, headers))

    # ------------------------------------------------------------------ what a response and a responder ask for

    def pause_reading(self) -> None:
        """Stop reading the worker's response from Envoy until `resume_reading` is called, so that Envoy stops sending, too."""
        self._reads.clear()

    def resume_reading(self) -> None:
        """Continue to read the worker's response from Envoy, after `pause_reading`."""
        self._reads.set()

    def abort(self) -> None:
        """End the stream; Envoy then resets the client's stream."""
        self._reads.set()
        self._answers.put_nowait(None)

    def response_head(self) -> bytes:
        """Return empty bytes: Envoy writes the head (status line and headers) of the response itself."""
        return b""

    def response_over(self, responder: Responder) -> None:  # noqa: ARG002 - the protocol's signature
        """End the stream after the data that were written."""
        self._answers.put_nowait(None)

    def given_away(self) -> None:
        """Do nothing; called when a connection changes from HTTP to another protocol, which a stream of Envoy cannot."""


class GatewayResponder(Responder):
    """Writes a response through Envoy.

    Attributes:
        stream: The request's stream.
        has_trailers: Whether the worker's response ended with trailers.
    """

    __slots__ = ("has_trailers", "stream")

    def __init__(self, stream: GatewayStream, request: Request) -> None:
        super().__init__(stream, asyncio.Transport(), request)
        self.stream = stream
        self.has_trailers = False

    def send(self, status: int, body: bytes, *, content_type: str = JSON, headers: Headers = ()) -> None:
        """Send a complete response: the worker's own, or a response of the router in place of it.

        Args:
            status: HTTP status.
            body: Body of the response.
            content_type: Value of the Content-Type header, for a response of the router.
            headers: Headers to add, as pairs of name and value.
        """
        if self.disconnected:
            return
        self.status = status
        if status == 200 and self.stream.is_forwarded:
            self.stream.put(messages.head(headers))
            self._end(body)
        else:
            self.stream.answer(status, body, content_type, headers)
        self._finish()

    def start(self, status: int, *, content_type: str = EVENT_STREAM, headers: Headers = ()) -> None:  # noqa: ARG002 - the worker's own
        """Relay the status and headers of the worker's response to the client, with ``headers`` added.

        ``status`` is that of the worker's response; ``content_type`` is not used, because the worker's own is relayed.
        """
        if not self.disconnected:
            self.status = status
            self.stream.put(messages.head(headers))

    def write(self, data: bytes) -> None:
        """Send ``data``, the next bytes of the body, to the client; does nothing after the end of the response."""
        if data and not self.closed:
            self.stream.put(messages.chunk(data, is_last=False))

    @property
    def write_framed(self) -> None:
        """Always None, because bytes are never sent to Envoy with HTTP chunk framing."""

    def end(self) -> None:
        """Complete a started response; does nothing after the end."""
        if not self.closed:
            self._end(b"")
            self._finish()

    def break_off(self) -> None:
        """End after the data that were written, in a way that shows the client that the response is incomplete."""
        self.stream.is_broken |= not self.closed
        super().break_off()

    abort = break_off

    def _end(self, body: bytes) -> None:
        if self.has_trailers:
            self.write(body)
            self.stream.put(messages.trailers())
        else:
            self.stream.put(messages.chunk(body, is_last=True))


async def _handle(handle: _Handle, request: Request, responder: GatewayResponder) -> None:
    try:
        with suppress(asyncio.CancelledError):  # by the application itself, when the client has left
            await handle(request, responder)
    except Exception:
        log.exception("gateway request failed", path=request.path)
    finally:
        if not responder.closed:
            if not responder.started:
                responder.send(500, error_body("internal error", kind="server_error", code="internal_error"))
            responder.break_off()


def _request(head: HttpHeaders) -> Request:
    headers = messages.read_headers(head.headers)
    pseudo = {name: headers.pop(name) for name in tuple(headers) if name.startswith(b":")}
    target = pseudo.get(b":path", b"/")
    headers[b"host"] = pseudo.get(b":authority", b"")
    return Request(pseudo.get(b":method", b"GET").decode("latin-1"), target, headers, peer="gateway")
