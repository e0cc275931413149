"""One request's answer on its way to the client; the worker pumps it, back-pressure stops it.

Tokens that are not sent yet are a number, not a buffer: a slow client costs no memory, and gets what has
become due in one write when it reads again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock_engine.core.requests import FinishReason, RequestState
from penstock_engine.serve import answers
from penstock_engine.serve.protocol import Call
from penstock_wire.server import Responder
from penstock_wire.sse import DONE

KvParams = Callable[[RequestState], dict[str, Any] | None]


class Stream:
    """The state of one answer.

    Attributes:
        request_id: The engine's id, unique; the client's own id is part of it.
        response_id: What the client sees.
        is_held: Nothing may be sent yet, because its KV is not known to have been read in time.
        is_read_sent: The prefill worker has been told that its blocks were read.
        state: The engine's state, once it has been seen.
        done: Set when the answer is complete or nobody is left to read it.
    """

    __slots__ = (
        "_format",
        "_headers",
        "_interval",
        "_is_paused",
        "_kv_params",
        "_responder",
        "_sent",
        "call",
        "done",
        "is_held",
        "is_read_sent",
        "request_id",
        "response_id",
        "state",
    )

    def __init__(
        self,
        call: Call,
        responder: Responder,
        *,
        request_id: str,
        response_id: str,
        headers: Sequence[tuple[bytes, bytes]],
        interval: int,
        kv_params: KvParams,
    ) -> None:
        self.call = call
        self.request_id = request_id
        self.response_id = response_id
        self.is_held = call.remote is not None
        self.is_read_sent = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._responder = responder
        self._headers = headers
        self._interval = interval
        self._kv_params = kv_params
        self._format: answers.EventFormat | None = None
        self._is_paused = False
        self._sent = 0
        self.state: RequestState | None = None
        if call.stream:
            responder.on_pause(self._pause)

    def pump(self, state: RequestState, outputs: int) -> None:
        """Send what has become due: tokens [sent, outputs), and the end if the request has ended."""
        self.state = state
        if self.is_held or self._is_paused or self.done.done():
            return
        reason = state.finish_reason
        if self.call.stream:
            if outputs > self._sent:
                self._send_events(state, outputs, reason)
        elif reason is not None:
            self._send_whole(state, reason)

    def release(self, outputs: Callable[[RequestState], int]) -> None:
        """Let a held stream go on, after its KV was read in time."""
        self.is_held = False
        if self.state is not None:
            self.pump(self.state, outputs(self.state))

    def resume_with(self, outputs: Callable[[RequestState], int]) -> None:
        """Go on when the client reads again, with as many tokens as are due then."""

        def resume() -> None:
            self._is_paused = False
            if self.state is not None:
                self.pump(self.state, outputs(self.state))

        if self.call.stream:
            self._responder.on_resume(resume)

    def restart(self) -> None:
        """Forget the engine's state of a request that is computed anew; nothing was sent yet."""
        self.state = None
        self.is_held = False

    def fail(self, message: str, status: int, kind: str) -> None:
        """Answer with an error, or break the connection off if tokens were sent."""
        if self.done.done():
            return
        if self._responder.started:
            self._responder.abort()
        else:
            body = answers.problem(message, status, kind)
            self._responder.send(status, body, headers=self._headers)
        self.done.set_result(None)

    def abandon(self) -> None:
        """Take note that the client is gone."""
        if not self.done.done():
            self.done.set_result(None)

    def _pause(self) -> None:
        self._is_paused = True

    def _send_events(self, state: RequestState, outputs: int, reason: FinishReason | None) -> None:
        events = self._format
        parts = []
        if events is None:
            events = self._format = answers.EventFormat(self.call, self.response_id, int(time.time()))
            self._responder.start(200, content_type=answers.EVENT_STREAM, headers=self._headers)
            parts.append(events.opening)
        texts = self._due_texts(outputs, is_last=reason is not None)
        if reason is None:
            if texts:
                parts.append(events.tokens(texts))
        else:
            if len(texts) > 1:
                parts.append(events.tokens(texts[:-1]))
            parts.append(events.last(texts[-1], reason))
            if self.call.include_usage:
                parts.append(events.usage(self._usage(state)))
            parts.append(DONE)
        self._responder.write(b"".join(parts))
        if reason is not None:
            self._responder.end()
            self.done.set_result(None)

    def _due_texts(self, outputs: int, *, is_last: bool) -> list[bytes]:
        """Return the texts of the events due: the first token alone, then every ``interval`` tokens."""
        start = self._sent
        texts = answers.words(self.call.salt, start, outputs)
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

    def _send_whole(self, state: RequestState, reason: FinishReason) -> None:
        text = b"".join(answers.words(self.call.salt, 0, state.outputs))
        body = answers.whole(
            self.call,
            self.response_id,
            int(time.time()),
            text=text,
            reason=reason,
            usage=self._usage(state),
            kv_transfer_params=self._kv_params(state),
        )
        self._responder.send(200, body, headers=self._headers)
        self.done.set_result(None)

    def _usage(self, state: RequestState) -> dict[str, Any]:
        remote = self.call.remote
        cached = state.cached_tokens + state.external_tokens
        if remote is not None and remote.cached_tokens is not None:
            cached = remote.cached_tokens
        return answers.usage_of(self.call, state.outputs, cached)
