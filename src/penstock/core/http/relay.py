"""Passes a response on from an upstream to a client by callbacks: no task, future or timer per chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.core.errors import ClientDisconnected
from penstock.core.http.messages import Responder
from penstock.core.http.streaming import StreamingResponse

Observe = Callable[[bytes], bytes]


def unchanged(data: bytes) -> bytes:
    """Pass data on as it is: the observer that looks at nothing."""
    return data


async def relay(upstream: StreamingResponse, responder: Responder, *, observe: Observe = unchanged) -> None:
    """Copy the rest of ``upstream``'s body to a started ``responder``; the caller ends the response.

    A slow client pauses the upstream; a client that leaves aborts it; a cancelled caller aborts it.

    Args:
        upstream: Response whose head has been looked at.
        responder: Started response.
        observe: Sees the body bytes of each read and returns what to send in their place (usually the
            same object, which is cheapest); an exception it raises aborts the upstream and comes out of
            this call.

    Raises:
        ClientDisconnected: the client left first.
        UpstreamError: the upstream broke or fell silent; what came before has been written.
    """
    passing = _Relay(upstream, responder, observe)
    upstream.set_sink(
        passing.on_data,
        passing.on_end,
        passing.on_error,
        on_chunk=passing.on_chunk if responder.takes_chunks else None,
    )
    responder.on_disconnect(passing.on_disconnect)
    responder.on_resume(upstream.resume)
    responder.on_pause(upstream.pause)
    try:
        await passing.done
    finally:
        upstream.abort()


class _Relay:
    __slots__ = ("_observe", "_responder", "_upstream", "done")

    def __init__(self, upstream: StreamingResponse, responder: Responder, observe: Observe) -> None:
        self._upstream = upstream
        self._responder = responder
        self._observe = observe
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_chunk(self, framed: bytes, body: bytes) -> None:
        try:
            sent = self._observe(body)
            if sent is body:
                self._responder.write_framed(framed)
            else:
                self._responder.write(sent)
        except Exception as exc:  # noqa: BLE001 - carried to the caller, which is the task root
            self._fail(exc)

    def on_data(self, data: bytes) -> None:
        try:
            self._responder.write(self._observe(data))
        except Exception as exc:  # noqa: BLE001 - carried to the caller, which is the task root
            self._fail(exc)

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_error(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def on_disconnect(self) -> None:
        self.on_error(ClientDisconnected("the client closed the connection during the relay"))

    def _fail(self, error: Exception) -> None:
        self._upstream.abort()
        self.on_error(error)
