"""Checks CA certificates in memory."""

from __future__ import annotations

import ssl


def problem_of_authorities(text: str) -> str | None:
    """Return why a PEM text cannot be used as CA certificates to verify a server; None if it can."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError, TypeError) as exc:  # text that is not ASCII
        return str(exc)
    return None
