"""One authenticated HTTP session to the API server: retries, renewed credentials, bounded time.

`KubeClient` is its only caller. Bodies go through as bytes; what they mean is not known here.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDictProxy

from penstock.core.errors import ClusterError, ConfigError, UnavailableError
from penstock.core.logs import get_logger
from penstock.kube.backoff import Backoff
from penstock.kube.credentials import Credentials
from penstock.kube.failures import FOREIGN, NOT_SENT, cluster_error, penstock_errors, status_error

log = get_logger(__name__)

CONNECT_S: Final = 5.0
"""Chosen: longest wait for a connection with TLS; within a cluster it takes milliseconds."""

ANSWER_S: Final = 20.0
"""Chosen: longest silence of the server within one call. It gives up itself after 60 s (--request-timeout)."""

BUDGET_S: Final = 30.0
"""Chosen: after this long no call is tried again; callers have their own, slower backoff."""

SILENCE_S: Final = 100.0
"""Longest silence of a watch: the server sends a bookmark every 60 to 75 s, so the connection is dead after this."""

MAX_CALLS: Final = 32
"""Chosen: calls under way at once; more would only queue in the server, which takes 400 reads and 200 writes."""

IDLE_S: Final = 60.0
"""Chosen: how long an unused connection is kept; the server closes it after 90 s."""

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
class KubeCall:
    """One request.

    Attributes:
        method: HTTP method.
        path: Below the server's URL.
        params: Query parameters.
        content: Body, or None.
        content_type: Of the body.
        is_repeatable: A second execution changes nothing more, so lost answers may be asked for again.
        refusal: Asked right before sending, after every wait: why it may not be sent; returns None if it may.
    """

    method: str
    path: str
    params: Mapping[str, str]
    content: bytes | None = None
    content_type: str = "application/json"
    is_repeatable: bool = True
    refusal: Callable[[], str | None] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def check(self) -> None:
        """Refuse to go on if the call may not be sent any more.

        Raises:
            ClusterError: with the reason.
        """
        why = None if self.refusal is None else self.refusal()
        if why is not None:
            raise ClusterError(f"{self}: not sent: {why}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        status: HTTP status.
        headers: Names in any case; repeated ones are kept.
        body: All of it.
    """

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class _Connections:
    """A pool of connections that closes once it is retired and its last user is gone."""

    __slots__ = ("_is_retired", "_users", "session")

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self._users = 0
        self._is_retired = False

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[aiohttp.ClientSession]:
        self._users += 1
        try:
            yield self.session
        finally:
            self._users -= 1
            if self._is_retired and not self._users:
                await self.session.close()

    async def retire(self) -> None:
        self._is_retired = True
        if not self._users:
            await self.session.close()


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
        return cls(credentials, _connect(credentials), rng)

    @property
    def rng(self) -> random.Random:
        """Generator of all jitter."""
        return self._rng

    def session(self) -> aiohttp.ClientSession:
        """Return a session of its own for a library that makes its own calls; the caller closes it.

        Every request carries the token of that moment; a new certificate or authority needs a new session.
        """
        credentials = self.credentials

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            if (token := credentials.token()) is not None:
                request.headers["authorization"] = f"Bearer {token}"
            if credentials.tls_server_name is not None:
                request.server_hostname = credentials.tls_server_name
            return await handler(request)

        return _session(credentials, middlewares=(authorize,), proxy=credentials.proxy)

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        await self._connections.session.close()

    async def send(self, call: KubeCall, *, is_urgent: bool = False) -> bytes:
        """Send a call and return the answer's body; see `ask`.

        Raises:
            ClusterError: or the subclass that fits.
        """
        return (await self.ask(call, is_urgent=is_urgent)).body

    async def ask(self, call: KubeCall, *, is_urgent: bool = False) -> Answer:
        """Send a call and return the whole answer.

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
    async def stream(self, call: KubeCall) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch and give its body in pieces as they arrive; never tried again.

        Raises:
            ClusterError: it was refused, broke off or went silent.
        """
        with penstock_errors(str(call)):
            for is_last in (False, True):
                seen = self.credentials.version
                async with (
                    self._connections.borrowed() as session,
                    self._request(session, call, read_s=SILENCE_S) as response,
                ):
                    if response.status == 401 and not is_last:
                        await self.renew(seen)
                        continue
                    if response.status >= 400:
                        body = await response.read()
                        raise status_error(response.status, body, response.headers, str(call))
                    yield response.content.iter_any()
                    return

    async def _attempt(self, call: KubeCall) -> Answer:
        for is_last in (False, True):
            seen = self.credentials.version
            call.check()
            async with self._connections.borrowed() as session:
                try:
                    async with self._request(session, call, read_s=ANSWER_S) as response:
                        answer = Answer(response.status, response.headers, await response.read())
                except FOREIGN as exc:
                    if isinstance(exc, aiohttp.ClientConnectorCertificateError) and not is_last:
                        await self.renew(seen)  # the cluster's authority may have changed
                        continue
                    error = cluster_error(exc, str(call))
                    if not isinstance(error, UnavailableError):
                        raise error from exc
                    raise _Again(error, may_repeat=call.is_repeatable or isinstance(exc, NOT_SENT)) from exc
            if answer.status == 401 and not is_last:
                await self.renew(seen)
                continue
            break
        self._note_warnings(answer)
        if answer.status < 400:
            return answer
        refused = status_error(answer.status, answer.body, answer.headers, str(call))
        if isinstance(refused, UnavailableError):
            # 429 says that nothing was done; after other failures that is not known.
            raise _Again(refused, may_repeat=call.is_repeatable or answer.status == 429)
        raise refused

    def _request(
        self, session: aiohttp.ClientSession, call: KubeCall, *, read_s: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {}
        if call.content is not None:
            headers["content-type"] = call.content_type
        token = self.credentials.token()
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return session.request(
            call.method,
            self.credentials.server + call.path,
            params=call.params or None,
            data=_Fenced(call.content, call) if call.content is not None and call.refusal else call.content,
            headers=headers,
            timeout=aiohttp.ClientTimeout(connect=CONNECT_S, sock_read=read_s),
            proxy=self.credentials.proxy,
            server_hostname=self.credentials.tls_server_name,
            allow_redirects=False,
        )

    async def renew(self, seen: int) -> None:
        """Read the credentials again, once for all calls that failed by them, and use new connections.

        Args:
            seen: Version of the credentials that failed.

        Raises:
            ConfigError: what is there now cannot be used.
        """
        async with self._lock:
            if self.credentials.version != seen:
                return
            log.info(
                "credentials or certificate refused; reading credentials again",
                server=self.credentials.server,
            )
            await self.credentials.renew()
            refused, self._connections = self._connections, _connect(self.credentials)
            await refused.retire()

    def _note_warnings(self, answer: Answer) -> None:
        for text in answer.headers.getall("warning", ()):
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


class _Fenced(aiohttp.BytesPayload):
    """A body that is held back if its call may not be sent any more; connecting takes time, too.

    Without it the server has half a request, which it does not carry out.
    """

    def __init__(self, content: bytes, call: KubeCall) -> None:
        super().__init__(content, content_type=call.content_type)
        self._call = call

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._call.check()
        await super().write_with_length(writer, content_length)


def _connect(credentials: Credentials) -> _Connections:
    return _Connections(_session(credentials))


def _session(credentials: Credentials, **options: Any) -> aiohttp.ClientSession:
    proxy = credentials.proxy
    if proxy is not None and not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"kubeconfig: proxy-url {proxy!r}: expected http://HOST:PORT or https://HOST:PORT")
    connector = aiohttp.TCPConnector(
        ssl=credentials.tls,
        limit=0,  # calls are bounded by the transport's own slots, watches by their number
        keepalive_timeout=IDLE_S,
        resolver=aiohttp.ThreadedResolver(),
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"accept": "application/json", "user-agent": "penstock"},
        **options,
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket for a connection that is about to be made."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for option in _KEEPALIVE:
        made.setsockopt(*option)
    return made
