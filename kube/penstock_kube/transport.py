"""One authenticated HTTP session to the API server: retries, renewed credentials, bounded time.

`KubeClient` is its only caller. Bodies go through as bytes; what they mean is not known here.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import httpx

from penstock_core.errors import ConfigError, UnavailableError
from penstock_core.logs import get_logger
from penstock_kube.backoff import Backoff
from penstock_kube.credentials import Credentials
from penstock_kube.failures import FOREIGN, NOT_SENT, cluster_error, penstock_errors, status_error

log = get_logger(__name__)

CONNECT_S: Final = 5.0
"""Chosen: longest wait for a connection with TLS; within a cluster it takes milliseconds."""

ANSWER_S: Final = 20.0
"""Chosen: longest silence of the server within one call. It gives up itself after 60 s (--request-timeout)."""

BUDGET_S: Final = 30.0
"""Chosen: after this long no call is tried again; callers have their own, slower backoff."""

SILENCE_S: Final = 80.0
"""Longest silence of a watch: the server sends a bookmark every 60 s, so the connection is dead after this."""

MAX_CALLS: Final = 8
"""Calls under way at once. httpcore looks at every connection at each request, so with 32 a call takes 2.5 times
the processor time of one with 8 (4.9 and 1.9 ms on two slow cores), and the server would only queue them."""

MAX_WATCHES: Final = 64
"""Chosen: more than any process has. httpcore counts busy connections too against those it may keep, so without
this a process with more watches than `MAX_CALLS` would make a new connection for every call."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # A peer that vanished without a word is given up after 30 s even while bytes are in flight.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)

_WARNINGS_KEPT: Final = 100
"""Chosen: different warnings of the server that are logged once each."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        method: HTTP method.
        path: Below the server's URL.
        params: Query parameters.
        content: Body, or None.
        content_type: Of the body.
        is_repeatable: A second execution changes nothing more, so lost answers may be asked for again.
    """

    method: str
    path: str
    params: Mapping[str, str]
    content: bytes | None = None
    content_type: str = "application/json"
    is_repeatable: bool = True

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class _Connections:
    """A pool of connections that closes once it is retired and its last user is gone."""

    __slots__ = ("_is_retired", "_users", "client")

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self._users = 0
        self._is_retired = False

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[httpx.AsyncClient]:
        self._users += 1
        try:
            yield self.client
        finally:
            self._users -= 1
            if self._is_retired and not self._users:
                await self.client.aclose()

    async def retire(self) -> None:
        self._is_retired = True
        if not self._users:
            await self.client.aclose()


class Transport:
    """Sends calls; one per client."""

    def __init__(self, credentials: Credentials, connections: _Connections, rng: random.Random) -> None:
        self.credentials = credentials
        self._connections = connections
        self._rng = rng
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._lock = asyncio.Lock()
        self._warned: set[str] = set()

    @classmethod
    async def open(cls, credentials: Credentials, rng: random.Random) -> Transport:
        """Prepare the session; nothing is sent yet.

        Raises:
            ConfigError: the credentials cannot be used.
        """
        return cls(credentials, await _connect(credentials), rng)

    @property
    def rng(self) -> random.Random:
        """Generator of all jitter."""
        return self._rng

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        await self._connections.client.aclose()

    async def send(self, call: Call, *, is_urgent: bool = False) -> bytes:
        """Send a call and return the answer's body; see `ask`.

        Raises:
            ClusterError: or the subclass that fits.
        """
        return (await self.ask(call, is_urgent=is_urgent)).content

    async def ask(self, call: Call, *, is_urgent: bool = False) -> httpx.Response:
        """Send a call and return the whole answer, its body read.

        Too many requests and failures of the server are tried again with growing pauses, other errors are not.
        Urgent calls do not wait for others to end.

        Raises:
            ClusterError: or the subclass that fits.
        """
        until_s = time.monotonic() + BUDGET_S
        backoff = Backoff(self._rng, first_s=0.1, limit_s=5.0)
        slot = nullcontext() if is_urgent else self._slots
        while True:
            try:
                async with slot:
                    return await self._attempt(call)
            except _Again as again:
                error = again.error
                pause_s = max(backoff.pause_s(), again.retry_after_s or 0.0)
                if not again.may_repeat or time.monotonic() + pause_s > until_s:
                    raise error from again.__cause__
                log.debug("call tried again", call=str(call), problem=str(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch and give its body in pieces as they arrive; never tried again.

        Raises:
            ClusterError: it was refused, broke off or went silent.
        """
        with penstock_errors(str(call)):
            for is_last in (False, True):
                seen = self.credentials.version
                async with self._connections.borrowed() as client:
                    request = self._request(client, call, read_s=SILENCE_S)
                    response = await client.send(request, stream=True)
                    try:
                        if response.status_code == 401 and not is_last:
                            await self._renew(seen)
                            continue
                        if response.is_error:
                            body = await response.aread()
                            raise status_error(response.status_code, body, response.headers, str(call))
                        yield response.aiter_bytes()
                        return
                    finally:
                        await response.aclose()

    async def _attempt(self, call: Call) -> httpx.Response:
        for is_last in (False, True):
            seen = self.credentials.version
            async with self._connections.borrowed() as client:
                try:
                    response = await client.send(self._request(client, call, read_s=ANSWER_S))
                except FOREIGN as exc:
                    error = cluster_error(exc, str(call))
                    if not isinstance(error, UnavailableError):
                        raise error from exc
                    raise _Again(error, may_repeat=call.is_repeatable or isinstance(exc, NOT_SENT)) from exc
            if response.status_code == 401 and not is_last:
                await self._renew(seen)
                continue
            break
        self._note_warnings(response)
        if not response.is_error:
            return response
        refused = status_error(response.status_code, response.content, response.headers, str(call))
        if isinstance(refused, UnavailableError):
            # 429 says that nothing was done; after other failures that is not known.
            raise _Again(refused, may_repeat=call.is_repeatable or response.status_code == 429)
        raise refused

    def _request(self, client: httpx.AsyncClient, call: Call, *, read_s: float) -> httpx.Request:
        headers = {"accept": "application/json"}
        if call.content is not None:
            headers["content-type"] = call.content_type
        token = self.credentials.token()
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        name = self.credentials.tls_server_name
        return client.build_request(
            call.method,
            self.credentials.server + call.path,
            params=dict(call.params) or None,
            content=call.content,
            headers=headers,
            timeout=httpx.Timeout(read_s, connect=CONNECT_S, pool=ANSWER_S),
            extensions={"sni_hostname": name} if name else None,
        )

    async def _renew(self, seen: int) -> None:
        """Read the credentials again, once for all calls refused; a client certificate needs new connections too."""
        async with self._lock:
            if self.credentials.version != seen:
                return
            log.info("credentials refused; reading them again", server=self.credentials.server)
            await self.credentials.renew()
            if self.credentials.has_certificate:
                refused, self._connections = self._connections, await _connect(self.credentials)
                await refused.retire()

    def _note_warnings(self, response: httpx.Response) -> None:
        for text in response.headers.get_list("warning"):
            if text not in self._warned and len(self._warned) < _WARNINGS_KEPT:
                self._warned.add(text)
                log.warning("the API server warns", warning=text)


class _Again(Exception):  # noqa: N818 - control flow within this module
    """An attempt failed in a way that may pass."""

    def __init__(self, error: UnavailableError, *, may_repeat: bool) -> None:
        self.error = error
        self.retry_after_s = error.retry_after_s
        self.may_repeat = may_repeat
        super().__init__(str(error))


async def _connect(credentials: Credentials) -> _Connections:
    tls = await credentials.tls()
    # Watches live long and come and go seldom; calls are bounded by the transport's own slots.
    kept = MAX_CALLS + MAX_WATCHES
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=60.0)
    options: dict[str, Any] = {"verify": tls, "limits": limits, "http2": False}
    try:
        if credentials.proxy is not None:
            client = httpx.AsyncClient(proxy=credentials.proxy, **options)
        else:
            plain = httpx.AsyncHTTPTransport(socket_options=_KEEPALIVE, **options)
            client = httpx.AsyncClient(transport=plain, headers={"user-agent": "penstock"})
    except (ValueError, ImportError) as exc:
        raise ConfigError(f"kubeconfig: proxy-url {credentials.proxy!r}: {exc}") from exc
    return _Connections(client)
