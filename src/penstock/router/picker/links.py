"""This router's connections to the other routers of its graph: connects, reconnects, and disconnects silent routers.

A connection starts as an HTTP request to the router's own port (``GET /picker``, ``upgrade: penstock-picker``) with the
graph's secret, so that it needs no further port or network rule. All messages of one turn of the event loop are sent in one
write.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

from penstock.core.http.messages import encode_headers
from penstock.core.http.own_lag import PatientTimeout
from penstock.core.logs import get_logger
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock.router.picker.messages import FrameReader, Message, ProtocolError, Status, frames
from penstock.router.picker.silence import SilencePatience
from penstock.router.proxy.auth import GraphSecret

log = get_logger(__name__)

PATH: Final = "/picker"
NAME: Final = "penstock-picker"
TICK_REAL_S: Final = 0.1
"""Interval between two calls of `Channel.tick`, in real seconds."""
SILENT_TICKS: Final = 5
"""Number of ticks after which a silent router counts as gone. Chosen; it increases if a router was only slow (`silence`)."""
_CONNECT_REAL_S: Final = 1.0
"""Timeout of a connection attempt in real seconds. Chosen: the routers of a graph are near each other."""
_MAX_BEHIND_BYTES: Final = 16 << 20
"""Maximum number of bytes that the other router may leave unread. Chosen: about 40,000 requests; a router that leaves more cannot
keep up."""
_MAX_HEAD_BYTES: Final = 16 << 10
_SWITCHED: Final = 101
_TURNED_DOWN: Final = {
    403: "a listed router is not of this graph's: set the same secret in all",
    404: "a listed router knows no others: it is of another build, or has no secret; each picks for itself until all are alike",
}
_BUSY: Final = "a listed router has no room for this one, or stops; it is asked again"


class Channel(asyncio.Protocol):
    """asyncio protocol of a connection between two routers, at either end.

    Attributes:
        silent_ticks: Number of consecutive calls of `tick` (every 0.1 real seconds) without received data. Ticks are
            counted, and not seconds, so that a pause of this process does not count as silence of the other router.
        answered: Future of the HTTP status of the response to the upgrade request; 0 if no response came. None at the end
            that accepts the connection.
    """

    def __init__(
        self, on_message: Callable[[Message], None], on_lost: Callable[[], None], request: bytes = b""
    ) -> None:
        """Create the protocol.

        Args:
            on_message: Called with each received message.
            on_lost: Called when the connection has ended.
            request: HTTP request that asks for the upgrade, at the end that connects; empty at the end that accepts.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        self._request = request
        self._head = b""
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Message] = []
        self._has_received = True
        self.silent_ticks = 0
        self.answered: asyncio.Future[int] | None = None
        if request:
            self.answered = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the upgrade request (from HTTP to the routers' own protocol) and the messages that were queued before."""
        # uvloop's transport has the methods of `asyncio.Transport`, but does not inherit from it.
        self._transport = cast("asyncio.Transport", transport)
        if self._request:
            self._transport.write(self._request)
        if self._outgoing:
            self._flush()

    def data_received(self, data: bytes) -> None:
        """Decode the messages in ``data`` and pass each to ``on_message``; other data close the connection.

        The response to the upgrade request comes first, at the end that connects.
        """
        self._has_received = True
        if self.answered is not None and not self.answered.done():
            data = self._read_answer(data, self.answered)
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
                if not self.is_open:
                    return
        except ProtocolError as exc:
            log.warning("connection to another router ended", problem=str(exc))
            self.abort()

    def _read_answer(self, data: bytes, answered: asyncio.Future[int]) -> bytes:
        """Return the bytes after the response's head, when the head is complete."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end and len(self._head) <= _MAX_HEAD_BYTES:
            return b""
        words = head.split(b" ", 2)
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        answered.set_result(status)
        if status == _SWITCHED:
            return rest
        self.abort()
        return b""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Call ``on_lost``, because the connection has ended; messages that were not sent yet are dropped."""
        self._transport = None
        self._outgoing = []
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(0)
        self._on_lost()

    def tick(self) -> int:
        """Count a tick of 0.1 real seconds; return for how many ticks in a row no data have come from the other router."""
        self.silent_ticks = 0 if self._has_received else self.silent_ticks + 1
        self._has_received = False
        return self.silent_ticks

    def send(self, message: Message) -> None:
        """Send ``message`` together with the other messages of this turn of the event loop.

        A message from before the connection is established waits for it; one from after its end is dropped.
        """
        if not self._outgoing and self._transport is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        transport = self._transport
        if transport is None or transport.is_closing() or not outgoing:
            return
        transport.write(frames(outgoing))
        if transport.get_write_buffer_size() > _MAX_BEHIND_BYTES:
            log.warning("peer router stopped reading; connection closed", bytes=_MAX_BEHIND_BYTES)
            transport.abort()


class RouterLink:
    """The connection to one of the routers that discovery lists.

    Attributes:
        url: Base URL of the router.
        channel: The connection; None while it is not connected.
        status: Last heartbeat of the router; None while the router is silent.
        has_vote: Whether the router counts as a member for a majority: it has sent a heartbeat and may still be running.
            False if it never answered, refuses connections, is not a router of this graph, or is this router itself.
    """

    def __init__(
        self, url: str, secret: GraphSecret, on_message: Callable[[RouterLink, Message], None]
    ) -> None:
        """Create the link; nothing is connected before `tick`.

        Args:
            url: Base URL of the router.
            secret: Secret of the graph.
            on_message: Called with this link and each received message.
        """
        self.url = url
        self._secret = secret
        self._on_message = on_message
        self._task: asyncio.Task[None] | None = None
        self._reported_status = 0
        self._is_self = False
        self.channel: Channel | None = None
        self.status: Status | None = None
        self.has_vote = False
        self._patience = SilencePatience(SILENT_TICKS, random.random)
        self._presumed_dead = ""

    @property
    def is_expected(self) -> bool:
        """Whether another router is connected, or may become connected in a moment, so that it is too early to act without it."""
        is_connecting = self._task is not None and not self._task.done()
        return not self._is_self and (self.channel is not None or self.has_vote or is_connecting)

    @property
    def silence_ticks(self) -> int:
        """Number of ticks (0.1 real seconds each) for which the other router may be silent before it is disconnected."""
        return self._patience.ticks

    def tick(self) -> None:
        """Start to connect if there is no connection; disconnect a router that has been silent for too long. Called every 0.1 s."""
        channel = self.channel
        self._patience.tick()
        if channel is None:
            if (self._task is None or self._task.done()) and not self._is_self:
                self._task = asyncio.create_task(self.connect(), name=f"connect {self.url}")
            return
        if channel.tick() >= self.silence_ticks:
            log.warning("router is silent", url=self.url, silent_s=channel.silent_ticks * TICK_REAL_S)
            if self.status is not None:
                self._presumed_dead = self.status.instance
            self.drop()

    def drop(self) -> None:
        """Close the connection."""
        channel, self.channel, self.status = self.channel, None, None
        if channel is not None:
            channel.abort()

    def drop_own_connection(self) -> None:
        """Record that the connection leads to this router itself; it is not opened again."""
        self._is_self, self.has_vote = True, False
        self.drop()

    async def close(self) -> None:
        """Close the connection and stop connecting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.drop()

    async def connect(self) -> None:
        """Try once to connect to the router; if that fails, `tick` tries again."""
        parts = urlsplit(self.url)
        request = f"GET {PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: upgrade\r\nupgrade: {NAME}\r\n"
        request_bytes = request.encode() + encode_headers(self._secret.headers) + b"\r\n"
        channel = Channel(self._take, lambda: self._lost(channel), request_bytes)
        assert channel.answered is not None  # noqa: S101 - it asks
        status = 0
        try:
            async with PatientTimeout(_CONNECT_REAL_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: channel, parts.hostname or "", parts.port or 80
                )
                status = await channel.answered
        except ConnectionRefusedError:
            self.has_vote = False
        except (TimeoutError, OSError) as exc:
            log.debug("router not reached", url=self.url, problem=str(exc))
        finally:
            if status != _SWITCHED:
                channel.abort()
        if status == _SWITCHED:
            self.channel = channel
        elif status:
            self._on_refusal_status(status)

    def _on_refusal_status(self, status: int) -> None:
        """Record a router that refuses the connection; that router chooses workers for its own requests."""
        self.has_vote = False
        if status != self._reported_status:
            log.warning(
                _TURNED_DOWN.get(status, _BUSY), url=self.url, status=status, variable=GRAPH_SECRET_VARIABLE
            )
        self._reported_status = status

    def _take(self, message: Message) -> None:
        if isinstance(message, Status):
            if self._presumed_dead:
                self._on_return(message.instance)
            self.status, self.has_vote = message, not self._is_self
        self._on_message(self, message)

    def _on_return(self, instance: str) -> None:
        """Allow a router more silence if it was taken for gone and is still the same process: it was slow."""
        if instance == self._presumed_dead:
            self._patience.record_false_alarm()
            log.warning(
                "a router that was silent is still the same process: its own log says why it sent nothing",
                url=self.url,
                silence_allowed_s=self.silence_ticks * TICK_REAL_S,
            )
        self._presumed_dead = ""

    def _lost(self, channel: Channel) -> None:
        if self.channel is channel:
            self.drop()
