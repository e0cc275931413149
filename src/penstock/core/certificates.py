"""Whether a text holds certificates by which a server can be proved; read in memory alone."""

from __future__ import annotations

import ssl


def problem_of_authorities(text: str) -> str | None:
    """Return why no server can be proved by these certificates in PEM; None: it can."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError, TypeError) as exc:  # text that is not ASCII
        return str(exc)
    return None
