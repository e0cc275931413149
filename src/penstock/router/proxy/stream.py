"""A worker's answer, complete or a stream that is being relayed: its beginning, first token, gaps, tokens and usage.

Nothing is sent before a token is seen, so that another worker can be tried: vLLM 0.32 begins a stream with status 200
before it has the prompt's KV. If the KV cannot be fetched, an error event follows, in a chat after the event that names
the role.

`RelayMeter.observe` is called once per read of the upstream socket, tens of thousands of times a second: the usual read
(complete events of one line each, without usage) costs a few C calls, one clock read and one bisect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from penstock.core.errors import StreamBroken, WrongAnswer
from penstock.core.histogram import BucketCounts
from penstock.core.http.sse import MAX_EVENT_BYTES, EventSplitter, encode_event, payload
from penstock.core.http.streaming import StreamingResponse
from penstock.router.core.retries import Assignment
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy import messages
from penstock.router.proxy.failures import ErrorReply
from penstock.router.proxy.kv_transfer import PrefillAnswer, with_cached_tokens
from penstock.router.proxy.routes import ApiEndpoint
from penstock.router.proxy.stream_record import BATCH, LARGE_READ_BYTES, StreamRecord


def read_completion(
    content: bytes, content_type: bytes, worker: str, endpoint: ApiEndpoint
) -> dict[str, Any]:
    """Return the object of the body of a 200.

    Raises:
        WrongAnswer: it is not a JSON object, or of a completion without a list of choices, of output items or of content.
    """
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        shown = content_type.decode("latin-1") or "no content type"
        raise WrongAnswer(f"{worker} answered 200 with {shown} that is not JSON") from exc
    if not isinstance(answer, dict) or not (endpoint.is_relayed or _is_completion(answer)):
        raise WrongAnswer(f"{worker} answered 200 with JSON that is not a completion")
    return answer


def _is_completion(answer: dict[str, Any]) -> bool:
    found = answer.get
    return (
        isinstance(found("choices"), list)
        or isinstance(found("output"), list)
        or isinstance(found("content"), list)
    )


def encoded_again(answer: dict[str, Any]) -> bytes:
    """Return a worker's JSON after a change.

    Raises:
        WrongAnswer: it can be read and not written: it is nested deeper than orjson writes, 254 levels.
    """
    try:
        return orjson.dumps(answer)
    except orjson.JSONEncodeError as exc:
        raise WrongAnswer(f"the answer cannot be written again: {exc}") from exc


async def read_preamble(response: StreamingResponse, worker: str, endpoint: ApiEndpoint) -> bytes:
    """Return the bytes up to the read that shows the first token.

    Raises:
        ErrorReply: an error event came first.
        WrongAnswer: an event is not a chunk of a completion, or nothing but comments and roles comes.
        UpstreamError: the stream broke off, or ended without a token.
    """
    splitter = EventSplitter()
    pieces: list[bytes] = []
    size = 0
    while size <= MAX_EVENT_BYTES:
        data = await anext(response, None)
        if data is None:
            raise StreamBroken(f"{worker} ended its stream before the first token")
        pieces.append(data)
        size += len(data)
        for event in splitter.feed(data):
            if _shows_token(event, worker, endpoint):
                return b"".join(pieces)
    raise WrongAnswer(f"{worker} sent {size} bytes of events without a token")


def _shows_token(event: bytes, worker: str, endpoint: ApiEndpoint) -> bool:
    data = payload(event)
    if data is None:
        return False
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise WrongAnswer(f"{worker} began its stream with an event that is not JSON") from exc
    if not isinstance(chunk, dict):
        raise WrongAnswer(f"{worker} began its stream with an event that is not an object")
    if chunk.get("error") is not None:
        raise ErrorReply(_status_of(chunk["error"]), data)
    kind = chunk.get("type")
    if isinstance(kind, str) and (kind == "error" or kind.startswith("response.")):
        if kind in {"error", "response.failed"}:
            raise ErrorReply(500, data)
        return kind.endswith((".delta", ".completed", ".incomplete"))
    if endpoint is ApiEndpoint.MESSAGES and isinstance(kind, str):
        return kind in {"content_block_delta", "message_stop"}
    if not isinstance(chunk.get("choices"), list):
        raise WrongAnswer(f"{worker} began its stream with an event that is not a chunk of a completion")
    return _has_text(chunk)


def _status_of(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


_USAGE = b'"usage":'
ERROR_EVENT: Final = b'data: {"error"'
"""How an error event begins."""
_NULL_USAGE = b'"usage":null}\n\n'
_CHOICES = b'"choices":[{'
_LINE_ENDS = len(b"\n\n\r\n")
_DONE = b"[DONE]"
_RESPONSE_EVENT = b"event: response."
_RESPONSE_ENDS = (b".completed", b".incomplete", b".failed")


@dataclass(slots=True, eq=False)
class RelayMeter:
    """Measures one stream.

    Attributes:
        assignment: Grows by the tokens.
        arrived_real_s: When the request came, ``time.monotonic()``.
        dispatched_real_s: When its prompt was dispatched to the worker that computes it, by the last try.
        prefilled: Whose cached-token count usage events get.
        kept: Records what is passed on; None: nothing is recorded.
        may_go_on: Another worker may continue where this one ends: what is passed on ends with a complete event, before an
            event of an error.
        tokens: Events with text so far; one token each unless the worker batches them.
        ttft_s: Arrival to first token, simulated seconds; None before it.
        usage: The last usage object seen, corrected if it was to be; None without one.
        is_done: ``[DONE]``, or the Responses API's last event, has been passed on.
        has_error: An error event came, which is passed on unless the stream may continue.
        last_real_s: When the last token came, ``time.monotonic()``.
    """

    metrics: RouterMetrics
    assignment: Assignment[Any]
    on_first_token: Callable[[], None]
    arrived_real_s: float
    dispatched_real_s: float
    speed: float
    prefilled: PrefillAnswer | None
    kept: StreamRecord | None = None
    may_go_on: bool = False
    tokens: int = 0
    ttft_s: float | None = None
    usage: dict[str, Any] | None = None
    is_done: bool = False
    has_error: bool = False
    last_real_s: float = 0.0
    _recorded_at: int = BATCH
    _splitter: EventSplitter = field(default_factory=EventSplitter)
    _tail: bytearray = field(init=False)
    _itl: BucketCounts = field(init=False)
    _is_held: bool = field(init=False)
    # How the stream's plain events begin and end, once a token was seen; no event is like that before.
    _usual_start: bytes = b"\0"
    _usual_end: bytes = b"\0"
    _usual_chunk_end: bytes = b"\0"

    def __post_init__(self) -> None:
        """Keep what each read needs."""
        self._tail, self._itl = self._splitter.tail, self.metrics.itl
        self._is_held = self.may_go_on or self.prefilled is not None

    @property
    def is_mid_event(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._tail)

    @property
    def is_complete(self) -> bool:
        """Whether the text has come to its end; ``[DONE]`` without a blank line behind it will do."""
        is_done = self.is_done or payload(bytes(self._tail)) == _DONE
        return is_done and not (self.has_error and self.may_go_on)

    def observe(self, data: bytes, at: int = 0) -> bytes:
        """Take one read and return what to send on.

        Where it is one complete chunk as it came, its body begins ``at`` > 0, and CR LF follow; at 0 all is body.

        Raises:
            StreamBroken: an event is too long to be one.
            WrongAnswer: a usage event cannot be rewritten.
        """
        now_real_s = time.monotonic()
        end = self._usual_chunk_end if at else self._usual_end
        if data.startswith(self._usual_start, at) and data.endswith(end) and not self._tail:
            is_single = data.find(b"\n", at) >= len(data) - _LINE_ENDS
            count = 1 if is_single else _plain_events(data[at:-2] if at else data)
            if count:
                gap_s = (now_real_s - self.last_real_s) * self.speed
                self._itl.observe(gap_s / count, count)
                self.last_real_s = now_real_s
                self.tokens += count
                self.assignment.grow(count, gap_s)
                if self.kept is not None:
                    self.kept.append(data[at:-2] if at else data)
                    if self.tokens >= self._recorded_at:
                        self._record()
                return data
        body = data[at:-2] if at else data
        sent = self._observe_slowly(body, now_real_s)
        if self.kept is not None:
            self.kept.append(sent)
            if (
                self.tokens >= self._recorded_at
                or len(self.kept.unread) >= BATCH
                or len(sent) >= LARGE_READ_BYTES
            ):
                self._record()
        return data if sent is body else sent

    def _record(self) -> None:
        self._recorded_at = self.tokens + BATCH
        if self.kept is not None:
            self.kept.read()

    def rest(self) -> bytes:
        """Return the bytes held back of an event that never ended; for a stream that ended in order."""
        held = bytes(self._tail) if self._is_held else b""
        self._tail.clear()
        return held

    def _observe_slowly(self, data: bytes, now_real_s: float) -> bytes:
        had_tail = bool(self._tail)
        events = self._splitter.feed(data)
        count = 0
        is_same = not had_tail and not self._tail
        for index, event in enumerate(events):
            is_token, rewritten = self._read_event(event, has_begun=self.tokens + count > 0)
            if self.has_error and self.may_go_on:
                del events[index:]
                is_same = False
                break
            count += is_token
            if rewritten is not None:
                events[index] = rewritten
                is_same = False
        if count:
            self._count_tokens(count, now_real_s)
            self._learn_usual(events[-1])
        return data if is_same or not self._is_held else b"".join(events)

    def _learn_usual(self, event: bytes) -> None:
        """Remember what a stream's events have in common before and behind their choices, where that holds no usage."""
        start, choices, rest = event.partition(_CHOICES)
        end = rest[rest.rfind(b"}]") :]
        is_usual = start.startswith(b"data: {") and end.endswith(b"}\n\n") and _USAGE not in start
        if is_usual and end.count(_USAGE) == end.endswith(_NULL_USAGE):
            self._usual_start, self._usual_end, self._usual_chunk_end = start + choices, end, end + b"\r\n"

    def _count_tokens(self, count: int, now_real_s: float) -> None:
        gap_s: float | None = None
        if self.ttft_s is None:
            self.ttft_s = (now_real_s - self.arrived_real_s) * self.speed
            self.metrics.ttft.observe(self.ttft_s)
            self.metrics.dispatched_ttft.observe((now_real_s - self.dispatched_real_s) * self.speed)
            self.on_first_token()
        else:
            # Tokens of one read cannot be distinguished in time: they share its gap.
            gap_s = (now_real_s - self.last_real_s) * self.speed
            self._itl.observe(gap_s / count, count)
        self.last_real_s = now_real_s
        self.tokens += count
        self.assignment.grow(count, gap_s)

    def _read_event(self, event: bytes, *, has_begun: bool) -> tuple[bool, bytes | None]:
        """Return whether the event carries a token, and what to send in its place (None: as it is).

        Only the first token is looked for in the JSON; once the text has begun every chunk is one.
        """
        if self.has_error and self.may_go_on:
            return False, None
        data = payload(event)
        is_error = event.startswith(ERROR_EVENT)
        self.has_error |= is_error
        self.is_done |= data == _DONE
        if data is None or data == _DONE or is_error:
            return False, None
        if event.startswith(messages.EVENTS):
            return self._read_message_event(event, data)
        if event.startswith(_RESPONSE_EVENT):
            return self._read_response_event(event[: event.find(b"\n")].strip(), data), None
        has_usage = _USAGE in data
        if has_begun and not has_usage:
            return True, None
        return self._read_chunk(data, has_usage=has_usage)

    def _read_chunk(self, data: bytes, *, has_usage: bool) -> tuple[bool, bytes | None]:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False, None
        if not isinstance(chunk, dict):
            return False, None
        rewritten = None
        usage = chunk.get("usage") if has_usage else None
        if isinstance(usage, dict):
            if self.prefilled is not None:
                with_cached_tokens(usage, self.prefilled.cached_tokens)
                rewritten = encode_event(encoded_again(chunk))
            self.usage = usage
        return _has_text(chunk), rewritten

    def _read_message_event(self, event: bytes, data: bytes) -> tuple[bool, bytes | None]:
        self.is_done |= messages.is_stop(event)
        self.has_error |= messages.is_error(event)
        if _USAGE not in data:
            return messages.is_delta(event), None
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False, None
        usage = messages.usage_of(chunk) if isinstance(chunk, dict) else None
        if usage is None:
            return messages.is_delta(event), None
        # A stream's last usage may leave the prompt out, which its first one has.
        if self.prefilled is None:
            self.usage = {**(self.usage or {}), **usage}
            return False, None
        with_cached_tokens(usage, self.prefilled.cached_tokens)
        self.usage = {**(self.usage or {}), **usage}
        return False, event[: event.find(b"\n") + 1] + encode_event(encoded_again(chunk))

    def _read_response_event(self, name: bytes, data: bytes) -> bool:
        if name.endswith(_RESPONSE_ENDS):
            self.is_done = True
            with suppress(orjson.JSONDecodeError):
                chunk = orjson.loads(data)
                response = chunk.get("response") if isinstance(chunk, dict) else None
                usage = response.get("usage") if isinstance(response, dict) else None
                self.usage = usage if isinstance(usage, dict) else self.usage
        return name.endswith(b".delta")


def _plain_events(data: bytes) -> int:
    """Return how many events of one line each a read holds, none an error's or with usage; 0: it holds others, too."""
    count = data.count(b"}\n\ndata: {") + 1
    has_usage = _USAGE in data and data.count(_USAGE) != data.count(_NULL_USAGE)
    return 0 if data.count(b"\n") != 2 * count or ERROR_EVENT in data or has_usage else count


def _has_text(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk shows generated text, or its end; a chat's first chunk names only the role."""
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        shown = delta if isinstance(delta, dict) else choice
        if choice.get("finish_reason") is not None or any(
            value for key, value in shown.items() if key not in _NO_TEXT
        ):
            return True
    return False


_NO_TEXT = frozenset(
    {"role", "index", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"}
)
