"""Parses and limits the bytes that one client sends, and emits complete requests. It has no socket and no clock."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NoReturn

import httptools

from penstock.core.http.intake import FIELD_BYTES, MAX_FIELDS, Intake, IntakeRefusal
from penstock.core.http.messages import Request

# llhttp's message for a length beyond 64 bits.
_LENGTH_OVERFLOW = "Content-Length overflow"
# Chosen: a chunk of 20 bytes has 6 bytes of framing. Framing beyond this part of the body is limited like a head.
_FRAMING_DIVISOR = 4
# RFC 3986 3.2.2 and 3.2.3: host and port, without user information. No comma: it joins the values of two fields.
_HOST = re.compile(
    rb"[ \t]*(?:\[[0-9A-Za-z:.]+\]|(?:[0-9A-Za-z._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?[ \t]*"
)


class ReaderPhase(Enum):
    """Part of a request that the next byte belongs to.

    Attributes:
        IDLE: No request has begun.
        HEAD: The request line or a header.
        BODY: The body.
    """

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


class _Refused(Exception):  # noqa: N818 - stops the parser; never leaves this module
    """Raised inside a parser callback to stop the parser."""


class RequestReader:
    """Reads the requests of one connection, one after another, and passes them to the callbacks of its constructor.

    Attributes:
        phase: Part of a request that the next byte belongs to.
        begun: Number of requests that have begun; it changes when a new one begins.
    """

    def __init__(
        self,
        intake: Intake,
        *,
        peer: str,
        on_request: Callable[[Request], IntakeRefusal | None],
        on_expect: Callable[[], None],
        wants_body: Callable[[Request], bool],
        hold: Callable[[int], None],
    ) -> None:
        """Prepare; `feed` parses data.

        Args:
            intake: Limits of the process.
            peer: ``host:port`` of the client.
            on_request: Called with each complete request; returns a refusal, or None if the request is accepted.
            on_expect: Called if a client waits for ``100 Continue``.
            wants_body: Returns whether a request's body should be read; otherwise it is answered from its head alone.
            hold: Called with the number of bytes of each piece of a body.
        """
        self._intake = intake
        self._max_head_bytes = intake.limits.max_header_bytes
        self._peer = peer
        self._on_request = on_request
        self._on_expect = on_expect
        self._wants_body = wants_body
        self._hold = hold
        self._parser: Any = httptools.HttpRequestParser(self)
        self._refusal: IntakeRefusal | Request | None = None
        self.phase = ReaderPhase.IDLE
        self.begun = 0
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._request: Request | None = None
        self._repeats = 0
        self._head_bytes = 0
        self._first_piece: bytes | None = None
        self._body: bytearray | None = None
        self._part_bytes = 0  # of target and header fields, then of the body
        self._framing_bytes = 0

    def close(self) -> None:
        """Drop the parser, which refers back to this object, so that a partial body is freed immediately."""
        self._parser = None

    @property
    def held_bytes(self) -> int:
        """Number of buffered bytes of a body that has not arrived completely."""
        return self._part_bytes if self.phase is ReaderPhase.BODY else 0

    def feed(self, data: bytes) -> IntakeRefusal | Request | None:
        """Parse data from the client; each request that is then complete is passed to the callback ``on_request``.

        Returns:
            A refusal if the client must not be read any further; a request without its body if the callback
            ``wants_body`` returned False, which has to be answered now; else None.
        """
        begun, phase, body_bytes = self.begun, self.phase, self._part_bytes
        try:
            self._parse(data)
        except _Refused:
            return self._refusal
        except httptools.HttpParserError as exc:
            return self._refusal or self._malformed(str(exc))
        # A read in which a part begins or ends also has bytes of other parts, so only reads inside one part count.
        if self.begun != begun or self.phase is not phase:
            return None
        if phase is ReaderPhase.HEAD:
            self._head_bytes += len(data)
            return self._intake.head_refusal(self._head_bytes, 0)
        if phase is ReaderPhase.BODY:
            self._framing_bytes += len(data) - (self._part_bytes - body_bytes)
            bound = self._max_head_bytes
            if self._framing_bytes > bound + self._part_bytes // _FRAMING_DIVISOR:
                message = (
                    f"chunk sizes, extensions and trailers exceed {bound} bytes and a"
                    f" {_FRAMING_DIVISOR}th of the body; send larger chunks"
                )
                return IntakeRefusal(400, "too_much_framing", message)
        return None

    def _parse(self, data: bytes) -> None:
        """Feed the parser; a request that offers an upgrade (h2c, websocket) is served as plain HTTP/1.1.

        RFC 9110 7.8 allows that. The parser would ignore the body of such a request, so its head is passed to a new
        parser without the offer, followed by the bytes after the head.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                head = self._head_without_offer()
                self._begin()
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(head)
            else:
                return

    def _head_without_offer(self) -> bytes:
        method: bytes = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(
                IntakeRefusal(400, "connect_unsupported", "method CONNECT: this server is not a proxy")
            )
        version = self._parser.get_http_version().encode()
        kept = {name: value for name, value in self._headers.items() if name != b"upgrade"}
        options = [each.strip() for each in kept.pop(b"connection", b"").split(b",")]
        if options := [each for each in options if each and each.lower() != b"upgrade"]:
            kept[b"connection"] = b", ".join(options)
        lines = b"".join(b"%b: %b\r\n" % item for item in kept.items())
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, lines)

    # ------------------------------------------------------------------ parser callbacks

    def on_message_begin(self) -> None:
        """Start a request."""
        self.begun += 1
        self.phase = ReaderPhase.HEAD

    def on_url(self, url: bytes) -> None:
        """Collect the request target, which may arrive in pieces."""
        self._url += url
        self._part_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header; trailers are ignored."""
        if self._request is not None:
            return
        name = name.lower()
        headers = self._headers
        self._part_bytes += len(name) + len(value) + FIELD_BYTES
        if name in headers:
            self._repeats += 1
            value = headers[name] + b", " + value
        headers[name] = value
        if self._part_bytes > self._max_head_bytes or self._repeats > MAX_FIELDS:
            self._check(self._intake.head_refusal(self._part_bytes, self._repeats))

    def on_headers_complete(self) -> None:
        """Check the headers before any body is read."""
        self._part_bytes = 0
        parser, headers = self._parser, self._headers
        self._check(self._intake.head_refusal(0, len(headers) + self._repeats))
        if parser.should_upgrade():
            return  # `_parse` feeds this head again without the offer
        method = parser.get_method().decode("latin-1")
        try:
            request = Request(method, self._url, headers, peer=self._peer)
        except ValueError as exc:
            self._refuse(
                IntakeRefusal(
                    400, "malformed_target", f"request target: {exc}; send /path or http://host/path"
                )
            )
        version = parser.get_http_version()
        request.http_1_0 = version == "1.0"
        self._check(_head_problem(headers, version))
        has_body = b"content-length" in headers or b"transfer-encoding" in headers
        if has_body:
            self._check(self._intake.length_refusal(headers))
        if has_body and headers.get(b"content-length") != b"0" and not self._wants_body(request):
            request.keep_alive = False
            self._refuse(request)
        self._request = request
        self.phase = ReaderPhase.BODY
        expect = headers.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                self._refuse(
                    IntakeRefusal(417, "expectation_failed", "header expect: only 100-continue is known")
                )
            if not request.http_1_0:
                self._on_expect()

    def on_body(self, body: bytes) -> None:
        """Collect body bytes up to the limit; pieces are joined immediately, because separate objects would cost more."""
        self._part_bytes += len(body)
        self._hold(len(body))
        self._check(self._intake.body_refusal(self._part_bytes))
        if self._body is not None:
            self._body += body
        elif self._first_piece is None:
            self._first_piece = body
        else:
            self._body = bytearray(self._first_piece)
            self._body += body

    def on_message_complete(self) -> None:
        """Pass the complete request to ``on_request``."""
        request = self._request
        if request is None:
            return
        request.body = self._first_piece or b"" if self._body is None else bytes(self._body)
        request.keep_alive = self._parser.should_keep_alive()
        self.phase = ReaderPhase.IDLE
        self._begin()
        refusal = self._on_request(request)
        if refusal is not None:
            self._refuse(refusal)

    # ------------------------------------------------------------------ refusals

    def _refuse(self, refusal: IntakeRefusal | Request) -> NoReturn:
        self._refusal = refusal
        raise _Refused

    def _malformed(self, problem: str) -> IntakeRefusal:
        if problem == _LENGTH_OVERFLOW:
            return self._intake.too_long()
        return IntakeRefusal(400, "malformed_request", f"not valid HTTP/1.1: {problem}")

    def _check(self, refusal: IntakeRefusal | None) -> None:
        if refusal is not None:
            self._refuse(refusal)


@lru_cache(256)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


def _head_problem(headers: dict[bytes, bytes], version: str) -> IntakeRefusal | None:
    """Return a refusal if a head is invalid, else None: RFC 9110 2.5 and 15.6.6, RFC 9112 3.2 and 6.1."""
    if version not in {"1.0", "1.1"}:
        return IntakeRefusal(505, "version_unsupported", f"HTTP/{version} is not served; send HTTP/1.1")
    host, coding = headers.get(b"host"), headers.get(b"transfer-encoding")
    if host is None and version == "1.1":
        return IntakeRefusal(400, "missing_host", "header host is required by HTTP/1.1; add it")
    if host is not None and not _is_host(host):
        return IntakeRefusal(400, "malformed_host", "header host: send one, as host or host:port")
    return None if coding is None else _coding_problem(coding, version)


def _coding_problem(coding: bytes, version: str) -> IntakeRefusal | None:
    if version == "1.0":
        message = "header transfer-encoding: HTTP/1.0 knows none; send content-length"
        return IntakeRefusal(400, "malformed_request", message)
    if coding.strip().lower() != b"chunked":
        message = "header transfer-encoding: only chunked is known; send the body as it is"
        return IntakeRefusal(501, "transfer_coding_unsupported", message)
    return None
