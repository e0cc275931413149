"""HTTP/1.1 client with keep-alive pools.

Requests are never repeated, but where a kept-alive connection was closed by the peer before an idempotent one. All that
sockets and the parser raise is mapped to ``penstock.core.errors`` here or in ``client_connection``.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from penstock.core.errors import (
    ConfigError,
    PenstockError,
    SaturatedError,
    UpstreamConnectError,
    UpstreamTimeout,
)
from penstock.core.http.client_connection import ClientConnection, Origin, StaleConnection
from penstock.core.http.limits import Timeouts
from penstock.core.http.messages import Headers, encode_headers
from penstock.core.http.own_lag import LATE_S, TURNS, OwnLag, PatientTimeout
from penstock.core.http.streaming import StreamingResponse
from penstock.core.http.tls import NO_FILES, Tls, TlsFiles
from penstock.core.logs import get_logger

__all__ = ["ConnectionPool", "PoolLimits", "Response", "StreamingResponse", "Timeouts"]

log = get_logger(__name__)

# RFC 9110 9.2.2.
_IDEMPOTENT = frozenset({"GET", "OPTIONS", "PUT", "DELETE"})
_BODYLESS = frozenset({"GET", "OPTIONS", "DELETE"})
_SWEEP_MAX_S = 1.0
_SWEEP_MIN_S = 0.02
# What this host lacks is not a fault of the peer.
_EXHAUSTED = {
    errno.EMFILE: "raise the process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the host's limit of open files (fs.file-max)",
}
_CLOSED = "the connection pool is closed: no request can be sent"


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response; header names are lower-case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Target:
    origin: Origin
    line: bytes  # the path, and the head up to its second field


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of a pool; chosen.

    Attributes:
        connections: Open connections of all origins; beyond it a request raises SaturatedError.
        idle_per_origin: Kept-alive connections without a request.
        body_bytes: Longest body that ``request`` returns.
        keep_alive_s: Longest rest of a kept connection, real seconds; below the servers' own limit, so that this side
            closes first and no request meets a closing socket.
        close_s: Longest wait of ``close``, real seconds. An aborted socket takes one turn of the event loop; an attempt
            under way finds the pool closed and ends by itself.
    """

    connections: int = 16384
    idle_per_origin: int = 1024
    body_bytes: int = 64 * 1024 * 1024
    keep_alive_s: float = 30.0
    close_s: float = 2.0


class ConnectionPool:
    """Keep-alive connections by origin; used from one event loop. No limit counts the time in which that stood.

    Attributes:
        lag_s: Real seconds for which the loop stood while connections were open.
    """

    def __init__(self, limits: PoolLimits = PoolLimits(), tls: TlsFiles = NO_FILES) -> None:
        self._limits = limits
        self._tls = Tls(tls)
        self._idle: dict[Origin, list[ClientConnection]] = {}
        self._open: set[ClientConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_period_s = _SWEEP_MAX_S
        self._lag = OwnLag()
        self._is_judging = True
        self.lag_s = 0.0
        self._closed = False
        self._all_gone = asyncio.Event()

    @property
    def connections(self) -> int:
        """Open connections, idle ones and attempts under way included."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """Kept-alive connections without a request."""
        return sum(map(len, self._idle.values()))

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: bytes = b"",
        headers: Headers = (),
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> Response:
        """Return the complete response, whatever its status.

        Raises:
            UpstreamConnectError: no connection; the request was not sent.
            UpstreamTimeout: with its phase.
            StreamBroken: the connection ended early, carried garbage, or the body exceeds the bound.
            SaturatedError: `PoolLimits.connections` are open, or this host has no file left for one.
            ConfigError: the URL is not a http or https URL.
        """
        stream = await self.stream(method, url, body=body, headers=headers, timeouts=timeouts)
        content = await stream.read(limit_bytes=self._limits.body_bytes)
        return Response(stream.status, stream.headers, content)

    async def stream(
        self,
        method: str,
        url: str,
        *,
        body: bytes = b"",
        headers: Headers = (),
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> StreamingResponse:
        """Return the response as soon as its head has arrived; raises as ``request`` does."""
        target = parse_http_url(url)
        if target.origin.is_tls:
            headers = self._with_token(headers)
        length = b"content-length: %d\r\n" % len(body) if body or method not in _BODYLESS else b""
        head = b"%b %b%b%b\r\n" % (method.encode(), target.line, length, encode_headers(headers))
        loop = asyncio.get_running_loop()
        # In seconds in which the loop ran: its pauses until the request is sent are put back then.
        deadline_s = None if timeouts.total_s is None else loop.time() - self.lag_s + timeouts.total_s
        idle = self._idle.get(target.origin)
        connection = idle.pop() if idle else None
        self._sweep_within(timeouts.shortest_s(), loop)
        if connection is None or not connection.is_open:
            connection = await self._connect(target.origin, timeouts, loop)
        try:
            return await connection.exchange(head, body, timeouts, self._put_back(deadline_s))
        except StaleConnection:
            if method not in _IDEMPOTENT:
                raise
        connection = await self._connect(target.origin, timeouts, loop)
        return await connection.exchange(head, body, timeouts, self._put_back(deadline_s))

    def _with_token(self, headers: Headers) -> Headers:
        """Return a request's headers with the pool's own token, in place of a client's."""
        own = self._tls.authorization(asyncio.get_running_loop().time())
        if own is None:
            return headers
        return (*(each for each in headers if each[0].lower() != b"authorization"), (b"authorization", own))

    def _put_back(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else deadline_s + self.lag_s

    async def close(self) -> None:
        """Close idle connections and break those in use; return within `PoolLimits.close_s`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in tuple(self._open):
            connection.cut("the connection pool was closed")
        if not self._open:
            return
        self._all_gone.clear()
        try:
            await asyncio.wait_for(self._all_gone.wait(), self._limits.close_s)
        except TimeoutError:
            after_s = self._limits.close_s
            log.warning("connections given up at close", connections=len(self._open), after_s=after_s)
            self._open.clear()
            self._idle.clear()

    def close_idle(self, url: str) -> None:
        """Close the connections to a URL's host and port that have no request, so that a server that ends need not wait."""
        for connection in tuple(self._idle.get(parse_http_url(url).origin, ())):
            connection.close()

    def cut(self, url: str, reason: str, *, silent_s: float = 0.0) -> int:
        """Break every round trip to a URL's host and port, as if that process had died; return how many."""
        origin = parse_http_url(url).origin
        found = [each for each in self._open if each.origin == origin and each.busy]
        since_s = asyncio.get_running_loop().time() - silent_s
        if any(each.received_s > since_s for each in found):
            return 0
        for connection in found:
            connection.cut(reason)
        return len(found)

    # ------------------------------------------------------------------ called by connections

    def _free(self, connection: ClientConnection) -> None:
        idle = self._idle.setdefault(connection.origin, [])
        if self._closed or len(idle) >= self._limits.idle_per_origin:
            connection.close()
            return
        connection.reused = True
        idle.append(connection)

    def _gone(self, connection: ClientConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._all_gone.set()
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.origin, None)

    # ------------------------------------------------------------------ connections

    async def _connect(
        self, origin: Origin, timeouts: Timeouts, loop: asyncio.AbstractEventLoop
    ) -> ClientConnection:
        """Open a connection; however the attempt ends, the pool counts it no longer than it lives."""
        if self._closed:
            raise UpstreamConnectError(_CLOSED)
        most = self._limits.connections
        if len(self._open) >= most:
            raise SaturatedError(f"all {most} upstream connections are open: retry later")
        connect_s = min((t for t in (timeouts.connect_s, timeouts.total_s) if t is not None), default=None)
        connection = ClientConnection(origin, loop, self._free, self._gone)
        self._open.add(connection)
        try:
            async with PatientTimeout(connect_s):
                tls = self._tls.context if origin.is_tls else None
                name = self._tls.server_name if origin.is_tls else None
                await loop.create_connection(
                    lambda: connection, origin.host, origin.port, ssl=tls, server_hostname=name
                )
        except BaseException as exc:
            # An attempt that is cut short behind `connection_made` gets no `connection_lost` from uvloop.
            connection.discard()
            if isinstance(exc, OSError):
                raise _connect_error(exc, origin, connect_s) from exc
            raise
        if self._closed:
            connection.discard()
            raise UpstreamConnectError(_CLOSED)
        return connection

    # ------------------------------------------------------------------ one timer for all limits

    def _sweep_within(self, limit_s: float, loop: asyncio.AbstractEventLoop) -> None:
        period_s = min(_SWEEP_MAX_S, max(_SWEEP_MIN_S, limit_s / TURNS))
        if self._timer is not None and period_s >= self._sweep_period_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._forgive()
        self._sweep_period_s = period_s
        self._lag.armed(period_s)
        self._timer = loop.call_later(period_s, self._sweep, loop)

    def _forgive(self) -> float:
        """Take the time for which the loop stood out of all limits, and return it."""
        late_s = self._lag.late_s()
        self.lag_s += late_s
        for connection in self._open:
            connection.forgive(late_s)
        return late_s

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # What came while the loop stood is read before anything is judged; once, so that every limit ends.
        self._is_judging = self._forgive() <= LATE_S or not self._is_judging
        if not self._is_judging:
            self._sweep_period_s = _SWEEP_MAX_S
            self._sweep_within(0.0, loop)
            return
        now_s = loop.time()
        shortest_s = _SWEEP_MAX_S * TURNS
        for connection in tuple(self._open):
            connection.sweep(now_s)
            if connection.busy:
                shortest_s = min(shortest_s, connection.shortest_limit_s)
        for idle in tuple(self._idle.values()):
            for connection in tuple(idle):
                if now_s - connection.idle_since_s < self._limits.keep_alive_s:
                    break  # the list is ordered: the newest are last
                connection.close()
                idle.remove(connection)
        if self._open and not self._closed:
            self._sweep_period_s = _SWEEP_MAX_S
            self._sweep_within(min(shortest_s, self._limits.keep_alive_s), loop)


@lru_cache(maxsize=4096)
def parse_http_url(url: str) -> _Target:
    """Split an http or https URL."""
    try:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        host, port = parts.hostname, parts.port or (443 if is_tls else 80)
    except ValueError as exc:
        raise ConfigError(f"url {url!r}: {exc}; write http://host:port/path") from exc
    if parts.scheme not in {"http", "https"} or not host:
        raise ConfigError(f"url {url!r}: only http and https are spoken; write http://host:port/path")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(c <= " " or c > "~" for c in path):
        raise ConfigError(f"url {url!r}: spaces and non-ASCII characters must be percent-encoded")
    line = f"{path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
    return _Target(Origin(host, port, is_tls), line.encode())


def _connect_error(exc: OSError, origin: Origin, connect_s: float | None) -> PenstockError:
    """Map what connecting raises: the one place that knows sockets' errors."""
    name = f"{origin.host}:{origin.port}"
    if exc.errno in _EXHAUSTED:
        return SaturatedError(f"cannot open a connection to {name}: {exc}; {_EXHAUSTED[exc.errno]}")
    if isinstance(exc, TimeoutError) and exc.errno is None:
        return UpstreamTimeout(f"{name} did not accept within connect limit {connect_s} s", phase="connect")
    if isinstance(exc, socket.gaierror):
        return UpstreamConnectError(f"host {origin.host!r} does not resolve: {exc}")
    if isinstance(exc, ConnectionRefusedError):
        return UpstreamConnectError(f"{name} refused the connection: nothing listens there")
    return UpstreamConnectError(f"cannot connect to {name}: {exc}")
