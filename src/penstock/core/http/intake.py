"""Limits on requests while they arrive and until they are answered, shared by all listeners of a process.

The HTTP server and the gateway's gRPC streams use the same object, so that none has separate limits. It has no socket
and no clock: the caller measures timeouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from penstock.core.http.limits import ServerLimits
from penstock.core.http.messages import Headers

MAX_FIELDS: Final = 256
"""Maximum number of header fields. Chosen: Envoy allows 100, and no client sends more than a few dozen; it keeps
joining repeated headers cheap."""
_LENGTH_DIGITS: Final = 19
"""Maximum number of digits of a content length: 64 bits."""
FIELD_BYTES: Final = 4
"""Bytes of a header field in addition to name and value: colon, space, line end."""


@dataclass(frozen=True, slots=True)
class IntakeRefusal:
    """Rejection of a request before any handler sees it.

    Attributes:
        status: HTTP status.
        code: Error code in the body.
        message: Error message in the body.
    """

    status: int
    code: str
    message: str

    @property
    def body(self) -> bytes:
        """Body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        # The path may be unknown, so the body is valid in OpenAI's and in Anthropic's form.
        return orjson.dumps(
            {
                "type": "error",
                "error": {"message": self.message, "type": kind, "param": None, "code": self.code},
            }
        )

    @property
    def headers(self) -> Headers:
        """Additional headers of the response: retry-after for 503, because connections and buffers become free within moments."""
        return ((b"retry-after", b"1"),) if self.status == 503 else ()


@dataclass(slots=True, eq=False)
class Intake:
    """Limits on the requests of one process, and the buffered bytes of their bodies.

    Attributes:
        limits: Limits of the server.
        buffered_bytes: Total length of the bodies from all listeners, until their requests are answered.
    """

    limits: ServerLimits
    buffered_bytes: int = 0

    def hold(self, count: int) -> None:
        """Add ``count`` bytes of a body to the buffered bytes."""
        self.buffered_bytes += count

    def release(self, count: int) -> None:
        """Subtract ``count`` bytes of a body from the buffered bytes."""
        self.buffered_bytes -= count

    def head_refusal(self, head_bytes: int, fields: int) -> IntakeRefusal | None:
        """Return a refusal (431) if a request head is too large; None if it is not.

        Args:
            head_bytes: Length of request line and headers so far.
            fields: Number of header fields so far.
        """
        bound = self.limits.max_header_bytes
        if head_bytes <= bound and fields <= MAX_FIELDS:
            return None
        message = f"request line and headers exceed {bound} bytes or {MAX_FIELDS} fields; send fewer"
        return IntakeRefusal(431, "headers_too_large", message)

    def length_refusal(self, headers: Mapping[bytes, bytes]) -> IntakeRefusal | None:
        """Return a refusal if the content length in ``headers`` is invalid (400) or too large (413); None if it is not."""
        sent = headers.get(b"content-length", b"0").strip()
        if not sent.isdigit():
            return IntakeRefusal(400, "malformed_length", "header content-length: send one number of bytes")
        digits = sent.lstrip(b"0") or b"0"
        is_over = len(digits) > _LENGTH_DIGITS or int(digits) > self.limits.max_body_bytes
        return self.too_long() if is_over else None

    def body_refusal(self, body_bytes: int) -> IntakeRefusal | None:
        """Return a refusal if a body (413), or all buffered bodies together (503), are too large; None if they are not.

        Args:
            body_bytes: Number of bytes of this body that have arrived.
        """
        if body_bytes > self.limits.max_body_bytes:
            return self.too_long()
        if self.buffered_bytes > self.limits.max_buffered_bytes:
            message = f"all requests together hold {self.limits.max_buffered_bytes} bytes; retry later"
            return IntakeRefusal(503, "body_buffers_full", message)
        return None

    def late_refusal(self) -> IntakeRefusal:
        """Return the refusal (408) of a request that has not arrived within ``limits.receive_timeout_s``."""
        limit_s = self.limits.receive_timeout_s
        return IntakeRefusal(408, "receive_timeout", f"head and body took longer than {limit_s} s")

    def full_refusal(self, bound: int) -> IntakeRefusal:
        """Return the refusal (503) of a client that exceeds the maximum number ``bound`` of connections."""
        return IntakeRefusal(503, "too_many_connections", f"{bound} connections are open; retry later")

    def too_long(self) -> IntakeRefusal:
        """Return the refusal (413) of a body that is longer than ``limits.max_body_bytes``."""
        bound = self.limits.max_body_bytes
        return IntakeRefusal(413, "body_too_large", f"request body exceeds {bound} bytes; send a shorter one")
