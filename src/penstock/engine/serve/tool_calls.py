"""Selects the tool that a simulated worker calls, if it calls one; equal for equal requests. Pure, used by `protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.engine.serve.fields import RequestError
from penstock.engine.serve.structured import json_of
from penstock.engine.serve.tool_choice import Tool, ToolChoice, ToolRule


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: Name of the function.
        arguments: JSON of its arguments, which satisfies the function's schema.
        is_chosen: Whether the simulated model selected the tool; False if the request named it.
    """

    name: str
    arguments: bytes
    is_chosen: bool


def tool_call(
    tools: Sequence[Tool], choice: ToolChoice, *, user_text: str | None, salt: int
) -> ToolCall | None:
    """Return the call with which a simulated worker answers a request; None if it answers with text.

    If the choice is left to the model (`ToolRule.AUTO`), it calls a tool when the conversation ends with a message of the user,
    and answers with text when it ends with anything else, such as a tool's result. It calls the tool whose name the message
    contains, otherwise one that the salt selects. If it cannot make arguments for that tool's schema, it answers with text.

    Args:
        tools: Tools of the request.
        choice: The request's choice.
        user_text: Text of the last message if it is the user's; None otherwise.
        salt: Number that selects the words of the response; it also selects tool and arguments.

    Raises:
        RequestError: A tool must be called, but the request does not define it, or its schema cannot be satisfied.
    """
    if choice.rule is ToolRule.NONE:
        return None
    if choice.rule is ToolRule.AUTO:
        if user_text is None or not tools:
            return None
        named = next((each for each in tools if each.name in user_text), None)
        tool = tools[(salt >> 16) % len(tools)] if named is None else named
        try:
            return ToolCall(tool.name, json_of(tool.schema, salt, param="tools"), is_chosen=True)
        except RequestError:
            return None
    found = next((each for each in tools if choice.name in {None, each.name}), None)
    if found is None:
        raise RequestError("tool_choice: names no function of tools; add it to tools.", param="tool_choice")
    arguments = json_of(found.schema, salt, param="tools")
    return ToolCall(found.name, arguments, is_chosen=choice.rule is ToolRule.REQUIRED)
