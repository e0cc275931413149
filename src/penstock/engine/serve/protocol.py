"""Parses completion, chat, Responses and Messages requests as vLLM does; the server calls `parse` once per request.

Refusals are `RequestError`s, with vLLM's wording if clients may rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, Final

from penstock.core.simulated_tokens import BYTES_PER_TOKEN, token_ids
from penstock.engine.core.kv_blocks import count_tokens
from penstock.engine.serve.fields import (
    ChatFields,
    CompletionFields,
    RequestError,
    SamplingFields,
    read_fields,
    read_object,
    too_small,
)
from penstock.engine.serve.message_fields import MessageFields
from penstock.engine.serve.remote_kv import RemoteKv, remote_of
from penstock.engine.serve.response_fields import ResponseFields
from penstock.engine.serve.settings import ServeSettings
from penstock.engine.serve.structured import json_of
from penstock.engine.serve.tool_calls import ToolCall, tool_call
from penstock.engine.serve.tool_choice import ToolRule
from penstock.engine.serve.words import (
    adapter_seed,
    find_stop,
    natural_length,
    said_before,
    salt_of_prompt,
    words,
)

DEFAULT_COMPLETION_TOKENS = 16
"""Default of max_tokens for /v1/completions, as in OpenAI's API."""


class Api(StrEnum):
    """APIs that a worker serves: OpenAI's and Anthropic's."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


_MODELS: Final[Mapping[Api, type[CompletionFields | ChatFields | MessageFields]]] = {
    Api.COMPLETIONS: CompletionFields,
    Api.CHAT: ChatFields,
    Api.RESPONSES: ResponseFields,
    Api.MESSAGES: MessageFields,
}


class Usage(StrEnum):
    """Events of a stream that contain ``usage``, according to ``stream_options``.

    Attributes:
        NONE: No event.
        LAST_EVENT: Only an additional event at the end.
        EVERY_EVENT: Every event.
    """

    NONE = "none"
    LAST_EVENT = "last-event"
    EVERY_EVENT = "every-event"


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One parsed request.

    Attributes:
        api: API of the request.
        model: Model name for the response.
        prompt: Prompt as bytes, of which every 4 are one token.
        prompt_tokens: Number of tokens in the prompt.
        output_tokens: Number of tokens that the engine will generate for the request.
        ends_by_stop: Whether the simulated model ends by itself after ``output_tokens`` tokens (finish reason stop);
            otherwise the token limit ends the response.
        salt: Number that selects the words of the response; equal for equal prompts and seeds.
        said: Number of the response's first words with which the prompt already ends; the generated tokens continue
            after them.
        text_bytes: Number of bytes of the text that the client receives; a stop string may cut the last words.
        held_bytes: Number of bytes at the end that are withheld until the response ends: the length of the longest
            stop string minus one.
        stop_reason: Stop string that ends the response; None if no stop string does.
        stream: Whether the response is streamed.
        usage: Events of the stream that contain token counts.
        priority: Priority of the request.
        pin: Whether its KV is kept for another worker: a prompt for decode, or a conversation for the prefill of its
            next turn.
        remote: KV on another worker to fetch; None if the prompt is computed here.
        fields: The request's JSON, for responses that repeat its fields.
        adapter: LoRA adapter of the request; None for the base model.
        alternatives: Number of alternatives whose log probabilities are returned with each token; None if no log
            probabilities are requested.
        content: The response's text if it is JSON for a schema; None if it consists of words.
        tool: Call of a function, whose arguments are the response; None if the response is text.
        choice: Index of this choice among the choices of the response.
        choices: Number of choices of the response (``n``); each is one call.
        returns_ids: Whether the response contains the token IDs of prompt and output.
    """

    api: Api
    model: str
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    ends_by_stop: bool
    salt: int
    said: int
    text_bytes: int
    held_bytes: int
    stop_reason: str | None
    stream: bool
    usage: Usage
    priority: int
    pin: bool
    remote: RemoteKv | None
    fields: Mapping[str, Any]
    adapter: str | None = None
    returns_ids: bool = False
    alternatives: int | None = None
    content: bytes | None = None
    tool: ToolCall | None = None
    choice: int = 0
    choices: int = 1

    def texts(self, start: int, stop: int) -> list[bytes]:
        """Return the shown text of each output token from ``start`` (inclusive) to ``stop`` (exclusive).

        As in vLLM, text that could become part of a stop string is withheld until the response ends.
        """
        if self.content is not None:
            return self.pieces(start, stop)
        if not self.held_bytes and self.text_bytes == self.output_tokens * BYTES_PER_TOKEN:
            return words(self.salt, self.said + start, self.said + stop)
        ends = [self._shown_bytes(tokens) for tokens in range(start, stop + 1)]
        first, last = ends[0] // BYTES_PER_TOKEN, -(-ends[-1] // BYTES_PER_TOKEN)
        text = b"".join(words(self.salt, self.said + first, self.said + last))
        origin = first * BYTES_PER_TOKEN
        return [text[begin - origin : end - origin] for begin, end in pairwise(ends)]

    def _shown_bytes(self, tokens: int) -> int:
        if tokens == self.output_tokens:
            return self.text_bytes
        return max(0, tokens * BYTES_PER_TOKEN - self.held_bytes)

    def pieces(self, start: int, stop: int) -> list[bytes]:
        """Return the bytes of the output tokens from ``start`` (inclusive) to ``stop`` (exclusive), withheld ones included."""
        if self.content is None:
            return words(self.salt, self.said + start, self.said + stop)
        at = range(start * BYTES_PER_TOKEN, stop * BYTES_PER_TOKEN, BYTES_PER_TOKEN)
        return [self.content[begin : begin + BYTES_PER_TOKEN] for begin in at]

    def ids(self, start: int, stop: int) -> list[int]:
        """Return the IDs of the output tokens from ``start`` (inclusive) to ``stop`` (exclusive)."""
        return list(token_ids(b"".join(self.pieces(start, stop))))

    def text(self, tokens: int) -> str:
        """Return the shown text of the first ``tokens`` output tokens."""
        return b"".join(self.texts(0, tokens)).decode()


def parse(body: bytes, settings: ServeSettings, *, api: Api) -> list[EngineCall]:
    """Parse a request body; return one call per choice (``n``) of the response.

    As in vLLM, the engine computes each choice as a request of its own with the same prompt. The choices differ as if their
    seeds did; the first one is the response to the same request with one choice.

    Args:
        body: The body.
        settings: Settings of the worker.
        api: API of the request.

    Raises:
        RequestError: The request is refused.
    """
    given = read_object(body)
    fields = read_fields(_MODELS[api], given)
    check_model(fields.model, settings)
    prompt = fields.prompt
    prompt_tokens = count_tokens(prompt)
    if not prompt_tokens:
        raise RequestError("The prompt must hold at least one token.", param="prompt")
    if fields.priority and not settings.engine.limits.by_priority:
        raise RequestError(
            f"Got priority {fields.priority} but Priority scheduling is not enabled.", param="priority"
        )
    params = fields.kv_transfer_params
    hands_over = settings.engine.role.keeps and params.get("do_remote_decode") is True
    remote = remote_of(params, settings)
    if fields.n > 1 and (hands_over or remote is not None):
        raise RequestError("n must be 1 with a KV transfer, which is for one choice.", param="n")
    limit = _output_limit(fields, settings.longest_tokens(fields.priority), prompt_tokens)
    first = EngineCall(
        api=api,
        model=fields.model or settings.served_names[0],
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        output_tokens=limit,
        ends_by_stop=False,
        salt=0,
        said=0,
        text_bytes=0,
        held_bytes=0
        if fields.include_stop_str_in_output
        else max((len(each) - 1 for each in fields.stop), default=0),
        stop_reason=None,
        stream=fields.stream,
        usage=_usage(fields),
        priority=fields.priority,
        pin=hands_over or (remote is not None and settings.is_bidirectional),
        remote=remote,
        fields=given,
        adapter=fields.model if fields.model in settings.adapters else None,
        returns_ids=fields.return_token_ids and api in {Api.COMPLETIONS, Api.CHAT},
        alternatives=fields.alternatives if isinstance(fields, CompletionFields | ChatFields) else None,
        choices=fields.n,
    )
    runs_to_limit = hands_over or fields.ignore_eos
    return [
        _with_response(replace(first, choice=choice), fields, settings, runs_to_limit=runs_to_limit)
        for choice in range(fields.n)
    ]


def _with_response(
    call: EngineCall, fields: SamplingFields, settings: ServeSettings, *, runs_to_limit: bool
) -> EngineCall:
    """Return a call with its response: the words or the JSON, their number, and what ends them.

    Args:
        call: Call whose ``output_tokens`` are the maximum.
        fields: Fields of the request.
        settings: Settings of the worker.
        runs_to_limit: Whether words are generated up to the maximum.
    """
    prompt, limit = call.prompt, call.output_tokens
    salt_of = partial(
        salt_of_prompt,
        worker_seed=adapter_seed(call.adapter, settings.flags.seed),
        seed=fields.seed,
        choice=call.choice,
    )
    said = said_before(prompt, salt_of)
    salt = salt_of(prompt[: len(prompt) - said * BYTES_PER_TOKEN])
    content, tool = _content(fields, salt)
    natural = (
        limit if runs_to_limit else max(1, natural_length(salt, settings.flags.mean_output_tokens) - said)
    )
    tokens = min(max(natural, fields.min_tokens), limit)
    if content is not None:
        tokens = min(count_tokens(content), limit)
    shown, stop_reason = tokens * BYTES_PER_TOKEN, None
    stop = (
        find_stop(salt, fields.stop, tokens, said=said, min_tokens=fields.min_tokens) if fields.stop else None
    )
    if stop is not None:
        tokens, shown, stop_reason = stop
        shown += len(stop_reason.encode()) if fields.include_stop_str_in_output else 0
    return replace(
        call,
        output_tokens=tokens,
        ends_by_stop=stop is not None
        or (tokens < limit if content is None else tokens == count_tokens(content)),
        salt=salt,
        said=said,
        text_bytes=shown,
        stop_reason=stop_reason,
        content=content,
        tool=tool,
    )


def _content(fields: SamplingFields, salt: int) -> tuple[bytes | None, ToolCall | None]:
    """Return the JSON, or the chosen text, of a response and the call of which it is the arguments; None each if there is none."""
    choice = fields.choice_of_tools
    is_free = choice.rule is ToolRule.AUTO
    call, schema, texts = None, fields.text_schema, fields.text_choices
    # Text is requested by its length or its end, which a call would ignore.
    if not (is_free and (fields.stop or fields.ignore_eos or fields.min_tokens)):
        call = tool_call(fields.functions, choice, user_text=fields.user_text, salt=salt)
    if call is None and schema is None:
        return None, None
    if fields.stop:
        raise RequestError("stop: a simulated worker does not cut JSON; leave it out.", param="stop")
    if call is not None:
        return call.arguments, call
    if texts is not None:
        return texts[(salt >> 8) % len(texts)].encode(), None
    param = "text.format" if isinstance(fields, ResponseFields) else "response_format"
    return json_of(schema, salt, param=param), None


def check_model(model: str | None, settings: ServeSettings) -> None:
    """Check that this worker serves the model named ``model``; None is accepted.

    Raises:
        RequestError: The worker does not serve the model (status 404).
    """
    names = (*settings.served_names, *settings.adapters)
    if model is not None and model not in names:
        raise RequestError(
            f"The model `{model[:256]}` does not exist. Valid aliases: {', '.join(names)}.",
            status=404,
            param="model",
        )


def _output_limit(fields: SamplingFields, longest: int, prompt_tokens: int) -> int:
    """Return the maximum number of output tokens: the requested number, limited by the context length."""
    left_tokens, asked = longest - prompt_tokens, fields.max_tokens
    if left_tokens < 0:
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if left_tokens == 0:
        raise too_small("max_tokens", 0)
    if asked is None:
        asked = (
            min(left_tokens, DEFAULT_COMPLETION_TOKENS)
            if isinstance(fields, CompletionFields)
            else left_tokens
        )
    if asked > longest:
        raise RequestError(
            f"max_tokens={asked} cannot be greater than max_model_len={longest}. Please request fewer output tokens. "
            f"(parameter=max_tokens, value={asked})",
            param="max_tokens",
        )
    limit = min(asked, left_tokens)
    if fields.min_tokens > limit:
        raise RequestError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {fields.min_tokens}.",
            param="min_tokens",
        )
    return limit


def _usage(fields: SamplingFields) -> Usage:
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise RequestError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    if options is None or not options.include_usage:
        return Usage.NONE
    return Usage.EVERY_EVENT if options.continuous_usage_stats else Usage.LAST_EVENT
