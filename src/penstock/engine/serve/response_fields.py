"""Reads the fields of requests in OpenAI's Responses API as vLLM does; used by `protocol`. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.engine.serve.fields import ChatFields, Fields, Message, NamedTool, Part, render_chat


def _as_named_tool(choice: Any) -> Any:
    """Return the ``tool_choice`` of a Responses request as a chat's, which has the name under ``function``."""
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


def _as_message(item: Any) -> Any:
    """Return an item of a Responses request as a chat message."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [item]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    if kind != "message":
        raise ValueError("must be a message, a function_call or a function_call_output")
    return item


def _as_items(said: Any) -> Any:
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


class _TextFormat(Fields):
    """Format of the text of a response: a schema comes next to the type, and not within ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema needs a schema")
        return self


class _Text(Fields):
    format: _TextFormat | None = None


class ResponseFields(ChatFields):
    """Fields of a request in OpenAI's Responses API. Clients always request encrypted reasoning, but the response has none."""

    max_tokens: int | None = Field(default=None, ge=1, validation_alias="max_output_tokens")
    top_logprobs: int = Field(default=0, ge=0, le=0)
    n: int = Field(default=1, ge=1, le=1)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_as_named_tool)
    ] = None
    messages: Annotated[
        list[Annotated[Message, BeforeValidator(_as_message)]], BeforeValidator(_as_items)
    ] = Field(min_length=1, validation_alias="input")
    instructions: str | None = None
    text: _Text | None = None
    include: list[Literal["reasoning.encrypted_content"]] = Field(default=[])
    truncation: Literal["auto", "disabled"] = "disabled"
    store: bool = True
    reasoning: dict[str, Any] = Field(default={})

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """JSON schema that the text must satisfy; None if the text is free."""
        shape = None if self.text is None else self.text.format
        if shape is None or shape.type == "text":
            return super().text_schema
        return shape.json_schema or {"type": "object"}

    @property
    def prompt(self) -> bytes:
        """The instructions and messages rendered as the model's prompt; as in vLLM 0.32 a last message in progress is continued."""
        head = [Message(role="system", content=[Part(text=self.instructions)])] if self.instructions else []
        goes_on = self.messages[-1].status in {"in_progress", "incomplete"}
        return render_chat([*head, *self.messages], self.tools, asks_for_answer=not goes_on, goes_on=goes_on)
