"""HTTP/1.1 server of the router, the simulated worker and the planner; one timer checks the timeouts of all connections."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from typing import Any, Final

from penstock.core.errors import ConfigError, PortInUseError
from penstock.core.http.intake import Intake
from penstock.core.http.limits import ServerLimits
from penstock.core.http.messages import Request, Responder
from penstock.core.http.own_lag import LATE_S, OwnLag
from penstock.core.http.server_connection import Handler, ServerConnection, ServerContext
from penstock.core.logs import get_logger
from penstock.core.ports import EVERY_ADDRESS

__all__ = ["Handler", "HttpServer", "Request", "Responder", "ServerLimits"]

log = get_logger(__name__)
BACKLOG: Final = 2048
"""Length of the listen queue. Chosen: more simultaneous connects than a load generator opens in one scheduling
quantum."""
# Chosen: maximum wall-clock seconds for cancelled handlers to clean up before close() returns.
_CANCEL_S = 5.0
# Chosen: minimum seconds for handlers to react to a lost connection before they are cancelled.
_NOTICE_S = 0.05
# Chosen: minimum wall-clock seconds between two log lines about refused connections.
_REPORT_S = 10.0


class HttpServer:
    """HTTP server that listens on one TCP address and passes every request to one handler."""

    def __init__(
        self,
        handler: Handler,
        *,
        limits: ServerLimits = ServerLimits(),  # noqa: B008 - frozen
        intake: Intake | None = None,
        is_vital: Callable[[Request], bool] = lambda _: False,
        wants_body: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            handler: Called with each request and the responder for its response.
            limits: Limits of the server.
            intake: Limits and buffered bytes to use instead of ``limits``, if they are shared with another part of
                the process; None creates new ones from ``limits``.
            is_vital: Returns whether a request, such as a probe, must be served even if all connections are in use.
            wants_body: Returns whether a request's body should be read; otherwise the handler gets an empty body, and
                the connection is closed afterwards.
        """
        self._shared = ServerContext(handler, intake or Intake(limits), is_vital, wants_body)
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reported_s = float("-inf")
        self._lag = OwnLag()
        self._is_judging = True
        self._port = 0

    async def start(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        held: socket.socket | None = None,
    ) -> None:
        """Listen on ``host:port``.

        Args:
            host: Address to listen on; ``::`` means every address of the machine, IPv6 and IPv4.
            port: Port; 0 selects a free one, which ``port`` then returns.
            tls: TLS context; None means plain HTTP.
            held: Socket that already listens there and was passed by the process that started this one. It is used
                instead of a new one; its other owners keep connections that are not accepted yet.

        Raises:
            ConfigError: Listening fails; PortInUseError if the port is in use.
        """
        shared = self._shared
        shared.loop = loop = asyncio.get_running_loop()
        shared.bound = shared.limits.connections_within_files()
        try:
            if held is None and host == EVERY_ADDRESS:
                held = _listen_everywhere(port)
            place: dict[str, Any] = {"host": host, "port": port} if held is None else {"sock": held}
            self._server = await loop.create_server(
                lambda: ServerConnection(shared), **place, backlog=BACKLOG, ssl=tls
            )
        except OSError as exc:
            raise _bind_error(exc, host, port) from exc
        self._port = self._server.sockets[0].getsockname()[1]
        self._sweep()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return self._port

    @property
    def intake(self) -> Intake:
        """Limits and buffered bytes, for sharing with another listener of the process."""
        return self._shared.intake

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._shared.connections)

    @property
    def handlers(self) -> int:
        """Number of handlers that have not returned."""
        return len(self._shared.responders)

    def drain(self) -> None:
        """Close every connection after its next response, which announces the end, or after being idle for `ServerLimits.drain_idle_s`.

        New connections are still accepted, for one request each.
        """
        shared = self._shared
        if shared.draining_since_s is None:
            shared.draining_since_s = shared.loop.time()
            for connection in tuple(shared.connections):
                connection.drain()

    async def close(self, *, grace_s: float) -> None:
        """Stop accepting connections and `drain`; return when all connections have ended, or after about ``grace_s`` wall-clock seconds.

        A client with a kept-alive connection can send its next request until `ServerLimits.drain_idle_s` have passed;
        the response announces the end. Clients that stop sending their request or reading their response get at most
        ``closing_s`` of the grace period.
        """
        shared, server = self._shared, self._server
        if server is None:
            return
        shared.closing_since_s = shared.loop.time()
        deadline_s = shared.closing_since_s + grace_s
        server.close()
        self.drain()
        if shared.connections:
            shared.on_empty.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(shared.on_empty.wait(), grace_s)
        self._cut_off(grace_s)
        if shared.responders:
            # Handlers are notified of the lost connection first; those still running are cancelled.
            tasks = [each.task for each in shared.responders if each.task is not None]
            _, late = await asyncio.wait(tasks, timeout=max(_NOTICE_S, deadline_s - shared.loop.time()))
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=_CANCEL_S)
        if self._timer is not None:
            self._timer.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), _CANCEL_S)
        self._server = None

    def _cut_off(self, grace_s: float) -> None:
        """End the connections that remain after the grace period; idle ones are closed, others aborted."""
        busy = [each for each in self._shared.connections if not each.is_idle]
        for connection in self._shared.connections.difference(busy):
            connection.close()
        if busy:
            log.warning("connections cut off at shutdown", connections=len(busy), grace_s=grace_s)
            for connection in busy:
                connection.abort()

    def _sweep(self) -> None:
        shared = self._shared
        late_s = self._lag.late_s()
        for connection in shared.connections:
            connection.extend_deadlines(late_s)
        if shared.closing_since_s is not None:
            shared.closing_since_s += late_s
        if shared.draining_since_s is not None:
            shared.draining_since_s += late_s
        # After a blockage, skip one check so that pending data is read first; only one, so that timeouts still expire.
        self._is_judging = late_s <= LATE_S or not self._is_judging
        period_s = shared.limits.sweep_period_s() if self._is_judging else LATE_S
        self._lag.armed(period_s)
        # The timer is set first, so that timeouts still work if this sweep fails.
        self._timer = shared.loop.call_later(period_s, self._sweep)
        now_s = shared.loop.time()
        shared.date_line = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
        if shared.refused and now_s - self._reported_s >= _REPORT_S:
            log.warning(
                "connections refused: all are in use", refused=shared.refused, max_connections=shared.bound
            )
            shared.refused, self._reported_s = 0, now_s
        if self._is_judging:
            for connection in tuple(shared.connections):
                connection.sweep(now_s)


def _listen_everywhere(port: int) -> socket.socket:
    """Return a socket that listens on every address of both families, or of IPv4 alone on a machine without IPv6.

    Without this, both event loops would create an IPv6-only socket for ``::``.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                (EVERY_ADDRESS, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    except OSError as exc:
        # The kernel supports IPv6 but the machine has it disabled.
        if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
    return socket.create_server(("", port), backlog=BACKLOG)


def _bind_error(exc: OSError, host: str, port: int) -> ConfigError:
    if exc.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"port {port} on {host} is in use: stop the process that listens there or choose another --port"
        )
    if exc.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges: choose a port of 1024 or above")
    if isinstance(exc, socket.gaierror):
        return ConfigError(
            f"host {host!r} does not resolve: give an address of this machine, such as 127.0.0.1"
        )
    return ConfigError(f"cannot listen on {host}:{port}: {exc}; give an address of this machine")
