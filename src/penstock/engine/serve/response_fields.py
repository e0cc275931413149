"""Reads requests of the Responses API as chat requests with other names. Pure.

Nothing is stored, so what refers to an earlier response is refused, as vLLM does without its store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from penstock.engine.serve.fields import Fields, read_fields, refuse
from penstock.engine.serve.prompts import input_messages
from penstock.engine.serve.sampling import TextFormat

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
    """Return the fields of the chat that a Responses request stands for.

    Raises:
        RequestError: no input, or something that cannot be simulated.
    """
    refuse(given, UNANSWERABLE)
    fields = read_fields(ResponseFields, given)
    chat = {name: given[name] for name in _SAME if name in given}
    chat["messages"] = input_messages(fields.instructions, given.get("input"))
    chat["max_completion_tokens"] = fields.max_output_tokens
    return chat
