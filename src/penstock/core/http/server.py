"""The HTTP/1.1 server of the router, the simulated worker and the planner; one timer looks over all connections."""

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
"""Chosen: more simultaneous connects than a load generator opens in one scheduling quantum."""
# Chosen: how long cancelled handlers may clean up before close() returns, real seconds.
_CANCEL_S = 5.0
# Chosen: the least time that handlers get to act on a lost connection before they are cancelled.
_NOTICE_S = 0.05
# Chosen: often enough to be seen, seldom enough for a log under attack; real seconds.
_REPORT_S = 10.0


class HttpServer:
    """Serves one handler on one TCP address."""

    def __init__(
        self,
        handler: Handler,
        *,
        limits: ServerLimits = ServerLimits(),  # noqa: B008 - frozen
        intake: Intake | None = None,
        is_vital: Callable[[Request], bool] = lambda _: False,
        wants_body: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        """Prepare; nothing listens yet. ``intake`` takes the place of ``limits`` where others count bytes in it, too.

        A request that ``is_vital``, such as a probe's, is served even when all connections are in use. One whose body
        ``wants_body`` does not want is handled with an empty body, and its connection ends.
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
        """Listen on ``host:port``; port 0 takes a free one, which ``port`` then returns. With ``tls`` it speaks https.

        The host ``::`` means every address of the machine, of IPv6 and of IPv4.

        ``held`` is a socket that listens there already, on behalf of who started this process: it is taken over, and its
        other holders keep the connections that are not accepted yet.
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
        """The port listened on."""
        return self._port

    @property
    def intake(self) -> Intake:
        """The limits and the buffered bytes, which another entrance of the process shares."""
        return self._shared.intake

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._shared.connections)

    @property
    def handlers(self) -> int:
        """Handlers that have not returned."""
        return len(self._shared.responders)

    def drain(self) -> None:
        """Let every connection end behind its next answer, which says so; those without a request end after a while.

        Connections are still accepted, for one request each.
        """
        shared = self._shared
        if shared.draining_since_s is None:
            shared.draining_since_s = shared.loop.time()
            for connection in tuple(shared.connections):
                connection.drain()

    async def close(self, *, grace_s: float) -> None:
        """Stop accepting and drain: return once all connections have ended, after ``grace_s`` real seconds at most.

        A client that was promised a kept connection may send its next request on it until `ServerLimits.drain_idle_s` have
        passed; the answer announces the end. Clients that stop sending their request or reading their response get
        ``closing_s`` of the grace.
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
        """End the connections that the grace has left, idle ones in order."""
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
            connection.forgive(late_s)
        if shared.closing_since_s is not None:
            shared.closing_since_s += late_s
        if shared.draining_since_s is not None:
            shared.draining_since_s += late_s
        # What came while this loop stood is read before anything is judged; once, so that every limit ends.
        self._is_judging = late_s <= LATE_S or not self._is_judging
        period_s = shared.limits.sweep_period_s() if self._is_judging else LATE_S
        self._lag.armed(period_s)
        # First, so that the limits outlive a sweep that fails.
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

    Both event loops would make a socket of ``::`` take IPv6 alone.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                (EVERY_ADDRESS, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    except OSError as exc:
        # A kernel with IPv6 whose machine has it switched off.
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
