"""Reads requests of the Responses API as chat requests with other names. Pure.

Nothing is stored, so what refers to an earlier response is refused, as vLLM does without its store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.engine.serve.fields import (
    Check,
    RequestError,
    absent,
    boolean,
    json_object,
    mapping,
    one_of,
    strings,
)
from penstock.engine.serve.prompts import input_messages

_UNSTORED: Final = "it stores no responses; send the whole input."
_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls"),
    *("user", "priority", "seed", "ignore_eos", "min_tokens", "cache_salt", "kv_transfer_params"),
)
"""Fields that a chat has under the same name."""


def read_response_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the chat that a Responses request stands for.

    Raises:
        RequestError: no input, or something that cannot be simulated.
    """
    for name, value in fields.items():
        check = _CHECKS.get(name)
        if check is not None and value is not None:
            check(name, value)
    chat = {name: fields[name] for name in _SAME if name in fields}
    chat["messages"] = input_messages(fields)
    if fields.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    return chat


def _text(name: str, value: Any) -> None:
    kind = mapping(mapping({name: value}, name), "format").get("type", "text")
    if kind != "text":
        raise RequestError("text.format must be text: its words follow no grammar.", param="text.format")


def _include(name: str, value: Any) -> None:
    if not isinstance(value, list) or any(each != _NO_REASONING for each in value):
        raise RequestError(f"{name} may hold {_NO_REASONING} only.", param=name)


_NO_REASONING: Final = "reasoning.encrypted_content"
"""Many clients ask for it always; a simulated model does not reason, so that there is none."""

_CHECKS: Final[dict[str, Check]] = {
    "text": _text,
    "include": _include,
    "previous_response_id": absent(_UNSTORED),
    "conversation": absent(_UNSTORED),
    "background": absent("leave it out."),
    "prompt": absent("send input."),
    "top_logprobs": lambda name, value: None if value == 0 else absent("leave it out.")(name, value),
    "truncation": one_of("auto", "disabled"),
    "store": boolean,
    "metadata": strings,
    "reasoning": json_object,
}
