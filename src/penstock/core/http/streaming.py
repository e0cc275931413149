"""A response whose body is still arriving, as its consumer sees it, and the relay that passes it on by callbacks.

Made by ``client_connection``; nothing here knows sockets or the parser. A relayed chunk costs no task, future or timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self

from penstock.core.errors import ClientDisconnected, StreamBroken, UpstreamError
from penstock.core.http.messages import Responder

# Chosen: body bytes held for a slow consumer before the upstream is no longer read.
_BUFFER_HIGH_BYTES = 256 * 1024

OnData = Callable[[bytes], None]
OnChunk = Callable[[bytes, int], None]
OnEnd = Callable[[], None]
OnError = Callable[[UpstreamError], None]
Observe = Callable[[bytes, int], bytes]


class BodySource(Protocol):
    """What a response needs from its connection."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Read again."""

    def abort(self) -> None:
        """Close the connection; nothing more is delivered."""


class StreamingResponse:
    """A response whose body arrives while it is used: iterate over it, read it, or give it a sink.

    Use it as an async context manager, iterate to the end, or call ``abort``: an unfinished response holds its connection.

    Attributes:
        headers: Lower-case names; repeated headers are joined by ``", "``.
        ended: The complete body has arrived.
        on_chunk: What takes reads that are exactly one chunk; see ``set_sink``.
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
        """Deliver the body by callbacks on the event loop: ``on_data``..., then one of the other two.

        What arrived before is delivered at once. One call of ``on_data`` carries all body bytes of one
        read of the socket, without framing. After ``abort`` nothing is called.

        With ``on_chunk``, a read that is exactly one chunk goes there instead, as it came, with the place where its
        body begins; CR LF follow the body. That spares a relay taking the frame off and putting it on again.
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
        """Stop reading from the upstream; the idle limit rests meanwhile."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """Read from the upstream again."""
        if self._connection is not None:
            self._connection.resume_reading()

    def abort(self) -> None:
        """Close the upstream connection unless the response has ended; the sink gets no more calls."""
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
        """Close the upstream connection unless the response has ended; its consumer gets ``error``."""
        if self.ended or self._error is not None:
            return
        connection = self._connection
        self.fail(error)
        if connection is not None:
            connection.abort()

    async def read(self, *, limit_bytes: int) -> bytes:
        """Return the rest of the body."""
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
        """Hand body bytes to the sink or to the buffer."""
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
        """Mark the body complete."""
        self._connection = None
        self.ended = True
        on_end = self._on_end
        self._drop_sink()
        if on_end is not None:
            on_end()
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        """Mark the response broken."""
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
    """Copy the rest of ``upstream``'s body to a started ``responder``; the caller ends the response.

    A slow client pauses the upstream; a client that leaves aborts it; a cancelled caller aborts it.

    ``observe`` sees each read and returns what to send in its place, usually the same object, which is cheapest: body bytes
    and 0, or one complete chunk as it came and where its body begins. What it raises aborts the upstream and comes out.

    Raises:
        ClientDisconnected: the client left first.
        UpstreamError: the upstream broke or fell silent; what came before has been written.
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
        except Exception as exc:  # noqa: BLE001 - carried to the caller, which is the task root
            stop(exc)

    def on_data(data: bytes) -> None:
        try:
            write(observe(data, 0))
        except Exception as exc:  # noqa: BLE001 - carried to the caller, which is the task root
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
