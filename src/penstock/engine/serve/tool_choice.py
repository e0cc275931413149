"""The tools of a request and its choice among them, in one form for all APIs; used by `fields` and `tool_calls`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class ToolRule(StrEnum):
    """Rule of a request for calls of its tools, the kind of its ``tool_choice``.

    Attributes:
        NONE: No tool is called.
        AUTO: The model decides whether it calls a tool.
        REQUIRED: A tool must be called; the model decides which one.
        NAMED: The tool that the request names must be called.
    """

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(NamedTuple):
    """A request's ``tool_choice``, in the same form for all APIs.

    Attributes:
        rule: Kind of the choice.
        name: Name of the tool; None unless the rule is `ToolRule.NAMED`.
    """

    rule: ToolRule
    name: str | None = None


class Tool(NamedTuple):
    """A tool of a request, in the same form for all APIs.

    Attributes:
        name: Name of the function.
        schema: JSON schema of its arguments.
    """

    name: str
    schema: Any


def tools_of(definitions: Sequence[Any], schema_key: str) -> list[Tool]:
    """Return the functions among a request's tools; tools without a name, such as a provider's own, are left out.

    Args:
        definitions: Definitions of the tools; a chat's definition contains the function under ``function``.
        schema_key: Key of the arguments' schema in a function.
    """
    functions = [each.get("function", each) if isinstance(each, Mapping) else None for each in definitions]
    return [
        Tool(each["name"], each.get(schema_key) or {})
        for each in functions
        if isinstance(each, Mapping) and isinstance(each.get("name"), str)
    ]
