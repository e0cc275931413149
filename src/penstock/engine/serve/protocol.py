"""Reads completion, chat and Responses requests as vLLM accepts them; the server calls `parse` once per request.

Refusals are `RequestError`s with vLLM's wording where a client may rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
import xxhash
from pydantic import BaseModel, Field, ValidationError

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.core.kv_blocks import count_tokens
from penstock.engine.core.lease import MAX_RANKS
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.fields import (
    MAX_PROMPTS,
    ChatFields,
    Fields,
    RequestError,
    SamplingFields,
    chat_prompt,
    completion_prompts,
    read_fields,
    read_response_fields,
    read_sampling,
    read_tools,
    too_small,
)
from penstock.engine.serve.settings import ServeSettings
from penstock.engine.serve.vocabulary import find_stop, words

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions."""


class Api(StrEnum):
    """OpenAI's APIs that a worker speaks."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"


class Usage(StrEnum):
    """Which events of a stream carry ``usage``, by ``stream_options``."""

    NONE = "none"
    LAST_EVENT = "last-event"
    EVERY_EVENT = "every-event"


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """Where a prompt's KV lies, from ``kv_transfer_params``.

    Attributes:
        engine_id: The process that keeps it.
        request_id: The prompt's, there.
        ranks: Its tensor parallelism.
        tokens: How many of the prompt's tokens lie there; None: all.
        cached_tokens: Prompt tokens that the prefill worker found in its own cache; None: it did not say.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    ranks: int = 1
    tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def notify_url(self) -> str:
        """Where to announce heartbeats and reads."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/kv/notify"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's answers; each is a request to the engine.

    Attributes:
        index: Its place among them: prompt by prompt, ``n`` to each.
        prompt: Bytes whose 4-byte pieces are the tokens.
        ends_by_stop: Whether the simulated model ends by itself there, or runs into its limit.
        salt: Chooses the words; the same for the same prompt and seed.
        text_bytes: Bytes of the words that are shown; a stop may cut the last ones.
        stop_reason: What stopped it: a string, a token id, or None.
    """

    index: int
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    ends_by_stop: bool
    salt: int
    text_bytes: int
    stop_reason: str | int | None = None

    def texts(self, start: int, stop: int) -> list[bytes]:
        """Return what is shown of the output tokens [start, stop), one text each."""
        texts = words(self.salt, start, stop)
        room = self.text_bytes - start * BYTES_PER_TOKEN
        if room < len(texts) * BYTES_PER_TOKEN:
            texts = [text[: max(0, room - at * BYTES_PER_TOKEN)] for at, text in enumerate(texts)]
        return texts


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One parsed request.

    Attributes:
        model: Name to answer with.
        n: Answers to each prompt.
        prompt_tokens: Of all prompts, each counted once.
        usage: Which events of a stream carry the counts.
        logprobs: Alternatives per token to show; None: no log probabilities.
        fields: The body, for answers that repeat what was asked.
        pin: Keep the KV for another worker: a prompt for decode, a conversation for its next turn's prefill.
        remote: KV to fetch, or None.
    """

    api: Api
    model: str
    choices: tuple[Choice, ...]
    n: int
    prompt_tokens: int
    stream: bool
    usage: Usage
    logprobs: int | None
    echo: bool
    priority: int
    pin: bool
    remote: RemoteKv | None
    fields: Mapping[str, Any]

    @property
    def events_differ(self) -> bool:
        """Whether each token needs an event of its own, because more than its word is in it."""
        return self.logprobs is not None or self.usage is Usage.EVERY_EVENT


def parse(body: bytes, settings: ServeSettings, *, api: Api) -> EngineCall:
    """Return the call in ``body``."""
    asked = _read_object(body)
    given = read_response_fields(asked) if api is Api.RESPONSES else asked
    fields = read_sampling(given, is_chat=api is not Api.COMPLETIONS)
    _check_model(fields, settings)
    prompts = [_chat(given, fields)] if isinstance(fields, ChatFields) else completion_prompts(given)
    params = fields.kv_transfer_params
    hands_over = settings.engine.role is EngineRole.PREFILL and params.get("do_remote_decode") is True
    remote = _remote_of(params, settings)
    _check_answers(len(prompts), fields.n, is_handed_over=hands_over or remote is not None)
    if fields.priority and not settings.engine.limits.by_priority:
        raise RequestError(
            f"Got priority {fields.priority} but Priority scheduling is not enabled.", param="priority"
        )
    counts = [_count(prompt, is_chat=api is not Api.COMPLETIONS) for prompt in prompts]
    choices = [
        _choice(prompt, tokens, fields, settings, index=at * fields.n + number, pin=hands_over)
        for at, (prompt, tokens) in enumerate(zip(prompts, counts, strict=True))
        for number in range(fields.n)
    ]
    return EngineCall(
        api=api,
        model=fields.model or settings.served_names[0],
        choices=tuple(choices),
        n=fields.n,
        prompt_tokens=sum(counts),
        stream=fields.stream,
        usage=_usage(fields),
        logprobs=fields.alternatives,
        echo=fields.echo,
        priority=fields.priority,
        pin=hands_over or (remote is not None and settings.is_bidirectional),
        remote=remote,
        fields=asked,
    )


def _check_answers(prompts: int, n: int, *, is_handed_over: bool) -> None:
    if is_handed_over and prompts * n > 1:
        raise RequestError(
            "kv_transfer_params: blocks of one prompt are kept for one answer; send one prompt and n=1.",
            param="kv_transfer_params",
        )
    if prompts * n > MAX_PROMPTS:
        raise RequestError(f"n: {prompts} prompts and n={n} make more than {MAX_PROMPTS} answers.", param="n")


def _choice(
    prompt: bytes,
    prompt_tokens: int,
    fields: SamplingFields,
    settings: ServeSettings,
    *,
    index: int,
    pin: bool,
) -> Choice:
    limit = _output_limit(fields, settings.longest_tokens(fields.priority), prompt_tokens)
    if fields.min_tokens > limit:
        raise RequestError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {fields.min_tokens}.",
            param="min_tokens",
        )
    salt = _salt(prompt, settings.flags.seed, fields.seed, index % fields.n)
    natural = limit if pin or fields.ignore_eos else _natural_length(salt, settings)
    natural = max(natural, fields.min_tokens)
    tokens, ends_by_stop = min(natural, limit), natural < limit
    stop = find_stop(
        salt,
        fields.stop,
        frozenset(fields.stop_token_ids),
        min_tokens=fields.min_tokens,
        is_shown=fields.include_stop_str_in_output,
    )
    if stop is not None and stop.tokens <= tokens:
        return Choice(index, prompt, prompt_tokens, stop.tokens, True, salt, stop.text_bytes, stop.reason)
    return Choice(index, prompt, prompt_tokens, tokens, ends_by_stop, salt, tokens * BYTES_PER_TOKEN)


def _salt(prompt: bytes, worker_seed: int, seed: int, number: int) -> int:
    salt = xxhash.xxh3_64_intdigest(prompt, worker_seed)
    if not seed and not number:
        return salt
    return xxhash.xxh3_64_intdigest(f"{salt} {seed} {number}".encode())


def _chat(given: Mapping[str, Any], fields: ChatFields) -> bytes:
    return chat_prompt(given.get("messages"), read_tools(given), asks_for_answer=fields.add_generation_prompt)


def _count(prompt: bytes, *, is_chat: bool) -> int:
    tokens = count_tokens(prompt)
    if not tokens:
        raise RequestError(
            "The prompt must hold at least one token.", param="messages" if is_chat else "prompt"
        )
    return tokens


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _check_model(fields: SamplingFields, settings: ServeSettings) -> None:
    if fields.model is not None and fields.model not in settings.served_names:
        raise RequestError(
            f"The model `{fields.model[:256]}` does not exist. Valid aliases: {', '.join(settings.served_names)}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )


def _output_limit(fields: SamplingFields, longest: int, prompt_tokens: int) -> int:
    room, asked = longest - prompt_tokens, fields.output_limit
    if room < 0:
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if room == 0:
        raise too_small("max_tokens", 0)
    if asked is None:
        return room if isinstance(fields, ChatFields) else min(room, DEFAULT_COMPLETION_TOKENS)
    if asked > longest:
        raise RequestError(
            f"max_tokens={asked} cannot be greater than max_model_len={longest}. Please request fewer output tokens. "
            f"(parameter=max_tokens, value={asked})",
            param="max_tokens",
        )
    return min(asked, room)


def _natural_length(salt: int, settings: ServeSettings) -> int:
    """Draw where the simulated model ends by itself: geometric, fixed by prompt and seed."""
    uniform = (xxhash.xxh3_64_intdigest(salt.to_bytes(8, "little")) + 1) / 2**64
    return max(1, math.ceil(-settings.flags.mean_output_tokens * math.log(uniform)))


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


def rejected_remote(body: bytes, settings: ServeSettings) -> RemoteKv | None:
    """Return the KV that a refused request was to fetch for decode; None if it names none.

    No other worker will fetch it, so its blocks can be freed. Source: vLLM 0.32, ``_with_kv_transfer_rejection_cleanup``.
    """
    if settings.engine.role is not EngineRole.DECODE or b"do_remote_prefill" not in body:
        return None
    try:
        return _remote_of(read_fields(_KvFields, _read_object(body)).kv_transfer_params, settings)
    except RequestError:
        return None


def _remote_of(params: Mapping[str, Any], settings: ServeSettings) -> RemoteKv | None:
    """Return the KV to fetch: a prompt's from prefill, or the conversation's so far from decode."""
    role = settings.engine.role
    if role is EngineRole.DECODE and params.get("do_remote_prefill") is True:
        return _remote(params, settings)
    is_next_turn = params.get("do_remote_decode") is True and params.get("remote_block_ids")
    if role is EngineRole.PREFILL and settings.is_bidirectional and is_next_turn:
        remote = _remote(params, settings)
        return remote if remote.tokens else None
    return None


def _remote(params: Mapping[str, Any], settings: ServeSettings) -> RemoteKv:
    try:
        given = _RemoteParams.model_validate(params)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise RequestError(
            "kv_transfer_params: a remote prompt needs remote_engine_id, remote_request_id, remote_host and "
            f"remote_port, as the other worker's answer gave them; {first['loc'][0]}: {first['msg']}.",
            param="kv_transfer_params",
        ) from exc
    own, cached = settings.engine.ranks, given.remote_prefill_cached_tokens
    if max(given.tp_size, own) % min(given.tp_size, own):
        raise RequestError(
            f"kv_transfer_params: tp_size {given.tp_size} and this worker's {own} cannot be joined; one must divide "
            "the other.",
            param="kv_transfer_params",
        )
    is_from_decode = settings.engine.role is EngineRole.PREFILL
    return RemoteKv(
        given.remote_engine_id,
        given.remote_request_id,
        given.remote_host,
        given.remote_port,
        given.tp_size,
        given.remote_num_tokens if is_from_decode else None,
        None if is_from_decode or type(cached) is not int else cached,
    )


class _KvFields(Fields):
    kv_transfer_params: dict[str, Any] = Field(default={})


class _RemoteParams(BaseModel):
    """Where another worker keeps KV, as its answer says; a port may be text."""

    remote_engine_id: str = Field(min_length=1)
    remote_request_id: str = Field(min_length=1)
    remote_host: str = Field(min_length=1)
    remote_port: int = Field(ge=1, le=65535)
    tp_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    remote_num_tokens: int | None = Field(default=None, ge=0)
    remote_prefill_cached_tokens: Any = None
