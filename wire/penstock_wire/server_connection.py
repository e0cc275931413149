"""One accepted connection: parses requests, queues pipelined ones, guards limits, reports disconnects.

Used only by ``server``. Responses leave in the order of their requests: the next handler starts when the
response before it is complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools

from penstock_core.errors import ClientDisconnected, PenstockError
from penstock_core.logs import get_logger
from penstock_wire.limits import ServerLimits
from penstock_wire.messages import Request, Responder
from penstock_wire.problem import error_body

Handler = Callable[[Request, Responder], Awaitable[None]]
log = get_logger(__name__)

_IDLE, _HEAD, _BODY, _REFUSING = range(4)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Chosen: a client that is told 413 may still be sending; closing at once would reset the connection and
# lose the answer, so what arrives is thrown away for this long (seconds) and this much (bytes).
_LINGER_S = 2.0
_LINGER_BYTES = 4 * 1024 * 1024
# Chosen: more pipelined requests than any client keeps outstanding; beyond it the socket is not read.
_MAX_PIPELINED = 32


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that no handler sees."""

    status: int
    code: str
    message: str


class _Refused(Exception):  # noqa: N818 - stops the parser; never leaves this module
    """Raised inside a parser callback."""


class Shared:
    """What the connections of one server have in common."""

    __slots__ = ("closing", "connections", "date_line", "handler", "limits", "loop", "on_empty", "tasks")

    def __init__(self, handler: Handler, limits: ServerLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.handler = handler
        self.limits = limits
        self.loop = loop
        self.connections: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.date_line = b""
        self.closing = False
        self.on_empty: asyncio.Event = asyncio.Event()


class ServerConnection(asyncio.Protocol):
    """Protocol of one accepted socket."""

    __slots__ = (
        "_body",
        "_current",
        "_drained_bytes",
        "_expects_continue",
        "_head_bytes",
        "_head_is_new",
        "_headers",
        "_parser",
        "_part_bytes",
        "_peer",
        "_phase",
        "_queue",
        "_queued_bytes",
        "_reading_paused",
        "_refusal",
        "_request",
        "_shared",
        "_since_s",
        "_stalled_since_s",
        "_transport",
        "_url",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._peer = ""
        self._phase = _IDLE
        self._since_s = 0.0
        self._stalled_since_s: float | None = None
        self._queue: deque[Request | Refusal] = deque()
        self._queued_bytes = 0
        self._current: Responder | None = None
        self._refusal: Refusal | None = None
        self._reading_paused = False
        self._drained_bytes = 0
        self._head_is_new = False
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._part_bytes = 0  # of the header fields, then of the body
        self._head_bytes = 0
        self._expects_continue = False

    # ------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept, or answer 503 when the server is full."""
        shared = self._shared
        # uvloop's transport is one by its methods, not by inheritance.
        self._transport = transport = cast("asyncio.Transport", transport)
        high = shared.limits.write_high_bytes
        transport.set_write_buffer_limits(high=high, low=high // 4)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if peer else ""
        self._since_s = shared.loop.time()
        shared.connections.add(self)
        bound = shared.limits.max_connections
        if len(shared.connections) > bound:
            self._refuse(Refusal(503, "too_many_connections", f"{bound} connections are open; retry later"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Tell the handler under way; forget requests that wait."""
        shared = self._shared
        shared.connections.discard(self)
        self._queue.clear()
        self._transport = None
        self._parser = None
        current, self._current = self._current, None
        if current is not None:
            current.connection_lost()
        if not shared.connections:
            shared.on_empty.set()

    def eof_received(self) -> bool:
        """Treat the client's end as its departure: a half-open client cannot be told from a closed one."""
        if self._current is not None and self._transport is not None:
            self._transport.abort()
        return False

    def pause_writing(self) -> None:
        """Start the stall clock and pause the response under way."""
        self._stalled_since_s = self._shared.loop.time()
        if self._current is not None:
            self._current.writing_paused()

    def resume_writing(self) -> None:
        """Stop the stall clock; go on with the response, or with the next request."""
        self._stalled_since_s = None
        if self._current is not None:
            self._current.writing_resumed()
        else:
            self._next()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; complete requests are queued by its callbacks."""
        if self._phase == _REFUSING:
            self._drained_bytes += len(data)
            if self._drained_bytes > _LINGER_BYTES and self._transport is not None:
                self._transport.abort()
            return
        if self._phase == _BODY:
            self._since_s = self._shared.loop.time()
        self._head_is_new = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as exc:
            self._refuse(self._refusal or Refusal(400, "malformed_request", f"not valid HTTP/1.1: {exc}"))
        # The read in which a head begins may also hold the requests before it: counted from the next on.
        if self._phase == _HEAD and not self._head_is_new:
            self._head_bytes += len(data)
            if self._head_bytes > self._shared.limits.max_header_bytes:
                self._refuse(self._header_refusal())
        if self._current is None and self._queue:
            self._next()

    # ------------------------------------------------------------------ parser callbacks

    def on_message_begin(self) -> None:
        """Start the header clock."""
        self._begin()
        self._phase = _HEAD
        self._head_is_new = True
        self._since_s = self._shared.loop.time()

    def on_url(self, url: bytes) -> None:
        """Collect the request target, which may come in pieces."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header; trailers are ignored."""
        if self._request is not None:
            return
        name = name.lower()
        headers = self._headers
        self._part_bytes += len(name) + len(value) + 4
        if self._part_bytes + len(self._url) > self._shared.limits.max_header_bytes:
            self._stop(self._header_refusal())
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        """Check what the headers promise, before any body is read."""
        self._part_bytes = 0
        parser, headers = self._parser, self._headers
        if parser.should_upgrade():
            return  # comes again without the offer, see _ignore_upgrade
        method = parser.get_method().decode("latin-1")
        request = Request(method, self._url, headers, peer=self._peer)
        request.http_1_0 = parser.get_http_version() == "1.0"
        self._request = request
        if not request.http_1_0 and b"host" not in headers:
            self._stop(Refusal(400, "missing_host", "header host is required by HTTP/1.1; add it"))
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._shared.limits.max_body_bytes:
            self._stop(self._body_refusal())
        expect = headers.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                self._stop(Refusal(417, "expectation_failed", "header expect: only 100-continue is known"))
            self._expects_continue = not request.http_1_0
        self._phase = _BODY
        # With a response under way its bytes must not be mixed with these; the client sends anyway then.
        if self._expects_continue and self._current is None and not self._queue and self._transport:
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Collect body bytes up to the bound."""
        self._part_bytes += len(body)
        if self._part_bytes > self._shared.limits.max_body_bytes:
            self._stop(self._body_refusal())
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Queue the request."""
        request = self._request
        if request is None:
            return
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        request.keep_alive = self._parser.should_keep_alive()
        self._phase = _IDLE
        self._since_s = self._shared.loop.time()
        self._queue.append(request)
        self._queued_bytes += self._part_bytes
        self._begin()
        if len(self._queue) > _MAX_PIPELINED or self._queued_bytes > self._shared.limits.max_body_bytes:
            self._pause_reading()

    # ------------------------------------------------------------------ responses in order

    def response_head(self) -> bytes:
        """Return the date header, refreshed by the server's sweep."""
        return self._shared.date_line

    def response_over(self, responder: Responder) -> None:
        """Close, or go on with the next request."""
        self._current = None
        self._since_s = self._shared.loop.time()
        transport = self._transport
        if transport is None:
            return
        if not responder.keep_alive:
            self._queue.clear()
            transport.close()
        elif self._queue:
            self._shared.loop.call_soon(self._next)
        elif self._shared.closing:
            transport.close()

    def _next(self) -> None:
        transport = self._transport
        if (
            self._current is not None
            or not self._queue
            or transport is None
            or transport.is_closing()
            or self._stalled_since_s is not None
        ):
            return
        item = self._queue.popleft()
        if isinstance(item, Refusal):
            self._answer_refusal(transport, item)
            return
        self._queued_bytes -= len(item.body)
        if self._reading_paused and len(self._queue) <= _MAX_PIPELINED // 2:
            self._reading_paused = False
            transport.resume_reading()
        shared = self._shared
        responder = Responder(self, transport, item)
        if shared.closing:
            responder.keep_alive = False
        self._current = responder
        task = shared.loop.create_task(_answer(shared.handler, item, responder))
        shared.tasks.add(task)
        task.add_done_callback(shared.tasks.discard)

    # ------------------------------------------------------------------ refusals and limits

    def _header_refusal(self) -> Refusal:
        bound = self._shared.limits.max_header_bytes
        return Refusal(431, "headers_too_large", f"request line and headers exceed {bound} bytes; send fewer")

    def _body_refusal(self) -> Refusal:
        bound = self._shared.limits.max_body_bytes
        return Refusal(413, "body_too_large", f"request body exceeds {bound} bytes; send a shorter one")

    def _stop(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _Refused

    def _refuse(self, refusal: Refusal) -> None:
        """Answer after the responses under way, then close; what still arrives is thrown away."""
        self._phase = _REFUSING
        self._since_s = self._shared.loop.time()
        self._begin()
        self._queue.append(refusal)
        self._next()

    def _answer_refusal(self, transport: asyncio.Transport, refusal: Refusal) -> None:
        request = Request("GET", b"/", {}, peer=self._peer)
        request.keep_alive = False
        kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
        # Its own owner: completing it must end our sending side only, so that the client can read it.
        responder = Responder(_NO_OWNER, transport, request)
        responder.send(refusal.status, error_body(refusal.message, kind=kind, code=refusal.code))
        self._since_s = self._shared.loop.time()
        if transport.can_write_eof():
            transport.write_eof()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers an upgrade (h2c, websocket) as plain HTTP/1.1, as RFC 9110 7.8 allows.

        The parser gives up the body of such a request, so its head is given to a new parser without the
        offer, followed by the bytes behind the head.
        """
        method: bytes = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(Refusal(400, "connect_unsupported", "method CONNECT: this server is no proxy"))
            return
        version = self._parser.get_http_version().encode()
        headers = [
            b"%b: %b\r\n" % item
            for item in self._headers.items()
            if item[0] not in {b"upgrade", b"connection"}
        ]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(headers))
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def sweep(self, now_s: float) -> None:
        """Apply the time limits; called by the server's one timer."""
        limits, transport = self._shared.limits, self._transport
        if transport is None:
            return
        if self._stalled_since_s is not None:
            if now_s - self._stalled_since_s > limits.write_stall_s:
                log.debug("client cut off: it does not read", peer=self._peer)
                transport.abort()
            return
        age_s = now_s - self._since_s
        if transport.is_closing():
            # What was written last still waits for a client that does not read.
            if age_s > limits.write_stall_s:
                transport.abort()
            return
        self._sweep_reading(age_s, limits, transport)

    def _sweep_reading(self, age_s: float, limits: ServerLimits, transport: asyncio.Transport) -> None:
        if self._phase == _REFUSING:
            if age_s > _LINGER_S and not self._queue:
                transport.abort()
        elif self._phase == _HEAD:
            bound = limits.header_timeout_s
            if age_s > bound:
                self._refuse(Refusal(408, "header_timeout", f"headers took longer than {bound} s"))
        elif self._phase == _BODY:
            bound = limits.body_timeout_s
            if age_s > bound and not self._reading_paused:
                self._refuse(Refusal(408, "body_timeout", f"no body bytes came for {bound} s"))
        elif self._current is None and not self._queue and age_s > limits.keep_alive_s:
            transport.close()

    def close_when_idle(self) -> None:
        """Close now if nothing is under way; else the response under way is the last."""
        if self._transport is None:
            return
        if self._current is None and not self._queue and self._phase == _IDLE:
            self._transport.close()
        elif self._current is not None and not self._current.started:
            self._current.keep_alive = False

    def abort(self) -> None:
        """Cut the connection off."""
        if self._transport is not None:
            self._transport.abort()


class _NoOwner:
    def response_head(self) -> bytes:
        return b""

    def response_over(self, responder: Responder) -> None:
        """Leave the connection to linger."""


_NO_OWNER = _NoOwner()


async def _answer(handler: Handler, request: Request, responder: Responder) -> None:
    """Run a handler; whatever it raises becomes an answer or a visible break, never silence."""
    try:
        await handler(request, responder)
    except ClientDisconnected:
        log.debug("client gone", path=request.path)
    except asyncio.CancelledError:
        responder.abort()
        raise
    except Exception as exc:
        message = str(exc) if isinstance(exc, PenstockError) else "internal error; see the server's log"
        log.exception("request failed", method=request.method, path=request.path)
        _fail(responder, message)
    else:
        if not responder.closed:
            log.error("handler returned before its response was complete", path=request.path)
            _fail(responder, "the handler gave no answer")


def _fail(responder: Responder, message: str) -> None:
    if responder.closed:
        return
    if responder.started:
        responder.abort()
    else:
        responder.send(500, error_body(message, kind="server_error", code="internal_error"))
