"""Sends calls with the official client, and adds retries for every verb, renewal of credentials, and fencing.

The official client reads the API server's address and the credentials from a kubeconfig or a pod's service account.
Used only by `KubeClient`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import UnauthorizedError
from kubernetes.aio.utils.retry import Backoff, on_retry_after_error, retry_after_seconds

from penstock.core.errors import ClusterError, ConfigError, UnavailableError
from penstock.core.logs import get_logger
from penstock.kube.expiry import Expiry, certificate_expiry, token_expiry
from penstock.kube.failures import FOREIGN, NOT_SENT, cluster_error, penstock_errors

log = get_logger(__name__)

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which the kubelet mounts a pod's own credentials."""

KUBECONFIG: Final = "~/.kube/config"
"""Default path of the kubeconfig, as in kubectl."""

PLUGIN_TIMEOUT_S: Final = 60.0
"""Maximum seconds to wait for a kubeconfig's credential plugin. Chosen: some plugins call a cloud API."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of one client.

    Attributes:
        configuration: Configuration of the official client.
        namespace: Namespace of the service account or of the kubeconfig's context.
        token_name: Description of the token's source, for messages.
        certificate: Expiry of the client certificate; None if there is none.
    """

    configuration: Configuration
    namespace: str
    token_name: str
    certificate: Expiry | None = None

    def note_expired(self, exc: BaseException) -> bool:
        """Add a note to ``exc`` for each credential that has expired, as a possible cause; return whether any has expired."""
        # Use the token that is now in the configuration, since a pod's token is reloaded.
        token = Expiry(self.token_name, token_expiry(self.configuration.api_key.get("BearerToken", "")))
        now = dt.datetime.now(dt.UTC)
        problems = [each.problem(now) for each in (token, self.certificate) if each is not None]
        for problem in filter(None, problems):
            exc.add_note(problem)
        return any(problems)


async def read_credentials(*, kubeconfig: Path | None, context: str | None) -> Credentials:
    """Read the credentials of a kubeconfig or of the pod's service account; arguments as in `KubeClient.connect`.

    Raises:
        ConfigError: There are no credentials, or they are unusable.
    """
    if kubeconfig is not None and not os.path.isfile(kubeconfig):  # noqa: ASYNC240, PTH113 - rarely, and local
        raise ConfigError(f"--kubeconfig: {kubeconfig}: no such file")
    paths = str(kubeconfig or os.environ.get("KUBECONFIG") or KUBECONFIG)
    try:
        async with asyncio.timeout(PLUGIN_TIMEOUT_S):
            found = await _read(paths, context)
    except TimeoutError as exc:
        raise ConfigError(f"kubeconfig: the credential plugin took more than {PLUGIN_TIMEOUT_S:g} s") from exc
    except ConfigError:
        raise
    except Exception as exc:
        # The package does not wrap the errors of a malformed kubeconfig: KeyError, TypeError, YAML errors...
        raise ConfigError(
            f"Kubernetes credentials: {paths}: {type(exc).__name__}: {exc}; give --kubeconfig or KUBECONFIG, "
            "or run in a pod with a service account"
        ) from exc
    if not found.configuration.host:
        raise ConfigError("kubeconfig: clusters: server: missing; name the API server's URL")
    proxy = found.configuration.proxy
    if proxy is not None and not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"kubeconfig: proxy-url {proxy!r}: expected http://HOST:PORT or https://HOST:PORT")
    return found


async def _read(paths: str, context: str | None) -> Credentials:
    configuration = Configuration(host="")
    files = [os.path.expanduser(each) for each in paths.split(os.pathsep)]  # noqa: ASYNC240, PTH111 - as above
    if not any(os.path.exists(each) for each in files) and SERVICE_ACCOUNT.is_dir():  # noqa: ASYNC240, PTH110
        token, authority = SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt"
        InClusterConfigLoader(str(token), str(authority)).load_and_set(configuration)
        namespace = "default"
        with suppress(OSError, UnicodeDecodeError):
            namespace = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or namespace
        return Credentials(configuration, namespace, f"the token in {token}")
    if not any(os.path.exists(each) for each in files):  # noqa: ASYNC240, PTH110 - as above
        raise ConfigError(
            f"Kubernetes credentials: {paths}: no such file; give --kubeconfig or KUBECONFIG, or run in a pod with a service account"
        )
    plugin_errors = _RaisedErrors(logging.ERROR)
    kube_config.logger.addHandler(plugin_errors)
    try:
        loader = await kube_config.load_kube_config(paths, context, configuration, persist_config=False)
    finally:
        kube_config.logger.removeHandler(plugin_errors)
    if token := configuration.api_key.get("BearerToken"):
        configuration.api_key["BearerToken"] = token.strip()  # a tokenFile ends with a newline
    chosen, user = loader.current_context["context"], loader._user or {}  # noqa: SLF001 - there is no public way
    whose = f"of user {chosen.get('user')} in {paths}"
    certificate = None
    if configuration.cert_file:
        # Read now, since the temporary copy of an inline certificate is deleted after its first use.
        text = Path(configuration.cert_file).read_text(encoding="utf-8", errors="replace")  # noqa: ASYNC240 - as above
        certificate = Expiry(_name(user, _CERTIFICATES, whose), certificate_expiry(text))
    namespace = chosen.get("namespace") or "default"
    return Credentials(configuration, namespace, _name(user, _TOKENS, whose), certificate)


_TOKENS: Final = ("token", "tokenFile")
_CERTIFICATES: Final = ("client-certificate-data", "client-certificate")


def _name(user: Mapping[str, Any], keys: tuple[str, str], whose: str) -> str:
    """Return a description of a credential: its kubeconfig key (the first of two that is set) and the file that the key names."""
    inline, file = keys
    if inline in user or file not in user:
        return f"{inline if inline in user else keys[0] + ' of the plugin'} {whose}"
    return f"{file} {user[file]} {whose}"


class _RaisedErrors(logging.Handler):
    """Raises errors that the package only logs: the reason why a credential plugin returned nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        raise kube_config.ConfigException(record.getMessage())


CONNECT_S: Final = 5.0
"""Maximum seconds to connect, including TLS. Chosen: within a cluster it takes milliseconds."""

ANSWER_S: Final = 20.0
"""Maximum seconds without data from the server within one call. Chosen. The server itself times out after 60 s
(--request-timeout)."""

BUDGET_S: Final = 30.0
"""Seconds after which a call is not retried any more. Chosen: callers have their own, slower backoff."""

RETRIES: Final = Backoff(steps=12, duration=0.2, factor=1.5, jitter=0.5)
"""Pauses between the attempts of one call: 0.2 to 12 s, 34 s in total without jitter. Chosen."""

SILENCE_S: Final = 100.0
"""Maximum seconds without data on a watch. The server sends a bookmark every 60 to 75 s, so the connection is dead
after this time."""

MAX_CALLS: Final = 32
"""Maximum number of concurrent calls. Chosen: more would only queue in the server, which accepts 400 reads and 200
writes."""

IDLE_S: Final = 60.0
"""Seconds for which an unused connection is kept open. Chosen: the server closes it after 90 s."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # A peer that disappeared without closing the connection times out after 30 s even with data in flight.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)

RETIRED_S: Final = 2 * (CONNECT_S + ANSWER_S)
"""Seconds after which no call uses connections with replaced credentials any more; watches are reopened."""

USER_AGENT: Final = "penstock"

_WARNINGS_KEPT: Final = 100
"""Maximum number of different API server warnings that are logged, once each. Chosen."""


@dataclass(frozen=True, slots=True)
class KubeCall:
    """One request to the API server.

    Attributes:
        method: HTTP method.
        path: Path of the URL.
        params: Query parameters.
        body: Body, sent as JSON; None means no body.
        content_type: Content type of the body.
        is_repeatable: Whether repeating the request has no further effect, so that it can be retried if its answer is
            lost.
        refusal: Called directly before sending, after every wait; returns why the request must not be sent, or None
            if it can. None means no such check.
    """

    method: str
    path: str
    params: Mapping[str, str]
    body: Any = None
    content_type: str = "application/json"
    is_repeatable: bool = True
    refusal: Callable[[], str | None] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def check(self) -> None:
        """Raise ClusterError if the call must not be sent any more."""
        why = None if self.refusal is None else self.refusal()
        if why is not None:
            raise ClusterError(f"{self}: not sent: {why}")


_sending: ContextVar[KubeCall] = ContextVar("_sending")
"""The call that the current task is sending, for `_check_fence`."""


class Transport:
    """Sends the calls of one client.

    Attributes:
        credentials: The credentials that were read last.
        version: Number that increases each time the credentials are read again.
        rng: Random generator for jitter.
    """

    def __init__(
        self, credentials: Credentials, rng: random.Random, kubeconfig: Path | None, context: str | None
    ) -> None:
        self.credentials = credentials
        self.version = 1
        self.rng = rng
        self._kubeconfig = kubeconfig
        self._context = context
        self._api = _api_client(credentials.configuration)
        self._retired: list[tuple[float, ApiClient]] = []
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._lock = asyncio.Lock()
        self._warned: set[str] = set()

    def session(self) -> aiohttp.ClientSession:
        """Return a separate HTTP session for a library (kopf) that makes its own calls; the caller closes it.

        Every request has the current token. If the server's certificate is not signed by the session's CA, the session
        is closed and the library requests a new one. At most 32 requests (`MAX_CALLS`) wait for an answer at the same
        time (a watch only until it begins): kopf would otherwise open a connection for each of a thousand graphs, and a
        busy machine would complete none of the TLS handshakes in time.
        """
        configuration, slots = self.credentials.configuration, asyncio.Semaphore(MAX_CALLS)

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            if (token := await configuration.get_api_key_with_prefix("BearerToken")) is not None:
                request.headers["authorization"] = token
            if configuration.tls_server_name is not None:
                request.server_hostname = configuration.tls_server_name
            async with slots:
                try:
                    return await handler(request)
                except aiohttp.ClientConnectorCertificateError:
                    await made.close()
                    raise

        made = _session(self._api, middlewares=(authorize,), proxy=configuration.proxy)
        return made

    async def close(self) -> None:
        """Close all connections; calls in progress fail."""
        await self._api.close()
        for _, api in self._retired:
            await api.close()

    async def send(self, call: KubeCall, *, is_urgent: bool = False) -> aiohttp.ClientResponse:
        """Send a call and return the response, whose body has been read.

        Status 429 and server failures are retried with growing pauses, or after the pause that the server requests;
        other errors are not.

        Args:
            call: The call.
            is_urgent: Whether the call is sent without waiting for a free slot, and is not retried.
        """
        until_s = time.monotonic() + BUDGET_S

        async def attempt() -> aiohttp.ClientResponse:
            async with nullcontext() if is_urgent else self._slots:
                response = await self._attempt(call, ANSWER_S)
                await response.read()
                return response

        asked_s: float | None = None

        def is_worth_a_try(exc: Exception) -> bool:
            nonlocal asked_s
            asked_s = retry_after_seconds(exc)
            left_s = until_s - time.monotonic() - (asked_s or 0.0)
            return left_s > 0 and _may_repeat(call, exc)

        async def pause(grown_s: float) -> None:
            # A server that sends Retry-After is not down, so the pauses need not grow.
            spread = self.rng.uniform(1.0, 1.5)
            await asyncio.sleep(grown_s if asked_s is None else max(asked_s, RETRIES.duration) * spread)

        with penstock_errors(str(call)):
            response: aiohttp.ClientResponse
            if is_urgent:
                response = await attempt()
            else:
                response = await on_retry_after_error(
                    RETRIES, is_worth_a_try, attempt, pause, self.rng.random
                )
        self._note_warnings(response)
        return response

    @asynccontextmanager
    async def stream(self, call: KubeCall) -> AsyncIterator[aiohttp.StreamReader]:
        """Open a watch and yield its body as a stream; it is not retried."""
        with penstock_errors(str(call)):
            async with await self._attempt(call, SILENCE_S) as response:
                yield response.content

    async def renew(self, seen: int) -> None:
        """Read the credentials again and use new connections; does nothing if `version` is no longer ``seen``.

        Raises:
            ConfigError: The current credentials are unusable.
        """
        async with self._lock:
            if self.version != seen:
                return
            log.info(
                "credentials or certificate refused; reading credentials again",
                server=self.credentials.configuration.host,
            )
            credentials = await read_credentials(kubeconfig=self._kubeconfig, context=self._context)
            new_client = _api_client(credentials.configuration)
            now_s = time.monotonic()
            # Calls in progress finish on the old connections.
            self._retired.append((now_s, self._api))
            self._api, self.credentials = new_client, credentials
            self.version += 1
            while self._retired[0][0] < now_s - RETIRED_S:
                await self._retired.pop(0)[1].close()

    async def _attempt(self, call: KubeCall, read_s: float) -> aiohttp.ClientResponse:
        """Send a call; credentials that are rejected, or that do not fit the server's certificate, are renewed once."""
        seen = self.version
        try:
            return await self._request(call, read_s)
        except (UnauthorizedError, aiohttp.ClientConnectorCertificateError):
            await self.renew(seen)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as exc:
            # A proxy closes the connection if the certificate has expired; the next attempt uses renewed credentials.
            is_reached = not isinstance(
                getattr(exc, "os_error", None), ConnectionRefusedError | socket.gaierror
            )
            if is_reached and self.credentials.note_expired(exc):
                await self.renew(seen)
            raise
        try:
            return await self._request(call, read_s)
        except UnauthorizedError as exc:
            self.credentials.note_expired(exc)
            raise

    async def _request(self, call: KubeCall, read_s: float) -> aiohttp.ClientResponse:
        call.check()
        sending = _sending.set(call)
        try:
            response: aiohttp.ClientResponse = await DynamicClient(self._api).request(
                call.method,
                call.path,
                body=call.body,
                query_params=list(call.params.items()),
                content_type=call.content_type,
                serialize=False,
                _request_timeout=aiohttp.ClientTimeout(connect=CONNECT_S, sock_read=read_s),
            )
        finally:
            _sending.reset(sending)
        return response

    def _note_warnings(self, response: aiohttp.ClientResponse) -> None:
        for text in response.headers.getall("warning", ()):
            if text not in self._warned and len(self._warned) < _WARNINGS_KEPT:
                self._warned.add(text)
                log.warning("the API server warns", warning=text)


def _may_repeat(call: KubeCall, exc: Exception) -> bool:
    """Return whether a failed call may succeed if it is repeated, without being executed twice."""
    if not isinstance(exc, FOREIGN) or not isinstance(cluster_error(exc, str(call)), UnavailableError):
        return False
    # After 429 the request was certainly not executed; after other failures that is unknown.
    return call.is_repeatable or isinstance(exc, NOT_SENT) or getattr(exc, "status", None) == 429


def _api_client(configuration: Configuration) -> ApiClient:
    try:
        api = ApiClient(configuration)
    except OSError as exc:
        raise ConfigError(f"kubeconfig: certificate or key not usable: {exc}") from exc
    finally:
        # The package copied inline keys into temporary files and would delete them only when the process ends.
        kube_config._cleanup_temp_files()  # noqa: SLF001 - there is no public way
    api.user_agent = USER_AGENT
    fence = aiohttp.TraceConfig()
    fence.on_request_headers_sent.append(_check_fence)
    api.rest_client.pool_manager = _session(api, trace_configs=[fence])
    return api


def _session(api: ApiClient, **options: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        ssl=api.rest_client.ssl_context,
        limit=0,  # calls are limited by the transport's own slots, watches by their number
        keepalive_timeout=IDLE_S,
        socket_factory=_socket,
    )
    # Unlike the package's own session, this one ignores HTTPS_PROXY: a pod's NO_PROXY has address ranges, which
    # Python does not support. The buffer size is the package's, for watches: a line can be twice as long, and an
    # object in etcd has up to 1.5 MiB.
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"user-agent": USER_AGENT},
        read_bufsize=2**21,
        **options,
    )


async def _check_fence(*_: object) -> None:
    """Abort a request before its first byte if it must not be sent any more, since connecting takes time too."""
    _sending.get().check()


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with keepalive options for a new connection."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for option in _KEEPALIVE:
        made.setsockopt(*option)
    return made
