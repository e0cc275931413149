"""One completion request, parsed once: what the router must know, and the bytes as the client sent them.

Everything else in the body is the worker's to judge. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from penstock.router.proxy.body_bounds import check_depth
from penstock.router.proxy.refusal import RequestRefused


class ApiEndpoint(StrEnum):
    """Endpoints in metrics; a closed set, so that paths made up by clients add no series."""

    COMPLETIONS = "completions"
    CHAT = "chat_completions"
    RESPONSES = "responses"
    MODELS = "models"
    WORKERS = "workers"
    OTHER = "other"


PATHS = {
    "/v1/completions": ApiEndpoint.COMPLETIONS,
    "/v1/chat/completions": ApiEndpoint.CHAT,
    "/v1/responses": ApiEndpoint.RESPONSES,
}

_TRANSFERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What vLLM 0.32 takes of another worker's blocks, as keys of the request and of its ``vllm_xargs``."""

_SHOWN_CHARACTERS: Final = 256
"""Of a client's value in a message; a longer one would come back whole."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for text.

    Attributes:
        endpoint: completions, chat_completions or responses.
        path: Path at the worker, the same as here.
        raw: Body as sent.
        body: The same, parsed.
        stream: Whether events are asked for.
        prompt_bytes: UTF-8 bytes of the prompt; 0 when it was sent as token ids.
        prompt_ids: Number of token ids in the prompt; 0 when it was sent as text.
        is_single: One prompt and one answer: what a KV hand-over can carry.
    """

    endpoint: ApiEndpoint
    path: str
    raw: bytes
    body: dict[str, Any]
    stream: bool
    prompt_bytes: int
    prompt_ids: int
    is_single: bool


def parse_completion(
    path: str, content_type: bytes | None, raw: bytes, *, model: str, aliases: Collection[str] = ()
) -> CompletionRequest:
    """Read a request.

    Args:
        path: A key of `PATHS`.
        content_type: Header value, or None.
        raw: Body.
        model: The name under which the model is served.
        aliases: Further names of it.

    Raises:
        RequestRefused: 415, 400 or 404.
    """
    if content_type is None or content_type.split(b";", 1)[0].strip().lower() != b"application/json":
        shown = (content_type or b"none").decode("latin-1")
        raise RequestRefused(
            415, f"content-type: {shown}: send application/json", code="unsupported_media_type"
        )
    body = _object(raw)
    _check_model(body, model, aliases)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        shown = str(stream)[:_SHOWN_CHARACTERS]
        raise RequestRefused(400, f"stream: {shown!r} must be true or false", code="invalid_request")
    _check_transfer(body)
    endpoint = PATHS[path]
    prompts, text_bytes, ids = _TEXTS[endpoint](body)
    several = _is_several(body.get("n")) or _is_several(body.get("best_of"))
    # vLLM's Responses API takes no kv_transfer_params, so that its requests cannot be handed over.
    is_single = prompts == 1 and not several and endpoint is not ApiEndpoint.RESPONSES
    return CompletionRequest(endpoint, path, raw, body, bool(stream), text_bytes, ids, is_single=is_single)


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


def _check_model(body: dict[str, Any], model: str, aliases: Collection[str]) -> None:
    asked = body.get("model")
    if not isinstance(asked, str) or not asked:
        raise RequestRefused(400, f"model: missing; this router serves {model!r}", code="invalid_request")
    if asked != model and asked not in aliases:
        shown = asked if len(asked) <= _SHOWN_CHARACTERS else asked[:_SHOWN_CHARACTERS] + "..."
        raise RequestRefused(
            404, f"model: {shown!r} does not exist; this router serves {model!r}", code="model_not_found"
        )


def _check_transfer(body: dict[str, Any]) -> None:
    """Refuse transfers of a client's own: it would choose which hosts a worker connects to, or stop its engine."""
    extra = body.get("vllm_xargs")
    for place, given in (("", body), ("vllm_xargs.", extra if isinstance(extra, dict) else {})):
        for key in _TRANSFERS & given.keys():
            raise RequestRefused(
                400, f"{place}{key}: set by the router alone; leave it out", code="invalid_request"
            )


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _prompt_texts(body: dict[str, Any]) -> tuple[int, int, int]:
    """Return prompts, bytes of text and token ids of a completion request."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return 1, _size(prompt), 0
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return 1, 0, len(prompt)
        if kinds == {str}:
            return len(prompt), sum(map(_size, prompt)), 0
        if kinds == {list}:
            return len(prompt), 0, sum(map(len, prompt))
    if prompt is None and body.get("prompt_embeds") is not None:
        return 1, 0, 1
    raise RequestRefused(
        400, "prompt: must be a string, a list of strings or of token ids, not empty", code="invalid_request"
    )


def _chat_texts(body: dict[str, Any]) -> tuple[int, int, int]:
    """Return 1, bytes of the messages' text, 0; the template's own tokens are learnt with the ratio."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(400, "messages: must be a list, not empty", code="invalid_request")
    return 1, sum(_content_size(message, "messages") for message in messages), 0


def _response_texts(body: dict[str, Any]) -> tuple[int, int, int]:
    """Return 1, bytes of the text of instructions and input, 0."""
    given, instructions = body.get("input"), body.get("instructions")
    size = _size(instructions) if isinstance(instructions, str) else 0
    if isinstance(given, str) and given:
        return 1, size + _size(given), 0
    if not isinstance(given, list) or not given:
        raise RequestRefused(
            400, "input: must be a string or a list of items, not empty", code="invalid_request"
        )
    return 1, size + sum(_content_size(item, "input") for item in given), 0


def _content_size(message: Any, key: str) -> int:
    if not isinstance(message, dict):
        raise RequestRefused(400, f"{key}: each must be an object", code="invalid_request")
    content = message.get("content")
    if isinstance(content, str):
        return _size(content)
    if not isinstance(content, list):
        return 0
    return sum(
        _size(part["text"])
        for part in content
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


_TEXTS: Final[dict[ApiEndpoint, Callable[[dict[str, Any]], tuple[int, int, int]]]] = {
    ApiEndpoint.COMPLETIONS: _prompt_texts,
    ApiEndpoint.CHAT: _chat_texts,
    ApiEndpoint.RESPONSES: _response_texts,
}
