"""Reads what a request says of sampling, as vLLM checks it: every field's type and range. Pure.

A field that changes nothing that is simulated (temperature, penalties) is checked and has no effect; one that would
change the answer and cannot be simulated (guided decoding, beam search) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.engine.serve.fields import (
    Check,
    RequestError,
    absent,
    boolean,
    flag,
    integer,
    mapping,
    number,
    one_of,
    string,
    strings,
    text,
    whole,
)

MAX_CHOICES: Final = 128
"""Answers to one prompt; OpenAI's bound. vLLM's is 16,384."""
MAX_LOGPROBS: Final = 20
"""Alternatives per token; vLLM's default of --max-logprobs."""
MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
"""Stop strings and their length. Chosen: OpenAI takes four; vLLM has no bound."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What shapes the simulated answer.

    Attributes:
        n: Answers to each prompt.
        logprobs: Alternatives per token whose log probabilities are shown; None: none are asked for.
        echo: The prompt comes before the text.
        stop: Strings that end the text.
        stop_ids: Tokens that end it, as numbers.
        shows_stop: The stop is part of the text.
        min_tokens: Nothing ends it before.
        ignore_eos: It does not end by itself.
        seed: Chooses other words and another length; 0: none was given.
    """

    n: int
    logprobs: int | None
    echo: bool
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    shows_stop: bool
    min_tokens: int
    ignore_eos: bool
    seed: int


def read_sampling(fields: Mapping[str, Any], *, is_chat: bool) -> Sampling:
    """Return what a request says.

    Raises:
        RequestError: a field of the wrong type, out of its range, or of no effect that can be simulated.
    """
    for name, value in fields.items():
        check = _CHECKS.get(name)
        if check is not None and value is not None:
            check(name, value)
    n = integer(fields, "n", lowest=1) or 1
    best_of = integer(fields, "best_of", lowest=1)
    if best_of not in {None, n}:
        raise RequestError(f"best_of must equal n={n}, got {best_of}: leave it out.", param="best_of")
    return Sampling(
        n=n,
        logprobs=_chat_logprobs(fields) if is_chat else _completion_logprobs(fields),
        echo=_echo(fields, is_chat=is_chat),
        stop=_stop(fields),
        stop_ids=frozenset(fields.get("stop_token_ids") or ()),
        shows_stop=flag(fields, "include_stop_str_in_output"),
        min_tokens=integer(fields, "min_tokens", lowest=0) or 0,
        ignore_eos=flag(fields, "ignore_eos"),
        seed=fields.get("seed") or 0,
    )


def read_tools(fields: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a chat; the answer is plain text all the same.

    Raises:
        RequestError: what is no tool, or a choice that asks for a call.
    """
    tools = fields.get("tools")
    if tools is None:
        tools = []
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise RequestError("tools must be a list of functions with names.", param="tools")
    choice = fields.get("tool_choice")
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


def _completion_logprobs(fields: Mapping[str, Any]) -> int | None:
    value: Any = fields.get("logprobs")
    if value is None or value is False:
        return None
    whole(0, MAX_LOGPROBS)("logprobs", value)
    return int(value)


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    is_asked = flag(fields, "logprobs")
    top = integer(fields, "top_logprobs", lowest=0)
    if top and not is_asked:
        raise RequestError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return (top or 0) if is_asked else None


def _echo(fields: Mapping[str, Any], *, is_chat: bool) -> bool:
    echo = flag(fields, "echo")
    if echo and is_chat:
        raise RequestError("echo is not supported in a chat: leave it out.", param="echo")
    return echo


def _stop(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    if stop is None:
        return ()
    given = [stop] if isinstance(stop, str) else stop
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise RequestError("stop must be a string or a list of strings.", param="stop")
    if "" in given:
        raise RequestError("stop cannot contain an empty string.", param="stop")
    if len(given) > MAX_STOPS or any(len(each) > MAX_STOP_CHARACTERS for each in given):
        raise RequestError(
            f"stop must hold at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters.", param="stop"
        )
    return tuple(given)


def _token_ids(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise RequestError(f"{name} must be a list of token ids.", param=name)


def _logit_bias(name: str, value: Any) -> None:
    biases = mapping({name: value}, name)
    for token, bias in biases.items():
        if not token.isdecimal():
            raise RequestError(f"{name}: {token[:50]!r} is no token id.", param=name)
        number(-100, 100)(f"{name}[{token[:20]}]", bias)


def _response_format(name: str, value: Any) -> None:
    kind = mapping({name: value}, name).get("type")
    one_of("text", "json_object", "json_schema", "structural_tag")(f"{name}.type", kind)
    if kind != "text":
        raise RequestError(f"{name}: {_UNGUIDED}", param=name)


_UNGUIDED: Final = "its words follow no grammar; ask for text."
_INT64: Final = 2**63

_CHECKS: Final[dict[str, Check]] = {
    "n": whole(1, MAX_CHOICES),
    "temperature": number(0),
    "top_p": number(0, 1, above=True),
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, above=True),
    "length_penalty": number(),
    "seed": whole(-_INT64, _INT64 - 1),
    "top_logprobs": whole(0, MAX_LOGPROBS),
    "stop_token_ids": _token_ids,
    "logit_bias": _logit_bias,
    "response_format": _response_format,
    "cache_salt": text,
    "user": string,
    "metadata": strings,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "add_special_tokens": boolean,
    "add_generation_prompt": boolean,
    "parallel_tool_calls": boolean,
    "use_beam_search": absent("leave it out."),
    "prompt_logprobs": absent("leave it out, or ask for echo and logprobs."),
    "prompt_embeds": absent("send text or token ids."),
    "suffix": lambda name, value: None if value == "" else absent("leave it out.")(name, value),
    "bad_words": absent("leave it out."),
    "allowed_token_ids": absent("leave it out."),
    "truncate_prompt_tokens": absent("send the prompt as it shall be."),
    "continue_final_message": absent("leave it out."),
    "return_token_ids": absent("leave it out."),
    "return_tokens_as_token_ids": absent("leave it out."),
    "functions": absent("send tools."),
    "function_call": absent("send tool_choice."),
    "structured_outputs": absent(_UNGUIDED),
    "guided_json": absent(_UNGUIDED),
    "guided_regex": absent(_UNGUIDED),
    "guided_choice": absent(_UNGUIDED),
    "guided_grammar": absent(_UNGUIDED),
}
