"""A stream whose worker is gone goes on at another one: what was said, the request for the rest, and the seam. Pure.

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
from penstock.router.proxy.not_continued import BEGUN, ENDING, NO_IDS, NOT_KEPT, WITH_IDS, refusal_of
from penstock.router.proxy.replay_buffer import ReplayBuffer
from penstock.router.proxy.routes import ApiEndpoint

LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Keys of the most tokens of an answer."""

_PROMPT_IDS: Final = "prompt_token_ids"
_SAID_KEYS: Final = frozenset(
    {"role", "content", "index", "logprobs", "finish_reason", "stop_reason", "text", "token_ids", _PROMPT_IDS}
)


@dataclass(frozen=True, slots=True)
class Said:
    """What a client has of a stream, and what another worker is asked to go on with.

    Attributes:
        text: Of the answer, that follows the prompt.
        shown: Of the answer, that the client has: ``text``, and what the next worker says again.
        tokens: Of ``text``.
        reported: That the client has events of; those beyond ``tokens`` come again.
        head: The keys of its chunks that a seam repeats: ``id``, ``created``, ``model``, ``object``; of a response its own,
            its item's id and the number of its last event.
        finish_reason: Of the answer, where the client has it; what lacks is the end of the stream.
        has_usage: The client has the event of it.
        refusal: Why no other worker can go on; empty: one can.
        token_ids: Of prompt and text, where the client has asked for them; the text's alone lie behind ``prompt_tokens``.
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


_NOTHING: Final = Said()


class Repeated:
    """Text that the client has and the next worker says again."""

    def __init__(self, said: Said) -> None:
        self._left = said.shown[len(said.text) :]

    def new(self, text: str) -> str:
        """Return a text without what the client has; what differs from that is all new."""
        if not self._left:
            return text
        both = zip(self._left, text, strict=False)
        same = sum(1 for _ in takewhile(lambda each: each[0] == each[1], both))
        self._left = self._left[same:] if same == len(text) else ""
        return text[same:]


class StreamSeam(ABC):
    """Makes the rest of a stream one with its beginning.

    Attributes:
        tokens: Said before; counted as output, and not as prompt.
        usage: Of the whole, once the rest has shown its own.
    """

    def __init__(self, said: Said) -> None:
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
        joined = self._joined_chunk(orjson.loads(data))
        return event if joined is None else joined

    @abstractmethod
    def _joined_chunk(self, chunk: dict[str, Any]) -> bytes | None:
        """Return the event of a chunk as it follows the beginning; empty: the client has it; None: it stays as it is."""

    def _whole(self, usage: dict[str, Any], prompt_key: str, output_key: str) -> dict[str, Any]:
        """Return the usage of the whole stream, and keep it, from that of its rest; counts that are no numbers stay."""
        self.usage = usage
        prompt, output = usage.get(prompt_key), usage.get(output_key)
        if not isinstance(prompt, int) or not isinstance(output, int):
            return usage
        prompt_tokens, details_key = max(0, prompt - self.tokens), f"{prompt_key}_details"
        self.usage = whole = usage | {prompt_key: prompt_tokens, output_key: output + self.tokens}
        details = usage.get(details_key)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            # Of the prompt: what was said lies behind it.
            whole[details_key] = details | {"cached_tokens": min(details["cached_tokens"], prompt_tokens)}
        return whole


@dataclass(slots=True)
class BegunStream:
    """A stream whose client has its beginning.

    Attributes:
        kept: Of the worker that speaks now.
        request: The client's.
        said: What the worker that speaks now goes on with; None: it is the first.
        last_real_s: When the client got the last token, ``time.monotonic()``.
        seam: Joins what that worker says; None: it is the first.
    """

    kept: ReplayBuffer
    request: CompletionRequest
    said: Said | None = None
    last_real_s: float = 0.0
    seam: StreamSeam | None = None


@dataclass(slots=True)
class _Part:
    """What one worker's events say."""

    head: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    has_usage: bool = False
    is_begun: bool = False
    is_ending: bool = False
    text: str = ""
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and characters shown behind each event that showed more."""


def _part_of(events: bytes, tokens_per_event: int) -> _Part:
    part = _Part()
    for event in EventSplitter(max_event_bytes=1 << 31).feed(events):
        data = payload(event)
        if data is None or not data.startswith(b"{"):
            continue
        chunk = orjson.loads(data)
        if str(chunk.get("type")).startswith("response."):
            _add_response_event(part, chunk, tokens_per_event)
            continue
        part.head = part.head or {
            key: chunk[key] for key in ("id", "created", "model", "object") if key in chunk
        }
        part.has_usage |= not chunk.get("choices") and bool(chunk.get("usage"))
        for choice in chunk.get("choices") or ():
            _add_choice(part, choice, tokens_per_event)
    return part


def _add_choice(part: _Part, choice: dict[str, Any], tokens_per_event: int) -> None:
    part.finish_reason = choice.get("finish_reason") or part.finish_reason
    delta = choice.get("delta", choice)
    part.is_begun |= any(value and key not in _SAID_KEYS for key, value in delta.items())
    part.prompt_ids = part.prompt_ids or tuple(choice.get(_PROMPT_IDS) or ())
    ids = choice.get("token_ids") or ()
    part.token_ids += ids
    text = delta.get("content" if "delta" in choice else "text") or ""
    if "role" in delta and not text:
        return
    _add_text(part, text, len(ids) or _logprob_count(choice), tokens_per_event)


def _add_text(part: _Part, text: str, tokens: int, tokens_per_event: int) -> None:
    """Count an event of so many tokens; 0: it does not say how many."""
    # Each worker's first token comes alone, then so many an event.
    part.tokens += tokens or (tokens_per_event if part.tokens else 1)
    if text:
        part.text += text
        part.steps.append((part.tokens, len(part.text)))


def _add_response_event(part: _Part, chunk: dict[str, Any], tokens_per_event: int) -> None:
    kind = chunk["type"]
    if kind == "response.created":
        made = chunk["response"]
        part.head |= {key: made.get(key) for key in ("id", "created_at", "max_output_tokens")}
    elif kind == "response.output_item.added":
        part.is_begun |= "item_id" in part.head or chunk["item"].get("type") != "message"
        part.head["item_id"] = chunk["item"].get("id")
    elif kind == "response.output_text.delta":
        _add_text(part, chunk.get("delta") or "", 0, tokens_per_event)
    elif kind.endswith(".delta"):
        part.is_begun = True
    elif kind not in {"response.in_progress", "response.content_part.added"}:
        part.is_ending = True
    part.head["sequence_number"] = chunk.get("sequence_number")


def _logprob_count(choice: dict[str, Any]) -> int:
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("content") or logprobs.get("tokens") or ())


def said_of(
    kept: ReplayBuffer, request: CompletionRequest, before: Said | None = None, *, tokens_per_event: int = 1
) -> Said:
    """Return what the client has of a stream.

    Args:
        kept: Events of the worker that speaks now.
        request: The client's.
        before: What that worker goes on with; None: it is the first.
        tokens_per_event: That it sends.
    """
    before, part = before or _NOTHING, _part_of(kept.events(), tokens_per_event)
    refusal = refusal_of(request)
    if kept.is_lost:
        refusal = str(NOT_KEPT)
    elif part.is_begun:
        refusal = refusal or str(BEGUN)
    elif part.is_ending:
        refusal = refusal or str(ENDING)
    ids: tuple[int, ...] = ()
    prompt_tokens = before.prompt_tokens
    if request.body.get(WITH_IDS) and not refusal:
        asked = before.token_ids or _ids_of(request) or part.prompt_ids
        prompt_tokens = prompt_tokens or len(asked)
        if asked and part.token_ids:
            ids = (*asked, *part.token_ids)
        else:
            refusal = str(NO_IDS)
    text = before.text + part.text
    if ids or part.finish_reason:
        tokens, end = part.tokens, len(part.text)
    else:
        tokens, end = _cut(part, request, before.text)
    limits = (request.body.get(key) for key in LIMITS)
    return Said(
        text=text[: len(before.text) + end],
        shown=max(before.shown, text, key=len),
        # The last event may hold fewer than the others.
        tokens=min([before.tokens + tokens, *(each for each in limits if isinstance(each, int))]),
        reported=max(before.reported, before.tokens + part.tokens),
        head=before.head or part.head,
        finish_reason=part.finish_reason,
        has_usage=part.has_usage,
        refusal=refusal,
        token_ids=ids,
        prompt_tokens=prompt_tokens,
    )


def _cut(part: _Part, request: CompletionRequest, before: str) -> tuple[int, int]:
    """Return how many tokens of a worker's text, and its first characters, the next one goes on with.

    A worker holds back as many characters as may become a stop string (vLLM 0.32, ``stop_buffer_length``), so that what it
    has shown may end within a token. The template of a chat may cut white space off the end of a message. At temperature 0
    the next worker goes on behind a whole token that is neither; else it would say other words again.
    """
    is_chat = request.endpoint in {ApiEndpoint.CHAT, ApiEndpoint.RESPONSES}
    held = max((len(stop) - 1 for stop in _stops(request)), default=0)
    steps = [(0, 0), *((tokens, end + held) for tokens, end in part.steps if end + held <= len(part.text))]
    if request.body.get("temperature") == 0:
        whole = (before + part.text[:end] for _, end in reversed(steps))
        ends = zip(reversed(steps), whole, strict=True)
        return next((step for step, text in ends if not (is_chat and text[-1:].isspace())), (0, 0))
    end = len(part.text.rstrip()) if is_chat else len(part.text)
    return next(tokens for tokens, upto in reversed(steps) if upto <= end), end


def _stops(request: CompletionRequest) -> Sequence[str]:
    stop = request.body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else stop


def _ids_of(request: CompletionRequest) -> tuple[int, ...]:
    """Return the ids of a prompt that was sent as such."""
    if not request.prompt_ids:
        return ()
    prompt = request.body["prompt"]
    return tuple(prompt[0] if isinstance(prompt[0], list) else prompt)


_DEFAULT_TOKENS: Final = 16
"""OpenAI's default of /v1/completions."""


def rest_of(request: CompletionRequest, said: Said) -> CompletionRequest | None:
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


def _open_input(given: Any, said: Said) -> Any:
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

    def __init__(self, said: Said) -> None:
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
            choice.pop(_PROMPT_IDS, None)
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


def ending(request: CompletionRequest, said: Said, prompt_tokens: int | None) -> bytes:
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
