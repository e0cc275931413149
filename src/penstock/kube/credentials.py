"""Where the API server is and how to be let in: kubeconfig or the pod's service account, read by the official client.

The `kubernetes` package reads the files, merges them and runs credential plugins. Its API classes are not used.
Tokens in files are read again here, because kubelet replaces a pod's token about every 50 minutes and the
package reads ``tokenFile`` once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from penstock.core.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet mounts a pod's own credentials."""

KUBECONFIG: Final = "~/.kube/config"
"""kubectl's own file."""

TOKEN_AGE_S: Final = 60.0
"""Chosen: how old a token read from a file may be; client-go reads it again every minute too."""

PLUGIN_TIMEOUT_S: Final = 60.0
"""Chosen: longest wait for a kubeconfig's credential plugin; some ask a cloud."""


class Credentials:
    """What one client presents.

    Attributes:
        server: URL of the API server.
        namespace: Of the service account or the context; ``default`` otherwise.
        proxy: Proxy that the kubeconfig asks for; None for none.
        tls_server_name: Name that the server's certificate carries, where it is not the URL's.
        tls: TLS context of the credentials as last read.
        has_certificate: Whether the client shows a certificate, which is part of the TLS context.
        version: Grows with every `renew`.
    """

    def __init__(self, kubeconfig: Path | None, context: str | None) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._token_file: Path | None = None
        self._token: str | None = None
        self._token_at_s = 0.0
        self.server = ""
        self.namespace = "default"
        self.proxy: str | None = None
        self.tls_server_name: str | None = None
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.has_certificate = False
        self.version = 0

    @classmethod
    async def load(cls, *, kubeconfig: Path | None, context: str | None) -> Credentials:
        """Read the credentials.

        Args:
            kubeconfig: None takes ``$KUBECONFIG``, then ``~/.kube/config``, then the pod's service account.
            context: Of the kubeconfig; None takes its current one.

        Raises:
            ConfigError: there are none, or they cannot be used.
        """
        if kubeconfig is not None and not os.path.isfile(kubeconfig):  # noqa: ASYNC240, PTH113 - once, at start
            raise ConfigError(f"--kubeconfig: {kubeconfig}: no such file")
        self = cls(kubeconfig, context)
        await self.renew()
        return self

    def token(self) -> str | None:
        """Return the bearer token, read from its file at most once a minute; None where there is none."""
        if self._token_file is not None and time.monotonic() - self._token_at_s > TOKEN_AGE_S:
            self._token_at_s = time.monotonic()
            with suppress(ConfigError):  # kubelet may be at it; the server says when the old one is over
                self._token = _token_in(self._token_file)
        return self._token

    async def renew(self) -> None:
        """Read everything again.

        Raises:
            ConfigError: what is there now cannot be used.
        """
        try:
            async with asyncio.timeout(PLUGIN_TIMEOUT_S):
                found = await _read(self._kubeconfig, self._context)
        except TimeoutError as exc:
            raise ConfigError(
                f"kubeconfig: the credential plugin took more than {PLUGIN_TIMEOUT_S:g} s"
            ) from exc
        except ConfigError:
            raise
        except Exception as exc:
            # The package hands on whatever a malformed kubeconfig provokes: KeyError, TypeError, YAML errors...
            raise ConfigError(
                f"Kubernetes credentials: {type(exc).__name__}: {exc}; give --kubeconfig or KUBECONFIG, "
                "or run in a pod with a service account"
            ) from exc
        self.server = found.server
        self.namespace = found.namespace
        self.proxy = found.proxy
        self.tls_server_name = found.tls_server_name
        self.tls = found.tls
        self.has_certificate = found.has_certificate
        self._token, self._token_file = found.token, found.token_file
        self._token_at_s = time.monotonic()
        self.version += 1


@dataclass(frozen=True, slots=True)
class _Found:
    """One reading; fields as in `Credentials`."""

    server: str
    namespace: str
    proxy: str | None
    tls_server_name: str | None
    tls: ssl.SSLContext
    has_certificate: bool
    token: str | None
    token_file: Path | None


async def _read(kubeconfig: Path | None, context: str | None) -> _Found:
    paths = str(kubeconfig or os.environ.get("KUBECONFIG") or KUBECONFIG)
    merger = kube_config.KubeConfigMerger(paths)
    is_in_pod = kubeconfig is None and not merger.paths and SERVICE_ACCOUNT.is_dir()
    settings = Configuration(host="")
    if is_in_pod:
        InClusterConfigLoader(
            token_filename=str(SERVICE_ACCOUNT / "token"), cert_filename=str(SERVICE_ACCOUNT / "ca.crt")
        ).load_and_set(settings)
        return _found(settings, _own_namespace(), SERVICE_ACCOUNT / "token")
    if merger.config is None:
        raise ConfigError(
            f"Kubernetes credentials: {paths}: nothing there; give --kubeconfig or KUBECONFIG, "
            "or run in a pod with a service account"
        )
    loader = kube_config.KubeConfigLoader(merger.config, active_context=context, config_base_path=None)
    named = loader.current_context["context"]
    user = merger.config["users"].get_with_name(named.get("user"), safe=True) if named.get("user") else None
    token_file = None if user is None else _token_file(user["user"])
    if token_file is not None:
        _token_in(token_file)  # the package's own error would not say what it looked for
    with _last_error() as errors:
        await loader.load_and_set(settings)
    found = _found(settings, named.get("namespace") or "default", token_file)
    if user is not None and "exec" in user["user"] and not (found.token or found.has_certificate):
        # The package logs why a plugin failed and goes on without.
        why = errors[-1] if errors else "it gave neither a token nor a certificate"
        raise ConfigError(f"kubeconfig: credential plugin {user['user']['exec']['command']}: {why}")
    return found


def _found(settings: Configuration, namespace: str, token_file: Path | None) -> _Found:
    """Return what the package read, and remove the files into which it copied inline keys."""
    try:
        tls = _tls(settings)
    finally:
        # It would keep them, and their names, until the process ends.
        for each in kube_config._temp_files.values():  # noqa: SLF001 - there is no public way
            Path(each).unlink(missing_ok=True)
        kube_config._temp_files.clear()  # noqa: SLF001
    if not settings.host:
        raise ConfigError("kubeconfig: clusters: server: missing; name the API server's URL")
    scheme, _, token = (settings.api_key.get("BearerToken") or "").partition(" ")
    if scheme == "Basic":
        raise ConfigError("kubeconfig: users: username, password: no API server takes them; use a token")
    return _Found(
        server=settings.host,
        namespace=namespace,
        proxy=settings.proxy,
        tls_server_name=settings.tls_server_name,
        tls=tls,
        has_certificate=settings.cert_file is not None,
        token=token or None if token_file is None else _token_in(token_file),
        token_file=token_file,
    )


def _tls(settings: Configuration) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if settings.ssl_ca_cert:
            context.load_verify_locations(cafile=settings.ssl_ca_cert)
        else:
            context.load_default_certs()
        if settings.cert_file:
            context.load_cert_chain(certfile=settings.cert_file, keyfile=settings.key_file)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"kubeconfig: certificate or key not usable: {exc}") from exc
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _token_file(user: kube_config.ConfigNode) -> Path | None:
    named = user.safe_get("tokenFile")
    return None if named is None else Path(user.path).parent / str(named)


def _token_in(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: token not readable: {exc}") from exc


def _own_namespace() -> str:
    with suppress(OSError, UnicodeDecodeError):
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or "default"
    return "default"


@contextmanager
def _last_error() -> Iterator[list[str]]:
    """Give the messages that the package logs in place of raising them."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    kube_config.logger.addHandler(handler)
    try:
        yield messages
    finally:
        kube_config.logger.removeHandler(handler)
