"""Lets web pages of listed origins call the API (CORS); off without any. Pure.

Only ``/v1`` is opened: health, metrics and the workers are no page's business. Credentials are never allowed; pages
send their key in ``Authorization``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.core.http.messages import Headers

_EXPOSED: Final = b"x-request-id, retry-after"
_MAX_AGE_S: Final = b"600"
"""How long a browser may remember a preflight's answer. Chosen: Chrome forgets after two hours at most."""
_MAX_ASKED_BYTES: Final = 1024
"""Of the headers that a page asks to send. Chosen: the official SDKs ask for some 300."""


class Cors:
    """The headers of answers to web pages."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Take the origins, as browsers write them, or ``*`` for all."""
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, path: str, sent: Mapping[bytes, bytes]) -> Headers:
        """Return what an answer carries; nothing for a path or an origin that is not allowed.

        Args:
            path: Of the request.
            sent: The request's headers.
        """
        if not self._origins or not path.startswith("/v1/"):
            return ()
        origin = sent.get(b"origin")
        vary = (b"vary", b"Origin")
        if origin is None or not self._allows(origin):
            # A cache must not give this answer to a page that is allowed.
            return (vary,)
        return (vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED))

    def preflight(self, method: str, path: str, sent: Mapping[bytes, bytes]) -> Headers | None:
        """Return the headers of a preflight's answer; None where the request is none, or not from an allowed page."""
        origin = sent.get(b"origin")
        is_asked = method == "OPTIONS" and b"access-control-request-method" in sent
        if not is_asked or not path.startswith("/v1/") or origin is None or not self._allows(origin):
            return None
        asked = sent.get(b"access-control-request-headers", b"")[:_MAX_ASKED_BYTES]
        return (
            (b"vary", b"Origin, Access-Control-Request-Headers"),
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", _MAX_AGE_S),
        )

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins
