"""Reads the fields of requests in Anthropic's API as vLLM does; used by `protocol` and `tokenizer`. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.engine.serve.fields import (
    MAX_STOPS,
    Fields,
    Message,
    Part,
    SamplingFields,
    Stop,
    as_json,
    check_media,
    render_chat,
)
from penstock.engine.serve.tool_choice import Tool, ToolChoice, ToolRule, tools_of


class _Block(Fields):
    """A content block of a message in Anthropic's API."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] = Field(default={})
    content: str | list[dict[str, Any]] = ""

    def as_text(self) -> str:
        """Return the block as text for the model; tool uses and results become JSON."""
        if self.type == "tool_use":
            return as_json("messages", {"name": self.name, "input": self.input})
        if self.type == "tool_result":
            return self.content if isinstance(self.content, str) else as_json("messages", self.content)
        return self.text or self.thinking


_Blocks = Annotated[
    list[_Block],
    BeforeValidator(
        lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else check_media(said)
    ),
]


class _Said(Fields):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class _ToolChoice(Fields):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise ValueError("type tool needs the name of a tool")
        return self


_MESSAGE_RULES: Final = {"any": ToolRule.REQUIRED, "tool": ToolRule.NAMED}
"""Types of Anthropic's ``tool_choice`` that have another name here."""


class CountFields(Fields):
    """Fields of a request in Anthropic's API to count tokens."""

    model: str | None = None
    messages: list[_Said] = Field(min_length=1)
    system: _Blocks = Field(default=[])
    tools: list[dict[str, Any]] = Field(default=[])
    tool_choice: _ToolChoice | None = None

    @property
    def prompt(self) -> bytes:
        """The messages rendered as the model's prompt."""
        said = [*([_Said(role="system", content=self.system)] if self.system else []), *self.messages]
        chat = [
            Message(role=each.role, content=[Part(text=block.as_text()) for block in each.content])
            for each in said
        ]
        return render_chat(chat, self.tools)


class MessageFields(CountFields, SamplingFields):
    """Fields of a message request in Anthropic's API, in which ``max_tokens`` is required."""

    model: str | None = None
    max_tokens: int = Field(ge=1)
    n: int = Field(default=1, ge=1, le=1)
    stop: list[Stop] = Field(default=[], max_length=MAX_STOPS, validation_alias="stop_sequences")
    thinking: dict[str, Any] = Field(default={})
    metadata: dict[str, Any] = Field(default={})

    @property
    def choice_of_tools(self) -> ToolChoice:
        """The request's choice of tools; the model decides if the request does not say."""
        choice = self.tool_choice
        if choice is None:
            return ToolChoice(ToolRule.AUTO)
        return ToolChoice(_MESSAGE_RULES.get(choice.type) or ToolRule(choice.type), choice.name)

    @property
    def functions(self) -> list[Tool]:
        """The functions that the response may call."""
        return tools_of(self.tools, "input_schema")

    @property
    def user_text(self) -> str | None:
        """Text of the last message if it is the user's and contains no tool result; None otherwise."""
        last = self.messages[-1]
        if last.role != "user" or any(block.type == "tool_result" for block in last.content):
            return None
        return "".join(block.text for block in last.content)
