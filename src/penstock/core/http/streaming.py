"""A response whose body is still arriving, as its consumer sees it, and the relay that forwards it with callbacks.

``client_connection`` creates the responses; this module has no sockets or parser. Relaying a chunk costs no task,
future or timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self

from penstock.core.errors import ClientDisconnected, StreamBroken, UpstreamError
from penstock.core.http.messages import Responder

# Chosen: buffered body bytes for a slow consumer above which reading from the upstream is paused.
_BUFFER_HIGH_BYTES = 256 * 1024

OnData = Callable[[bytes], None]
OnChunk = Callable[[bytes, int], None]
OnEnd = Callable[[], None]
OnError = Callable[[UpstreamError], None]
Observe = Callable[[bytes, int], bytes]


class BodySource(Protocol):
    """Interface of the upstream connection that a `StreamingResponse` uses."""

    def pause_reading(self) -> None:
        """Stop reading from the upstream."""

    def resume_reading(self) -> None:
        """Read from the upstream again."""

    def abort(self) -> None:
        """Close the connection; no more data is delivered."""


class StreamingResponse:
    """A response whose body arrives while it is used: iterate over it, ``read`` it, or pass callbacks to ``set_sink``.

    Use it as an async context manager, iterate to the end, or call ``abort``; an unfinished response occupies its
    connection.

    Attributes:
        status: HTTP status.
        headers: Headers by lower-case name; repeated headers are joined by ``", "``.
        ended: Whether the complete body has arrived.
        on_chunk: Callback for reads of the socket that are exactly one chunk, from ``set_sink``; None if there is none.
    """

    def __init__(self, connection: BodySource) -> None:
        self._connection: BodySource | None = connection
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._error: UpstreamError | None = None
        self._on_data: OnData | None = None
        self._on_end: OnEnd | None = None
        self._on_error: OnError | None = None
        self._held = False  # paused because the buffer is full
        self._waiter: asyncio.Future[None] | None = None
        self.on_chunk: OnChunk | None = None
        self.ended = False
        self.headers: dict[bytes, bytes] = {}
        self.status = 0

    def set_sink(
        self, on_data: OnData, on_end: OnEnd, on_error: OnError, *, on_chunk: OnChunk | None = None
    ) -> None:
        """Deliver the body with callbacks on the event loop: any number of ``on_data``, then either ``on_end`` or ``on_error``.

        Data that has already arrived is delivered immediately. After ``abort`` no callback is called.

        Args:
            on_data: Called with all body bytes of one read of the socket, without framing.
            on_end: Called when the body is complete.
            on_error: Called with the error if the response fails.
            on_chunk: If given, called instead of ``on_data`` for a read that is exactly one chunk, with the chunk
                including its framing and the offset at which its body begins; CR LF follow the body. A relay can then
                forward it without removing and adding the framing.
        """
        self._on_data, self._on_end, self._on_error = on_data, on_end, on_error
        self.on_chunk = on_chunk
        if self._buffer:
            on_data(self._take())
        if self.ended:
            self._drop_sink()
            on_end()
        elif self._error is not None:
            self._drop_sink()
            on_error(self._error)

    def pause(self) -> None:
        """Stop reading from the upstream; the idle timeout does not run meanwhile."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """Read from the upstream again."""
        if self._connection is not None:
            self._connection.resume_reading()

    def abort(self) -> None:
        """Close the upstream connection and call no more callbacks; does nothing if the response has ended."""
        if self.ended:
            return
        connection, self._connection = self._connection, None
        self._drop_sink()
        if connection is not None:
            connection.abort()
        if self._error is None:
            self._error = StreamBroken("response aborted by its reader before it was complete")
            self._wake()

    def break_off(self, error: UpstreamError) -> None:
        """Close the upstream connection and fail the response with ``error``; does nothing if it has ended or failed."""
        if self.ended or self._error is not None:
            return
        connection = self._connection
        self.fail(error)
        if connection is not None:
            connection.abort()

    async def read(self, *, limit_bytes: int) -> bytes:
        """Return the rest of the body.

        Args:
            limit_bytes: Maximum number of bytes.

        Raises:
            StreamBroken: The body is longer than ``limit_bytes``, and the connection has been aborted; or the
                connection broke.
        """
        parts: list[bytes] = []
        size = 0
        async for part in self:
            size += len(part)
            if size > limit_bytes:
                self.abort()
                raise StreamBroken(f"response body exceeds {limit_bytes} bytes: raise the limit or stream it")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.abort()
                raise
        return self._take()

    def _take(self) -> bytes:
        data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        if self._held:
            self._held = False
            self.resume()
        return data

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.abort()

    # ------------------------------------------------------------------ called by the connection

    def deliver(self, data: bytes) -> None:
        """Pass body bytes to the callbacks of `set_sink` or, if there are none, add them to the buffer."""
        if self._on_data is not None:
            self._on_data(data)
            return
        self._buffer.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > _BUFFER_HIGH_BYTES and not self._held:
            self._held = True
            self.pause()
        self._wake()

    def finish(self) -> None:
        """Mark the body as complete."""
        self._connection = None
        self.ended = True
        on_end = self._on_end
        self._drop_sink()
        if on_end is not None:
            on_end()
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        """Mark the response as failed with ``error``."""
        self._connection = None
        self._error = error
        on_error = self._on_error
        self._drop_sink()
        if on_error is not None:
            on_error(error)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _drop_sink(self) -> None:
        self._on_data = self._on_end = self._on_error = self.on_chunk = None


async def relay(upstream: StreamingResponse, responder: Responder, *, observe: Observe) -> None:
    """Copy the rest of the body of ``upstream`` to a started ``responder``; the caller ends the response.

    A slow client pauses the upstream. If the client disconnects or the caller is cancelled, the upstream is aborted.

    Args:
        upstream: Response to read.
        responder: Responder to write to; its head must have been sent.
        observe: Called for each read; returns the bytes to send, usually the same object, which is cheapest. Its
            arguments are either body bytes and 0, or one complete chunk including its framing and the offset at which
            its body begins. If it raises, the upstream is aborted and the exception is raised here.

    Raises:
        ClientDisconnected: The client disconnected first.
        UpstreamError: The upstream failed or timed out; data received before that has been written.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    write, write_framed = responder.write, responder.write_framed

    def on_chunk(framed: bytes, at: int) -> None:
        try:
            sent = observe(framed, at)
            if sent is framed and write_framed is not None:
                write_framed(framed)
            else:
                write(sent)
        except Exception as exc:  # noqa: BLE001 - raised in the caller
            stop(exc)

    def on_data(data: bytes) -> None:
        try:
            write(observe(data, 0))
        except Exception as exc:  # noqa: BLE001 - raised in the caller
            stop(exc)

    def finish(error: BaseException | None = None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def stop(error: Exception) -> None:
        upstream.abort()
        finish(error)

    upstream.set_sink(on_data, finish, finish, on_chunk=None if write_framed is None else on_chunk)
    gone = ClientDisconnected("the client closed the connection during the relay")
    responder.on_disconnect(lambda: stop(gone))
    responder.on_resume(upstream.resume)
    responder.on_pause(upstream.pause)
    try:
        await done
    finally:
        upstream.abort()
