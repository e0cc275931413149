"""Reads completion and chat requests as vLLM accepts them; the server calls `parse` once per request.

Refusals are `RequestError`s with vLLM's wording where a client may rely on it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from penstock_core.errors import PenstockError
from penstock_engine.core.prefix_keys import count_tokens
from penstock_engine.core.requests import EngineRole
from penstock_engine.serve.settings import ServeSettings

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions."""


class RequestError(PenstockError):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        kind: vLLM's error type, ``BadRequestError`` and so on.
        param: Field at fault, or None.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        super().__init__(message)

    def body(self) -> bytes:
        """Return the JSON error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """Where a prompt's KV lies, from ``kv_transfer_params``.

    Attributes:
        cached_tokens: Prompt tokens that the prefill worker found in its own cache; None: it did not say.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    cached_tokens: int | None = None

    @property
    def notify_url(self) -> str:
        """Where to announce heartbeats and reads."""
        return f"http://{self.host}:{self.port}/kv/notify"


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed request.

    Attributes:
        is_chat: Chat or plain completion.
        model: Name to answer with.
        prompt: Bytes whose 4-byte pieces are the tokens.
        prompt_tokens: Their number.
        output_tokens: Tokens that will be generated.
        ends_by_stop: Whether the simulated model ends by itself there, or runs into its limit.
        salt: Chooses the words; the same for the same prompt and seed.
        pin: Keep the KV for a decode worker.
        remote: KV to fetch, or None.
    """

    is_chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    ends_by_stop: bool
    salt: int
    stream: bool
    include_usage: bool
    priority: int
    pin: bool
    remote: RemoteKv | None


def parse(body: bytes, settings: ServeSettings, *, is_chat: bool) -> Call:
    """Return the call in ``body``.

    Raises:
        RequestError: malformed, unsupported, too long, or for another model.
    """
    fields = _read_object(body)
    _check_model(fields, settings)
    _refuse_unsupported(fields)
    prompt = _chat_prompt(fields) if is_chat else _completion_prompt(fields)
    prompt_tokens = count_tokens(prompt)
    if not prompt_tokens:
        raise RequestError(
            "The prompt must hold at least one token.", param="messages" if is_chat else "prompt"
        )
    params = _mapping(fields, "kv_transfer_params")
    role = settings.engine.role
    pin = role is EngineRole.PREFILL and params.get("do_remote_decode") is True
    fetch = role is EngineRole.DECODE and params.get("do_remote_prefill") is True
    limit = _output_limit(fields, settings, prompt_tokens, is_chat=is_chat)
    salt = xxhash.xxh3_64_intdigest(prompt, settings.flags.seed)
    natural = limit if pin or _flag(fields, "ignore_eos") else _natural_length(salt, settings)
    least = _integer(fields, "min_tokens", lowest=0) or 0
    if least > limit:
        raise RequestError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.", param="min_tokens"
        )
    natural = max(natural, least)
    return Call(
        is_chat=is_chat,
        model=fields.get("model") or settings.served_names[0],
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        output_tokens=min(natural, limit),
        ends_by_stop=natural < limit,
        salt=salt,
        stream=_flag(fields, "stream"),
        include_usage=_include_usage(fields),
        priority=_priority(fields, settings),
        pin=pin,
        remote=_remote(params) if fetch else None,
    )


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _check_model(fields: Mapping[str, Any], settings: ServeSettings) -> None:
    model = fields.get("model")
    if model is not None and model not in settings.served_names:
        raise RequestError(
            f"The model `{model}` does not exist. Valid aliases: {', '.join(settings.served_names)}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("n", 1) not in {1, None}:
        raise RequestError(f"n={fields['n']!r} is not supported: a simulated worker answers n=1.", param="n")
    if fields.get("best_of") not in {1, None}:
        raise RequestError("best_of is not supported: leave it out.", param="best_of")
    for name in ("echo", "logprobs", "prompt_logprobs", "tools", "use_beam_search"):
        value = fields.get(name)
        if value is not None and value is not False and value != []:
            raise RequestError(f"{name} is not supported by a simulated worker: leave it out.", param=name)


def _completion_prompt(fields: Mapping[str, Any]) -> bytes:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        try:
            return array("I", prompt).tobytes()
        except OverflowError as exc:
            raise RequestError("prompt: token ids must be in [0, 2**32).", param="prompt") from exc
    if isinstance(prompt, list) and len(prompt) > 1:
        raise RequestError(
            "prompt: several prompts in one request are not supported; send one request each.", param="prompt"
        )
    raise RequestError("prompt must be a string or a list of token ids.", param="prompt")


def _chat_prompt(fields: Mapping[str, Any]) -> bytes:
    """Render messages in Llama 3's layout, so that equal beginnings stay equal bytes."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("messages: each needs a role and content.", param="messages")
        parts.append(
            f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n{_content(message)}<|eot_id|>"
        )
    parts.append("<|start_header_id|>assistant<|end_header_id|>\n\n")
    return "".join(parts).encode()


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = (
        [part.get("text") for part in content if isinstance(part, dict)]
        if isinstance(content, list)
        else [None]
    )
    if any(not isinstance(text, str) for text in texts):
        raise RequestError("messages: content must be text or a list of text parts.", param="messages")
    return "".join(map(str, texts))


def _output_limit(
    fields: Mapping[str, Any], settings: ServeSettings, prompt_tokens: int, *, is_chat: bool
) -> int:
    longest = settings.max_model_len
    room = longest - prompt_tokens
    if room < 0:
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if room == 0:
        raise _too_small("max_tokens", 0)
    asked = _integer(fields, "max_completion_tokens", lowest=1) if is_chat else None
    if asked is None:
        asked = _integer(fields, "max_tokens", lowest=1)
    if asked is None:
        return room if is_chat else min(room, DEFAULT_COMPLETION_TOKENS)
    if asked > longest:
        raise RequestError(
            f"max_tokens={asked} cannot be greater than max_model_len={longest}. Please request fewer output tokens. "
            f"(parameter=max_tokens, value={asked})",
            param="max_tokens",
        )
    return min(asked, room)


def _natural_length(salt: int, settings: ServeSettings) -> int:
    """Draw where the simulated model ends by itself: geometric, fixed by prompt and seed."""
    uniform = (xxhash.xxh3_64_intdigest(salt.to_bytes(8, "little")) + 1) / 2**64
    return max(1, math.ceil(-settings.flags.mean_output_tokens * math.log(uniform)))


def _priority(fields: Mapping[str, Any], settings: ServeSettings) -> int:
    priority = _integer(fields, "priority") or 0
    if priority and not settings.by_priority:
        raise RequestError(
            f"Got priority {priority} but Priority scheduling is not enabled.", param="priority"
        )
    return priority


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = _mapping(fields, "stream_options")
    if options and not _flag(fields, "stream"):
        raise RequestError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    return options.get("include_usage") is True


def _remote(params: Mapping[str, Any]) -> RemoteKv:
    engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    host, port = params.get("remote_host"), params.get("remote_port")
    try:
        number = int(port) if port is not None else 0
    except (TypeError, ValueError):
        number = 0
    texts = (engine_id, request_id, host)
    if not all(isinstance(text, str) and text for text in texts) or not 0 < number < 65536:
        raise RequestError(
            "kv_transfer_params: do_remote_prefill needs remote_engine_id, remote_request_id, remote_host and "
            "remote_port, as the prefill worker's answer gave them.",
            param="kv_transfer_params",
        )
    cached = params.get("remote_prefill_cached_tokens")
    return RemoteKv(
        str(engine_id), str(request_id), str(host), number, cached if type(cached) is int else None
    )


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object.", param=name)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"{name} must be true or false.", param=name)


def _integer(fields: Mapping[str, Any], name: str, *, lowest: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer.", param=name)
    if lowest is not None and value < lowest:
        raise _too_small(name, value, lowest)
    return value


def _too_small(name: str, value: int, lowest: int = 1) -> RequestError:
    message = f"{name} must be at least {lowest}, got {value}. (parameter={name}, value={value})"
    return RequestError(message, param=name)
