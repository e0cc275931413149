"""When credentials expire, as far as they say so themselves: certificates and JSON Web Tokens; `transport` asks. Pure."""

from __future__ import annotations

import datetime as dt
import ssl
from base64 import urlsafe_b64decode
from dataclasses import dataclass
from typing import Final

import orjson


@dataclass(frozen=True, slots=True)
class Expiry:
    """When one credential expires.

    Attributes:
        name: The credential, and the file or key that it was read from.
        at: None: it does not say.
    """

    name: str
    at: dt.datetime | None

    def problem(self, now: dt.datetime) -> str | None:
        """Return that it has expired, and when; None: it has not, as far as is known."""
        if self.at is None or now < self.at:
            return None
        return f"{self.name} expired at {self.at:%Y-%m-%dT%H:%M:%SZ}"


_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_TIMES: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
"""UTCTime and GeneralizedTime, as RFC 5280 (4.1.2.5) has them in certificates."""


def certificate_expiry(text: str) -> dt.datetime | None:
    """Return until when the first certificate of a PEM text is valid; None: it is not one that can be read.

    Source: RFC 5280, 4.1: ``Certificate`` holds ``TBSCertificate``: version, serial number, signature, issuer, validity.
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
    """Return where the content of an element begins and ends."""
    length, at = der[at + 1], at + 2
    if length >= 0x80:
        octets = length & 0x7F
        length, at = int.from_bytes(der[at : at + octets]), at + octets
    return at, at + length


def _inside(der: bytes, at: int) -> tuple[int, int]:
    if der[at] != _SEQUENCE:
        raise ValueError(f"byte {at} begins no sequence")
    return _content(der, at)


def _behind(der: bytes, at: int) -> int:
    return _content(der, at)[1]


def token_expiry(token: str) -> dt.datetime | None:
    """Return the ``exp`` of a JSON Web Token, as service accounts have; None: it is another token, or never expires."""
    try:
        _, claims, _ = token.strip().removeprefix("Bearer ").removeprefix("bearer ").split(".")
        found = orjson.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        return dt.datetime.fromtimestamp(found["exp"], dt.UTC)
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None
