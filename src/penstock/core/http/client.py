"""HTTP/1.1 client with pools of keep-alive connections.

Requests are not retried, except an idempotent one whose kept-alive connection the peer closed before it answered. All
exceptions of sockets and the parser are converted to ``penstock.core.errors`` here or in ``client_connection``.
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
# Exhausted resources of this host are not a fault of the peer.
_EXHAUSTED = {
    errno.EMFILE: "raise the process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the host's limit of open files (fs.file-max)",
}
_CLOSED = "the connection pool is closed: no request can be sent"


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response; header names are lower-case.

    Attributes:
        status: HTTP status.
        headers: Headers by lower-case name; repeated headers are joined by ``", "``.
        body: Complete body.
    """

    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Target:
    origin: Origin
    line: bytes  # the path, and the head up to its second field


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of a connection pool. The values are chosen.

    Attributes:
        connections: Maximum number of open connections to all origins; beyond it a request raises SaturatedError.
        idle_per_origin: Maximum number of idle kept-alive connections per origin.
        body_bytes: Maximum length of a body that ``request`` returns.
        keep_alive_s: Wall-clock seconds after which an idle connection is closed. It is below the servers' own limit,
            so that this side closes first and no request meets a closing socket.
        close_s: Maximum wall-clock seconds for ``close``. An aborted socket takes one turn of the event loop; an
            attempt in progress notices that the pool is closed and ends by itself.
    """

    connections: int = 16384
    idle_per_origin: int = 1024
    body_bytes: int = 64 * 1024 * 1024
    keep_alive_s: float = 30.0
    close_s: float = 2.0


class ConnectionPool:
    """Keep-alive connections by origin, for use from one event loop. Timeouts do not count time in which the event loop was blocked.

    Attributes:
        lag_s: Total wall-clock seconds for which the event loop was blocked while connections were open.
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
        """Number of open connections, including idle ones and connection attempts in progress."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """Number of kept-alive connections without a request."""
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
        """Send a request and return the complete response, whatever its status.

        Args:
            method: HTTP method.
            url: URL with scheme http or https.
            body: Request body.
            headers: Request headers.
            timeouts: Timeouts of the request.

        Raises:
            UpstreamConnectError: The connection could not be opened; the request was not sent.
            UpstreamTimeout: A timeout expired; the exception has its phase.
            StreamBroken: The connection ended early or delivered invalid data, or the body is too long.
            SaturatedError: The maximum number of connections (`PoolLimits.connections`) is open, or no file descriptor
                is free.
            ConfigError: The URL is not a valid http or https URL.
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
        """Send a request and return the response as soon as status line and headers have arrived; raises as `request` does.

        Args:
            method: HTTP method.
            url: URL with scheme http or https.
            body: Request body.
            headers: Request headers.
            timeouts: Timeouts of the request.
        """
        target = parse_http_url(url)
        if target.origin.is_tls:
            headers = self._with_token(headers)
        length = b"content-length: %d\r\n" % len(body) if body or method not in _BODYLESS else b""
        head = b"%b %b%b%b\r\n" % (method.encode(), target.line, length, encode_headers(headers))
        loop = asyncio.get_running_loop()
        # The deadline counts only seconds in which the loop was not blocked; `_put_back` adds the blocked time.
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
        """Return the request's headers with the pool's own token instead of the client's, if the pool has one."""
        own = self._tls.authorization(asyncio.get_running_loop().time())
        if own is None:
            return headers
        return (*(each for each in headers if each[0].lower() != b"authorization"), (b"authorization", own))

    def _put_back(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else deadline_s + self.lag_s

    async def close(self) -> None:
        """Close idle connections and abort those in use; returns within `PoolLimits.close_s`."""
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
        """Close idle connections to a URL's host and port, so that a server that shuts down does not have to wait for them."""
        for connection in tuple(self._idle.get(parse_http_url(url).origin, ())):
            connection.close()

    def cut(self, url: str, reason: str, *, silent_s: float = 0.0) -> int:
        """Abort all requests in progress to a URL's host and port, as if the process there had died; return their number.

        Args:
            url: URL with the host and port.
            reason: Reason, for the exceptions' messages.
            silent_s: If above 0, abort nothing and return 0 if any of the connections has received data within this
                many wall-clock seconds.
        """
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
        """Open a connection; the pool stops counting it when it ends, or if the attempt fails in any way."""
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
            # uvloop does not call `connection_lost` for an attempt that is cancelled after `connection_made`.
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
        """Extend all timeouts by the time for which the event loop was blocked, and return that time in seconds."""
        late_s = self._lag.late_s()
        self.lag_s += late_s
        for connection in self._open:
            connection.extend_deadlines(late_s)
        return late_s

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # After a blockage, skip one check so that pending data is read first; only one, so that timeouts still expire.
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
                    break  # the list is ordered: the connections used last are at its end
                connection.close()
                idle.remove(connection)
        if self._open and not self._closed:
            self._sweep_period_s = _SWEEP_MAX_S
            self._sweep_within(min(shortest_s, self._limits.keep_alive_s), loop)


@lru_cache(maxsize=4096)
def parse_http_url(url: str) -> _Target:
    """Parse an http or https URL into its origin and the start of the request head.

    Raises:
        ConfigError: The URL is invalid.
    """
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
    """Convert an exception of a connection attempt; the only place that knows the errors of sockets."""
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
