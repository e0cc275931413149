"""This router's connections to the others of its graph: made, kept, and cut off once the other side is silent.

A connection begins as an HTTP request on the router's own port (``GET /picker``, ``upgrade: penstock-picker``) that carries the
graph's secret, so that it needs no port and no rule of its own. What is sent in one turn of the loop leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Final, cast
from urllib.parse import urlsplit

from penstock.core.http.messages import Headers, encode_headers
from penstock.core.logs import get_logger
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock.router.picker.messages import FrameReader, Message, ProtocolError, Status, frames
from penstock.router.proxy.auth import GraphSecret

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
        """Begin; earlier messages follow."""
        # uvloop's transport is one by its methods, not by inheritance.
        self._transport = cast("asyncio.Transport", transport)
        if self._outgoing:
            self._flush()

    def data_received(self, data: bytes) -> None:
        """Read messages; anything else ends the connection."""
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
        """Report that it is over."""
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
        """Record that there is no answer."""
        if not self.answered.done():
            self.answered.set_result(0)


SILENT_TICKS: Final = 5
"""Chosen: a router silent for this many ticks of 0.1 s is considered gone."""
_SWITCHED: Final = 101
_CONNECT_REAL_S: Final = 1.0
"""Chosen: routers of a graph are near each other; real seconds."""


class Standing(Enum):
    """What is known of a router that is listed."""

    ABSENT = auto()
    """It never answered, refuses connections, or is no router of this graph: it has no vote."""
    ALIVE = auto()
    """It has said something in the last moments."""
    SILENT = auto()
    """It has, and may be there still: it has a vote."""
    SELF = auto()
    """It is this one."""


class Link:
    """The connection to one router.

    Attributes:
        url: Its base URL.
        channel: While it is connected.
        status: Its last status; None while it is silent.
        standing: What is known of it.
    """

    def __init__(self, url: str, secret: GraphSecret, on_message: Callable[[Link, Message], None]) -> None:
        """Prepare; nothing is connected before `tick`."""
        self.url = url
        self._secret = secret
        self._on_message = on_message
        self._task: asyncio.Task[None] | None = None
        self._reported_status = 0
        self.channel: Channel | None = None
        self.status: Status | None = None
        self.standing = Standing.ABSENT

    def tick(self) -> None:
        """Connect where there is no connection, and cut off one that has been silent for too long."""
        channel = self.channel
        if channel is None:
            if (self._task is None or self._task.done()) and self.standing is not Standing.SELF:
                self._task = asyncio.create_task(self.connect(), name=f"connect {self.url}")
            return
        if channel.tick() >= SILENT_TICKS:
            log.warning("router is silent", url=self.url)
            self.drop()

    def drop(self) -> None:
        """Cut the connection off."""
        channel, self.channel, self.status = self.channel, None, None
        if self.standing is Standing.ALIVE:
            self.standing = Standing.SILENT
        if channel is not None:
            channel.abort()

    def is_self(self) -> None:
        """Record that this router is at the other end."""
        self.standing = Standing.SELF
        self.drop()

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.drop()

    async def connect(self) -> None:
        """Try once to connect."""
        parts = urlsplit(self.url)
        loop = asyncio.get_running_loop()
        channel = Channel(self._take, lambda: self._lost(channel))
        handshake = Handshake(channel, parts.netloc, self._secret.headers)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(_CONNECT_REAL_S):
                transport, _ = await loop.create_connection(
                    lambda: handshake, parts.hostname or "", parts.port or 80
                )
                status = await handshake.answered
        except ConnectionRefusedError:
            self.standing = Standing.ABSENT
        except (TimeoutError, OSError) as exc:
            log.debug("router not reached", url=self.url, problem=str(exc))
        else:
            if status == _SWITCHED:
                self.channel, transport = channel, None
            elif status:
                self._turned_down(status)
        finally:
            if transport is not None:
                transport.abort()

    def _turned_down(self, status: int) -> None:
        """Record a router that does not know this one: it picks for itself."""
        self.standing = Standing.ABSENT
        if status != self._reported_status:
            log.warning(
                "a listed router is not of this graph's: set the same secret in all",
                url=self.url,
                status=status,
                variable=GRAPH_SECRET_VARIABLE,
            )
        self._reported_status = status

    def _take(self, message: Message) -> None:
        if isinstance(message, Status):
            self.status = message
            if self.standing is not Standing.SELF:
                self.standing = Standing.ALIVE
        self._on_message(self, message)

    def _lost(self, channel: Channel) -> None:
        if self.channel is channel:
            self.drop()


class Links:
    """The connections to all listed routers, by URL."""

    def __init__(self, secret: GraphSecret, on_message: Callable[[Link, Message], None]) -> None:
        self._secret = secret
        self._on_message = on_message
        self._links: dict[str, Link] = {}

    def follow(self, urls: Iterable[str]) -> None:
        """Keep connections to these routers, and drop those to others."""
        wanted = set(urls)
        for url in self._links.keys() - wanted:
            # What is under way of a task ends with its time-out.
            self._links.pop(url).drop()
        for url in wanted - self._links.keys():
            self._links[url] = Link(url, self._secret, self._on_message)

    def tick(self) -> None:
        """See `Link.tick`; called each 0.1 s."""
        for link in self._links.values():
            link.tick()

    async def connect(self) -> None:
        """Try every router once, so that a start knows the others."""
        await asyncio.gather(*(link.connect() for link in self._links.values()))

    def alive(self) -> list[Link]:
        """Return the routers that reported in the last moments, each once however many addresses it has."""
        found = {each.status.instance: each for each in self._links.values() if each.status is not None}
        return list(found.values())

    @property
    def members(self) -> int:
        """Routers that have a vote, this one included."""
        alive = {each.status.instance for each in self._links.values() if each.status is not None}
        return 1 + len(alive) + sum(each.standing is Standing.SILENT for each in self._links.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a connected router has not identified itself yet."""
        return any(each.channel is not None and each.status is None for each in self._links.values())

    async def close(self) -> None:
        """End all."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            await link.close()
