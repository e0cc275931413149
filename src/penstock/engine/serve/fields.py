"""Reads completion and chat requests as vLLM does: fields and the resulting prompt; invalid requests raise `RequestError`. Pure.

The fields of other APIs, which are built on these, are in `message_fields` and `response_fields`.

Fields without effect on the simulation (temperature, penalties) are validated and ignored. Fields that would change
the response and cannot be simulated (several prompts, guided decoding by a grammar) are refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import orjson
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from penstock.core.errors import PenstockError
from penstock.core.http.messages import error_body
from penstock.engine.serve.tool_choice import Tool, ToolChoice, ToolRule, tools_of

_OBJECT_ERRORS = frozenset({"dict_type", "model_type"})


class RequestError(PenstockError):
    """A request that is refused.

    Attributes:
        status: HTTP status of the response.
        param: Name of the request field that is wrong; None if no single field is.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        self.status = status
        self.param = param
        super().__init__(message)

    def body(self) -> bytes:
        """Return the JSON body of the error response."""
        kind = "NotFoundError" if self.status == 404 else "BadRequestError"
        return error_body(str(self), kind=kind, code=self.status, param=self.param)


class Fields(BaseModel):
    """Fields of a request with their JSON types; values are not converted, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


_Model = TypeVar("_Model", bound=Fields)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        RequestError: The body is not a JSON object.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def read_fields(model: type[_Model], given: Mapping[str, Any]) -> _Model:
    """Return the validated fields of a request; null counts as absent.

    Args:
        model: Model of the fields.
        given: The request's JSON object.

    Raises:
        RequestError: A field is invalid or not supported.
    """
    for name in given.keys() & REFUSED.keys():
        value = given[name]
        if value is not None and value is not False and value not in ("", []):
            message = f"{name} is not supported by a simulated worker: {REFUSED[name]}"
            raise RequestError(message, param=name)
    try:
        return model.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    bounds: Mapping[str, Any] = first.get("ctx", {})
    if first["type"] == "greater_than_equal":
        raise too_small(name, first["input"], bounds["ge"])
    if first["type"] == "less_than_equal":
        raise RequestError(f"{name} must be at most {bounds['le']}, got {first['input']}.", param=name)
    for begin, remedy in _UNSUPPORTED.items():
        if name.startswith(begin) and first["type"] == "literal_error":
            raise RequestError(f"{name}: a simulated worker {remedy}.", param=name)
    if first["type"] in _OBJECT_ERRORS:
        raise RequestError(f"{name} must be an object.", param=name)
    raise RequestError(f"{name}: {first['msg'].removeprefix('Value error, ')}.", param=name)


def too_small(name: str, value: float, lowest: float = 1) -> RequestError:
    """Return the error for a field ``name`` whose number ``value`` is below its minimum ``lowest``."""
    message = f"{name} must be at least {lowest}, got {value}. (parameter={name}, value={value})"
    return RequestError(message, param=name)


_UNSUPPORTED: Final = {
    "tool_choice": "knows none, auto, required (any in Anthropic's API) and a function's name; send one of them",
    "response_format": "knows the types text, json_object and json_schema; send one of them",
    "text.format": "knows the types text, json_object and json_schema; send one of them",
}
"""Prefixes of fields of which only some values are supported, each with the rest of the error message."""

MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
"""Maximum number of stop strings (``MAX_STOPS``) and of characters in each. Chosen: OpenAI accepts four; vLLM has no
limit."""

MAX_CHOICES: Final = 128
"""Maximum of ``n``, the number of choices of a response. Source: OpenAI's API; vLLM's default limit is 16,384."""

_INT64: Final = 2**63
_OMIT: Final = "leave it out."
_UNGUIDED: Final = "its words follow no grammar; send response_format for JSON of a schema."
_UNSTORED: Final = "it stores no responses; send the whole input."
REFUSED: Final[Mapping[str, str]] = {
    "prompt_logprobs": _OMIT,
    "echo": _OMIT,
    "suffix": _OMIT,
    "use_beam_search": _OMIT,
    "stop_token_ids": _OMIT,
    "bad_words": _OMIT,
    "allowed_token_ids": _OMIT,
    "return_tokens_as_token_ids": _OMIT,
    "background": _OMIT,
    "guided_json": _UNGUIDED,
    "guided_regex": _UNGUIDED,
    "guided_choice": _UNGUIDED,
    "guided_grammar": _UNGUIDED,
    "previous_response_id": _UNSTORED,
    "conversation": _UNSTORED,
    "prompt_embeds": "send text or token ids.",
    "truncate_prompt_tokens": "send the prompt as it shall be.",
    "functions": "send tools.",
    "function_call": "send tool_choice.",
}
"""Fields that would change the response and are refused, each with a remedy."""

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
"""Type of a stop string."""
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Fields):
    """Options of a stream.

    Attributes:
        include_usage: Whether the stream ends with an event that has the token counts.
        continuous_usage_stats: Whether every event has the token counts.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Schema(Fields):
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """Format of the text: free, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema needs a schema")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """JSON schema that the text must satisfy; None if the text is free."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.json_schema


class StructuredOutputs(Fields):
    """vLLM's own form of guided decoding, as far as it is simulated: JSON, or one of several texts."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    choice: list[Annotated[str, Field(min_length=1, pattern="^[ -~]+$")]] | None = Field(
        default=None, min_length=1
    )

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if [self.json_schema is not None, self.json_object, self.choice is not None].count(True) != 1:
            raise ValueError(
                "a simulated worker knows json (a schema), json_object and choice; send one of them"
            )
        return self


class SamplingFields(Fields):
    """Fields that all APIs share. Names and meanings are vLLM's; see the module for those without effect."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] = Field(default={})
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int = Field(default=1, ge=1, le=1)
    seed: int = Field(default=0, ge=-_INT64, lt=_INT64)
    stop: Annotated[list[Stop], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = (
        Field(default=[], max_length=MAX_STOPS)
    )
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=0)
    temperature: float = Field(default=1, ge=0)
    top_p: float = Field(default=1, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0, ge=0, le=1)
    presence_penalty: _Penalty = 0
    frequency_penalty: _Penalty = 0
    repetition_penalty: float = Field(default=1, gt=0)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]+$")], _Bias] = Field(default={})
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    user: str = ""
    metadata: dict[str, str] = Field(default={})

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """JSON schema that the text must satisfy; None if the text is free."""
        if self.structured_outputs is not None:
            return self.structured_outputs.json_schema or {"type": "object"}
        return None if self.response_format is None else self.response_format.schema_of_text

    @property
    def text_choices(self) -> list[str] | None:
        """Texts of which one must be the response; None if the request names none."""
        return None if self.structured_outputs is None else self.structured_outputs.choice

    @property
    def choice_of_tools(self) -> ToolChoice:
        """The request's choice of tools; none for an API without tools."""
        return ToolChoice(ToolRule.NONE)

    @property
    def functions(self) -> list[Tool]:
        """The functions that the response may call."""
        return []

    @property
    def user_text(self) -> str | None:
        """Text of the last message if it is the user's; None otherwise."""
        return None


def _prompt(prompt: Any) -> bytes:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode()
    if not isinstance(prompt, list) or not prompt or set(map(type, prompt)) != {int}:
        raise ValueError("must be one string or one list of token ids")
    try:
        return array("I", prompt).tobytes()
    except OverflowError as exc:
        raise ValueError("token ids must be in [0, 2**32)") from exc


_MAX_LOGPROBS: Final = 20
"""Maximum number of alternatives per token. Source: vLLM's default of ``max_logprobs``, and OpenAI's maximum."""


class CompletionFields(SamplingFields):
    """Fields of a completion request; the prompt is converted to bytes of which every 4 are one token."""

    prompt: Annotated[bytes, PlainValidator(_prompt)]
    logprobs: int | None = Field(default=None, ge=0, le=_MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives whose log probabilities are returned with each token; None if none are requested."""
        return self.logprobs


class Part(Fields):
    """One part of a message: text."""

    text: str


_MEDIA: Final = {"image": "images", "audio": "audio", "video": "videos", "file": "files", "document": "files"}


def check_media(parts: Any) -> Any:
    """Refuse parts that are not text, as vLLM does for text-only models."""
    for part in parts if isinstance(parts, list) else ():
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        for word, kinds in _MEDIA.items():
            if word in kind:
                raise ValueError(f"this model takes no {kinds}; send text alone")
    return parts


def _as_parts(said: Any) -> Any:
    return [{"text": said}] if isinstance(said, str) else check_media(said)


class Message(Fields):
    """One message of a chat.

    Attributes:
        role: Who has said it.
        content: Its parts; None if it consists of calls of tools only.
        tool_calls: Its calls of tools.
        status: Whether it is complete, in OpenAI's Responses API.
    """

    role: str
    content: Annotated[list[Part] | None, BeforeValidator(_as_parts)] = None
    tool_calls: list[Any] | None = None
    status: str | None = None


def render_chat(
    messages: Sequence[Message], tools: list[Any], *, asks_for_answer: bool = True, goes_on: bool = False
) -> bytes:
    """Render messages in Llama 3's format, so that equal prefixes are equal bytes; ``goes_on`` leaves the last message open."""
    parts = [_block("system", as_json("tools", tools))] if tools else []
    for message in messages:
        said = "".join(part.text for part in message.content or ())
        calls = as_json("tool_calls", message.tool_calls) if message.tool_calls else ""
        parts.append(_block(message.role, said + calls))
    if goes_on:
        parts[-1] = parts[-1].removesuffix(_END)
    if asks_for_answer:
        parts.append("<|start_header_id|>assistant<|end_header_id|>\n\n")
    return "".join(parts).encode()


_END: Final = "<|eot_id|>"


def _block(role: str, content: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}{_END}"


def as_json(name: str, value: Any) -> str:
    """Return a value as JSON, which ``name`` names in the error if it is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as exc:
        # JSON that can be parsed may be nested too deeply to be encoded.
        raise RequestError(f"{name} cannot be rendered: {exc}.", param=name) from exc


class _FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """The function that a response must call."""

    type: Literal["function"]
    function: _FunctionName


class ChatFields(SamplingFields):
    """Fields of a chat request; the response is text, JSON or a call of a tool.

    ``max_completion_tokens`` takes precedence over ``max_tokens``.
    """

    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=_MAX_LOGPROBS)
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _goes_on_or_begins(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True")
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives whose log probabilities are returned with each token; None if none are requested."""
        return self.top_logprobs if self.logprobs else None

    @property
    def choice_of_tools(self) -> ToolChoice:
        """The request's choice of tools; the model decides if the request does not say."""
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice(ToolRule.NAMED, self.tool_choice.function.name)
        return ToolChoice(ToolRule(self.tool_choice or ToolRule.AUTO))

    @property
    def functions(self) -> list[Tool]:
        """The functions that the response may call."""
        return tools_of(self.tools, "parameters")

    @property
    def user_text(self) -> str | None:
        """Text of the last message if it is the user's; None otherwise."""
        last = self.messages[-1]
        return "".join(part.text for part in last.content or ()) if last.role == "user" else None

    @property
    def prompt(self) -> bytes:
        """The messages rendered as the model's prompt."""
        return render_chat(
            self.messages,
            self.tools,
            asks_for_answer=self.add_generation_prompt,
            goes_on=self.continue_final_message,
        )
