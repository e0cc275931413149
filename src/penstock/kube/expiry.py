"""Reads when credentials expire, from certificates and JSON Web Tokens; used by `transport`. Pure."""

from __future__ import annotations

import datetime as dt
import ssl
from base64 import urlsafe_b64decode
from dataclasses import dataclass
from typing import Final

import orjson


@dataclass(frozen=True, slots=True)
class Expiry:
    """Expiry of one credential.

    Attributes:
        name: Description of the credential and of the file or key that it was read from.
        at: Time of expiry; None if it is unknown or the credential never expires.
    """

    name: str
    at: dt.datetime | None

    def problem(self, now: dt.datetime) -> str | None:
        """Return a sentence that the credential has expired at ``now``; None if it has not expired, or if its expiry is unknown."""
        if self.at is None or now < self.at:
            return None
        return f"{self.name} expired at {self.at:%Y-%m-%dT%H:%M:%SZ}"


_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_TIMES: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
"""Formats of UTCTime and GeneralizedTime, by their tag, as certificates use them (RFC 5280, 4.1.2.5)."""


def certificate_expiry(text: str) -> dt.datetime | None:
    """Return the end of validity of the first certificate in a PEM text; None if there is no readable certificate.

    Source: RFC 5280, 4.1: ``Certificate`` contains ``TBSCertificate`` with version, serial number, signature, issuer,
    validity.
    """
    try:
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(text[begin:end])
        at, _ = _inside(der, 0)
        at, _ = _inside(der, at)
        for _ in range(4 if der[at] == _VERSION else 3):
            at = _behind(der, at)
        at, _ = _inside(der, at)
        at = _behind(der, at)
        begin, end = _content(der, at)
        return dt.datetime.strptime(der[begin:end].decode(), _TIMES[der[at]]).replace(tzinfo=dt.UTC)
    except (ValueError, IndexError, KeyError):
        return None


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Return the start and end offset of the content of the DER element at ``at``."""
    length, at = der[at + 1], at + 2
    if length >= 0x80:
        octets = length & 0x7F
        length, at = int.from_bytes(der[at : at + octets]), at + octets
    return at, at + length


def _inside(der: bytes, at: int) -> tuple[int, int]:
    if der[at] != _SEQUENCE:
        raise ValueError(f"byte {at} does not begin a sequence")
    return _content(der, at)


def _behind(der: bytes, at: int) -> int:
    return _content(der, at)[1]


def token_expiry(token: str) -> dt.datetime | None:
    """Return the ``exp`` of a JSON Web Token, such as a service account's; None for other tokens or those without ``exp``."""
    try:
        _, claims, _ = token.strip().removeprefix("Bearer ").removeprefix("bearer ").split(".")
        found = orjson.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        return dt.datetime.fromtimestamp(found["exp"], dt.UTC)
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None
