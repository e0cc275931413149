"""Renders prompts, chats and inputs of the Responses API into the bytes whose 4-byte pieces are the tokens. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from pydantic import Field

from penstock.engine.serve.fields import Fields, RequestError, TextFormat, read_fields, refuse

MAX_PROMPTS: Final = 1024
"""Prompts of one request. Chosen: evaluation suites send up to a few hundred."""
_NO_PROMPT: Final = "prompt must be a string, a list of token ids, or a list of either."


def completion_prompts(fields: Mapping[str, Any]) -> list[bytes]:
    """Return the prompts of a completion request."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(
                f"prompt: {len(prompt)} prompts in one request; send at most {MAX_PROMPTS}.", param="prompt"
            )
        return [_prompt(each) for each in prompt]
    return [_prompt(prompt)]


def _prompt(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode()
    if not isinstance(prompt, list) or not prompt or set(map(type, prompt)) != {int}:
        raise RequestError(_NO_PROMPT, param="prompt")
    try:
        return array("I", prompt).tobytes()
    except OverflowError as exc:
        raise RequestError("prompt: token ids must be in [0, 2**32).", param="prompt") from exc


def chat_prompt(messages: Any, tools: list[Any], *, asks_for_answer: bool = True) -> bytes:
    """Render messages in Llama 3's layout, so that equal beginnings stay equal bytes."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    parts = [_block("system", _json("tools", tools))] if tools else []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("messages: each needs a role and content.", param="messages")
        parts.append(_block(message["role"], _content(message)))
    if asks_for_answer:
        parts.append("<|start_header_id|>assistant<|end_header_id|>\n\n")
    return "".join(parts).encode()


def _block(role: str, content: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"


def _content(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    said = _json("tool_calls", calls) if calls else ""
    return _text(message.get("content")) + said


def _json(name: str, value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as exc:
        # What can be read may be nested too deep to be written.
        raise RequestError(f"{name} cannot be rendered: {exc}.", param=name) from exc


def _text(content: Any) -> str:
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


def input_messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """Return the chat messages that a Responses request stands for: instructions, then the input."""
    head = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str) and given:
        return [*head, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input must be a string or a list of items, not empty.", param="input")
    return [*head, *_items(given)]


def _items(given: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            yield {"role": item["role"], "content": item.get("content")}
        elif kind == "function_call":
            yield {"role": "assistant", "tool_calls": [item]}
        elif kind == "function_call_output":
            yield {"role": "tool", "content": item.get("output")}
        else:
            raise RequestError(
                "input: each item must be a message with a role, a function_call or a function_call_output.",
                param="input",
            )


_UNSTORED: Final = "it stores no responses; send the whole input."
UNANSWERABLE: Final[Mapping[str, str]] = {
    "previous_response_id": _UNSTORED,
    "conversation": _UNSTORED,
    "background": "leave it out.",
    "prompt": "send input.",
}
"""Fields of the Responses API that a worker cannot follow, and what to do instead."""
_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls"),
    *("user", "priority", "seed", "ignore_eos", "min_tokens", "cache_salt", "kv_transfer_params"),
)
"""Fields that a chat has under the same name."""


class _Text(Fields):
    format: TextFormat | None = None


class ResponseFields(Fields):
    """What only a Responses request has; clients ask for encrypted reasoning always, and there is none."""

    text: _Text | None = None
    include: list[Literal["reasoning.encrypted_content"]] = Field(default=[])
    top_logprobs: Literal[0] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    store: bool = True
    metadata: dict[str, str] = Field(default={})
    reasoning: dict[str, Any] = Field(default={})
    max_output_tokens: int | None = Field(default=None, ge=1)
    instructions: str | None = None


def read_response_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the chat that a Responses request stands for."""
    refuse(given, UNANSWERABLE)
    fields = read_fields(ResponseFields, given)
    chat = {name: given[name] for name in _SAME if name in given}
    chat["messages"] = input_messages(fields.instructions, given.get("input"))
    chat["max_completion_tokens"] = fields.max_output_tokens
    return chat
