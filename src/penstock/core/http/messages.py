"""HTTP request as a handler receives it, the object that writes its response, and error bodies in OpenAI's form.

The connection (``server_connection``) creates both; handlers read the request and write the response.
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
"""Header with the request ID, which is the same at the client, the router and the workers, and in their logs."""
_WELL_FORMED_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_ID_PREFIX: Final = os.urandom(8).hex()
_ID_NUMBERS: Final = itertools.count(1)


def well_formed_id(sent: bytes | None) -> bytes | None:
    """Return a request ID that was sent if it is well-formed; else None.

    Well-formed IDs have 1 to 128 characters of ``A-Z a-z 0-9 . _ : + / = -``; others could corrupt logs or headers.
    """
    return sent if sent is not None and _WELL_FORMED_ID.fullmatch(sent) else None


def request_id(sent: bytes | None) -> bytes:
    """Return the client's request ID if it is well-formed, else a new one."""
    return well_formed_id(sent) or f"{_ID_PREFIX}-{next(_ID_NUMBERS):x}".encode()


def error_body(
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | int | None = None,
    param: str | None = None,
) -> bytes:
    """Return an error body in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``.

    Args:
        message: Message for users.
        kind: Value of ``type``.
        code: Error code; None if there is none.
        param: Request parameter that is wrong; None if there is none.
    """
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


Headers = Sequence[tuple[bytes, bytes]]
"""Header names and values, in order."""
Callback = Callable[[], object]
"""Function without arguments."""

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_BODYLESS = frozenset({204, 304})
_BREAKS = b"\r\n\0"

# State of a response, which determines how body bytes are sent.
_NOT_STARTED, _CHUNKED, _UNTIL_CLOSE, _NO_BODY, _OVER = range(5)


class Request:
    """A parsed request.

    Attributes:
        method: HTTP method.
        target: Request target as sent, for example ``b"/v1/models?a=b"``.
        path: Decoded path without the query.
        query: Decoded query parameters; for a repeated one, its last value.
        headers: Headers by lower-case name; repeated headers are joined by ``", "``.
        body: Complete body without framing; at most ``ServerLimits.max_body_bytes`` long.
        peer: ``host:port`` of the client.
        keep_alive: Whether the connection can be used for further requests.
        http_1_0: Whether the client uses HTTP/1.0, which has no chunked encoding.
    """

    def __init__(self, method: str, target: bytes, headers: dict[bytes, bytes], *, peer: str) -> None:
        """Create a request from its head.

        Raises:
            ValueError: The target is neither a path, a URL, nor ``*``.
        """
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
    """Interface of the client's connection that a `Responder` uses."""

    def response_head(self) -> bytes:
        """Return the header lines that every response of this server has at present, such as the date."""

    def response_over(self, responder: Responder) -> None:
        """Record that the response is complete, so that the next request can start."""

    def given_away(self) -> None:
        """Record that another protocol has taken over the connection."""


class Responder:
    """Writes one response: either ``send`` once, or ``start``, any number of ``write``, and ``end``.

    After the client has disconnected, writes are ignored; ``disconnected`` and ``on_disconnect`` report it. Callbacks
    run on the event loop, in the order of the events.

    Attributes:
        keep_alive: Whether the connection stays open after this response.
        disconnected: Whether the client disconnected before the response was complete.
        status: HTTP status that was sent; 0 before that.
        patience_s: Wall-clock seconds for which the handler's task continues after the client disconnected.
        task: Task of the handler; None before it starts and after it ends.
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
        """Whether the head (status line and headers) has been sent."""
        return self.status != 0

    @property
    def closed(self) -> bool:
        """Whether the response is over, so that nothing more can be written."""
        return self._mode == _OVER

    def send(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = JSON,
        headers: Headers = (),
    ) -> None:
        """Send a complete response in one write; does nothing if the client has disconnected.

        Args:
            status: HTTP status.
            body: Body; ignored for 204 and 304.
            content_type: Content type of the body.
            headers: Additional headers.

        Raises:
            RuntimeError: A response was already started.
            ValueError: A header contains a line break or NUL.
        """
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
        """Send the head of a response of unknown length; does nothing if the client has disconnected. Raises as `send` does.

        The body is sent in chunks, or until the connection closes for HTTP/1.0.

        Args:
            status: HTTP status.
            content_type: Content type of the body.
            headers: Additional headers.
        """
        if not self._may_start():
            return
        if self._http_1_0:
            self.keep_alive = False
            head, mode = self._head(status, content_type, headers, b""), _UNTIL_CLOSE
        else:
            framing = b"transfer-encoding: chunked\r\n"
            head, mode = self._head(status, content_type, headers, framing), _CHUNKED
        self._mode = _NO_BODY if self._head_only else mode
        self._transport.write(head)

    def write(self, data: bytes) -> None:
        """Send body bytes as one chunk, in one transport write; does nothing if ``data`` is empty.

        Raises:
            RuntimeError: The response has not been started.
        """
        if self._mode == _CHUNKED:
            if data:
                self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._mode == _UNTIL_CLOSE:
            self._transport.write(data)
        elif self._mode == _NOT_STARTED:
            raise RuntimeError("Responder.write before Responder.start: call start(status) first")

    @property
    def write_framed(self) -> Callable[[bytes], object] | None:
        """Function that sends one complete chunk including its framing; None if the response is not chunked.

        It can be called until the response is complete or the client has disconnected.
        """
        return self._transport.write if self._mode == _CHUNKED else None

    def end(self) -> None:
        """Complete a started response; does nothing if it is complete or the client has disconnected.

        Raises:
            RuntimeError: The response has not been started.
        """
        if self._mode == _OVER:
            return
        if self._mode == _NOT_STARTED:
            raise RuntimeError("Responder.end before Responder.start: call start(status) or send(...) first")
        if self._mode == _CHUNKED:
            self._transport.write(b"0\r\n\r\n")
        self._finish()

    def break_off(self) -> None:
        """Close the connection after the data written so far, without the end of the body, so that the client sees that it is incomplete.

        The client then cannot reuse the connection either, although the head did not announce its end.
        """
        self.keep_alive = False
        if self._mode != _OVER:
            self._finish()

    def abort(self) -> None:
        """Abort the connection; unsent data is lost. Does nothing if the response is complete."""
        if self._mode != _OVER:
            self._transport.abort()

    def on_disconnect(self, callback: Callback) -> None:
        """Call ``callback`` once if the client disconnects before the response is complete; immediately if it already has."""
        if self.disconnected:
            callback()
        elif self._mode != _OVER:
            self._on_disconnect += (callback,)

    def cancel_on_disconnect(self) -> None:
        """Cancel the handler's task, after ``patience_s``, if the client disconnects before the response is complete."""
        task = self.task

        def left() -> None:
            if task is not None and self.patience_s > 0:
                task.get_loop().call_later(self.patience_s, task.cancel)
            elif task is not None:
                task.cancel()

        self.on_disconnect(left)

    def on_pause(self, callback: Callback) -> None:
        """Call ``callback`` whenever more than ``ServerLimits.write_high_bytes`` are unsent to the client; immediately if that is so already."""
        self._on_pause = callback
        if self._paused:
            callback()

    def on_resume(self, callback: Callback) -> None:
        """Call ``callback`` whenever the unsent bytes have fallen below a quarter of ``ServerLimits.write_high_bytes`` again."""
        self._on_resume = callback

    def writing_paused(self) -> None:
        """Record that too many bytes are unsent, and call the callbacks of `on_pause`."""
        self._paused = True
        if self._on_pause is not None:
            self._on_pause()

    def writing_resumed(self) -> None:
        """Record that few enough bytes are unsent again, and call the callbacks of `on_resume`."""
        self._paused = False
        if self._on_resume is not None:
            self._on_resume()

    def connection_lost(self) -> None:
        """Record that the client has disconnected, and call the callbacks of `on_disconnect`."""
        if self._mode == _OVER:
            return
        self.disconnected = True
        callbacks = self._on_disconnect
        self._release()
        for callback in callbacks:
            callback()

    def upgrade(self, protocol: asyncio.Protocol, name: str) -> None:
        """Send status 101 and pass the connection to another protocol; the server no longer limits or closes it.

        Args:
            protocol: Protocol object that takes over the connection.
            name: Name of the protocol for the upgrade header.
        """
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
        # Callbacks refer to handlers' frames; dropping them here frees a request immediately instead of at the
        # next garbage collection.
        self._mode = _OVER
        self._owner = None
        self._on_disconnect = ()
        self._on_pause = self._on_resume = None


def encode_headers(headers: Headers) -> bytes:
    """Return the headers as ``name: value`` lines.

    Raises:
        ValueError: A header contains CR, LF or NUL.
    """
    lines = b""
    for each in headers:
        lines += b"%b: %b\r\n" % each
    if len(lines.translate(None, _BREAKS)) != len(lines) - 2 * len(headers):
        name, value = next(
            each for each in headers if len(b"".join(each).translate(None, _BREAKS)) < sum(map(len, each))
        )
        raise ValueError(f"header {name!r}: value {value!r} must not carry CR, LF or NUL; remove them")
    return lines
