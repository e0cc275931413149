"""A worker's response, complete or as a stream: its first token, the gaps between tokens, the token count, and the usage.

Nothing is sent to the client before the first token, so that another worker can be tried: vLLM 0.32 starts a stream with
status 200 before it has the prompt's KV. If the KV cannot be fetched, an error event follows; in a chat it follows the event
with the role.

`RelayMeter.observe` is called once per read of the worker's socket, tens of thousands of times per second: the usual read
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
from penstock.router.proxy.kv_transfer import PrefillResponse, with_cached_tokens
from penstock.router.proxy.routes import ApiEndpoint
from penstock.router.proxy.stream_record import BATCH, LARGE_READ_BYTES, StreamRecord


def read_completion(
    content: bytes, content_type: bytes, worker: str, endpoint: ApiEndpoint
) -> dict[str, Any]:
    """Parse ``content``, the body of a response with status 200 from the worker named ``worker``.

    ``content_type`` is only used in error messages.

    Raises:
        WrongAnswer: the body is not a JSON object; or it has none of the lists ``choices``, ``output`` and ``content``,
            although ``endpoint`` generates tokens (it is not `ApiEndpoint.is_relayed`).
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


def reencode(answer: dict[str, Any]) -> bytes:
    """Return ``answer``, the JSON object of a worker's response that the router has changed, as bytes for the client.

    Raises:
        WrongAnswer: the object is nested deeper than orjson can write, which is 254 levels.
    """
    try:
        return orjson.dumps(answer)
    except orjson.JSONEncodeError as exc:
        raise WrongAnswer(f"the answer cannot be written again: {exc}") from exc


async def read_preamble(response: StreamingResponse, worker: str, endpoint: ApiEndpoint) -> bytes:
    """Return the first bytes of a worker's stream, up to and including the read that contains the first token.

    Nothing was sent to the client before that, so that a failure can be answered by a retry or with an error status.

    Args:
        response: Response of the worker, from which the stream is read.
        worker: Name of the worker, for error messages.
        endpoint: API endpoint of the request, which determines the form of the events.

    Raises:
        ErrorReply: an error event came before the first token.
        WrongAnswer: an event is not a chunk of a completion, or no token came within the maximum size of an event.
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
"""First bytes of an error event."""
_NULL_USAGE = b'"usage":null}\n\n'
_CHOICES = b'"choices":[{'
_LINE_ENDS = len(b"\n\n\r\n")
_DONE = b"[DONE]"
_RESPONSE_EVENT = b"event: response."
_RESPONSE_ENDS = (b".completed", b".incomplete", b".failed")


@dataclass(slots=True, eq=False)
class RelayMeter:
    """Measures one stream while the router relays it from a worker to the client.

    Attributes:
        metrics: The router's metrics, to which the measurements are added.
        assignment: The request's assignment to the worker, whose token count is updated.
        on_first_token: Called at the first token.
        arrived_real_s: ``time.monotonic()`` when the request arrived.
        dispatched_real_s: ``time.monotonic()`` when the prompt was dispatched, in the last try, to the worker that computes
            it.
        speed: Time factor: simulated seconds per real second, 1 in production.
        prefilled: Response of the prefill worker, whose cached-token count replaces that in usage events; None leaves them
            unchanged.
        record: Record of the relayed events, by which another worker could resume the stream; None records nothing.
        can_resume: Whether another worker can resume the stream. If it can, only complete events are relayed, and no error
            event.
        is_single: Whether the stream has one response to one prompt. The events of several mix, so that the times between
            them are not ITL; such a stream adds nothing to the ITL histogram and to the worker's decode speed.
        tokens: Number of events with text so far; one token each unless the worker batches them.
        ttft_s: Time from arrival to first token, in simulated seconds; None before it.
        usage: The last usage object (token counts), as it was relayed; None if there was none.
        is_done: Whether ``[DONE]``, or the last event of the Responses API, was relayed.
        has_error: Whether an error event came. The error event is relayed unless another worker can resume the stream.
        last_real_s: ``time.monotonic()`` at the last token; 0 before the first one.
    """

    metrics: RouterMetrics
    assignment: Assignment[Any]
    on_first_token: Callable[[], None]
    arrived_real_s: float
    dispatched_real_s: float
    speed: float
    prefilled: PrefillResponse | None
    record: StreamRecord | None = None
    can_resume: bool = False
    is_single: bool = True
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
    # First and last bytes of the stream's usual events, known after the first token; before that no event matches.
    _usual_start: bytes = b"\0"
    _usual_end: bytes = b"\0"
    _usual_chunk_end: bytes = b"\0"

    def __post_init__(self) -> None:
        """Look up the objects that each read needs."""
        self._tail, self._itl = self._splitter.tail, self.metrics.itl
        self._is_held = self.can_resume or self.prefilled is not None

    @property
    def is_mid_event(self) -> bool:
        """Whether the last read from the worker ended within an event, so that the event is incomplete."""
        return bool(self._tail)

    @property
    def is_complete(self) -> bool:
        """Whether the stream has ended with its complete text; ``[DONE]`` without a blank line after it counts."""
        is_done = self.is_done or payload(bytes(self._tail)) == _DONE
        return is_done and not (self.has_error and self.can_resume)

    def observe(self, data: bytes, at: int = 0) -> bytes:
        """Count the tokens and gaps of one read from the worker, and return the bytes to send to the client.

        The bytes are ``data``, framing included, in nearly every case. They differ if the event with the usage gets the cached
        tokens of prefill, if an error event is left out because another worker is to continue the stream, or if the read ends
        within an event of a stream whose events are held back: that part is kept for the next read.

        Args:
            data: Bytes that were read. They can include the framing of one HTTP chunk (its size before and CR LF after the
                body).
            at: Position at which the body starts in ``data`` if the framing is included, > 0; 0 if all of ``data`` is body.

        Raises:
            StreamBroken: an event exceeds the maximum size.
            WrongAnswer: the event with the usage cannot be encoded as JSON again.
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
                if self.record is not None:
                    self.record.append(data[at:-2] if at else data)
                    if self.tokens >= self._recorded_at:
                        self._record()
                return data
        body = data[at:-2] if at else data
        sent = self._observe_slowly(body, now_real_s)
        if self.record is not None:
            self.record.append(sent)
            if (
                self.tokens >= self._recorded_at
                or len(self.record.unread) >= BATCH
                or len(sent) >= LARGE_READ_BYTES
            ):
                self._record()
        return data if sent is body else sent

    def _record(self) -> None:
        self._recorded_at = self.tokens + BATCH
        if self.record is not None:
            self.record.read()

    def take_remaining(self) -> bytes:
        """Return the bytes of an incomplete event at the end of the stream, which were not sent to the client; empty if there are none.

        Called when the stream has ended without an error.
        """
        held = bytes(self._tail) if self._is_held else b""
        self._tail.clear()
        return held

    def _observe_slowly(self, data: bytes, now_real_s: float) -> bytes:
        had_tail = bool(self._tail)
        events = self._splitter.feed(data)
        count = 0
        is_same = not had_tail and not self._tail
        for index, event in enumerate(events):
            is_token, rewritten = self._read_event(event, has_first_token=self.tokens + count > 0)
            if self.has_error and self.can_resume:
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
        """Remember the bytes before and after the choices of a stream's events, if these contain no usage.

        The events of a stream with several responses are never usual, because each must be counted without a time.
        """
        if not self.is_single:
            return
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
        elif self.is_single:
            # The tokens of one read have no individual times: the gap is divided among them.
            gap_s = (now_real_s - self.last_real_s) * self.speed
            self._itl.observe(gap_s / count, count)
        self.last_real_s = now_real_s
        self.tokens += count
        self.assignment.grow(count, gap_s)

    def _read_event(self, event: bytes, *, has_first_token: bool) -> tuple[bool, bytes | None]:
        """Return whether the event contains a token, and the bytes to send instead of it (None sends it unchanged).

        The JSON is only parsed until the first token; after it every chunk counts as one.
        """
        if self.has_error and self.can_resume:
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
        if has_first_token and not has_usage:
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
                rewritten = encode_event(reencode(chunk))
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
        # A stream's last usage may omit the prompt's tokens, which its first usage contains.
        if self.prefilled is None:
            self.usage = {**(self.usage or {}), **usage}
            return False, None
        with_cached_tokens(usage, self.prefilled.cached_tokens)
        self.usage = {**(self.usage or {}), **usage}
        return False, event[: event.find(b"\n") + 1] + encode_event(reencode(chunk))

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
    """Return the number of one-line events in a read that contains no error event and no usage; 0 if it contains other events."""
    count = data.count(b"}\n\ndata: {") + 1
    has_usage = _USAGE in data and data.count(_USAGE) != data.count(_NULL_USAGE)
    return 0 if data.count(b"\n") != 2 * count or ERROR_EVENT in data or has_usage else count


def _has_text(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk contains generated text or the finish reason; a chat's first chunk contains only the role."""
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
