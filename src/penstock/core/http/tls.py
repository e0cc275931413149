"""TLS credentials: a client's own, and the CA certificates that verify servers; also a server's certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from penstock.core.errors import ConfigError, UpstreamConnectError

_REREAD_S: Final = 10.0
"""Seconds for which a token file is not read again. Chosen: Kubernetes writes a rotated token minutes before the old
one expires."""


@dataclass(frozen=True)
class TlsFiles:
    """Files with a client's credentials; None means the system's CA certificates, and no client certificate or token.

    Attributes:
        ca: File with the CA certificates that verify servers.
        certificate: File with the client certificate; given together with ``key`` or not at all.
        key: File with the private key of the client certificate.
        token: File with a token that is sent as ``Authorization: Bearer``; it is read again every few seconds, since
            it may rotate.
        authorities: CA certificates as PEM text, instead of ``ca``.
        server_name: Name that the servers' certificates must have, whatever address is used; None means that address.
        is_verified: Whether servers' certificates are verified.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None
    authorities: str | None = None
    server_name: str | None = None
    is_verified: bool = True

    def check(self) -> None:
        """Read all files once, to check them.

        Raises:
            ConfigError: A file cannot be used, or only one of certificate and key is given.
        """
        if (self.certificate is None) is not (self.key is None):
            raise ConfigError(
                "a client's certificate and its key belong together; give both files, or neither"
            )
        try:
            _ = self.context
            if self.token is not None:
                self.token.read_bytes()
        except (OSError, ValueError) as exc:  # ssl's own errors are OSErrors
            raise ConfigError(f"{self._named()}: {exc}; give readable files in PEM") from exc

    @cached_property
    def context(self) -> ssl.SSLContext:
        """TLS context of all connections; the process must be restarted if the certificate rotates."""
        context = ssl.create_default_context(cafile=self.ca, cadata=self.authorities)
        if not self.is_verified:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def _named(self) -> str:
        return ", ".join(str(each) for each in (self.ca, self.certificate, self.key, self.token) if each)


NO_FILES: Final = TlsFiles()
"""Default credentials: the system's CA certificates, no client certificate and no token."""
UNVERIFIED: Final = TlsFiles(is_verified=False)
"""Credentials that do not verify servers. For clients that only check whether a process is healthy or busy, as the
kubelet does."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a server.

    Args:
        certificate: PEM file with the server's certificate.
        key: PEM file with its private key.

    Raises:
        ConfigError: A file cannot be used, or the key does not belong to the certificate.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as exc:
        raise ConfigError(
            f"{certificate}, {key}: not a certificate and its key in PEM ({exc.reason}); give a pair that belongs together"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{certificate}, {key}: {exc}; give readable files in PEM") from exc
    return context


class Workers(Protocol):
    """Interface of the settings for workers that use https (``spec.engine.tls`` of a graph)."""

    @property
    def ca_bundle(self) -> str:
        """CA certificates that verify the workers, as PEM text."""
        ...

    @property
    def server_name(self) -> str:
        """Name in the workers' certificates."""
        ...

    @property
    def token_key(self) -> str | None:
        """Name of the file with the token that workers accept; None if no token is sent."""
        ...


def files_of(workers: Workers | None, folder: str | None = None) -> TlsFiles:
    """Return the credentials of a client of a graph's workers.

    Args:
        workers: TLS settings of the workers; None if they use plain HTTP.
        folder: Folder with the workers' token, for a client that sends it; None if no token is sent.
    """
    if workers is None:
        return NO_FILES
    token = None if folder is None or workers.token_key is None else Path(folder, workers.token_key)
    return TlsFiles(token=token, authorities=workers.ca_bundle, server_name=workers.server_name)


class Tls:
    """The credentials of one connection pool: TLS context, expected server name, and authorization header."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._token = b""
        self._reread_at_s = float("-inf")

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context of the pool's connections."""
        return self._files.context

    @property
    def server_name(self) -> str | None:
        """Name that the servers' certificates must have; None means the address."""
        return self._files.server_name

    def authorization(self, now_s: float) -> bytes | None:
        """Return the value of the authorization header; None if there is no token.

        Args:
            now_s: Monotonic time in seconds; the file is read again if the last read is too old.

        Raises:
            UpstreamConnectError: The token file cannot be read.
        """
        if self._files.token is None:
            return None
        if now_s >= self._reread_at_s:
            try:
                self._token = b"Bearer " + self._files.token.read_bytes().strip()
            except OSError as exc:
                raise UpstreamConnectError(f"no token for a server: {exc}") from exc
            self._reread_at_s = now_s + _REREAD_S
        return self._token
