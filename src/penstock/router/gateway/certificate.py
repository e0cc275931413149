"""The TLS certificate of the endpoint picker's server for Envoy.

By default the picker creates one for itself, like the reference picker of the Gateway API Inference Extension: gateways such
as Envoy AI Gateway and kgateway encrypt the connection to a picker, and accept any certificate. A configured certificate is
read again when its files change, so that a rotation needs no restart.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.core.errors import ConfigError
from penstock.core.http.tls import server_context
from penstock.core.logs import get_logger

log = get_logger(__name__)

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
"""Files in a certificate's folder, as in a Secret of type kubernetes.io/tls."""

_NAME: Final = "penstock-picker"
_VALID: Final = dt.timedelta(days=3650)
"""Chosen: the same as the reference picker's. A picker creates a new certificate at each start, and no gateway checks it."""
_BACKDATED: Final = dt.timedelta(hours=1)
"""Chosen: differences between the clocks of nodes that are shorter than this have no effect."""


class KeyPair(NamedTuple):
    """A certificate followed by its issuers, and its private key; both PEM."""

    certificate: bytes
    key: bytes


def own_key_pair() -> KeyPair:
    """Return a new self-signed certificate, valid for ten years, and its private key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def read_key_pair(folder: Path) -> KeyPair:
    """Return the certificate and the private key in ``folder``: its files ``tls.crt`` and ``tls.key``.

    Raises:
        ConfigError: a file cannot be read, or the key does not belong to the certificate.
    """
    certificate, key = folder / CERTIFICATE, folder / KEY
    try:
        found = KeyPair(certificate.read_bytes(), key.read_bytes())
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename}: {exc.strerror}; give a folder with {CERTIFICATE} and {KEY}"
        ) from exc
    server_context(certificate, key)  # only to check that they belong together
    return found


def credentials(folder: Path | None) -> grpc.ServerCredentials:
    """Return the credentials for a gRPC server.

    If ``folder`` is not None, its certificate is used, and is read again for new connections when it has changed. None
    creates a self-signed certificate.

    Raises:
        ConfigError: a file cannot be read, or the key does not belong to the certificate.
    """
    if folder is None:
        pair = own_key_pair()
        return grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    reloaded = _Reloaded(folder)
    return grpc.dynamic_ssl_server_credentials(
        reloaded.configuration, reloaded.fetch, require_client_authentication=False
    )


class _Reloaded:
    """A folder's certificate; if a new version cannot be read, the previous one stays in effect."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps = self._current_stamps()
        pair = read_key_pair(folder)
        self.configuration = grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration for a new connection; None if the previous one is still valid. gRPC calls it in a thread of its own."""
        stamps = self._current_stamps()
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            pair = read_key_pair(self._folder)
        except ConfigError as exc:
            log.warning("certificate not reloaded; the one before stays in force", problem=str(exc))
            return None
        log.info("certificate reloaded", folder=str(self._folder))
        self.configuration = grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])
        return self.configuration

    def _current_stamps(self) -> tuple[tuple[int, int] | None, ...]:
        """Return values that change with the files: a mounted Secret's files are links that are replaced."""
        stamps: list[tuple[int, int] | None] = []
        for name in (CERTIFICATE, KEY):
            try:
                found = (self._folder / name).stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_ino, found.st_mtime_ns))
        return tuple(stamps)
