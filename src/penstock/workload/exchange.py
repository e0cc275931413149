"""Sends one request and measures its stream, by callbacks: a task switch per token would cost more than reading it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from penstock.core.clock import SimulatedClock
from penstock.core.errors import (
    SaturatedError,
    StreamBroken,
    UpstreamConnectError,
    UpstreamError,
    UpstreamTimeout,
)
from penstock.core.flags import check_bounds, flag
from penstock.core.http.client import ConnectionPool, StreamingResponse, Timeouts
from penstock.core.http.sse import EventSplitter, payload
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.traces import TraceRequest

MAX_EVENT_BYTES: Final = 1 << 20
"""Chosen: a thousand times the longest event of one token; beyond it the stream is not an event stream."""


class StreamError(StreamBroken):
    """The server reported an error inside the stream, after its headers had said 200."""


class ClientStreamMeter:
    """Token times and usage of one stream.

    A token event is one whose choice carries text; a server with a stream interval puts several tokens
    in one event, and then the gaps are gaps between such events.

    Attributes:
        gaps_s: Seconds between successive token events, as 32-bit floats: 4 bytes a token.
        prompt_tokens, output_tokens, cached_tokens: From ``usage``; None when it does not say.
    """

    def __init__(self) -> None:
        self._splitter = EventSplitter(max_event_bytes=MAX_EVENT_BYTES)
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s: array[float] = array("f")
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.is_done = False

    def feed(self, now_s: float, data: bytes) -> int:
        """Take one read and return how many token events it completed."""
        tokens = 0
        for raw in self._splitter.feed(data):
            content = payload(raw)
            if content is None:
                continue
            if content == b"[DONE]":
                self.is_done = True
                continue
            event = _object(content)
            if _has_text(event):
                tokens += 1
                if self.first_s is None:
                    self.first_s = now_s
                else:
                    self.gaps_s.append(now_s - self.last_s)
                self.last_s = now_s
            if usage := event.get("usage"):
                self._take_usage(usage)
            if error := event.get("error"):
                raise StreamError(error.get("message", str(error)) if isinstance(error, dict) else str(error))
        return tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first: (last - first) / (tokens - 1), or None below two.

        Tokens are counted by ``usage`` where it says so, and by token events otherwise.
        """
        tokens = self.output_tokens if self.output_tokens is not None else len(self.gaps_s) + 1
        return (
            (self.last_s - self.first_s) / (tokens - 1) if self.first_s is not None and tokens > 1 else None
        )

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            raise StreamBroken(f"usage: {usage!r} is not a JSON object")
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _object(content: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise StreamBroken(f"an event is not JSON ({exc}): {content[:80]!r}") from exc
    if not isinstance(event, dict):
        raise StreamBroken(f"an event is not a JSON object: {content[:80]!r}")
    return event


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not choices:
        return False
    try:
        choice = choices[0]
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content")
    except (TypeError, AttributeError, LookupError) as exc:
        raise StreamBroken(f"choices: {choices!r} is not a list of JSON objects") from exc
    return bool(text)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


_MAX_ERROR_BYTES = 64 * 1024
_REJECTED_STATUSES: Final = frozenset({429, 503})


NO_TOKENS: Final = "no_tokens"
"""Error class of a complete stream without text."""


class TargetEndpoint(StrEnum):
    """Which OpenAI endpoint gets the requests."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Path below the server's address."""
        return "/v1/completions" if self is TargetEndpoint.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where requests go and how; the help of its fields is the command line's. Keys are never written to a file."""

    url: str = flag("Address of the router or server.", default="http://127.0.0.1:8000")
    model: str | None = flag("Model to ask for.", unset="the first that the server lists")
    endpoint: TargetEndpoint = flag(
        "OpenAI endpoint; on chat the server's template adds prompt tokens.",
        default=TargetEndpoint.COMPLETIONS,
    )
    tier_header: str = flag(
        "Header in which requests ask for tiers; the router's.", default="x-penstock-tier"
    )
    timeout_s: float = flag("Longest request, simulated seconds.", default=600.0, gt=0)
    api_key: str | None = flag(
        "File with the bearer token, which is never written to another.",
        default=None,
        key_variable="PENSTOCK_API_KEY",
    )
    admin_key: str | None = flag(
        "File with the router's admin key, where it has one: with it the workers' own lag is measured too.",
        default=None,
        key_variable="PENSTOCK_ADMIN_KEY",
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class _Ending:
    http_status: int | None
    error_class: str | None = None
    error: str | None = None


class RequestSender:
    """Sends requests of one replay to a destination whose model is known; holds their shared state."""

    def __init__(
        self,
        pool: ConnectionPool,
        clock: SimulatedClock,
        destination: Destination,
        *,
        on_first: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._on_first = on_first
        self._url = destination.url.rstrip("/") + destination.endpoint.path
        self._is_chat = destination.endpoint is TargetEndpoint.CHAT
        self._timeouts = Timeouts(
            first_byte_s=None, idle_s=None, total_s=clock.to_real_s(destination.timeout_s)
        )
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        if destination.api_key is not None:
            self._headers.append((b"authorization", b"Bearer " + destination.api_key.encode()))
        opening = b'"messages":[{"role":"user","content":"' if self._is_chat else b'"prompt":"'
        self._tier_header = destination.tier_header.lower().encode()
        self._before = b'{"model":' + orjson.dumps(destination.model) + b"," + opening
        self._after = b'"}],' if self._is_chat else b'",'

    def body(self, request: TraceRequest, prompt: bytes) -> bytes:
        """Return the JSON body; ``prompt`` must need no escaping, so that 50 KB are copied and not scanned."""
        return b"".join(
            (
                self._before,
                prompt,
                self._after,
                b'"max_tokens":%d,"ignore_eos":true,"stream":true,' % request.output_tokens,
                b'"stream_options":{"include_usage":true}}',
            )
        )

    async def send(
        self, request: TraceRequest, body: bytes, *, request_id: str, zero_s: float
    ) -> RequestResult:
        """Send one request and return its result; only cancellation escapes."""
        meter = ClientStreamMeter()
        sent_s = self._clock.now_s()
        headers = [*self._headers, (b"x-request-id", request_id.encode())]
        if request.tier is not None:
            headers.append((self._tier_header, request.tier.value.encode()))
        ending = await self._exchange(body, headers, meter, sent_s)
        return RequestResult(
            id=request_id,
            line=request.line,
            arrival_s=request.arrival_s,
            sent_s=sent_s - zero_s,
            ended_s=self._clock.now_s() - zero_s,
            status=_status(ending),
            http_status=ending.http_status,
            error=ending.error,
            error_class=ending.error_class,
            trace_input_tokens=request.input_tokens,
            trace_output_tokens=request.output_tokens,
            block_ids=request.block_ids,
            is_prompt_exact=not self._is_chat,
            prompt_tokens=meter.prompt_tokens,
            output_tokens=meter.output_tokens,
            cached_tokens=meter.cached_tokens,
            ttft_s=None if meter.first_s is None else meter.first_s - sent_s,
            e2e_s=None if meter.first_s is None else meter.last_s - sent_s,
            tpot_s=meter.tpot_s,
            itl_s=meter.gaps_s,
            tier=request.tier,
        )

    async def _exchange(
        self, body: bytes, headers: list[tuple[bytes, bytes]], meter: ClientStreamMeter, sent_s: float
    ) -> _Ending:
        status: int | None = None
        try:
            response = await self._pool.stream(
                "POST", self._url, body=body, headers=headers, timeouts=self._timeouts
            )
            status = response.status
            async with response:
                if status != 200:
                    text = await response.read(limit_bytes=_MAX_ERROR_BYTES)
                    return _Ending(status, f"http_{status}", _message(text))
                await self._feed(response, meter, sent_s)
        except (UpstreamError, SaturatedError) as exc:
            return _Ending(status, _error_class(exc), str(exc))
        if not meter.is_done:
            return _Ending(status, "truncated", "the stream ended without [DONE]")
        if meter.first_s is None:
            return _Ending(status, NO_TOKENS, "the stream held no token")
        return _Ending(status)

    async def _feed(self, response: StreamingResponse, meter: ClientStreamMeter, sent_s: float) -> None:
        """Feed the meter by callbacks until the body is complete, and wake the request's task then."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: UpstreamError) -> None:
            if not done.done():
                done.set_exception(error)

        def end() -> None:
            if not done.done():
                done.set_result(None)

        def take(data: bytes) -> None:
            is_first = meter.first_s is None
            try:
                meter.feed(self._clock.now_s(), data)
            except StreamBroken as exc:
                response.abort()
                fail(exc)
                return
            if is_first and meter.first_s is not None:
                self._on_first(meter.first_s - sent_s)

        response.set_sink(take, end, fail)
        await done


def _status(ending: _Ending) -> RequestStatus:
    if ending.error_class is None:
        return RequestStatus.OK
    return RequestStatus.REJECTED if ending.http_status in _REJECTED_STATUSES else RequestStatus.FAILED


def _error_class(exc: UpstreamError | SaturatedError) -> str:
    if isinstance(exc, UpstreamTimeout):
        return f"timeout_{exc.phase}"
    if isinstance(exc, UpstreamConnectError):
        return "connect"
    if isinstance(exc, StreamError):
        return "stream_error"
    return "client_connections" if isinstance(exc, SaturatedError) else "broken"


def _message(body: bytes) -> str:
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else body[:200].decode("utf-8", "replace")
