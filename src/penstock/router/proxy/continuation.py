"""A stream whose worker is gone continues on another one: what was said, the request for the rest, and the seam. Pure.

The rest is asked for as a prompt: a completion's with what was said behind it, by token ids where the client has asked for
those and so the stream carries them, a chat's with it as the assistant's message that is not finished. The client sees one
stream: one id, one role, one ``[DONE]``, usage of the whole.

Text is taken up where a token ends, as far as that is known: what the client has beyond, the next worker says again, and the
seam leaves it out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

import orjson

from penstock.core.http.sse import DONE, EventSplitter, encode_event, payload
from penstock.router.proxy.completion import CompletionRequest, encoded
from penstock.router.proxy.not_continued import NO_IDS, UNKNOWN, WITH_IDS
from penstock.router.proxy.routes import ApiEndpoint
from penstock.router.proxy.stream_record import PROMPT_IDS, StreamRecord, stops_of

LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Keys of the most tokens of an answer."""


@dataclass(frozen=True, slots=True)
class EmittedPrefix:
    """What a client has of a stream, and what another worker is asked to continue.

    Attributes:
        text: Of the answer, that follows the prompt.
        shown: Of the answer, that the client has: ``text``, and what the next worker says again.
        tokens: Of ``text``.
        reported: That the client has events of; those beyond ``tokens`` come again.
        head: The keys of its chunks that a seam repeats: ``id``, ``created``, ``model``, ``object``; of a response its own,
            its item's id and the number of its last event.
        finish_reason: Of the answer, where the client has it; what lacks is the end of the stream.
        has_usage: The client has the event of it.
        refusal: Why no other worker can continue; empty: one can.
        token_ids: Of prompt and text, where the client has asked for them; the text's alone follow ``prompt_tokens``.
    """

    text: str = ""
    shown: str = ""
    tokens: int = 0
    reported: int = 0
    head: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    has_usage: bool = False
    refusal: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0


_NOTHING: Final = EmittedPrefix()


class Repeated:
    """Text that the client has and the next worker says again."""

    def __init__(self, said: EmittedPrefix) -> None:
        self._left = said.shown[len(said.text) :]

    def new(self, text: Any) -> str:
        """Return a text without what the client has; what differs from that is all new.

        Raises:
            TypeError: it is not text.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text is a {type(text).__name__}")
        if not self._left:
            return text
        both = zip(self._left, text, strict=False)
        same = sum(1 for _ in takewhile(lambda each: each[0] == each[1], both))
        self._left = self._left[same:] if same == len(text) else ""
        return text[same:]


class StreamSeam(ABC):
    """Makes the rest of a stream one with its beginning.

    Attributes:
        tokens: Emitted before; counted as output, and not as prompt.
        usage: Of the whole, once the rest has shown its own.
    """

    def __init__(self, said: EmittedPrefix) -> None:
        self.tokens = said.tokens
        self.usage: dict[str, Any] | None = None
        self._repeated = Repeated(said)
        self._splitter = EventSplitter()

    def join(self, data: bytes) -> bytes:
        """Return complete events of the rest as they follow the beginning."""
        return b"".join(self._joined(event) for event in self._splitter.feed(data))

    def _joined(self, event: bytes) -> bytes:
        data = payload(event)
        if data is None or not data.startswith(b"{"):
            return event
        try:
            joined = self._joined_chunk(orjson.loads(data))
        except (AttributeError, LookupError, TypeError, ValueError):
            # An event of an unknown form passes as it came, as in a stream of one worker; its record refuses a continuation.
            return event
        return event if joined is None else joined

    @abstractmethod
    def _joined_chunk(self, chunk: dict[str, Any]) -> bytes | None:
        """Return the event of a chunk as it follows the beginning; empty: the client has it; None: it stays as it is."""

    def _whole(self, usage: dict[str, Any], prompt_key: str, output_key: str) -> dict[str, Any]:
        """Return the usage of the whole stream, and keep it, from that of its rest; counts that are not numbers stay."""
        self.usage = usage
        prompt, output = usage.get(prompt_key), usage.get(output_key)
        if not isinstance(prompt, int) or not isinstance(output, int):
            return usage
        prompt_tokens, details_key = max(0, prompt - self.tokens), f"{prompt_key}_details"
        self.usage = whole = usage | {prompt_key: prompt_tokens, output_key: output + self.tokens}
        details = usage.get(details_key)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            # Of the prompt: what was said is behind it.
            whole[details_key] = details | {"cached_tokens": min(details["cached_tokens"], prompt_tokens)}
        return whole


@dataclass(slots=True)
class BegunStream:
    """A stream whose client has its beginning.

    Attributes:
        kept: Of the worker that speaks now.
        request: The client's.
        said: What the worker that speaks now continues; None: it is the first.
        last_real_s: When the client got the last token, ``time.monotonic()``.
        seam: Joins what that worker says; None: it is the first.
    """

    kept: StreamRecord
    request: CompletionRequest
    said: EmittedPrefix | None = None
    last_real_s: float = 0.0
    seam: StreamSeam | None = None


def emitted_prefix(record: StreamRecord, before: EmittedPrefix | None = None) -> EmittedPrefix:
    """Return what the client has of a stream.

    Args:
        record: Of the worker that speaks now.
        before: What that worker continues; None: it is the first.
    """
    before, request = before or _NOTHING, record.request
    refusal = refusal_of_stream(record, before)
    if refusal:
        return EmittedPrefix(refusal=refusal)
    ids: tuple[int, ...] = ()
    prompt_tokens = before.prompt_tokens
    if request.body.get(WITH_IDS):
        asked = _asked_ids(record, before)
        prompt_tokens = prompt_tokens or len(asked)
        ids = (*asked, *record.token_ids)
    own = record.text()
    text = before.text + own
    if ids or record.finish_reason:
        tokens, end = record.tokens, len(own)
    else:
        tokens, end = _cut(record, own)
    limits = (request.body.get(key) for key in LIMITS)
    return EmittedPrefix(
        text=text[: len(before.text) + end],
        shown=max(before.shown, text, key=len),
        # The last event may hold fewer than the others.
        tokens=min([before.tokens + tokens, *(each for each in limits if isinstance(each, int))]),
        reported=max(before.reported, before.tokens + record.tokens),
        head=before.head or record.head,
        finish_reason=record.finish_reason,
        has_usage=record.has_usage,
        token_ids=ids,
        prompt_tokens=prompt_tokens,
    )


def refusal_of_stream(record: StreamRecord, before: EmittedPrefix | None = None) -> str:
    """Return why no other worker can continue a stream; empty: one can. Reads no more than the record's last batch."""
    before, request = before or _NOTHING, record.request
    refusal = record.refusal()
    if refusal:
        return refusal
    if request.body.get(WITH_IDS) and not (record.token_ids and _asked_ids(record, before)):
        return str(NO_IDS)
    head = before.head or record.head
    is_response = request.endpoint is ApiEndpoint.RESPONSES
    if is_response and not (
        isinstance(head.get("item_id"), str) and isinstance(head.get("sequence_number"), int)
    ):
        return str(UNKNOWN)
    return ""


def _asked_ids(record: StreamRecord, before: EmittedPrefix) -> tuple[int, ...]:
    """Return the ids of the prompt, and of what earlier workers said; empty: they are not known."""
    return before.token_ids or _ids_of(record.request) or record.prompt_ids


def _cut(record: StreamRecord, own: str) -> tuple[int, int]:
    """Return how many tokens of a worker's text, and its first characters, the next one continues.

    A worker holds back as many characters as may become a stop string (vLLM 0.32, ``stop_buffer_length``), so that what it
    has shown may end within a token. The template of a chat may cut white space off the end of a message. At temperature 0
    the next worker continues after a whole token that is neither; else it would say other words again.
    """
    request = record.request
    is_chat = request.endpoint in {ApiEndpoint.CHAT, ApiEndpoint.RESPONSES}
    held = max((len(stop) - 1 for stop in stops_of(request)), default=0)
    steps = ((tokens, end + held) for tokens, end in record.steps() if end + held <= len(own))
    if request.body.get("temperature") == 0:
        for tokens, upto in steps:
            if not (is_chat and own[upto - 1].isspace()):
                return tokens, upto
        return 0, 0
    end = len(own.rstrip()) if is_chat else len(own)
    return next((tokens for tokens, upto in steps if upto <= end), 0), end


def _ids_of(request: CompletionRequest) -> tuple[int, ...]:
    """Return the ids of a prompt that was sent as such."""
    if not request.prompt_ids:
        return ()
    prompt = request.body["prompt"]
    return tuple(prompt[0] if isinstance(prompt[0], list) else prompt)


_DEFAULT_TOKENS: Final = 16
"""OpenAI's default of /v1/completions."""


def continuation_request(request: CompletionRequest, said: EmittedPrefix) -> CompletionRequest | None:
    """Return the request for what follows; None: its limit of tokens is reached."""
    body = dict(request.body)
    if request.endpoint is ApiEndpoint.CHAT:
        messages = list(body["messages"])
        if body.get("continue_final_message"):
            messages[-1] = {**messages[-1], "content": _text_of(messages[-1]) + said.text}
            body["messages"] = messages
        elif said.text:
            messages.append({"role": "assistant", "content": said.text})
            body |= {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    elif request.endpoint is ApiEndpoint.RESPONSES:
        body["input"] = _open_input(body["input"], said)
    else:
        prompt = body["prompt"]
        if said.token_ids:
            body["prompt"] = list(said.token_ids)
        else:
            body["prompt"] = (prompt if isinstance(prompt, str) else prompt[0]) + said.text
        body.setdefault("max_tokens", _DEFAULT_TOKENS)
    for key in LIMITS:
        if isinstance(body.get(key), int):
            body[key] -= said.tokens
            if body[key] < 1:
                return None
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = max(0, body["min_tokens"] - said.tokens)
    size = 0 if said.token_ids else request.prompt_bytes + len(said.text.encode())
    return request._replace(body=body, raw=encoded(body), prompt_bytes=size, prompt_ids=len(said.token_ids))


def _open_input(given: Any, said: EmittedPrefix) -> Any:
    """Return a response's input with what was said as a message in progress, which vLLM 0.32 leaves open."""
    if not said.text:
        return given
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    content = [{"type": "output_text", "text": said.text, "annotations": []}]
    message = {"type": "message", "role": "assistant", "id": said.head["item_id"], "content": content}
    return [*items, message | {"status": "in_progress"}]


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Seam(StreamSeam):
    """That of a completion or a chat."""

    def __init__(self, said: EmittedPrefix) -> None:
        super().__init__(said)
        self._head = said.head
        self._again_tokens = said.reported - said.tokens
        self._characters = len(said.text)

    def _joined_chunk(self, chunk: dict[str, Any]) -> bytes | None:
        if "choices" not in chunk:
            return None
        choices = list(self._choices(chunk["choices"]))
        if chunk["choices"] and not choices:
            return b""
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = self._whole(usage, "prompt_tokens", "completion_tokens")
        return encode_event(orjson.dumps({**chunk, **self._head, "choices": choices}))

    def _choices(self, choices: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            choice.pop(PROMPT_IDS, None)
            delta = choice.get("delta", choice)
            key = "content" if "delta" in choice else "text"
            if "role" in delta:
                del delta["role"]
                if not delta.get(key):
                    delta.pop(key, None)
                if not any(delta.values()) and not choice.get("finish_reason"):
                    continue
            if delta.get(key):
                delta[key] = self._repeated.new(delta[key])
            if isinstance(logprobs := choice.get("logprobs"), dict):
                choice["logprobs"] = self._new_logprobs(logprobs)
            yield choice

    def _new_logprobs(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens' values without those that the client has, their offsets counted from the answer's beginning."""
        count = len(logprobs.get("content") or logprobs.get("tokens") or ())
        again = min(count, self._again_tokens)
        self._again_tokens -= again
        new = {key: each[again:] if isinstance(each, list) else each for key, each in logprobs.items()}
        if isinstance(offsets := new.get("text_offset"), list):
            new["text_offset"] = [each + self._characters for each in offsets]
        return new


def ending(request: CompletionRequest, said: EmittedPrefix, prompt_tokens: int | None) -> bytes:
    """Return the events that a stream lacks of which nothing is left to say.

    Args:
        request: The client's.
        said: All of the answer; its limit is reached where no reason was given.
        prompt_tokens: Where a worker has counted them.
    """
    events = b""
    if said.finish_reason is None:
        is_chat = request.endpoint is ApiEndpoint.CHAT
        said_last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        choice = {"index": 0, **said_last, "finish_reason": "length"}
        events += encode_event(orjson.dumps({**said.head, "choices": [choice]}))
    options = request.body.get("stream_options")
    asks_usage = isinstance(options, dict) and options.get("include_usage")
    if asks_usage and not said.has_usage and prompt_tokens is not None:
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": said.tokens,
            "total_tokens": prompt_tokens + said.tokens,
        }
        events += encode_event(orjson.dumps({**said.head, "choices": [], "usage": usage}))
    return events + DONE
