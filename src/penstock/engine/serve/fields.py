"""Holds a request's JSON against a model of its fields, as vLLM checks them; what does not fit is a `RequestError`. Pure.

A field that changes nothing that is simulated (temperature, penalties) is checked and has no effect; one that would
change the answer and cannot be simulated (guided decoding, beam search) is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.core.errors import PenstockError
from penstock.core.http.messages import error_body

_OBJECT_ERRORS = frozenset({"dict_type", "model_type"})


class RequestError(PenstockError):
    """A request that is refused."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        super().__init__(message)

    def body(self) -> bytes:
        """Return the JSON error object."""
        return error_body(str(self), kind=self.kind, code=self.status, param=self.param)


class Fields(BaseModel):
    """Fields of a request: their JSON types, nothing converted; other fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


_Model = TypeVar("_Model", bound=Fields)


def read_fields(model: type[_Model], given: Mapping[str, Any]) -> _Model:
    """Return the fields of a request; null counts as missing."""
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
    if first["type"] in _OBJECT_ERRORS:
        raise RequestError(f"{name} must be an object.", param=name)
    raise RequestError(f"{name}: {first['msg']}.", param=name)


def too_small(name: str, value: float, lowest: float = 1) -> RequestError:
    """Return the refusal of a number below its bound."""
    message = f"{name} must be at least {lowest}, got {value}. (parameter={name}, value={value})"
    return RequestError(message, param=name)


def refuse(given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse fields that a simulated worker cannot follow, unless they ask for nothing."""
    for name in given.keys() & reasons.keys():
        value = given[name]
        if value is not None and value is not False and value not in ("", []):
            message = f"{name} is not supported by a simulated worker: {reasons[name]}"
            raise RequestError(message, param=name)


MAX_CHOICES: Final = 128
"""Answers to one prompt; OpenAI's bound. vLLM's is 16,384."""
MAX_LOGPROBS: Final = 20
"""Alternatives per token; vLLM's default of --max-logprobs."""
MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
"""Stop strings and their length. Chosen: OpenAI takes four; vLLM has no bound."""

_INT64: Final = 2**63
_UNGUIDED: Final = "its words follow no grammar; ask for text."
_OMIT: Final = "leave it out."
REFUSED: Final[Mapping[str, str]] = {
    "use_beam_search": _OMIT,
    "prompt_logprobs": "leave it out, or ask for echo and logprobs.",
    "prompt_embeds": "send text or token ids.",
    "suffix": _OMIT,
    "bad_words": _OMIT,
    "allowed_token_ids": _OMIT,
    "truncate_prompt_tokens": "send the prompt as it shall be.",
    "continue_final_message": _OMIT,
    "return_token_ids": _OMIT,
    "return_tokens_as_token_ids": _OMIT,
    "functions": "send tools.",
    "function_call": "send tool_choice.",
    "structured_outputs": _UNGUIDED,
    "guided_json": _UNGUIDED,
    "guided_regex": _UNGUIDED,
    "guided_choice": _UNGUIDED,
    "guided_grammar": _UNGUIDED,
}
"""Fields that would change the answer, and what to do instead."""

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Fields):
    """Which events of a stream carry the counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Fields):
    """The one format that a simulated worker writes."""

    type: Literal["text"]


class SamplingFields(Fields):
    """What completions and chats have in common; the attributes are vLLM's."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] = Field(default={})
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=-_INT64, lt=_INT64)
    stop: Annotated[list[_Stop], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = (
        Field(default=[], max_length=MAX_STOPS)
    )
    stop_token_ids: list[int] = Field(default=[])
    include_stop_str_in_output: bool = False
    echo: bool = False

    temperature: float = Field(default=1, ge=0)
    top_p: float = Field(default=1, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0, ge=0, le=1)
    presence_penalty: _Penalty = 0
    frequency_penalty: _Penalty = 0
    repetition_penalty: float = Field(default=1, gt=0)
    length_penalty: float = 1
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]+$")], _Bias] = Field(default={})
    response_format: TextFormat | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    user: str = ""
    metadata: dict[str, str] = Field(default={})
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int | None:
        """Alternatives per token whose log probabilities are shown; None: none are requested."""
        raise NotImplementedError

    @property
    def output_limit(self) -> int | None:
        """Most output tokens that are requested."""
        return self.max_tokens


class CompletionFields(SamplingFields):
    """A completion's."""

    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        """See the base."""
        return self.logprobs


class ChatFields(SamplingFields):
    """A chat's."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True

    @property
    def alternatives(self) -> int | None:
        """See the base."""
        return self.top_logprobs if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        """See the base; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def read_sampling(given: Mapping[str, Any], *, is_chat: bool) -> SamplingFields:
    """Return what a request says."""
    refuse(given, REFUSED)
    fields: SamplingFields
    if is_chat:
        fields = chat = read_fields(ChatFields, given)
        if chat.top_logprobs and not chat.logprobs:
            raise RequestError(
                "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
            )
        if chat.echo:
            raise RequestError("echo is not supported in a chat: leave it out.", param="echo")
    else:
        is_off = given.get("logprobs") is False
        fields = read_fields(CompletionFields, {**given, "logprobs": None} if is_off else given)
    if fields.best_of not in {None, fields.n}:
        raise RequestError(
            f"best_of must equal n={fields.n}, got {fields.best_of}: leave it out.", param="best_of"
        )
    return fields


def read_tools(given: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a chat; the answer is plain text all the same."""
    tools = given.get("tools")
    if tools is None:
        tools = []
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise RequestError("tools must be a list of functions with names.", param="tools")
    choice = given.get("tool_choice")
    if choice is not None and choice != "none" and not tools:
        raise RequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if choice not in (None, "none", "auto"):
        raise RequestError(
            "tool_choice must be none or auto: a simulated worker answers in text and calls no tool.",
            param="tool_choice",
        )
    return tools


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function", tool)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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
