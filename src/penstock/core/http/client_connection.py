"""One connection to an upstream server, and the response that is streamed over it.

No task or timer is started here. A read that consists of exactly one chunk, in the form that common servers send, is
passed to a relay unchanged, without the parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import httptools

from penstock.core.errors import StreamBroken, UpstreamConnectError, UpstreamError, UpstreamTimeout
from penstock.core.http.limits import Timeouts
from penstock.core.http.streaming import StreamingResponse

# Chosen: several times the longest event of a stream without logprobs; the table has 200 kB.
_LONGEST: Final = 4096
# A size line has at most 16 digits (64 bits), and CR LF.
_SIZE_LINE_BYTES: Final = 18

UNKNOWN: Final = -1
"""Value that means that the start of the next chunk is unknown."""


def _size_lines() -> tuple[bytes, ...]:
    never = bytes(_LONGEST)  # longer than every read that it is compared with
    lines = [never] * _LONGEST
    for size in range(1, _LONGEST):
        line = b"%x\r\n" % size
        length = len(line) + size + 2
        if length < _LONGEST:
            lines[length] = line
    return tuple(lines)


SIZE_LINES: Final = _size_lines()
"""Size line of a chunk, by the total length of the chunk with framing; for lengths that no chunk has, bytes longer
than any read."""


def next_chunk_at(data: bytes, at: int) -> int:
    """Return the offset of the first chunk after ``data``, relative to the end of ``data``.

    Args:
        data: Bytes of a chunked body.
        at: Offset in ``data`` at which a chunk begins.

    Returns:
        0 if ``data`` ends with a complete chunk, more if the rest of a chunk is missing, and -1 (`UNKNOWN`) if the line
        with a chunk's size is incomplete, has an extension, or is that of the last chunk.
    """
    end = len(data)
    while at < end:
        line_end = data.find(b"\r\n", at, at + _SIZE_LINE_BYTES)
        if line_end < 0:
            return UNKNOWN
        try:
            size = int(data[at:line_end], 16)
        except ValueError:
            return UNKNOWN
        if size == 0:
            return UNKNOWN
        at = line_end + 2 + size + 2
    return at - end


# Chosen: a worker's complete response head has a few hundred bytes; a peer that sends more is not a worker.
_MAX_HEAD_BYTES = 64 * 1024
# Chosen: Envoy allows 100; the limit keeps joining repeated headers cheap.
_MAX_FIELDS = 256
# Chosen: a chunk of one byte has 5 bytes of framing, or 12 with leading zeros. Framing (chunk sizes, extensions,
# trailers) beyond this multiple of the body is limited like a head.
_FRAMING_PER_BODY = 12
# RFC 9110 15. No request of this client offers to switch protocols.
_MIN_STATUS, _FIRST_FINAL_STATUS, _MAX_STATUS, _SWITCHING = 100, 200, 599, 101
_END_OF_HEAD = b"\r\n\r\n"


class Origin(NamedTuple):
    """Target of connections.

    Attributes:
        host: Host name or address.
        port: TCP port.
        is_tls: Whether connections use TLS.
    """

    host: str
    port: int
    is_tls: bool = False


class StaleConnection(StreamBroken):
    """The peer closed a kept-alive connection before it answered a byte."""


class ClientConnection(asyncio.Protocol):
    """Protocol of one upstream socket; processes one request at a time.

    CPython 3.11 stores up to 29 attributes directly in the object; with one more, each attribute access would need a
    dictionary look-up.

    Attributes:
        origin: Host, port and scheme of the upstream.
        reused: Whether the connection has served a request before.
        idle_since_s: Time at which the last request ended, by the event loop's clock.
    """

    def __init__(
        self,
        origin: Origin,
        loop: asyncio.AbstractEventLoop,
        on_free: Callable[[ClientConnection], None],
        on_closed: Callable[[ClientConnection], None],
    ) -> None:
        """Prepare; the event loop opens the connection.

        Args:
            origin: Host, port and scheme of the upstream.
            loop: The event loop.
            on_free: Called when the connection can be used for the next request.
            on_closed: Called when the connection is closed.
        """
        self._loop = loop
        self._on_free = on_free
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # what the parser calls, so that a chunk costs no Python frame
        self._parser: Any = None
        self._response: StreamingResponse | None = None
        self._started: asyncio.Future[StreamingResponse] | None = None
        self._timeouts = Timeouts()
        self._total_deadline_s: float | None = None
        self._sent_s = 0.0
        self._touched_s = 0.0
        self._reading_paused = False
        self._discarded = False
        self._reset()
        self.origin = origin
        self.reused = False
        self.idle_since_s = 0.0

    def _reset(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._repeats = 0
        self._head_bytes = 0
        self._excess_bytes = 0
        self._head_done = False
        self._informational = False
        self._until_close = False
        self._chunked = False
        self._next_chunk_at = UNKNOWN
        self._complete = False
        self._keep = False

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self._response is not None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def received_s(self) -> float:
        """Time at which the current request last received bytes, by the event loop's clock; 0 if it has received none."""
        return self._touched_s if self._touched_s > self._sent_s else 0.0

    @property
    def shortest_limit_s(self) -> float:
        """Shortest timeout of the current request, in seconds."""
        return self._timeouts.shortest_s()

    @property
    def name(self) -> str:
        """``host:port`` of the upstream, for messages."""
        return f"{self.origin.host}:{self.origin.port}"

    async def exchange(
        self, head: bytes, body: bytes, timeouts: Timeouts, total_deadline_s: float | None
    ) -> StreamingResponse:
        """Send a request and return its response as soon as the head (status line and headers) has arrived.

        Args:
            head: Complete request head: request line and headers.
            body: Request body.
            timeouts: Timeouts of the request.
            total_deadline_s: Time by the event loop's clock at which the total timeout expires; None if there is
                none.

        Raises:
            UpstreamConnectError: The peer had closed this connection; nothing was sent.
            StaleConnection: It was a kept-alive connection, and the peer closed it without answering a byte.
            StreamBroken: The connection ended or delivered invalid data before the head was complete.
            UpstreamTimeout: A timeout expired, in phase ``first_byte`` or ``total``.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise UpstreamConnectError(f"{self.name} closed the connection before it was used")
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._reset()
        self._timeouts, self._total_deadline_s = timeouts, total_deadline_s
        response = self._response = StreamingResponse(self)
        started: asyncio.Future[StreamingResponse] = self._loop.create_future()
        self._started = started
        self._sent_s = self._touched_s = self._loop.time()
        transport.write(head + body if body else head)
        try:
            return await started
        except asyncio.CancelledError:
            # If the response is already complete, the connection may belong to the next request; then nothing happens.
            response.abort()
            raise

    def pause_reading(self) -> None:
        """Stop reading from the socket; the idle timeout does not run meanwhile."""
        if self._transport is not None and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again; the idle timeout starts again."""
        if self._reading_paused:
            self._reading_paused = False
            self._touched_s = self._loop.time()
            if self._transport is not None:
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close the socket without notifying the current request."""
        self._response = None
        self._started = None
        if self._transport is not None:
            self._transport.abort()

    def discard(self) -> None:
        """Abandon a connection attempt, whether or not asyncio still calls this object for it."""
        self._discarded = True
        if self._transport is not None:
            self._transport.abort()
        self._on_closed(self)

    def cut(self, reason: str) -> None:
        """Fail the current request, if any, with ``reason``, and close the socket."""
        self._break(f"{self.name}: {reason}", None)

    def close(self) -> None:
        """Close an idle connection; does nothing if it is closed."""
        if self._transport is not None:
            self._transport.close()

    def extend_deadlines(self, lag_s: float) -> None:
        """Extend the timeouts by ``lag_s`` seconds for which this process's event loop was blocked."""
        self._sent_s += lag_s
        self._touched_s += lag_s
        if self._total_deadline_s is not None:
            self._total_deadline_s += lag_s

    def sweep(self, now_s: float) -> None:
        """Fail the current request if one of its timeouts has expired at ``now_s`` by the event loop's clock."""
        if self._response is None:
            return
        limits = self._timeouts
        if self._total_deadline_s is not None and now_s >= self._total_deadline_s:
            self._time_out("total", limits.total_s)
        elif not self._head_done:
            if limits.first_byte_s is not None and now_s - self._sent_s >= limits.first_byte_s:
                self._time_out("first_byte", limits.first_byte_s)
        elif (
            limits.idle_s is not None
            and not self._reading_paused
            and now_s - self._touched_s >= limits.idle_s
        ):
            self._time_out("idle", limits.idle_s)

    # ------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; asyncio and uvloop set TCP_NODELAY on it."""
        # uvloop's transport has the methods of asyncio.Transport but does not inherit from it.
        self._transport = cast("asyncio.Transport", transport)
        if self._discarded:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse the data, and deliver all body bytes of this read at once."""
        response = self._response
        if response is None:
            # Unsolicited bytes: the next response could not be separated from them.
            if self._transport is not None:
                self._transport.abort()
            return
        self._touched_s = self._loop.time()
        length = len(data)
        on_chunk = response.on_chunk
        if (
            on_chunk is not None
            and self._next_chunk_at == 0
            and length < _LONGEST
            and data.startswith(size_line := SIZE_LINES[length])
            and data.endswith(b"\r\n")
        ):
            # Exactly one chunk: the parser's state would be the same after it, so the parser can be skipped.
            on_chunk(data, len(size_line))
            return
        in_head = not self._head_done
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            cause = exc.__context__ if isinstance(exc, httptools.HttpParserCallbackError) else exc
            self._break(f"{self.name} sent what is not a valid HTTP response: {cause}", exc)
            return
        if in_head:
            self._account_head(data)
        elif self._next_chunk_at != UNKNOWN:
            self._next_chunk_at = next_chunk_at(data, self._next_chunk_at)
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._chunked and not in_head and not self._account_framing(len(data), len(body)):
            return
        if body:
            response.deliver(body)
        if self._complete and self._response is response:
            self._finish(response)

    def _account_head(self, data: bytes) -> None:
        """Limit the length of the head, and compute where the first chunk after this read begins."""
        before, self._head_bytes = self._head_bytes, self._head_bytes + len(data)
        if not self._head_done:
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._break(f"{self.name} sent a response head of over {_MAX_HEAD_BYTES} bytes", None)
        elif self._chunked and before == 0:
            # After an informational response this is not the end of the head, but then no size line follows.
            end = data.find(_END_OF_HEAD)
            if end >= 0:
                self._next_chunk_at = next_chunk_at(data, end + len(_END_OF_HEAD))

    def _account_framing(self, read_bytes: int, body_bytes: int) -> bool:
        """Limit the framing of a chunked response; return whether the response can continue."""
        self._excess_bytes += read_bytes - body_bytes - _FRAMING_PER_BODY * body_bytes
        if self._excess_bytes <= _MAX_HEAD_BYTES:
            return True
        self._break(f"{self.name} sent chunk extensions or trailers of over {_MAX_HEAD_BYTES} bytes", None)
        return False

    def eof_received(self) -> bool:
        """Let the transport close; ``connection_lost`` handles the end."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete a response that ends with the connection; any other response in progress fails."""
        response, self._transport = self._response, None
        self._parser = None  # break the reference cycle
        self._on_closed(self)
        if response is None:
            return
        if exc is None and self._until_close and self._head_done:
            self._response = None
            response.finish()
        elif self.reused and not self._head_bytes and not self._head_done and self._started is not None:
            started, self._started, self._response = self._started, None, None
            if not started.done():
                message = f"{self.name} closed the kept-alive connection before it answered"
                started.set_exception(StaleConnection(message))
        else:
            where = "inside its response" if self._head_done else "before it answered"
            self._break(f"{self.name} closed the connection {where}", exc)

    # ------------------------------------------------------------------ parser callbacks

    def on_message_begin(self) -> None:
        """Reject a second response to one request."""
        if self._complete:
            raise StreamBroken("more than one response to one request")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header; trailers are ignored."""
        if not self._head_done:
            name = name.lower()
            headers = self._headers
            if name in headers:
                self._repeats += 1
                value = headers[name] + b", " + value
            headers[name] = value
            if len(headers) + self._repeats > _MAX_FIELDS:
                raise StreamBroken(f"over {_MAX_FIELDS} header fields")

    def on_headers_complete(self) -> None:
        """Pass the response to the waiting caller."""
        status = self._parser.get_status_code()
        self._informational = status < _FIRST_FINAL_STATUS
        if self._informational or status > _MAX_STATUS:
            if not _MIN_STATUS <= status <= _MAX_STATUS or status == _SWITCHING:
                raise StreamBroken(f"status {status} cannot answer this request")
            return
        response, headers = self._response, self._headers
        self._head_done = True
        if response is None:
            return
        response.status, response.headers = status, headers
        coding = headers.get(b"transfer-encoding")
        self._chunked = coding is not None and coding.lower().endswith(b"chunked")
        has_length = b"content-length" in headers or self._chunked or status in {204, 304}
        self._until_close = not has_length
        started, self._started = self._started, None
        if started is not None and not started.done():
            started.set_result(response)

    def on_message_complete(self) -> None:
        """Record the end of the response; it takes effect after the bytes of this read have been delivered."""
        if not self._informational:
            self._complete = True
            self._keep = self._parser.should_keep_alive()

    # ------------------------------------------------------------------ ends

    def _finish(self, response: StreamingResponse) -> None:
        self._response = None
        transport = self._transport
        # The connection cannot be reused if the request is still being sent or the body ends with the connection.
        if self._keep and transport is not None and not transport.get_write_buffer_size():
            self.resume_reading()
            self.idle_since_s = self._touched_s
            self._on_free(self)
        elif transport is not None:
            transport.close()
        response.finish()

    def _time_out(self, phase: str, bound_s: float | None) -> None:
        what = {"first_byte": "did not answer", "idle": "fell silent", "total": "took longer than allowed"}[
            phase
        ]
        self._fail(UpstreamTimeout(f"{self.name} {what} ({phase} limit {bound_s} s)", phase=phase))

    def _break(self, message: str, cause: BaseException | None) -> None:
        error = StreamBroken(message)
        error.__cause__ = cause
        self._fail(error)

    def _fail(self, error: UpstreamError) -> None:
        response, started = self._response, self._started
        self._response = self._started = None
        if self._transport is not None:
            self._transport.abort()
        if started is not None and not started.done():
            started.set_exception(error)
        elif response is not None:
            response.fail(error)
