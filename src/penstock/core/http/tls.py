"""What proves a client to servers behind TLS, and the authority that proves them to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

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
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None

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
        """Of all connections; a certificate that rotates needs a new process."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def _named(self) -> str:
        return ", ".join(str(each) for each in (self.ca, self.certificate, self.key, self.token) if each)


NO_FILES: Final = TlsFiles()


class Tls:
    """The credentials of one pool of connections."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._token = b""
        self._reread_at_s = float("-inf")

    @property
    def context(self) -> ssl.SSLContext:
        """Of connections."""
        return self._files.context

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
