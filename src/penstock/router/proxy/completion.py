"""Parses a completion request once: the facts that the router needs, and the bytes as the client sent them. Pure.

The router leaves all other keys of the body to the worker. Python objects take up to 300 times the bytes of their JSON: a
body of 13 MB can contain a million small objects. So the number of values is limited independently of the number of bytes.
``app`` calls `check_size` in steps, one per turn of the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, NamedTuple

import orjson

from penstock.core.http.messages import Headers, error_body
from penstock.router.proxy.prompt_parts import PromptMeter, PromptPart, size_of
from penstock.router.proxy.routes import PATHS, ApiEndpoint
from penstock.runtimes.kv_transfer import KvTransferProtocol

_REFUSAL_KINDS: Final = {401: "authentication_error", 403: "permission_error"}
"""OpenAI's error types, by HTTP status."""


class RequestRefused(Exception):  # noqa: N818 - a refusal is an answer, not a fault of the router
    """The request is rejected, because the router cannot serve it as it is.

    Attributes:
        status: HTTP status of the response.
        message: Text for the client: the key, its value, the limit, and the remedy.
        code: Machine-readable code for the client; also the reason in ``penstock_router_errors_total``.
        headers: Headers of the response, in addition to those of every response.
        body: Body of the response; in OpenAI's form unless another body was passed.
    """

    def __init__(
        self, status: int, message: str, *, code: str, headers: Headers = (), body: bytes | None = None
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers
        kind = _REFUSAL_KINDS.get(status, "invalid_request_error")
        self.body = error_body(message, kind=kind, code=code) if body is None else body
        super().__init__(message)


def not_served(path: str) -> RequestRefused:
    """Return the rejection (404) of a request whose ``path`` the router does not serve."""
    return RequestRefused(404, f"path: {path[:200]} is not served here", code="not_found")


MAX_DEPTH: Final = 64
"""Maximum nesting of objects and lists, the body included. Chosen: orjson writes 254 levels and reads 1,024, so that a body that
was read might not be writable; OpenAI's own schemas may have 10."""
MAX_CONTAINERS: Final = 32_768
"""Maximum number of objects and lists in a body. Chosen: five times a chat of 500 messages with parts and calls and 100 tools."""
MAX_STRINGS: Final = 262_144
"""Maximum number of strings in a body, keys included. Chosen: eight for each object."""
MAX_VALUES: Final = 2_097_152
"""Maximum number of commas outside strings in a body. Chosen: twice the longest context of today, sent as token ids."""

SMALL_BYTES: Final = 2 * MAX_CONTAINERS
"""Size of a body up to which no limit can be exceeded, because each container takes two bytes; such a body is parsed at once."""
_STEP_BYTES: Final = 1 << 18
"""Number of bytes counted per step: about half a millisecond."""
_EXACT_STEP_BYTES: Final = 1 << 15
"""Number of bytes read string by string per step: at most a few milliseconds."""

# Match a limited number of bytes within a string, or between two strings, with the quote at the end if it is reached.
_INSIDE_STRING: Final = re.compile(rb'(?:[^"\\]{1,256}+|\\.){0,256}+("?)', re.DOTALL)
_OUTSIDE_STRING: Final = re.compile(rb'[^"]{0,32768}+("?)')
_BOUNDS: Final = ((MAX_CONTAINERS, "objects and lists"), (MAX_STRINGS, "strings"), (MAX_VALUES, "values"))


def check_size(raw: bytes) -> Iterator[None]:
    """Check the limits on the numbers of objects, strings and values in ``raw``, the body of a request, before it is parsed.

    The check runs in steps, and the iterator yields None after each. At each yield the caller can let other tasks run.
    Braces, quotes and commas are counted first wherever they are. Only a body with too many of these characters is read
    string by string, because the text of a prompt may contain any number of them.

    Raises:
        RequestRefused: 400, a limit is exceeded.
    """
    if len(raw) <= SMALL_BYTES:
        return
    containers = quotes = commas = 0
    for start in range(0, len(raw), _STEP_BYTES):
        stop = start + _STEP_BYTES
        containers += raw.count(b"{", start, stop) + raw.count(b"[", start, stop)
        quotes += raw.count(b'"', start, stop)
        commas += raw.count(b",", start, stop)
        yield
    if _excess(containers, quotes // 2, commas) is not None:
        yield from _check_exactly(raw)


def _check_exactly(raw: bytes) -> Iterator[None]:
    containers = strings = commas = at = checked = 0
    is_inside = False
    while at < len(raw):
        match = (_INSIDE_STRING if is_inside else _OUTSIDE_STRING).match(raw, at)
        end, has_quote = (at, False) if match is None else (match.end(), bool(match[1]))
        if not is_inside:
            containers += raw.count(b"{", at, end) + raw.count(b"[", at, end)
            commas += raw.count(b",", at, end)
            strings += has_quote
        is_inside ^= has_quote
        at = max(end, at + 1)  # one that ends in a backslash is not JSON
        if at - checked >= _EXACT_STEP_BYTES or at >= len(raw):
            checked = at
            excess = _excess(containers, strings, commas)
            if excess is not None:
                raise RequestRefused(
                    400, f"body: holds {excess}; send less in one request", code="body_too_complex"
                )
            yield


def _excess(*counts: int) -> str | None:
    found = (
        f"more than {bound} {what}"
        for count, (bound, what) in zip(counts, _BOUNDS, strict=True)
        if count > bound
    )
    return next(found, None)


def check_depth(raw: bytes, body: dict[str, Any]) -> None:
    """Check that a body (``raw`` as bytes, ``body`` parsed) is not nested deeper than 64 levels (`MAX_DEPTH`).

    Raises:
        RequestRefused: 400, the body is nested deeper.
    """
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:
        return
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RequestRefused(
        400,
        f"body: objects and lists are nested deeper than {MAX_DEPTH} levels; send a flatter one",
        code="body_too_deep",
    )


_JSON: Final = b"application/json"
_SHOWN_CHARACTERS: Final = 256
"""Maximum number of characters of a client's value that an error message repeats."""


class CompletionRequest(NamedTuple):
    """A parsed request to one of the inference endpoints (completions, chat, embeddings and so on).

    Attributes:
        endpoint: API endpoint.
        path: Path of the request.
        raw: Body as sent.
        body: The body, parsed.
        stream: Whether the client requests a stream.
        prompt_bytes: Number of UTF-8 bytes of the prompt's text; 0 if it was sent as token ids.
        prompt_ids: Number of token ids of the prompt; 0 if it was sent as text.
        is_single: Whether the request has one prompt and asks for one response to it.
        adapter: Name of the requested LoRA adapter; None for the model itself.
        parts: Parts of the prompt other than text (tools, images and so on), and long texts that often recur unchanged in
            other requests (system prompts).
    """

    endpoint: ApiEndpoint
    path: str
    raw: bytes
    body: dict[str, Any]
    stream: bool
    prompt_bytes: int
    prompt_ids: int
    is_single: bool
    adapter: str | None = None
    parts: tuple[PromptPart, ...] = ()


def parse_completion(
    path: str,
    content_type: bytes | None,
    raw: bytes,
    *,
    model: str,
    aliases: Collection[str] = (),
    adapters: Collection[str] = (),
    transfer_keys: frozenset[str] = KvTransferProtocol.keys,
) -> CompletionRequest:
    """Parse the body of a request to one of the inference endpoints (`PATHS`), and check that it names the served model.

    Args:
        path: Path of the request, a key of `PATHS`.
        content_type: Value of the Content-Type header; None if there is none.
        raw: Body of the request.
        model: Name of the served model.
        aliases: Further accepted names of the model.
        adapters: Names of the LoRA adapters.
        transfer_keys: Keys of the runtime's KV transfer, which clients must not set.

    Raises:
        RequestRefused: 415 (content type), 400 (body) or 404 (unknown model).
    """
    if content_type != _JSON and (content_type or b"").split(b";", 1)[0].strip().lower() != _JSON:
        shown = (content_type or b"none").decode("latin-1")[:100]
        raise RequestRefused(
            415, f"content-type: {shown}: send application/json", code="unsupported_media_type"
        )
    body = _object(raw)
    endpoint = PATHS[path]
    # As in vLLM, a request that is only relayed may omit the model.
    if not (endpoint.is_relayed and body.get("model") is None):
        _check_model(body, model, aliases, adapters)
    asked = body.get("model")
    adapter = asked if asked in adapters else None
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        shown = str(stream)[:_SHOWN_CHARACTERS]
        raise RequestRefused(400, f"stream: {shown!r} must be true or false", code="invalid_request")
    _check_transfer(body, transfer_keys)
    if endpoint.is_relayed:
        _check_relayed(body, path, stream=stream is True)
        text_bytes, ids = _sizes(body) if endpoint.runs_model else (0, 0)
        return CompletionRequest(endpoint, path, raw, body, False, text_bytes, ids, False, adapter)
    meter = PromptMeter()
    prompts, ids = _TEXTS[endpoint](body, meter)
    several = ("n" in body and _is_several(body["n"])) or ("best_of" in body and _is_several(body["best_of"]))
    is_single = prompts == 1 and not several
    return CompletionRequest(
        endpoint, path, raw, body, stream is True, meter.text_bytes, ids, is_single, adapter, meter.parts
    )


def encoded(body: dict[str, Any]) -> bytes:
    """Return the body of a request as JSON bytes.

    Raises:
        RequestRefused: 400, the body is nested deeper than orjson can write, which is 254 levels.
    """
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as exc:
        raise RequestRefused(
            400, f"body: cannot be passed on: {exc}; nest it 250 levels deep at most", code="invalid_request"
        ) from exc


def changed_body(request: CompletionRequest, changes: dict[str, Any]) -> bytes:
    """Return the body that the client sent, as bytes, with ``changes`` added as keys at its end.

    If the body already has one of these keys, the body is encoded again with the new values.

    Raises:
        RequestRefused: 400, the body is nested deeper than orjson can write, which is 254 levels.
    """
    if not request.body.keys().isdisjoint(changes):
        # If a key occurs twice, not every JSON reader uses the last one.
        return encoded({**request.body, **changes})
    # The body is an object with at least a model, so its last byte is the brace to move.
    return request.raw.rstrip()[:-1] + b"," + orjson.dumps(changes)[1:]


def _is_several(count: object) -> bool:
    return isinstance(count, int) and count > 1


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise RequestRefused(400, f"body is not valid JSON: {exc}", code="invalid_json") from exc
    if not isinstance(body, dict):
        raise RequestRefused(400, "body: must be a JSON object", code="invalid_json")
    check_depth(raw, body)
    return body


def _check_model(
    body: dict[str, Any], model: str, aliases: Collection[str], adapters: Collection[str]
) -> None:
    asked = body.get("model")
    if not isinstance(asked, str) or not asked:
        listed = _names_of_models(model, aliases, adapters)
        raise RequestRefused(400, f"model: missing; this router serves {listed}", code="invalid_request")
    if asked != model and asked not in aliases and asked not in adapters:
        raise unknown_model(asked, model, aliases, adapters)


def unknown_model(
    asked: str, model: str, aliases: Collection[str], adapters: Collection[str]
) -> RequestRefused:
    """Return the rejection of the unknown model name ``asked``; its message lists the model, its aliases and its adapters."""
    shown = asked if len(asked) <= _SHOWN_CHARACTERS else asked[:_SHOWN_CHARACTERS] + "..."
    message = (
        f"model: {shown!r} does not exist; this router serves {_names_of_models(model, aliases, adapters)}"
    )
    return RequestRefused(404, message, code="model_not_found")


def _names_of_models(model: str, aliases: Collection[str], adapters: Collection[str]) -> str:
    return ", ".join(map(repr, (model, *aliases, *adapters)))


def _check_transfer(body: dict[str, Any], keys: frozenset[str]) -> None:
    """Reject KV transfer keys from a client: with them it could choose the hosts to which a worker connects, or stop its engine."""
    extra = body.get("vllm_xargs")
    if extra is None and keys.isdisjoint(body):
        return
    for place, given in (("", body), ("vllm_xargs.", extra if isinstance(extra, dict) else {})):
        for key in keys & given.keys():
            raise RequestRefused(
                400, f"{place}{key}: set by the router alone; leave it out", code="invalid_request"
            )


def _prompt_texts(body: dict[str, Any], meter: PromptMeter) -> tuple[int, int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        meter.add_content(prompt)
        return 1, 0
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return 1, len(prompt)
        if kinds == {str}:
            for each in prompt:
                meter.add_content(each)
            return len(prompt), 0
        if kinds == {list}:
            return len(prompt), sum(map(len, prompt))
    if prompt is None and body.get("prompt_embeds") is not None:
        return 1, 1
    raise RequestRefused(
        400, "prompt: must be a string, a list of strings or of token ids, not empty", code="invalid_request"
    )


def _chat_texts(body: dict[str, Any], meter: PromptMeter) -> tuple[int, int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(400, "messages: must be a list, not empty", code="invalid_request")
    _add_messages(messages, "messages", meter)
    if "tools" in body:
        meter.add_tools(body["tools"])
    return 1, 0


def _response_texts(body: dict[str, Any], meter: PromptMeter) -> tuple[int, int]:
    given = body.get("input")
    meter.add_system(body.get("instructions"))
    meter.add_tools(body.get("tools"))
    if isinstance(given, str) and given:
        meter.add_content(given)
        return 1, 0
    if not isinstance(given, list) or not given:
        raise RequestRefused(
            400, "input: must be a string or a list of items, not empty", code="invalid_request"
        )
    _add_messages(given, "input", meter)
    return 1, 0


def _message_texts(body: dict[str, Any], meter: PromptMeter) -> tuple[int, int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RequestRefused(400, "messages: must be a list of objects, not empty", code="invalid_request")
    if body.get("max_tokens") is None:
        # The prefill request sets max_tokens to one, so a missing limit would not be noticed there.
        raise RequestRefused(400, "max_tokens: missing; give a number >= 1", code="invalid_request")
    meter.add_system(body.get("system"))
    meter.add_tools(body.get("tools"))
    _add_messages(messages, "messages", meter)
    return 1, 0


def _add_messages(messages: list[Any], key: str, meter: PromptMeter) -> None:
    for message in messages:
        if not isinstance(message, dict):
            raise RequestRefused(400, f"{key}: each must be an object", code="invalid_request")
        meter.add_message(message)


def _check_relayed(body: dict[str, Any], path: str, *, stream: bool) -> None:
    if stream:
        raise RequestRefused(400, f"stream: {path} has no streams; leave it out", code="invalid_request")
    encoding = body.get("encoding_format")
    if encoding in _BINARY:
        raise RequestRefused(
            400,
            f"encoding_format: {encoding!r}: answers are relayed as JSON; ask for float or base64",
            code="invalid_request",
        )


_BINARY: Final = ("bytes", "bytes_only")
"""vLLM's embedding formats that are not JSON."""


def _sizes(value: object) -> tuple[int, int]:
    """Return the bytes of all texts and the number of all integers in lists, anywhere in a value not deeper than `MAX_DEPTH`."""
    if isinstance(value, str):
        return size_of(value), 0
    if not isinstance(value, dict | list):
        return 0, 0
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return 0, len(value)
    sizes = [_sizes(each) for each in (value.values() if isinstance(value, dict) else value)]
    return sum(text for text, _ in sizes), sum(ids for _, ids in sizes)


# Functions that add a body's prompts to a meter, and return the number of prompts and of token ids.
_TEXTS: Final[dict[ApiEndpoint, Callable[[dict[str, Any], PromptMeter], tuple[int, int]]]] = {
    ApiEndpoint.COMPLETIONS: _prompt_texts,
    ApiEndpoint.CHAT: _chat_texts,
    ApiEndpoint.RESPONSES: _response_texts,
    ApiEndpoint.MESSAGES: _message_texts,
}
