"""One request's answer on its way to the client: the worker pumps its choices, back-pressure stops them.

Tokens that are not sent yet are a number, not a buffer: a slow client costs no memory, and gets what has
become due in one write when it reads again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.core.http.messages import error_body
from penstock.core.http.server import Responder
from penstock.engine.core.requests import FinishReason, RequestState
from penstock.engine.serve.answers import (
    EVENT_STREAM,
    ChoiceEvents,
    CompletionFormat,
    Finished,
    ResponseFormat,
)
from penstock.engine.serve.protocol import Api, Choice, EngineCall

if TYPE_CHECKING:
    from penstock.engine.serve.worker import ServedWorker

OutputsOf = Callable[[RequestState], int]


class Stream:
    """The state of one choice.

    Attributes:
        request_id: The engine's id, unique; the client's own id is part of it.
        is_held: Nothing may be sent yet, because its KV is not known to have been read in time.
        is_read_sent: The prefill worker has been notified that its blocks were read.
        done: Set when the choice is complete or no client is left to read it.
        transfer_s: When its KV began and ended to arrive, simulated seconds; None: it was computed here.
    """

    def __init__(self, reply: Reply, choice: Choice, request_id: str) -> None:
        self._reply = reply
        self.choice = choice
        self.request_id = request_id
        self.is_held = reply.call.remote is not None
        self.is_read_sent = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transfer_s: tuple[float, float] | None = None
        self.state: RequestState | None = None
        self._events: ChoiceEvents | ResponseFormat | None = None
        self._sent = 0

    @property
    def call(self) -> EngineCall:
        """The request that it is part of."""
        return self._reply.call

    def pump(self, state: RequestState, outputs: int) -> None:
        """Send what has become due: tokens [sent, outputs), and the end if the request has ended."""
        self.state = state
        if self.is_held or self._reply.is_paused or self.done.done():
            return
        reason = state.finish_reason
        if self.call.stream:
            if outputs > self._sent:
                self._send_events(state, outputs, reason)
        elif reason is not None:
            self.done.set_result(None)
            self._reply.finish(self._finished(state, reason))

    def release(self, outputs: OutputsOf) -> None:
        """Let a held stream go on, after its KV was read in time."""
        self.is_held = False
        self.catch_up(outputs)

    def catch_up(self, outputs: OutputsOf) -> None:
        """Send what became due while nothing could be sent."""
        if self.state is not None:
            self.pump(self.state, outputs(self.state))

    def restart(self) -> None:
        """Forget the engine's state of a request that is recomputed; nothing was sent yet."""
        self.state = None
        self.is_held = False

    def fail(self, message: str, status: int, kind: str) -> None:
        """Answer with an error, or break the connection off if tokens were sent."""
        if not self.done.done():
            self._reply.fail(message, status, kind)
            self.abandon()

    def abandon(self) -> None:
        """Record that the client is gone."""
        if not self.done.done():
            self.done.set_result(None)
        self._reply.abandon()

    def _send_events(self, state: RequestState, outputs: int, reason: FinishReason | None) -> None:
        events, parts = self._events, []
        if events is None:
            events = self._events = self._reply.begin(self.choice)
            parts.append(events.opening)
        start = self._sent
        texts = self._due_texts(outputs, is_last=reason is not None)
        if reason is None:
            if texts:
                parts.append(events.tokens(start, texts))
            self._reply.write(b"".join(parts))
            return
        if len(texts) > 1:
            parts.append(events.tokens(start, texts[:-1]))
        parts.append(events.last(start + len(texts) - 1, texts[-1], reason))
        self.done.set_result(None)
        self._reply.write(b"".join(parts), self._finished(state, reason))

    def _due_texts(self, outputs: int, *, is_last: bool) -> list[bytes]:
        """Return the texts of the events due: the first token alone, then every ``interval`` tokens."""
        start = self._sent
        texts = self.choice.texts(start, outputs)
        interval = self._reply.interval
        if interval == 1:
            self._sent = outputs
            return texts
        merged = []
        while texts:
            size = interval if self._sent else 1
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
        return Finished(self.choice, state.outputs, reason, cached, self._reply.kv_params(state))


class Reply:
    """One request's answer, made of its choices."""

    def __init__(
        self,
        call: EngineCall,
        responder: Responder,
        *,
        response_id: str,
        request_id: str,
        headers: Sequence[tuple[bytes, bytes]],
        interval: int,
        worker: ServedWorker,
    ) -> None:
        """Begin an answer that the client knows by ``response_id``, the engine by ``request_id``, which is unique."""
        self.call = call
        self.is_paused = False
        self.interval = 1 if call.events_differ else interval
        self.kv_params = worker.pinned_params
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._responder = responder
        self._headers = headers
        self._outputs_of = worker.engine.outputs_of
        self._finished: list[Finished] = []
        make = ResponseFormat if call.api is Api.RESPONSES else CompletionFormat
        self._format = make(call, response_id, int(time.time()))
        self.streams = tuple(
            Stream(self, choice, f"{request_id}-{choice.index}" if choice.index else request_id)
            for choice in call.choices
        )
        if call.stream:
            responder.on_pause(self._pause)
            responder.on_resume(self._resume)

    def begin(self, choice: Choice) -> ChoiceEvents | ResponseFormat:
        """Return what encodes a choice's events; the first choice starts the answer."""
        if not self._responder.started:
            self._responder.start(200, content_type=EVENT_STREAM, headers=self._headers)
        return self._format.events(choice)

    def write(self, data: bytes, finished: Finished | None = None) -> None:
        """Send events; with the last of all choices the end of the answer."""
        if finished is not None:
            self._finished.append(finished)
            if len(self._finished) == len(self.streams):
                self._responder.write(data + self._format.closing(self._in_order()))
                self._responder.end()
                self.abandon()
                return
        self._responder.write(data)

    def finish(self, finished: Finished) -> None:
        """Record a choice that is not streamed; the last one sends the answer."""
        self._finished.append(finished)
        if len(self._finished) == len(self.streams):
            self._responder.send(200, self._format.complete(self._in_order()), headers=self._headers)
            self.abandon()

    def fail(self, message: str, status: int, kind: str) -> None:
        """Answer with an error, or break the connection off if tokens were sent."""
        if self._responder.started:
            self._responder.abort()
        else:
            self._responder.send(status, error_body(message, kind=kind, code=status), headers=self._headers)

    def abandon(self) -> None:
        """Record that nothing more is to be sent."""
        if not self.done.done():
            self.done.set_result(None)

    def _in_order(self) -> list[Finished]:
        return sorted(self._finished, key=lambda each: each.choice.index)

    def _pause(self) -> None:
        self.is_paused = True

    def _resume(self) -> None:
        self.is_paused = False
        for stream in self.streams:
            stream.catch_up(self._outputs_of)
