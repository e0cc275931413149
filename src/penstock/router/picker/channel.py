"""One connection between two routers: frames in and out, what is sent in one turn of the loop in one write.

It begins as an HTTP request on the router's own port (``GET /picker``, ``upgrade: penstock-picker``) that carries the graph's
secret, so that it needs no port and no rule of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from penstock.core.http.messages import Headers, encode_headers
from penstock.core.logs import get_logger
from penstock.router.picker.messages import FrameReader, Message, ProtocolError, frames

log = get_logger(__name__)

PATH: Final = "/picker"
NAME: Final = "penstock-picker"
TICK_REAL_S: Final = 0.1
"""Between two calls of `Channel.tick`."""
_MAX_BEHIND_BYTES: Final = 16 << 20
"""Chosen: what the other side may leave unread; some 40,000 requests. More is a router that cannot keep up."""
_MAX_HEAD_BYTES: Final = 16 << 10


class Channel(asyncio.Protocol):
    """Protocol of the connection, at either end.

    Attributes:
        silent_ticks: Calls of `tick` in a row before which nothing had come. They are this process's own, so that a pause
            of it is not taken for the other side's.
    """

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        """Prepare.

        Args:
            on_message: Takes each message.
            on_lost: Called once, after the last message.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Message] = []
        self._was_heard = True
        self.silent_ticks = 0

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; what was sent before follows."""
        # uvloop's transport is one by its methods, not by inheritance.
        self._transport = cast("asyncio.Transport", transport)
        if self._outgoing:
            self._flush()

    def data_received(self, data: bytes) -> None:
        """Read messages; whatever is none ends the connection."""
        self._was_heard = True
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
                if not self.is_open:
                    return
        except ProtocolError as exc:
            log.warning("connection to another router ended", problem=str(exc))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Tell that it is over."""
        self._transport = None
        self._outgoing = []
        self._on_lost()

    def tick(self) -> int:
        """Return for how many ticks the other side has been silent; called each 0.1 s."""
        self.silent_ticks = 0 if self._was_heard else self.silent_ticks + 1
        self._was_heard = False
        return self.silent_ticks

    def send(self, message: Message) -> None:
        """Send a message with the others of this turn of the loop; dropped where the connection is over."""
        if not self._outgoing and self._transport is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def abort(self) -> None:
        """Cut the connection off."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        transport = self._transport
        if transport is None or transport.is_closing() or not outgoing:
            return
        transport.write(frames(outgoing))
        if transport.get_write_buffer_size() > _MAX_BEHIND_BYTES:
            log.warning("connection to another router ended: it does not read", bytes=_MAX_BEHIND_BYTES)
            transport.abort()


class Handshake(asyncio.Protocol):
    """Asks for the upgrade, and hands the connection to its channel.

    Attributes:
        answered: The status of the answer, once it is there.
    """

    def __init__(self, channel: Channel, host: str, secret: Headers) -> None:
        """Prepare; the request goes out with the connection."""
        self._channel = channel
        self._request = (
            f"GET {PATH} HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: {NAME}\r\n".encode()
        )
        self._request += encode_headers(secret) + b"\r\n"
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self.answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read the answer's head."""
        transport = self._transport
        if transport is None or self.answered.done():
            return
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end and len(self._head) <= _MAX_HEAD_BYTES:
            return
        words = head.split(b" ", 2)
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        self.answered.set_result(status)
        if status != 101:
            transport.abort()
            return
        transport.set_protocol(self._channel)
        self._channel.connection_made(transport)
        if rest:
            self._channel.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Take note that there is no answer."""
        if not self.answered.done():
            self.answered.set_result(0)
