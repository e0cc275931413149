"""One HTTP request as a handler sees it, the object that writes its response, and OpenAI-style error bodies.

The connection (``server_connection``) creates both; handlers only read the one and write the other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import parse_qsl, unquote

import httptools
import orjson

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

REQUEST_ID: Final = b"x-request-id"
"""One name of a request at its client, the router and the workers, and in their logs."""
_WELL_FORMED_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_ID_PREFIX: Final = os.urandom(8).hex()
_ID_NUMBERS: Final = itertools.count(1)


def well_formed_id(sent: bytes | None) -> bytes | None:
    """Return a request id that was sent, if it is one.

    Accepted: 1 to 128 of ``A-Z a-z 0-9 . _ : + / = -``; anything else could break logs or headers.
    """
    return sent if sent is not None and _WELL_FORMED_ID.fullmatch(sent) else None


def request_id(sent: bytes | None) -> bytes:
    """Return the client's request id if it is one, else a new one."""
    return well_formed_id(sent) or f"{_ID_PREFIX}-{next(_ID_NUMBERS):x}".encode()


def error_body(
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | int | None = None,
    param: str | None = None,
) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}`` as the OpenAI API and its clients spell it."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


Headers = Sequence[tuple[bytes, bytes]]
Callback = Callable[[], object]

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_BODYLESS = frozenset({204, 304})
_BREAKS = b"\r\n\0"

# How body bytes leave, by the state of the response.
_NOT_STARTED, _CHUNKED, _UNTIL_CLOSE, _MUTE, _OVER = range(5)


class Request:
    """A parsed request.

    Attributes:
        target: Request target as sent, for example ``b"/v1/models?a=b"``.
        path: Decoded path without the query.
        query: Decoded query parameters; of a repeated one, the last.
        headers: Lower-case names; repeated headers are joined by ``", "``.
        body: Complete body, framing removed; at most ``ServerLimits.max_body_bytes``.
        peer: ``host:port`` of the client.
        http_1_0: Whether the client speaks HTTP/1.0 and knows no chunks.
    """

    def __init__(self, method: str, target: bytes, headers: dict[bytes, bytes], *, peer: str) -> None:
        """Take the head of a request; ValueError where the target is neither a path, a URL, nor ``*``."""
        self.method = method
        self.target = target
        self.headers = headers
        self.peer = peer
        self.body = b""
        self.keep_alive = True
        self.http_1_0 = False
        self.path, self.query = _split(target)


def _split(target: bytes) -> tuple[str, dict[str, str]]:
    if target == b"*" or (
        target[:1] == b"/" and b"?" not in target and b"%" not in target and b"#" not in target
    ):
        return target.decode("latin-1"), {}
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserError as exc:
        raise ValueError(str(exc)) from exc
    if url.userinfo is not None:
        raise ValueError("user information in a URL")
    query = (url.query or b"").decode("latin-1")
    path = unquote((url.path or b"/").decode("latin-1"))
    return path, dict(parse_qsl(query, keep_blank_values=True)) if query else {}


class ResponseOwner(Protocol):
    """What a responder needs from its connection."""

    def response_head(self) -> bytes:
        """Return headers that every response of this server carries now."""

    def response_over(self, responder: Responder) -> None:
        """Record that the response is complete; the next request may start."""

    def given_away(self) -> None:
        """Record that another protocol has the connection."""


class Responder:
    """Writes one response: either ``send`` once, or ``start``, ``write``..., ``end``.

    After the client is gone every write is dropped; ``disconnected`` and ``on_disconnect`` report it. Callbacks run on
    the event loop, in the order of the events.

    Attributes:
        status: Status sent, or 0.
        patience_s: How long the task that answers continues once the client is gone, real seconds.
    """

    def __init__(self, owner: ResponseOwner | None, transport: asyncio.Transport, request: Request) -> None:
        self._owner = owner
        self._transport = transport
        self._head_only = request.method == "HEAD"
        self._http_1_0 = request.http_1_0
        self._mode = _NOT_STARTED
        self._paused = False
        self._on_disconnect: tuple[Callback, ...] = ()
        self._on_pause: Callback | None = None
        self._on_resume: Callback | None = None
        self.keep_alive = request.keep_alive
        self.disconnected = False
        self.status = 0
        self.patience_s = 0.0
        self.task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether the head has been sent."""
        return self.status != 0

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._mode == _OVER

    def send(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = JSON,
        headers: Headers = (),
    ) -> None:
        """Send a complete response in one write; RuntimeError if one was started, ValueError for a header's line break."""
        if not self._may_start():
            return
        if status in _BODYLESS:
            head = self._head(status, None, headers, b"")
            body = b""
        else:
            head = self._head(status, content_type, headers, b"content-length: %d\r\n" % len(body))
        self._transport.write(head if self._head_only else head + body)
        self._finish()

    def start(self, status: int, *, content_type: str = EVENT_STREAM, headers: Headers = ()) -> None:
        """Send the head of a response whose length is not known: chunked, or until close for HTTP/1.0; raises as `send`."""
        if not self._may_start():
            return
        if self._http_1_0:
            self.keep_alive = False
            head, mode = self._head(status, content_type, headers, b""), _UNTIL_CLOSE
        else:
            framing = b"transfer-encoding: chunked\r\n"
            head, mode = self._head(status, content_type, headers, framing), _CHUNKED
        self._mode = _MUTE if self._head_only else mode
        self._transport.write(head)

    def write(self, data: bytes) -> None:
        """Send body bytes as one chunk, in one transport write; nothing when ``data`` is empty."""
        if self._mode == _CHUNKED:
            if data:
                self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._mode == _UNTIL_CLOSE:
            self._transport.write(data)
        elif self._mode == _NOT_STARTED:
            raise RuntimeError("Responder.write before Responder.start: call start(status) first")

    @property
    def write_framed(self) -> Callable[[bytes], object] | None:
        """The writer of one complete chunk with its framing; None: the response is not chunked.

        It may be called until the response is complete or the client is gone.
        """
        return self._transport.write if self._mode == _CHUNKED else None

    def end(self) -> None:
        """Complete a started response; does nothing when it is complete or the client is gone."""
        if self._mode == _OVER:
            return
        if self._mode == _NOT_STARTED:
            raise RuntimeError("Responder.end before Responder.start: call start(status) or send(...) first")
        if self._mode == _CHUNKED:
            self._transport.write(b"0\r\n\r\n")
        self._finish()

    def break_off(self) -> None:
        """Close behind what was written, without the body's end: the client sees that it is incomplete.

        So it does not keep the connection either, whose end the head could not announce.
        """
        self.keep_alive = False
        if self._mode != _OVER:
            self._finish()

    def abort(self) -> None:
        """Cut the connection off, with what was written but not sent yet."""
        if self._mode != _OVER:
            self._transport.abort()

    def on_disconnect(self, callback: Callback) -> None:
        """Call back once if the client goes away before the response is complete (at once if it has)."""
        if self.disconnected:
            callback()
        elif self._mode != _OVER:
            self._on_disconnect += (callback,)

    def cancel_on_disconnect(self) -> None:
        """Cancel the task that answers, after its patience, once the client goes away before the response is complete."""
        task = self.task

        def left() -> None:
            if task is not None and self.patience_s > 0:
                task.get_loop().call_later(self.patience_s, task.cancel)
            elif task is not None:
                task.cancel()

        self.on_disconnect(left)

    def on_pause(self, callback: Callback) -> None:
        """Call back whenever the client's buffer passes the high-water mark (at once if it has)."""
        self._on_pause = callback
        if self._paused:
            callback()

    def on_resume(self, callback: Callback) -> None:
        """Call back whenever the client's buffer falls below the low-water mark again."""
        self._on_resume = callback

    def writing_paused(self) -> None:
        """Record that the connection's buffer is above the high-water mark."""
        self._paused = True
        if self._on_pause is not None:
            self._on_pause()

    def writing_resumed(self) -> None:
        """Record that the connection's buffer is below the low-water mark."""
        self._paused = False
        if self._on_resume is not None:
            self._on_resume()

    def connection_lost(self) -> None:
        """Record that the client is gone."""
        if self._mode == _OVER:
            return
        self.disconnected = True
        callbacks = self._on_disconnect
        self._release()
        for callback in callbacks:
            callback()

    def upgrade(self, protocol: asyncio.Protocol, name: str) -> None:
        """Answer 101, and give the connection to another protocol, which the server no longer bounds or ends."""
        if not self._may_start():
            return
        owner, transport, self.status = self._owner, self._transport, 101
        head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: %s\r\n\r\n"
        transport.write((head % name).encode())
        self._release()
        if owner is not None:
            owner.given_away()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def _may_start(self) -> bool:
        if self.disconnected:
            return False
        if self._mode != _NOT_STARTED:
            raise RuntimeError(f"response already started with status {self.status}: send only one")
        return True

    def _head(self, status: int, content_type: str | None, headers: Headers, framing: bytes) -> bytes:
        head = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if self._owner is not None:
            head += self._owner.response_head()
        if content_type is not None:
            framing += b"content-type: %b\r\n" % content_type.encode("latin-1")
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif self._http_1_0:
            framing += b"connection: keep-alive\r\n"
        self.status = status
        return b"%b%b%b\r\n" % (head, framing, encode_headers(headers))

    def _finish(self) -> None:
        owner = self._owner
        self._release()
        if owner is not None:
            owner.response_over(self)

    def _release(self) -> None:
        # Callbacks hold handlers' frames; dropping them here frees a request at once instead of at the next
        # cyclic collection.
        self._mode = _OVER
        self._owner = None
        self._on_disconnect = ()
        self._on_pause = self._on_resume = None


def encode_headers(headers: Headers) -> bytes:
    """Return ``name: value`` lines."""
    lines = b""
    for each in headers:
        lines += b"%b: %b\r\n" % each
    if len(lines.translate(None, _BREAKS)) != len(lines) - 2 * len(headers):
        name, value = next(
            each for each in headers if len(b"".join(each).translate(None, _BREAKS)) < sum(map(len, each))
        )
        raise ValueError(f"header {name!r}: value {value!r} must not carry CR, LF or NUL; remove them")
    return lines
