"""This router's connections to the others of its graph: made, kept, and cut off once the other side is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Final
from urllib.parse import urlsplit

from penstock.core.logs import get_logger
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock.router.picker.channel import Channel, Handshake
from penstock.router.picker.messages import Message, Status
from penstock.router.proxy.auth import GraphSecret

log = get_logger(__name__)

SILENT_TICKS: Final = 5
"""Chosen: a router that says nothing for so many ticks of 0.1 s is taken to be gone."""
_SWITCHED: Final = 101
_CONNECT_REAL_S: Final = 1.0
"""Chosen: routers of a graph are near each other; real seconds."""


class Standing(Enum):
    """What is known of a router that is listed."""

    ABSENT = auto()
    """It was never heard, refuses connections, or is no router of this graph: it has no vote."""
    HEARD = auto()
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
        status: What it said last; None while it is not heard.
        standing: What is known of it.
    """

    def __init__(self, url: str, secret: GraphSecret, on_message: Callable[[Link, Message], None]) -> None:
        """Prepare; nothing is connected before `tick`."""
        self.url = url
        self._secret = secret
        self._on_message = on_message
        self._task: asyncio.Task[None] | None = None
        self._told_status = 0
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
        if self.standing is Standing.HEARD:
            self.standing = Standing.SILENT
        if channel is not None:
            channel.abort()

    def is_self(self) -> None:
        """Take note that this router is at the other end."""
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
        """Take note of a router that does not know this one: it picks for itself."""
        self.standing = Standing.ABSENT
        if status != self._told_status:
            log.warning(
                "a listed router is not of this graph's: set the same secret in all",
                url=self.url,
                status=status,
                variable=GRAPH_SECRET_VARIABLE,
            )
        self._told_status = status

    def _take(self, message: Message) -> None:
        if isinstance(message, Status):
            self.status = message
            if self.standing is not Standing.SELF:
                self.standing = Standing.HEARD
        self._on_message(self, message)

    def _lost(self, channel: Channel) -> None:
        if self.channel is channel:
            self.drop()


class Links:
    """The connections to all listed routers, by URL."""

    def __init__(self, secret: GraphSecret, on_message: Callable[[Link, Message], None]) -> None:
        """Begin without any.

        Args:
            secret: By which routers know each other.
            on_message: Takes what comes.
        """
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
        """Try every router once, so that a start knows who is there."""
        await asyncio.gather(*(link.connect() for link in self._links.values()))

    def heard(self) -> list[Link]:
        """Return the routers that were heard in the last moments, each once however many addresses it has."""
        found = {each.status.instance: each for each in self._links.values() if each.status is not None}
        return list(found.values())

    @property
    def members(self) -> int:
        """Routers that have a vote, this one included."""
        heard = {each.status.instance for each in self._links.values() if each.status is not None}
        return 1 + len(heard) + sum(each.standing is Standing.SILENT for each in self._links.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a router that is connected has not said who it is."""
        return any(each.channel is not None and each.status is None for each in self._links.values())

    async def close(self) -> None:
        """End all."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            await link.close()
