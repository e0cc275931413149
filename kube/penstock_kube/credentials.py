"""Where the API server is and how to be let in: kubeconfig or the pod's service account, read by kr8s.

kr8s reads the files, runs credential plugins and builds the TLS context. Its session is not used: it closes
every open watch whenever one call is refused. Tokens in files are read again here, because kubelet replaces
a pod's token about every 50 minutes and kr8s does not know ``tokenFile``.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import kr8s.asyncio

from penstock_core.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet mounts a pod's own credentials."""

TOKEN_AGE_S: Final = 60.0
"""Chosen: how old a token read from a file may be; client-go reads it again every minute too."""

PLUGIN_TIMEOUT_S: Final = 60.0
"""Chosen: longest wait for a kubeconfig's credential plugin; some ask a cloud."""


class Credentials:
    """What one client presents.

    Attributes:
        version: Grows with every `renew`.
    """

    def __init__(self, api: Any) -> None:
        self._auth = api.auth
        self._token_file: Path | None = None
        self._token: str | None = None
        self._token_at_s = 0.0
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
        # The constructor makes no call; the factory would ask the server for its version.
        api = kr8s.asyncio.Api(
            bypass_factory=True,
            kubeconfig=str(kubeconfig) if kubeconfig is not None else None,
            context=context,
            serviceaccount=str(SERVICE_ACCOUNT),
        )
        self = cls(api)
        await self._read()
        return self

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._auth.server).rstrip("/")

    @property
    def namespace(self) -> str:
        """Namespace of the service account or the context; ``default`` otherwise."""
        # Not kr8s' own: that is the current context's even when another one is chosen, and never the pod's.
        if not self._in_pod():
            return str(self._context().get("namespace") or "default")
        with suppress(OSError, UnicodeDecodeError):
            return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or "default"
        return "default"

    @property
    def proxy(self) -> str | None:
        """Proxy that the kubeconfig asks for."""
        value: str | None = self._auth.proxy
        return value

    @property
    def tls_server_name(self) -> str | None:
        """Name that the server's certificate carries, where it is not the URL's."""
        value: str | None = self._auth.tls_server_name
        return value

    @property
    def has_certificate(self) -> bool:
        """Whether the client shows a certificate, which is part of the TLS context."""
        return self._auth.client_cert_file is not None

    def token(self) -> str | None:
        """Return the bearer token, read from its file at most once a minute; None where there is none."""
        if self._token_file is not None and time.monotonic() - self._token_at_s > TOKEN_AGE_S:
            self._read_token()
        return self._token

    async def renew(self) -> None:
        """Read everything again.

        Raises:
            ConfigError: what is there now cannot be used.
        """
        await self._read()

    async def tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context for the credentials as last read; True for the system's defaults.

        Raises:
            ConfigError: a certificate or key cannot be read.
        """
        try:
            context: ssl.SSLContext | bool = await self._auth.ssl_context()
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"kubeconfig: certificate or key not usable: {exc}") from exc
        finally:
            self._forget_copies()
        return context

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(PLUGIN_TIMEOUT_S):
                await self._auth.reauthenticate()
        except TimeoutError as exc:
            raise ConfigError(
                f"kubeconfig: the credential plugin took more than {PLUGIN_TIMEOUT_S:g} s"
            ) from exc
        except Exception as exc:
            # kr8s hands on whatever a malformed kubeconfig provokes: KeyError, TypeError, YAML errors...
            raise ConfigError(
                f"Kubernetes credentials: {type(exc).__name__}: {exc}; give --kubeconfig or KUBECONFIG, "
                "or run in a pod with a service account"
            ) from exc
        self.version += 1
        self._token = self._auth.token
        self._token_file = self._find_token_file()
        if self._token_file is not None:
            self._read_token()

    def _in_pod(self) -> bool:
        ca_file = self._auth.server_ca_file
        return ca_file is not None and Path(str(ca_file)).parent == SERVICE_ACCOUNT

    def _context(self) -> dict[str, Any]:
        if not self._auth.active_context:
            return {}
        found: dict[str, Any] = self._auth.kubeconfig.get_context(self._auth.active_context)
        return found

    def _user(self) -> dict[str, Any]:
        name = self._context().get("user")
        if not name:
            return {}
        found: dict[str, Any] = self._auth.kubeconfig.get_user(name)
        return found

    def _cluster(self) -> dict[str, Any]:
        name = self._context().get("cluster")
        if not name:
            return {}
        found: dict[str, Any] = self._auth.kubeconfig.get_cluster(name)
        return found

    def _find_token_file(self) -> Path | None:
        named = self._user().get("tokenFile")
        if named is not None:
            kubeconfig = Path(str(self._auth.kubeconfig.get_path(self._auth.active_context)))
            return kubeconfig.expanduser().parent / str(named)
        return SERVICE_ACCOUNT / "token" if self._in_pod() else None

    def _read_token(self) -> None:
        assert self._token_file is not None  # noqa: S101 - both callers have looked
        self._token_at_s = time.monotonic()
        try:
            self._token = self._token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as exc:
            if self._token is None:
                raise ConfigError(f"{self._token_file}: token not readable: {exc}") from exc

    def _forget_copies(self) -> None:
        # kr8s writes a kubeconfig's inline keys into temporary files and leaves them there.
        auth, user = self._auth, self._user()
        for is_copy, path in (
            ("client-key-data" in user, auth.client_key_file),
            ("client-certificate-data" in user, auth.client_cert_file),
            ("certificate-authority-data" in self._cluster(), auth.server_ca_file),
        ):
            if is_copy and path is not None:
                Path(str(path)).unlink(missing_ok=True)
