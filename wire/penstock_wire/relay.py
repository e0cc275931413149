"""Passes a response on from an upstream to a client by callbacks: no task, future or timer per chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock_core.errors import ClientDisconnected, UpstreamError
from penstock_wire.messages import Responder
from penstock_wire.streaming import StreamingResponse

Observe = Callable[[bytes], bytes]


async def relay(upstream: StreamingResponse, responder: Responder, *, observe: Observe | None = None) -> None:
    """Copy the rest of ``upstream``'s body to a started ``responder``; the caller ends the response.

    A slow client pauses the upstream; a client that leaves aborts it; a cancelled caller aborts it.

    Args:
        upstream: Response whose head has been looked at.
        responder: Started response.
        observe: Sees the body bytes of each read and returns what to send in their place (usually the
            same object); an exception it raises aborts the upstream and comes out of this call.

    Raises:
        ClientDisconnected: the client left first.
        UpstreamError: the upstream broke or fell silent; what came before has been written.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    write = responder.write

    def on_end() -> None:
        if not done.done():
            done.set_result(None)

    def on_error(error: BaseException) -> None:
        if not done.done():
            done.set_exception(error)

    def on_disconnect() -> None:
        on_error(ClientDisconnected("the client closed the connection during the relay"))

    def on_observed_data(data: bytes) -> None:
        try:
            write(observe(data))  # type: ignore[misc]  # chosen below only when there is an observer
        except Exception as exc:  # noqa: BLE001 - carried to the caller, which is the task root
            upstream.abort()
            on_error(exc)

    sink_error: Callable[[UpstreamError], None] = on_error
    upstream.set_sink(write if observe is None else on_observed_data, on_end, sink_error)
    responder.on_disconnect(on_disconnect)
    responder.on_resume(upstream.resume)
    responder.on_pause(upstream.pause)
    try:
        await done
    finally:
        upstream.abort()
