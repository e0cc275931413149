"""Sends the response of one request to its client: the worker calls `pump`, and back-pressure pauses it.

The choices of a response (``n``) are one `Reply` each, because the engine computes each as a request of its own.

Tokens that are not sent yet are stored as a number, not in a buffer: a slow client costs no memory, and gets all
pending tokens in one write when it reads again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.core.http.messages import error_body
from penstock.core.http.server import Responder
from penstock.engine.core.requests import FinishReason, RequestState
from penstock.engine.serve.answers import EVENT_STREAM, CompletionFormat, Finished
from penstock.engine.serve.choices import ChoiceTally
from penstock.engine.serve.message_answers import MessageFormat, message_error
from penstock.engine.serve.protocol import Api, EngineCall, Usage
from penstock.engine.serve.response_answers import ResponseFormat

_FORMATS: Final[Mapping[Api, type[CompletionFormat | ResponseFormat | MessageFormat]]] = {
    Api.COMPLETIONS: CompletionFormat,
    Api.CHAT: CompletionFormat,
    Api.RESPONSES: ResponseFormat,
    Api.MESSAGES: MessageFormat,
}


class Reply:
    """Response to one request, or one of its choices. Times are simulated seconds.

    Attributes:
        call: The parsed request.
        peers: The other choices of the response, which end with this one if it fails.
        request_id: Unique ID in the engine; it contains the client's own ID.
        is_held: Whether nothing can be sent yet, because it is not known whether the request's KV was read from the
            other worker before its lease expired.
        is_read_sent: Whether the worker that keeps the request's KV has been notified that the KV was read.
        done: Future that is set when the response is complete or the client has disconnected.
        transfer_s: Start and end of the transfer of the request's KV; None if the KV was computed here.
        state: State of the request in the engine; None before the first call of `pump`.
    """

    def __init__(
        self,
        call: EngineCall,
        responder: Responder,
        *,
        response_id: str,
        request_id: str,
        headers: Sequence[tuple[bytes, bytes]],
        interval: int,
        outputs_of: Callable[[RequestState], int],
        kv_params: Callable[[RequestState], dict[str, Any] | None],
        tally: ChoiceTally,
    ) -> None:
        """Create the response.

        Args:
            call: The parsed request.
            responder: Object that writes the HTTP response.
            response_id: ID that the client sees.
            request_id: Unique ID in the engine.
            headers: Additional headers of the response.
            interval: Number of tokens per streamed event.
            outputs_of: Function that returns the number of tokens that a request has generated.
            kv_params: Function that returns the ``kv_transfer_params`` of a request, or None if the request's blocks
                are not kept.
            tally: Counts the choices of the response that have not ended, and joins them; the same object for all.
        """
        self.call = call
        self.peers: Sequence[Reply] = ()
        self.request_id = request_id
        self.is_held = call.remote is not None
        self.is_read_sent = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transfer_s: tuple[float, float] | None = None
        self.state: RequestState | None = None
        self._responder = responder
        self._headers = headers
        self._interval = 1 if call.usage is Usage.EVERY_EVENT else interval
        self._outputs_of = outputs_of
        self._kv_params = kv_params
        self._tally = tally
        self._sent = 0
        self._is_paused = False
        created_s = int(time.time())
        self._format = (
            CompletionFormat(call, response_id, created_s, interval=self._interval)
            if call.returns_ids
            else _FORMATS[call.api](call, response_id, created_s)
        )

    def pump(self, state: RequestState, outputs: int) -> None:
        """Send the tokens that are not sent yet, and the end of the response if the request has ended.

        ``outputs`` is the number of tokens that the request has generated so far.

        Does nothing while the response is held or the client is slow, or if it is done.
        """
        self.state = state
        if self.is_held or self._is_paused or self.done.done():
            return
        reason = state.finish_reason
        if self.call.stream:
            if outputs > self._sent:
                self._send_events(state, outputs, reason)
        elif reason is not None:
            done = self._finished(state, reason)
            body = self._tally.end_complete(self.call.choice, self._format.complete(done))
            if body is not None:
                self._responder.send(200, body, headers=self._headers)
            self.abandon()

    def release(self) -> None:
        """Let a held response continue, after the request's KV was read before its lease expired."""
        self.is_held = False
        self._catch_up()

    def restart(self, request_id: str) -> None:
        """Start the response again, with a new request in the engine; nothing of the response must have been sent."""
        self.request_id = request_id
        self.state = None
        self.is_held = False

    def fail(self, message: str, status: int, kind: str) -> None:
        """Send an error, or abort the connection if tokens have been sent; does nothing if the response is done.

        The other choices of the response end too; the worker must abort them.

        Args:
            message: Error message.
            status: HTTP status.
            kind: Error type in the body.
        """
        if self.done.done():
            return
        if self._responder.started:
            self._responder.abort()
        else:
            body = error_body(message, kind=kind, code=status)
            if self.call.api is Api.MESSAGES:
                body = message_error(body)
            self._responder.send(status, body, headers=self._headers)
        for each in (self, *self.peers):
            each.abandon()

    def abandon(self) -> None:
        """Record that nothing more will be sent; does nothing if the response is done."""
        if not self.done.done():
            self.done.set_result(None)

    def _send_events(self, state: RequestState, outputs: int, reason: FinishReason | None) -> None:
        parts = []
        start = self._sent
        if not self._responder.started:
            self._responder.start(200, content_type=EVENT_STREAM, headers=self._headers)
        if not start:
            parts.append(self._format.opening())
        texts = self._due_texts(outputs, is_last=reason is not None)
        if texts:
            parts.append(self._format.events(start, texts, reason))
        if reason is None:
            self._responder.write(b"".join(parts))
            return
        done = self._tally.end_stream(self.call.choice, self._finished(state, reason))
        if done is not None:
            parts.append(self._format.closing(done))
        self._responder.write(b"".join(parts))
        if done is not None:
            self._responder.end()
        self.abandon()

    def _due_texts(self, outputs: int, *, is_last: bool) -> list[bytes]:
        """Return the texts of the events to send: the first token alone, then every ``interval`` tokens."""
        start = self._sent
        texts = self.call.texts(start, outputs)
        if self._interval == 1:
            self._sent = outputs
            return texts
        merged = []
        while texts:
            size = self._interval if self._sent else 1
            if len(texts) < size and not is_last:
                break
            merged.append(b"".join(texts[:size]))
            self._sent += len(texts[:size])
            del texts[:size]
        return merged

    def _finished(self, state: RequestState, reason: FinishReason) -> Finished:
        remote = self.call.remote
        cached = state.cached_tokens + state.external_tokens
        if remote is not None and remote.cached_tokens is not None:
            cached = remote.cached_tokens
        return Finished(state.outputs, reason, cached, self._kv_params(state))

    def _catch_up(self) -> None:
        if self.state is not None:
            self.pump(self.state, self._outputs_of(self.state))

    def pause(self) -> None:
        """Send nothing until `resume` is called, because the client reads slowly."""
        self._is_paused = True

    def resume(self) -> None:
        """Send what has come in the meantime, and continue."""
        self._is_paused = False
        self._catch_up()
