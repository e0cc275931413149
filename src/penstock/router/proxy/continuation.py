"""A stream whose worker is gone goes on at another one: what was said, the request for the rest, and the seam. Pure.

The rest is asked for as a prompt: a completion's with what was said behind it, by token ids where the client has asked for
those and so the stream carries them, a chat's with it as the assistant's message that is not finished. The client sees one stream: one id, one role, one ``[DONE]``, usage of the whole.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from penstock.core.http.sse import DONE, EventSplitter, encode_event, payload
from penstock.router.proxy.completion import CompletionRequest, encoded
from penstock.router.proxy.routes import ApiEndpoint

MAX_CONTINUATIONS: Final = 3
"""Of one stream. Chosen: a rollout may take its worker away again and again; an engine that dies of it is counted apart."""

KEPT_BYTES: Final = 64 * 1024 * 1024
"""Of what was said, over all streams. Chosen: a thousand streams of 4,000 tokens, compressed."""

COUNTED: Final = 64
"""Reads of a stream between two counts of what is kept. Chosen: some 12 kB."""

_PIECE_BYTES: Final = 32 * 1024
"""Chosen: 150 events are compressed at once, to a twentieth, in 0.1 us each; shorter streams are never."""

_WHOLE_ANSWER: Final = "it shapes the whole answer, and another worker has not seen its beginning"
_OF_REQUEST: Final[dict[str, str]] = {
    "structured_outputs": _WHOLE_ANSWER,
    "guided_json": _WHOLE_ANSWER,
    "guided_regex": _WHOLE_ANSWER,
    "guided_choice": _WHOLE_ANSWER,
    "guided_grammar": _WHOLE_ANSWER,
    "use_beam_search": "several answers are searched at once",
    "echo": "the prompt would be repeated in the middle",
    "suffix": "what follows the text is not what was said",
    "logprobs": "offsets and top tokens of the rest would count anew",
    "prompt_logprobs": "they were given with the beginning",
    "truncate_prompt_tokens": "the cut would fall elsewhere",
}
"""Keys of a request whose stream ends with its worker, and why."""

_OF_ENDPOINT: Final = {
    ApiEndpoint.RESPONSES: "responses: their events are numbered and stored by the worker",
    ApiEndpoint.MESSAGES: "messages: the API has no field to have an assistant's last message go on",
}
"""APIs whose streams end with their worker, and why."""

_IDS: Final = "return_token_ids"
"""Key of a request whose events carry their tokens' ids, and the first one the prompt's, as vLLM gives them."""
_PROMPT_IDS: Final = "prompt_token_ids"
_SAID_KEYS: Final = frozenset(
    {"role", "content", "index", "logprobs", "finish_reason", "stop_reason", "text", "token_ids", _PROMPT_IDS}
)


@dataclass(slots=True)
class KeptTotal:
    """Bytes that all streams of a router keep."""

    kept_bytes: int = 0


class Kept:
    """The events of one stream as they were relayed; a stream that would pass the bound of all keeps none.

    Attributes:
        append: Keeps one read, of complete events: their bytes, or one chunk with its framing. It costs a relay a few
            nanoseconds, so it counts nothing; `count` does, which is due every `COUNTED` reads.
    """

    __slots__ = ("_bound_bytes", "_kept_bytes", "_packed", "_pieces", "_total", "append", "is_lost")

    def __init__(self, total: KeptTotal, *, bound_bytes: int = KEPT_BYTES) -> None:
        self._total = total
        self._bound_bytes = bound_bytes
        self._pieces: list[bytes] = []
        self._packed: list[bytes] = []
        self._kept_bytes = 0
        self.is_lost = False
        self.append: Callable[[bytes], object] = self._pieces.append

    def count(self) -> None:
        """Count what came since the last time, and compress it once it is large."""
        size = sum(map(len, self._pieces))
        if size > _PIECE_BYTES:
            packer = zlib.compressobj(1, zlib.DEFLATED, -12, 4)
            self._packed.append(packer.compress(b"".join(map(_unframed, self._pieces))) + packer.flush())
            self._pieces.clear()
            size = 0
        kept_bytes = size + sum(map(len, self._packed))
        self._total.kept_bytes += kept_bytes - self._kept_bytes
        self._kept_bytes = kept_bytes
        if self._total.kept_bytes > self._bound_bytes:
            self.drop()
            self.is_lost = True
            self.append = _forget

    def events(self) -> bytes:
        """Return everything that was kept."""
        packed = (zlib.decompress(each, -12) for each in self._packed)
        return b"".join((*packed, *map(_unframed, self._pieces)))

    def drop(self) -> None:
        """Forget it, at the end of the stream."""
        self._total.kept_bytes -= self._kept_bytes
        self._kept_bytes = 0
        self._pieces.clear()
        self._packed.clear()


def _forget(_read: bytes) -> None: ...


def _unframed(read: bytes) -> bytes:
    """Return the body of a chunk that is framed as HTTP/1.1 does; events begin with no hexadecimal line."""
    return read[read.index(b"\r\n") + 2 : -2] if _FRAME.match(read) else read


_FRAME: Final = re.compile(rb"[0-9A-Fa-f]+\r\n")


@dataclass(slots=True)
class BegunStream:
    """A stream whose client has its beginning.

    Attributes:
        request: The client's.
        speakers: Workers that have said at least a token.
        last_real_s: When the client got the last token, ``time.monotonic()``.
        seam: Joins what the worker says that speaks now; None: it is the first.
    """

    kept: Kept
    request: CompletionRequest
    speakers: int = 0
    last_real_s: float = 0.0
    seam: Seam | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What a client has of a stream.

    Attributes:
        text: Of the answer.
        events: That carried text.
        token_ids: Of prompt and text, where the client has asked for them; the text's alone lie behind ``prompt_tokens``.
        head: The keys of its chunks that a seam repeats: ``id``, ``created``, ``model``, ``object``.
        finish_reason: Of the answer, where the client has it; what lacks is the end of the stream.
        refusal: Why no other worker can go on; empty: one can.
    """

    text: str
    events: int
    head: dict[str, Any]
    finish_reason: str | None = None
    refusal: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the text; None: only its events are known."""
        return len(self.token_ids) - self.prompt_tokens if self.token_ids else None


def refusal_of(request: CompletionRequest) -> str:
    """Return why a request's stream cannot go on elsewhere; empty: it can."""
    body = request.body
    if request.endpoint not in {ApiEndpoint.COMPLETIONS, ApiEndpoint.CHAT}:
        return _OF_ENDPOINT.get(request.endpoint, "its answer is complete at once")
    if not request.is_single:
        return "n, best_of or several prompts: the answers are mixed"
    if why := _refusal_of_ids(request):
        return why
    for key, why in _OF_REQUEST.items():
        if body.get(key):
            return f"{key}: {why}"
    shape = body.get("response_format")
    if isinstance(shape, dict) and shape.get("type") not in {None, "text"}:
        return f"response_format: {_WHOLE_ANSWER}"
    return ""


def _refusal_of_ids(request: CompletionRequest) -> str:
    """Return why prompt and answer do not go together, as text or as token ids."""
    body = request.body
    if body.get(_IDS):
        if request.endpoint is ApiEndpoint.CHAT:
            return f"{_IDS}: the rest of a chat is asked for as text, whose ids may be others"
        if body.get("stop"):
            return f"stop, {_IDS}: text that a worker holds back for a stop string would be lost"
    elif request.prompt_ids:
        return f"prompt: token ids, and what was said is text; {_IDS} makes it ids"
    prompt = body.get("messages") if "messages" in body else body.get("prompt")
    return "" if isinstance(prompt, str | list) else "prompt: it is neither text nor token ids"


def said_of(kept: Kept, request: CompletionRequest) -> Said:
    """Return what the relayed events say."""
    texts: list[str] = []
    ids: list[int] = []
    prompt_ids = _ids_of(request)
    head: dict[str, Any] = {}
    reason, refusal = None, refusal_of(request)
    if kept.is_lost:
        refusal = "the streams of this router hold more than is kept of them"
    for event in EventSplitter(max_event_bytes=1 << 31).feed(kept.events()):
        data = payload(event)
        if data is None or not data.startswith(b"{"):
            continue
        chunk = orjson.loads(data)
        head = head or {key: chunk[key] for key in ("id", "created", "model", "object") if key in chunk}
        for choice in chunk.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            delta = choice.get("delta", choice)
            if others := sorted(key for key, value in delta.items() if value and key not in _SAID_KEYS):
                refusal = f"{', '.join(others)}: begun in what was said, and cannot be taken up in the middle"
            prompt_ids = prompt_ids or tuple(choice.get(_PROMPT_IDS) or ())
            ids += choice.get("token_ids") or ()
            text = delta.get("content") if "delta" in choice else choice.get("text")
            if text:
                texts.append(text)
    said = Said("".join(texts), len(texts), head, reason, refusal)
    if not request.body.get(_IDS) or refusal:
        return said
    if not ids or not prompt_ids:
        return replace(said, refusal=f"{_IDS}: the worker has given none")
    return replace(said, token_ids=(*prompt_ids, *ids), prompt_tokens=len(prompt_ids))


def _ids_of(request: CompletionRequest) -> tuple[int, ...]:
    """Return the ids of a prompt that was sent as such."""
    if not request.prompt_ids:
        return ()
    prompt = request.body["prompt"]
    return tuple(prompt[0] if isinstance(prompt[0], list) else prompt)


LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Keys of the most tokens of an answer."""

_DEFAULT_TOKENS: Final = 16
"""OpenAI's default of /v1/completions."""


def rest_of(request: CompletionRequest, said: Said, tokens: int) -> CompletionRequest | None:
    """Return the request for what follows; None: its limit of tokens is reached."""
    body = dict(request.body)
    if request.endpoint is ApiEndpoint.CHAT:
        messages = list(body["messages"])
        if body.get("continue_final_message"):
            messages[-1] = {**messages[-1], "content": _text_of(messages[-1]) + said.text}
        else:
            messages.append({"role": "assistant", "content": said.text})
        body |= {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    else:
        prompt = body["prompt"]
        if said.token_ids:
            body["prompt"] = list(said.token_ids)
        else:
            body["prompt"] = (prompt if isinstance(prompt, str) else prompt[0]) + said.text
        body.setdefault("max_tokens", _DEFAULT_TOKENS)
    for key in LIMITS:
        if isinstance(body.get(key), int):
            body[key] -= tokens
            if body[key] < 1:
                return None
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = max(0, body["min_tokens"] - tokens)
    size = 0 if said.token_ids else request.prompt_bytes + len(said.text.encode())
    return request._replace(body=body, raw=encoded(body), prompt_bytes=size, prompt_ids=len(said.token_ids))


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclass(slots=True)
class Seam:
    """Makes the rest of a stream one with its beginning.

    Attributes:
        head: Of the beginning's chunks.
        tokens: Said before; counted as output, and not as prompt.
        usage: Of the whole, once the rest has shown its own.
    """

    head: dict[str, Any]
    tokens: int
    usage: dict[str, Any] | None = None
    _splitter: EventSplitter = field(default_factory=EventSplitter)

    def join(self, data: bytes) -> bytes:
        """Return complete events of the rest as they follow the beginning."""
        return b"".join(self._joined(event) for event in self._splitter.feed(data))

    def _joined(self, event: bytes) -> bytes:
        data = payload(event)
        if data is None or not data.startswith(b"{"):
            return event
        chunk = orjson.loads(data)
        if "choices" not in chunk:
            return event
        choices = chunk["choices"]
        for choice in choices:
            choice.pop(_PROMPT_IDS, None)
        if any("role" in choice.get("delta", ()) for choice in choices):
            choices = [_without_role(choice) for choice in choices]
            if not any(choice["delta"] or choice.get("finish_reason") for choice in choices):
                return b""
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = chunk["usage"] = self._whole(usage)
        return encode_event(orjson.dumps({**chunk, **self.head, "choices": choices}))

    def _whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(output, int):
            return usage
        whole = usage | {
            "prompt_tokens": max(0, prompt - self.tokens),
            "completion_tokens": output + self.tokens,
        }
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            # Of the prompt: what was said lies behind it.
            cached = min(details["cached_tokens"], whole["prompt_tokens"])
            whole["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        return whole


def _without_role(choice: dict[str, Any]) -> dict[str, Any]:
    delta = {
        key: value for key, value in choice["delta"].items() if key != "role" and value not in {"", None}
    }
    return {**choice, "delta": delta}


def ending(request: CompletionRequest, said: Said, tokens: int, prompt_tokens: int | None) -> bytes:
    """Return the events that a stream lacks of which nothing is left to say.

    Args:
        request: The client's.
        said: All of the answer; its limit is reached where no reason was given.
        tokens: Of the answer.
        prompt_tokens: Where a worker has counted them.
    """
    events = b""
    if said.finish_reason is None:
        is_chat = request.endpoint is ApiEndpoint.CHAT
        said_last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        choice = {"index": 0, **said_last, "finish_reason": "length"}
        events += encode_event(orjson.dumps({**said.head, "choices": [choice]}))
    options = request.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") and prompt_tokens is not None:
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }
        events += encode_event(orjson.dumps({**said.head, "choices": [], "usage": usage}))
    return events + DONE
