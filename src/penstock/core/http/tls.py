"""What proves a client to servers behind TLS, and the authority that proves them to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from penstock.core.errors import ConfigError, UpstreamConnectError

_REREAD_S: Final = 10.0
"""Seconds for which a token's file is not read again. Chosen: Kubernetes writes a rotated one minutes before the old one ends."""


@dataclass(frozen=True)
class TlsFiles:
    """Files of credentials; None: the system's authorities, and no certificate or token.

    Attributes:
        ca: Authorities of the servers.
        certificate, key: The client's own; both or neither.
        token: Sent as ``Authorization: Bearer``; its file is read again as it rotates.
        authorities: Of the servers, as text in PEM, in place of ``ca``.
        server_name: In the servers' certificates, whatever address they are reached at; None: that address.
        is_verified: Whether servers must prove themselves.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None
    authorities: str | None = None
    server_name: str | None = None
    is_verified: bool = True

    def check(self) -> None:
        """Read all files once.

        Raises:
            ConfigError: one cannot be used, or half of a pair is given.
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
        """Return the context of all connections; a certificate that rotates needs a new process."""
        context = ssl.create_default_context(cafile=self.ca, cadata=self.authorities)
        if not self.is_verified:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def _named(self) -> str:
        return ", ".join(str(each) for each in (self.ca, self.certificate, self.key, self.token) if each)


NO_FILES: Final = TlsFiles()
UNVERIFIED: Final = TlsFiles(is_verified=False)
"""For one that only asks whether a process is well or busy, as the kubelet asks its pods."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return what a server needs to prove itself.

    Raises:
        ConfigError: a file cannot be used, or the key does not belong to the certificate.
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
    """What a manifest says of workers that speak https: ``spec.engine.tls``."""

    @property
    def ca_bundle(self) -> str:
        """Authorities, PEM."""
        ...

    @property
    def server_name(self) -> str:
        """Return the name in the workers' certificates."""
        ...

    @property
    def token_key(self) -> str | None:
        """File of their token; None: none is sent."""
        ...


def files_of(workers: Workers | None, folder: str | None = None) -> TlsFiles:
    """Return what a client of a graph's workers needs; ``folder`` has their token, for one that sends it."""
    if workers is None:
        return NO_FILES
    token = None if folder is None or workers.token_key is None else Path(folder, workers.token_key)
    return TlsFiles(token=token, authorities=workers.ca_bundle, server_name=workers.server_name)


class Tls:
    """The credentials of one pool of connections."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._token = b""
        self._reread_at_s = float("-inf")

    @property
    def context(self) -> ssl.SSLContext:
        """Return the context of connections."""
        return self._files.context

    @property
    def server_name(self) -> str | None:
        """Return the name in the servers' certificates; None: their address."""
        return self._files.server_name

    def authorization(self, now_s: float) -> bytes | None:
        """Return the value of the header; None: no token is given.

        Raises:
            UpstreamConnectError: its file cannot be read any more.
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
