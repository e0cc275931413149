"""Keys and certificates of a control plane for tests, valid for a day."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def pem(key: Any) -> bytes:
    """Return a private key as PEM without a password."""
    text: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return text


def write_certificates(folder: Path, *, client_valid: dt.timedelta = dt.timedelta(days=1)) -> None:
    """Write an authority, the server's certificate and an administrator's client certificate, which may have expired."""
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock-test-ca")])
    ca = _certificate(issuer, issuer, authority.public_key(), authority, is_ca=True)
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    for name, subject, names in (
        (
            "server",
            [x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")],
            ["localhost", "127.0.0.1", "penstock-worker"],
        ),
        (
            "client",
            [
                x509.NameAttribute(NameOID.COMMON_NAME, "certified-admin"),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:masters"),
            ],
            [],
        ),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        valid = dt.timedelta(days=1) if names else client_valid
        certificate = _certificate(
            x509.Name(subject), issuer, key.public_key(), authority, names=names, valid=valid
        )
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(pem(key))


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: Any,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool = False,
    names: list[str] | None = None,
    valid: dt.timedelta = dt.timedelta(days=1),
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + min(valid, dt.timedelta()) - dt.timedelta(hours=1))
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if is_ca:
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    else:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_san(name) for name in names]), critical=False
        )
    return builder.sign(signer, hashes.SHA256())


def _san(name: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)
