"""One accepted connection: queues parsed requests, applies limits and timeouts, and reports disconnects.

Responses are sent in the order of their requests. Every request ends in a response or a closed connection, whatever
its handler does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from penstock.core.errors import ClientDisconnected, PenstockError
from penstock.core.http.intake import Intake, IntakeRefusal
from penstock.core.http.limits import MAX_LINGERING, ServerLimits
from penstock.core.http.messages import Request, Responder
from penstock.core.http.request_reader import ReaderPhase, RequestReader
from penstock.core.logs import get_logger

Handler = Callable[[Request, Responder], Awaitable[None]]
"""Async function that handles a request and writes its response."""
log = get_logger(__name__)

_MAPPED = "::ffff:"
"""Prefix of an IPv4 address in IPv6 form (RFC 4291, section 2.5.5.2)."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Chosen: a client that gets 413 may still be sending; closing immediately would reset the connection and lose
# the response. So arriving data is discarded for at most this many seconds and bytes.
_LINGER_S = 2.0
_LINGER_BYTES = 4 * 1024 * 1024
# Chosen: more pipelined requests than any client keeps outstanding.
_MAX_PIPELINED = 32
# Chosen: maximum wall-clock seconds for the request on a reserve connection; a probe is sent in one packet.
_RESERVE_S = 2.0


@dataclass(slots=True, eq=False)
class ServerContext:
    """Shared state of the connections of one server.

    Attributes:
        handler: Handler of requests.
        intake: Limits and buffered bytes of all listeners of the process.
        is_vital: Returns whether a request, such as a probe, must be served even if all connections are in use.
        wants_body: Returns whether a request's body should be read.
        loop: The event loop.
        bound: Maximum number of connections, without those that are reserved for vital requests.
        refused: Number of connections rejected since the last log line about that.
        connections: Open connections.
        responders: Responders of requests whose handlers have not returned.
        date_line: Date header line of all responses.
        draining_since_s: Time by the loop's clock since when each connection ends after its next response; None if
            the server does not drain.
        closing_since_s: Time by the loop's clock since when the server accepts no more connections; None if it does.
        on_empty: Event that is set when the last connection has ended.
    """

    handler: Handler
    intake: Intake
    is_vital: Callable[[Request], bool]
    wants_body: Callable[[Request], bool]
    loop: asyncio.AbstractEventLoop = field(init=False)
    bound: int = 0
    refused: int = 0
    connections: set[ServerConnection] = field(default_factory=set)
    responders: set[Responder] = field(default_factory=set)
    date_line: bytes = b""
    draining_since_s: float | None = None
    closing_since_s: float | None = None
    on_empty: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def limits(self) -> ServerLimits:
        """Limits of every listener."""
        return self.intake.limits


class ServerConnection(asyncio.Protocol):
    """Asyncio protocol of one client's connection: parses and limits requests, and passes them to the handler one after another."""

    def __init__(self, shared: ServerContext) -> None:
        self._shared = shared
        self._transport: asyncio.Transport | None = None
        self._reader: RequestReader | None = None
        self._peer = ""
        self._since_s = (
            0.0  # start of the arriving request, or else of the current wait, such as since the last response
        )
        self._read_s = 0.0
        self._stalled_since_s: float | None = None
        self._queue: deque[Request | IntakeRefusal] = deque()
        self._queued_bytes = 0
        self._current_bytes = 0
        self._held_bytes = 0
        self._current: Responder | None = None
        self._is_refusing = False
        self._is_reserve = False
        self._left: int | None = (
            None  # responses until the last one of a draining connection; None if not determined yet
        )
        self._drained_bytes = 0
        self._unsent_bytes = -1  # at the last sweep of a closing server; `_progress_s` is the time since when the number has not changed
        self._progress_s = 0.0

    # ------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection; if the server is full, accept only a vital request or send 503."""
        shared = self._shared
        # uvloop's transport has the methods of asyncio.Transport but does not inherit from it.
        self._transport = transport = cast("asyncio.Transport", transport)
        high = shared.limits.write_high_bytes
        transport.set_write_buffer_limits(high=high, low=high // 4)
        peer = transport.get_extra_info("peername")
        # A dual-stack socket shows an IPv4 client with an IPv6 address.
        self._peer = f"{peer[0].removeprefix(_MAPPED)}:{peer[1]}" if peer else ""
        self._reader = RequestReader(
            shared.intake,
            peer=self._peer,
            on_request=self._take,
            on_expect=self._permit_body,
            wants_body=shared.wants_body,
            hold=self._hold,
        )
        self._since_s = shared.loop.time()
        shared.connections.add(self)
        over = len(shared.connections) - shared.bound
        self._is_reserve = over > 0
        beyond = over - shared.limits.reserve_connections
        if beyond > MAX_LINGERING:
            shared.refused += 1
            transport.abort()
        elif beyond > 0:
            self._refuse(self._full())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Notify the current handler, and drop waiting requests."""
        shared = self._shared
        shared.connections.discard(self)
        self._queue.clear()
        self._transport = None
        self._end_reading()
        self._release(self._held_bytes)
        current, self._current = self._current, None
        if current is not None:
            current.connection_lost()
        if not shared.connections:
            shared.on_empty.set()

    def eof_received(self) -> bool:
        """Treat the end of the client's data as a disconnect: a half-closed connection cannot be distinguished from a closed one."""
        if self._current is not None and self._transport is not None:
            self._transport.abort()
        return False

    def pause_writing(self) -> None:
        """Start the write-stall timeout and pause the current response."""
        self._stalled_since_s = self._shared.loop.time()
        if self._current is not None:
            self._current.writing_paused()

    def resume_writing(self) -> None:
        """Stop the write-stall timeout; resume the current response, or start the next request."""
        self._stalled_since_s = None
        if self._current is not None:
            self._current.writing_resumed()
        else:
            self._next()

    def data_received(self, data: bytes) -> None:
        """Parse the data; requests that are complete are queued, and the first one is passed to the handler."""
        if self._is_refusing:
            self._drained_bytes += len(data)
            if self._drained_bytes > _LINGER_BYTES and self._transport is not None:
                self._transport.abort()
            return
        reader = self._reader
        if reader is None:
            return
        self._read_s = self._shared.loop.time()
        begun = reader.begun
        refusal = reader.feed(data)
        if reader.begun != begun:
            self._since_s = self._read_s
        if refusal is not None:
            self._refuse(refusal)
        elif self._current is None and self._queue:
            self._next()

    def _end_reading(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._release(reader.held_bytes)
            reader.close()

    def _release(self, count: int) -> None:
        self._held_bytes -= count
        self._shared.intake.release(count)

    # ------------------------------------------------------------------ called by the reader

    def _hold(self, count: int) -> None:
        self._held_bytes += count
        self._shared.intake.hold(count)

    def _take(self, request: Request) -> IntakeRefusal | None:
        waiting_bytes = self._queued_bytes + len(request.body)
        if self._queue and (
            len(self._queue) >= _MAX_PIPELINED or waiting_bytes > self._shared.limits.max_body_bytes
        ):
            message = f"over {_MAX_PIPELINED} requests, or a longest body, wait on this connection; send fewer at once"
            return IntakeRefusal(503, "too_many_pipelined", message)
        self._queue.append(request)
        self._queued_bytes = waiting_bytes
        return None

    def _permit_body(self) -> None:
        # While a response is being sent, this must not be inserted; the client sends its body anyway after a while.
        if self._current is None and not self._queue and self._transport is not None:
            self._transport.write(_CONTINUE)

    # ------------------------------------------------------------------ responses in order

    def response_head(self) -> bytes:
        """Return the date header line, which the server's sweep refreshes."""
        return self._shared.date_line

    def response_over(self, responder: Responder) -> None:
        """Continue with the next request, or close the connection if the response announced its end."""
        self._current = None
        self._release(self._current_bytes)
        shared, transport = self._shared, self._transport
        if not responder.keep_alive or not self._is_arriving:
            self._since_s = shared.loop.time()
        if transport is None:
            return
        if self._is_refusing and not self._queue:
            self._linger(transport)
        elif not responder.keep_alive:
            self._end(transport)
        elif self._queue:
            shared.loop.call_soon(self._next)

    def _end(self, transport: asyncio.Transport) -> None:
        """Close after the last response, in a way that the client can still read it."""
        has_more = bool(self._queue) or self._is_arriving
        self._queue.clear()
        if has_more and self._shared.draining_since_s is not None:
            # Closing a socket with unread requests would reset it, and the client might lose the last response.
            self._is_refusing = True
            self._end_reading()
            self._linger(transport)
        else:
            transport.close()

    @property
    def _is_arriving(self) -> bool:
        """Whether a request has arrived partially."""
        return self._reader is not None and self._reader.phase is not ReaderPhase.IDLE

    def given_away(self) -> None:
        """Stop managing the connection, which another protocol has taken over."""
        self._current = None
        self._release(self._current_bytes)
        self.connection_lost(None)

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
        if isinstance(item, IntakeRefusal):
            self._answer_refusal(transport, item)
            return
        self._current_bytes = len(item.body)
        self._queued_bytes -= self._current_bytes
        shared = self._shared
        if self._is_reserve and not shared.is_vital(item):
            self._queue.clear()
            self._refuse(self._full())
            return
        responder = Responder(self, transport, item)
        if self._is_reserve or (shared.draining_since_s is not None and self._is_last()):
            responder.keep_alive = False
        self._current = responder
        responder.task = shared.loop.create_task(_answer(shared, item, responder))
        shared.responders.add(responder)

    def _is_last(self) -> bool:
        """Return whether the response that begins now on a draining connection is its last.

        Requests that had arrived, at least partially, when the first such response began are answered as well.
        """
        if self._left is None:
            self._left = 1 + len(self._queue) + self._is_arriving
        self._left -= 1
        return self._left <= 0

    def drain(self) -> None:
        """Announce the end of the connection with the next response whose head is not sent yet, and close after that response."""
        current = self._current
        if current is not None and not current.started and self._is_last():
            current.keep_alive = False

    # ------------------------------------------------------------------ refusals and limits

    def _full(self) -> IntakeRefusal:
        self._shared.refused += 1
        return self._shared.intake.full_refusal(self._shared.bound)

    def _refuse(self, refusal: IntakeRefusal | Request) -> None:
        """Send a refusal after the current responses, then close; data that still arrives is discarded."""
        self._is_refusing = True
        self._since_s = self._shared.loop.time()
        self._end_reading()
        self._queue.append(refusal)
        self._next()

    def _answer_refusal(self, transport: asyncio.Transport, refusal: IntakeRefusal) -> None:
        request = Request("GET", b"/", {}, peer=self._peer)
        request.keep_alive = False
        # The responder has no owner, so that completing it ends only the sending side and the client can read it.
        responder = Responder(None, transport, request)
        responder.send(refusal.status, refusal.body, headers=refusal.headers)
        self._linger(transport)

    def _linger(self, transport: asyncio.Transport) -> None:
        """Close only the sending side, so that a client that is still sending can read its response; the sweep closes the rest."""
        self._since_s = self._shared.loop.time()
        if transport.can_write_eof():
            transport.write_eof()

    def extend_deadlines(self, lag_s: float) -> None:
        """Extend the timeouts by ``lag_s`` seconds for which this process's event loop was blocked."""
        self._since_s += lag_s
        self._read_s += lag_s
        self._progress_s += lag_s
        if self._stalled_since_s is not None:
            self._stalled_since_s += lag_s

    def sweep(self, now_s: float) -> None:
        """Apply the timeouts at ``now_s`` by the event loop's clock; the server's timer calls it."""
        transport = self._transport
        if transport is None:
            return
        if self._stalled_since_s is not None:
            if self._is_stuck(now_s, self._stalled_since_s, transport):
                log.debug("client cut off: it does not read", peer=self._peer)
                transport.abort()
            return
        age_s = now_s - self._since_s
        if transport.is_closing():
            # Unsent data waits for a client that does not read.
            if self._is_stuck(now_s, self._since_s, transport):
                transport.abort()
        elif self._is_refusing:
            if age_s > _LINGER_S and not self._queue and self._current is None:
                transport.abort()
        elif self._reader is not None:
            self._sweep_reading(now_s, age_s, self._reader.phase, transport)

    def _is_stuck(self, now_s: float, since_s: float, transport: asyncio.Transport) -> bool:
        """Return whether the client has not read for too long; a shorter limit applies while the server closes."""
        limits = self._shared.limits
        if self._shared.closing_since_s is not None:
            unsent_bytes = transport.get_write_buffer_size()
            if unsent_bytes != self._unsent_bytes:
                self._unsent_bytes, self._progress_s = unsent_bytes, now_s
            if now_s - self._progress_s > limits.closing_s:
                return True
        return now_s - since_s > limits.write_stall_s

    def _sweep_reading(
        self, now_s: float, age_s: float, phase: ReaderPhase, transport: asyncio.Transport
    ) -> None:
        limits, closing_since_s = self._shared.limits, self._shared.closing_since_s
        if phase is ReaderPhase.IDLE:
            if self.is_idle and self._is_unused(now_s, age_s):
                transport.close()
        elif self._is_reserve and age_s > _RESERVE_S:
            self._refuse(self._full())
        elif closing_since_s is not None and now_s - max(closing_since_s, self._read_s) > limits.closing_s:
            self._refuse(
                IntakeRefusal(503, "shutting_down", "the server stops before the request has arrived; retry")
            )
        elif phase is ReaderPhase.HEAD and age_s > limits.header_timeout_s:
            self._time_out("header_timeout", f"headers took longer than {limits.header_timeout_s} s")
        elif age_s > limits.receive_timeout_s:
            self._refuse(self._shared.intake.late_refusal())
        elif phase is ReaderPhase.BODY and now_s - self._read_s > limits.body_timeout_s:
            self._time_out("body_timeout", f"no body bytes came for {limits.body_timeout_s} s")

    def _time_out(self, code: str, message: str) -> None:
        self._refuse(IntakeRefusal(408, code, message))

    def _is_unused(self, now_s: float, age_s: float) -> bool:
        """Return whether an idle connection has waited too long for a request; during a drain the time since its start also counts."""
        limits, since_s = self._shared.limits, self._shared.draining_since_s
        if age_s > (_RESERVE_S if self._is_reserve else limits.keep_alive_s):
            return True
        return since_s is not None and min(age_s, now_s - since_s) > limits.drain_idle_s

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no request, complete or partial, that is not answered."""
        return self._current is None and not self._queue and not self._is_arriving and not self._is_refusing

    def close(self) -> None:
        """Close an idle connection; does nothing if it is closed."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Abort the connection; does nothing if it is closed."""
        if self._transport is not None:
            self._transport.abort()


async def _answer(shared: ServerContext, request: Request, responder: Responder) -> None:
    """Run a handler; however it ends, the client gets a response or sees a broken connection."""
    try:
        await shared.handler(request, responder)
    except ClientDisconnected:
        log.debug("client gone", path=request.path)
    except Exception as exc:
        log.exception("request failed", method=request.method, path=request.path)
        _fail(responder, exc)
    else:
        if not responder.closed:
            log.error("handler returned before its response was complete", path=request.path)
            _fail(responder, None)
    finally:
        shared.responders.discard(responder)
        responder.task = None  # break the reference cycle
        responder.abort()


def _fail(responder: Responder, error: Exception | None) -> None:
    if responder.closed or responder.started:
        return
    try:
        message = "the handler gave no answer"
        if error is not None:
            known = isinstance(error, PenstockError)
            message = str(error) if known else "internal error; see the server's log"
        responder.send(500, IntakeRefusal(500, "internal_error", message).body)
    except Exception:  # the caller then closes the connection
        log.exception("request could not be answered")
