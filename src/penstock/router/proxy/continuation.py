"""Resumes a stream on another worker when its worker is gone: the text sent so far, the next request, and the splicing of the two. Pure.

The remaining part is requested by a prompt that ends with the response so far, in one of two ways. By text, it is the prompt followed by
the text; for a chat, the text is an unfinished assistant message. By tokens, if the stream contains token ids, it is a completion
whose prompt is the exact ids of prompt and response, whatever API the client uses. The client sees one stream: one id, one role,
one ``[DONE]``, and the usage of the entire stream.

The text is cut where a token ends, as far as that is known. The next worker generates the text after the cut again; the part
of it that the client has already is removed when the two streams are joined.
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
from penstock.router.proxy.messages import chat_of
from penstock.router.proxy.not_resumable import (
    CHAT_LIMITS,
    NO_IDS,
    NOT_KEPT,
    UNKNOWN,
    WITH_IDS,
    refusal_of,
)
from penstock.router.proxy.routes import ApiEndpoint
from penstock.router.proxy.stream_record import PROMPT_IDS, StreamRecord, stops_of

_INCOMPLETE: Final = "\ufffd"
"""What a tokenizer shows of a character that is not complete, or not valid."""
LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Keys of the maximum number of tokens of a response."""


@dataclass(frozen=True, slots=True)
class EmittedPrefix:
    """The part of a stream that the client has, and the part of it that another worker is asked to continue.

    A stream is resumed by text (the next worker's prompt ends with the text so far) or by tokens (it ends with their ids).

    Attributes:
        text: Text of the response that follows the prompt in the next request.
        shown: Text that the client has: `text`, plus the text that the next worker generates again.
        tokens: Number of tokens of `text`.
        reported: Number of tokens that the client has received; the tokens beyond `tokens` are generated again by the next
            worker.
        head: Keys of the stream's events, with their values, that the events of the remaining part must repeat: ``id``,
            ``created``, ``model``, ``object``. For the Responses API: the keys of the response object, the id of the output
            item, and the number of the last event.
        finish_reason: Finish reason of the response, if the client has it; only the end of the stream is then missing. None
            otherwise.
        has_usage: Whether the client has the event with the usage.
        refusal: Why another worker cannot resume the stream; empty if one can.
        token_ids: Token ids of the prompt and of `text`, if the stream is resumed by tokens; empty if it is resumed by
            text.
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


_NOTHING: Final = EmittedPrefix()


class OverlapFilter:
    """Removes, from the text of the worker that resumes a stream, the part that the client has already.

    The worker generates this part again, because a prompt can only end at certain points of a text. ``emitted`` says which
    text the client has, and where in it the prompt of that worker ends. The text between this point and the end of what the
    client has is removed. If the worker generates another text there, its text from the first difference on is kept.
    """

    def __init__(self, emitted: EmittedPrefix) -> None:
        self._left = emitted.shown[len(emitted.text) :]

    def new(self, text: Any) -> str:
        """Return the part of ``text`` that the client does not have yet.

        ``text`` is the next text of the worker that resumes the stream. As soon as the generated text differs from what the
        client has, all further text is new.

        Raises:
            TypeError: ``text`` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text is a {type(text).__name__}")
        if not self._left:
            return text
        both = zip(self._left, text, strict=False)
        same = sum(1 for _ in takewhile(lambda each: each[0] == each[1], both))
        self._left = self._left[same:] if same == len(text) else ""
        return text[same:]


class StreamSplicer(ABC):
    """Joins the remaining part of an interrupted stream to its first part, so that the client sees one stream.

    ``emitted`` is the first part, which the client has.

    Attributes:
        tokens: Number of tokens of the first part; they count as output, and not as prompt.
        usage: Usage (token counts) of the entire stream; None until the worker of the remaining part has reported its own
            usage.
    """

    def __init__(self, emitted: EmittedPrefix) -> None:
        self.tokens = emitted.tokens
        self.usage: dict[str, Any] | None = None
        self._overlap = OverlapFilter(emitted)
        self._splitter = EventSplitter()

    def splice(self, data: bytes) -> bytes:
        """Return the complete events in ``data``, changed so that they continue the part of the stream that the client has.

        ``data`` is the next part of the stream of the worker that resumes it; an incomplete event at its end is kept for
        the next call. Events that the client has already are left out, so that the result can be empty.
        """
        return b"".join(self._spliced(event) for event in self._splitter.feed(data))

    def _spliced(self, event: bytes) -> bytes:
        data = payload(event)
        if data is None or not data.startswith(b"{"):
            return event
        try:
            spliced = self._spliced_chunk(orjson.loads(data))
        except (AttributeError, LookupError, TypeError, ValueError):
            # An event of an unknown form is sent unchanged, as in a stream of one worker; the stream's record then refuses a
            # continuation.
            return event
        return event if spliced is None else spliced

    @abstractmethod
    def _spliced_chunk(self, chunk: dict[str, Any]) -> bytes | None:
        """Return the event for a chunk of the rest; empty if the client has it already, None to send the event unchanged."""

    def _whole(self, usage: dict[str, Any], prompt_key: str, output_key: str) -> dict[str, Any]:
        """Return the usage of the entire stream, calculated from that of its rest, and store it; counts that are not integers are kept."""
        self.usage = usage
        prompt, output = usage.get(prompt_key), usage.get(output_key)
        if not isinstance(prompt, int) or not isinstance(output, int):
            return usage
        prompt_tokens, details_key = max(0, prompt - self.tokens), f"{prompt_key}_details"
        self.usage = whole = usage | {prompt_key: prompt_tokens, output_key: output + self.tokens}
        details = usage.get(details_key)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            # At most the prompt: the first part of the response follows it.
            whole[details_key] = details | {"cached_tokens": min(details["cached_tokens"], prompt_tokens)}
        return whole


@dataclass(slots=True)
class ResumableStream:
    """The state of a stream whose client has its first part, and which another worker could resume.

    Attributes:
        record: Record of the part of the stream that the present worker sends, from which the request to another worker would
            be made.
        request: Request of the client.
        hides_ids: Whether token ids are removed from the events for the client, because the router has requested them and
            the client has not.
        emitted: Part of the stream that the client had before, and that the present worker continues; None if the present
            worker is the first one.
        last_real_s: ``time.monotonic()`` when the last token was relayed; 0 before it.
        splicer: Joins the present worker's events to the part before; None if the present worker is the first one.
    """

    record: StreamRecord
    request: CompletionRequest
    hides_ids: bool = False
    emitted: EmittedPrefix | None = None
    last_real_s: float = 0.0
    splicer: StreamSplicer | None = None


def emitted_prefix(record: StreamRecord, before: EmittedPrefix | None = None) -> EmittedPrefix:
    """Return the part of a stream that the client has, from all workers that have sent a part of the stream.

    Args:
        record: Record of the part that the present worker has sent.
        before: Part that the client had before, which the present worker continues; None if the present worker is the first
            one.
    """
    before, request = before or _NOTHING, record.request
    refusal = refusal_of_stream(record, before)
    if refusal:
        return EmittedPrefix(refusal=refusal)
    own, asked = record.text(), _prompt_ids(record, before)
    ids: tuple[int, ...] = ()
    if asked:
        tokens, end = _cut_ids(record, own)
        ids = (*asked, *record.token_ids[:tokens])
    elif record.finish_reason:
        tokens, end = record.tokens, len(own)
    else:
        tokens, end = _cut(record, own)
    text = before.text + own
    limits = (request.body.get(key) for key in LIMITS)
    return EmittedPrefix(
        text=text[: len(before.text) + end],
        shown=max(before.shown, text, key=len),
        # The last event can contain fewer tokens than the others.
        tokens=min([before.tokens + tokens, *(each for each in limits if isinstance(each, int))]),
        reported=max(before.reported, before.tokens + (len(record.token_ids) if asked else record.tokens)),
        head=before.head or record.head,
        finish_reason=record.finish_reason,
        has_usage=record.has_usage,
        token_ids=ids,
    )


def refusal_of_stream(record: StreamRecord, before: EmittedPrefix | None = None) -> str:
    """Return why another worker cannot continue a stream if it breaks off; an empty text if one can.

    Parses at most the last 128 reads (`BATCH`) of the record.

    Args:
        record: Record of the part that the present worker has sent.
        before: Part that the client had before, which the present worker continues; None if the present worker is the first
            one.
    """
    before, request = before or _NOTHING, record.request
    problem, by_text = record.problem(), refusal_of(request)
    if problem is NOT_KEPT or (problem is not None and not by_text):
        return str(problem)
    if _prompt_ids(record, before):
        return "" if problem is None else str(problem)
    if by_text:
        return str(NO_IDS if record.by_tokens and problem is None else problem or by_text)
    if request.body.get(WITH_IDS):
        return str(NO_IDS)
    head = before.head or record.head
    is_response = request.endpoint is ApiEndpoint.RESPONSES
    if is_response and not (
        isinstance(head.get("item_id"), str) and isinstance(head.get("sequence_number"), int)
    ):
        return str(UNKNOWN)
    return ""


def _prompt_ids(record: StreamRecord, before: EmittedPrefix) -> Sequence[int]:
    """Return the token ids of the present worker's prompt; empty if the stream is resumed by text."""
    request = record.request
    if not record.token_ids or not (record.by_tokens or request.body.get(WITH_IDS)):
        return ()
    return record.prompt_ids or before.token_ids or _ids_of(request)


def _cut_ids(record: StreamRecord, own: str) -> tuple[int, int]:
    """Return how many of the present worker's tokens the next one continues, and how many characters of text these are.

    Those that end with a complete character: vLLM 0.32 would otherwise begin its text with that of the whole prompt. If a stop
    string may have started, fewer: a worker finds stop strings in its own text only, so the next worker generates again the
    characters that could become part of one. At temperature 0 they are the same.
    """
    request, tokens = record.request, len(record.token_ids)
    held = max((len(stop) - 1 for stop in stops_of(request)), default=0)
    if record.finish_reason:
        return tokens, len(own)
    # With the stop string in the output nothing is held back from the client.
    hidden = 0 if request.body.get("include_stop_str_in_output") else held
    steps = [(count, end + hidden) for count, end in record.steps() if end + held <= len(own)]
    if request.body.get("temperature") == 0:
        return next((each for each in steps if own[each[1] - 1] != _INCOMPLETE), (0, 0))
    return steps[0] if steps and steps[0][1] == len(own) else (tokens, len(own))


def _cut(record: StreamRecord, own: str) -> tuple[int, int]:
    """Return the number of tokens, and of characters, of a worker's text that the next worker continues.

    A worker holds back as many characters as may become a stop string (vLLM 0.32, ``stop_buffer_length``), so that the text
    it has sent can end within a token. A chat template can remove white space at the end of a message. At temperature 0 the
    next worker therefore continues after a complete token that is affected by neither; otherwise it would generate different
    words.
    """
    request = record.request
    is_chat = request.endpoint is not ApiEndpoint.COMPLETIONS
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
    """Return the token ids of a prompt that was sent as ids; empty if it was sent as text."""
    if not request.prompt_ids:
        return ()
    prompt = request.body["prompt"]
    return tuple(prompt[0] if isinstance(prompt[0], list) else prompt)


_DEFAULT_TOKENS: Final = 16
"""Default of max_tokens in OpenAI's /v1/completions."""
_COMPLETIONS: Final = "/v1/completions"
_CHATS: Final = "/v1/chat/completions"
_OF_MESSAGES: Final = frozenset({"system", "metadata", "tool_choice"})
"""Keys of Anthropic's API that a chat does not have, or that mean something else there."""
_OF_CHAT: Final = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "logprobs",
        "top_logprobs",
        "response_format",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "include_reasoning",
        "max_completion_tokens",
        "echo",
        "modalities",
        "store",
    }
)
"""Keys of a chat that a completion does not have, or that mean something else there."""


def continuation_request(
    request: CompletionRequest, emitted: EmittedPrefix, *, context_tokens: int | None = None
) -> CompletionRequest | None:
    """Return the request for the remaining part of an interrupted stream; None if its token limit is reached.

    Args:
        request: Request of the client.
        emitted: Part of the stream that the client has.
        context_tokens: Context length of the model in tokens, which limits a chat without `max_tokens`; None if unknown.
    """
    body = (
        _body_by_ids(request, emitted, context_tokens)
        if emitted.token_ids
        else _body_by_text(request, emitted)
    )
    for key in LIMITS:
        if isinstance(body.get(key), int):
            body[key] -= emitted.tokens
            if body[key] < 1:
                return None
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = max(0, body["min_tokens"] - emitted.tokens)
    size = 0 if emitted.token_ids else request.prompt_bytes + len(emitted.text.encode())
    rest = request._replace(
        body=body, raw=encoded(body), prompt_bytes=size, prompt_ids=len(emitted.token_ids)
    )
    if emitted.token_ids:
        return rest._replace(endpoint=ApiEndpoint.COMPLETIONS, path=_COMPLETIONS)
    if request.endpoint is ApiEndpoint.MESSAGES:
        return rest._replace(endpoint=ApiEndpoint.CHAT, path=_CHATS)
    return rest


def _body_by_ids(
    request: CompletionRequest, emitted: EmittedPrefix, context_tokens: int | None
) -> dict[str, Any]:
    """Return the body of a completion that continues the exact token ids, and asks for ids itself."""
    is_chat = request.endpoint is ApiEndpoint.CHAT
    dropped = _OF_CHAT if is_chat else ()
    body = {key: value for key, value in request.body.items() if key not in dropped}
    body |= {"prompt": list(emitted.token_ids), WITH_IDS: True}
    body.pop("truncate_prompt_tokens", None)
    if not is_chat:
        body.setdefault("max_tokens", _DEFAULT_TOKENS)
        return body
    given = (request.body.get(key) for key in CHAT_LIMITS)
    limit = next((each for each in given if isinstance(each, int)), None)
    if limit is None:
        assert context_tokens is not None  # noqa: S101 - see `takes_tokens`
        limit = context_tokens - len(emitted.token_ids) + emitted.tokens
    body["max_tokens"] = limit
    return body


def _body_by_text(request: CompletionRequest, emitted: EmittedPrefix) -> dict[str, Any]:
    body = dict(request.body)
    if request.endpoint is ApiEndpoint.MESSAGES:
        body = _chat_body(body)
    if "messages" in body:
        messages = list(body["messages"])
        if body.get("continue_final_message"):
            messages[-1] = {**messages[-1], "content": _text_of(messages[-1]) + emitted.text}
            body["messages"] = messages
        elif emitted.text:
            messages.append({"role": "assistant", "content": emitted.text})
            body |= {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    elif request.endpoint is ApiEndpoint.RESPONSES:
        body["input"] = _open_input(body["input"], emitted)
    else:
        prompt = body["prompt"]
        body["prompt"] = (prompt if isinstance(prompt, str) else prompt[0]) + emitted.text
        body.setdefault("max_tokens", _DEFAULT_TOKENS)
    return body


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the chat that a plain request to /v1/messages stands for, as vLLM 0.32 makes it."""
    chat = {key: value for key, value in body.items() if key not in _OF_MESSAGES}
    return {**chat, "messages": chat_of(body), "stream_options": {"include_usage": True}}


def _open_input(given: Any, emitted: EmittedPrefix) -> Any:
    """Return a response's input with the text so far as a message in progress, which vLLM 0.32 leaves open."""
    if not emitted.text:
        return given
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    content = [{"type": "output_text", "text": emitted.text, "annotations": []}]
    message = {"type": "message", "role": "assistant", "id": emitted.head["item_id"], "content": content}
    return [*items, message | {"status": "in_progress"}]


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class CompletionSplicer(StreamSplicer):
    """Joins the parts of an interrupted stream of the completions or chat API, so that the client sees one stream."""

    def __init__(self, emitted: EmittedPrefix, request: CompletionRequest) -> None:
        """Create the splicer for the client's ``request``, of whose response the client has ``emitted``.

        If a chat is resumed by tokens, the remaining part comes as a completion, and is converted to a chat's events.
        """
        super().__init__(emitted)
        self._head = emitted.head
        self._is_chat = request.endpoint is ApiEndpoint.CHAT
        self._again_tokens = self._again_ids = emitted.reported - emitted.tokens
        self._characters = len(emitted.text)

    def _spliced_chunk(self, chunk: dict[str, Any]) -> bytes | None:
        if "choices" not in chunk:
            return None
        choices = list(self._choices(chunk["choices"]))
        if chunk["choices"] and not choices:
            return b""
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = self._whole(usage, "prompt_tokens", "completion_tokens")
        chunk.pop(PROMPT_IDS, None)
        return encode_event(orjson.dumps({**chunk, **self._head, "choices": choices}))

    def _choices(self, choices: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            choice.pop(PROMPT_IDS, None)
            if self._is_chat and "text" in choice:
                _make_delta(choice)
            delta = choice.get("delta", choice)
            key = "content" if "delta" in choice else "text"
            if "role" in delta:
                del delta["role"]
                if not delta.get(key):
                    delta.pop(key, None)
                if not any(delta.values()) and not choice.get("finish_reason"):
                    continue
            if delta.get(key):
                delta[key] = self._overlap.new(delta[key])
            if isinstance(logprobs := choice.get("logprobs"), dict):
                choice["logprobs"] = self._new_logprobs(logprobs)
            if isinstance(choice.get("token_ids"), list):
                again = min(len(choice["token_ids"]), self._again_ids)
                self._again_ids -= again
                choice["token_ids"] = choice["token_ids"][again:]
            yield choice

    def _new_logprobs(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return the logprobs without the tokens that the client has, with text offsets counted from the start of the response."""
        count = len(logprobs.get("content") or logprobs.get("tokens") or ())
        again = min(count, self._again_tokens)
        self._again_tokens -= again
        new = {key: each[again:] if isinstance(each, list) else each for key, each in logprobs.items()}
        if isinstance(offsets := new.get("text_offset"), list):
            new["text_offset"] = [each + self._characters for each in offsets]
        return new


def _make_delta(choice: dict[str, Any]) -> None:
    """Give a completion's choice the form of a chat's, in place."""
    choice["delta"] = {"content": choice.pop("text")}
    if choice.get("finish_reason") is None:
        choice.pop("stop_reason", None)


def ending(request: CompletionRequest, emitted: EmittedPrefix, prompt_tokens: int | None) -> bytes:
    """Return the final events (finish reason, usage, ``[DONE]``) of a stream of which the client has the complete text.

    Args:
        request: Request of the client.
        emitted: Part of the stream that the client has. If it has no finish reason, the reason is that the token limit is
            reached.
        prompt_tokens: Number of prompt tokens as a worker has counted them; None if unknown, and no usage is then sent.
    """
    events = b""
    if emitted.finish_reason is None:
        is_chat = request.endpoint is ApiEndpoint.CHAT
        last_delta: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        choice = {"index": 0, **last_delta, "finish_reason": "length"}
        events += encode_event(orjson.dumps({**emitted.head, "choices": [choice]}))
    options = request.body.get("stream_options")
    asks_usage = isinstance(options, dict) and options.get("include_usage")
    if asks_usage and not emitted.has_usage and prompt_tokens is not None:
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": emitted.tokens,
            "total_tokens": prompt_tokens + emitted.tokens,
        }
        events += encode_event(orjson.dumps({**emitted.head, "choices": [], "usage": usage}))
    return events + DONE
