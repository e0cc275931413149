"""What requests may take of a process while they arrive and until they are answered, whatever the entrance they come by.

The HTTP server and the gateway's streams ask the same object, so that no entrance has limits of its own. No socket, no
clock: who waits for a request says when it is late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from penstock.core.http.limits import ServerLimits
from penstock.core.http.messages import Headers

MAX_FIELDS: Final = 256
"""Chosen: Envoy allows 100; no client sends more than a few dozen. It keeps joining repeated ones cheap."""
_LENGTH_DIGITS: Final = 19
"""Longest number of a body's bytes that is read: 64 bits."""
FIELD_BYTES: Final = 4
"""What a header field takes besides its name and value: colon, space, line end."""


@dataclass(frozen=True, slots=True)
class IntakeRefusal:
    """A request that no handler sees."""

    status: int
    code: str
    message: str

    @property
    def body(self) -> bytes:
        """The answer's body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        # The path may not be known yet: this is OpenAI's form and Anthropic's at once.
        return orjson.dumps(
            {
                "type": "error",
                "error": {"message": self.message, "type": kind, "param": None, "code": self.code},
            }
        )

    @property
    def headers(self) -> Headers:
        """The answer's further headers; connections and buffers become free within moments."""
        return ((b"retry-after", b"1"),) if self.status == 503 else ()


@dataclass(slots=True, eq=False)
class Intake:
    """The limits of one process's requests, and the bytes that their bodies hold.

    Attributes:
        buffered_bytes: Of the bodies of all entrances, until their requests are answered.
    """

    limits: ServerLimits
    buffered_bytes: int = 0

    def hold(self, count: int) -> None:
        """Count bytes of a body."""
        self.buffered_bytes += count

    def release(self, count: int) -> None:
        """Count them no more."""
        self.buffered_bytes -= count

    def head_refusal(self, head_bytes: int, fields: int) -> IntakeRefusal | None:
        """Return why a head is too large."""
        bound = self.limits.max_header_bytes
        if head_bytes <= bound and fields <= MAX_FIELDS:
            return None
        message = f"request line and headers exceed {bound} bytes or {MAX_FIELDS} fields; send fewer"
        return IntakeRefusal(431, "headers_too_large", message)

    def length_refusal(self, headers: Mapping[bytes, bytes]) -> IntakeRefusal | None:
        """Return why a body of the announced length is not read at all."""
        sent = headers.get(b"content-length", b"0").strip()
        if not sent.isdigit():
            return IntakeRefusal(400, "malformed_length", "header content-length: send one number of bytes")
        digits = sent.lstrip(b"0") or b"0"
        is_over = len(digits) > _LENGTH_DIGITS or int(digits) > self.limits.max_body_bytes
        return self.too_long() if is_over else None

    def body_refusal(self, body_bytes: int) -> IntakeRefusal | None:
        """Return why no more is read of a body of which this many bytes have come."""
        if body_bytes > self.limits.max_body_bytes:
            return self.too_long()
        if self.buffered_bytes > self.limits.max_buffered_bytes:
            message = f"all requests together hold {self.limits.max_buffered_bytes} bytes; retry later"
            return IntakeRefusal(503, "body_buffers_full", message)
        return None

    def late_refusal(self) -> IntakeRefusal:
        """Return the refusal of a request that has not arrived in time."""
        limit_s = self.limits.receive_timeout_s
        return IntakeRefusal(408, "receive_timeout", f"head and body took longer than {limit_s} s")

    def full_refusal(self, bound: int) -> IntakeRefusal:
        """Return the refusal of a client beyond the most that are served at a time."""
        return IntakeRefusal(503, "too_many_connections", f"{bound} connections are open; retry later")

    def too_long(self) -> IntakeRefusal:
        """Return the refusal of a body that exceeds the bound."""
        bound = self.limits.max_body_bytes
        return IntakeRefusal(413, "body_too_large", f"request body exceeds {bound} bytes; send a shorter one")
