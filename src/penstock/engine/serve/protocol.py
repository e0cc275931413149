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

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.core.prefix_keys import count_tokens
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.fields import RequestError, flag, integer, mapping, too_small
from penstock.engine.serve.notifications import MAX_RANKS
from penstock.engine.serve.prompts import MAX_PROMPTS, chat_prompt, completion_prompts
from penstock.engine.serve.response_fields import read_response_fields
from penstock.engine.serve.sampling import Sampling, read_sampling, read_tools
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
        host, port: Where that process listens.
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
        prompt_tokens: Their number.
        output_tokens: Tokens that will be generated.
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
        api: Which API it came by.
        model: Name to answer with.
        choices: What is generated, at least one.
        n: Answers to each prompt.
        prompt_tokens: Of all prompts, each counted once.
        usage: Which events of a stream carry the counts.
        logprobs: Alternatives per token to show; None: no log probabilities.
        echo: The prompt comes before the text.
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
    """Return the call in ``body``.

    Raises:
        RequestError: malformed, unsupported, too long, or for another model.
    """
    asked = _read_object(body)
    _check_model(asked, settings)
    fields = read_response_fields(asked) if api is Api.RESPONSES else asked
    is_chat = api is not Api.COMPLETIONS
    sampling = read_sampling(fields, is_chat=is_chat)
    prompts = [_chat(fields)] if is_chat else completion_prompts(fields)
    params = mapping(fields, "kv_transfer_params")
    role = settings.engine.role
    hands_over = role is EngineRole.PREFILL and params.get("do_remote_decode") is True
    remote = _remote_of(params, settings)
    _check_answers(len(prompts), sampling.n, is_handed_over=hands_over or remote is not None)
    counts = [_count(prompt, is_chat=is_chat) for prompt in prompts]
    priority = _priority(fields, settings)
    terms = _Terms(fields, settings, sampling, is_chat=is_chat, pin=hands_over, priority=priority)
    choices = [
        _choice(index, prompt, tokens, terms)
        for index, (prompt, tokens) in enumerate(
            (prompt, tokens)
            for prompt, tokens in zip(prompts, counts, strict=True)
            for _ in range(sampling.n)
        )
    ]
    return EngineCall(
        api=api,
        model=fields.get("model") or settings.served_names[0],
        choices=tuple(choices),
        n=sampling.n,
        prompt_tokens=sum(counts),
        stream=flag(fields, "stream"),
        usage=_usage(fields),
        logprobs=sampling.logprobs,
        echo=sampling.echo,
        priority=priority,
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


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all choices of a request have in common."""

    fields: Mapping[str, Any]
    settings: ServeSettings
    sampling: Sampling
    is_chat: bool
    pin: bool
    priority: int


def _choice(index: int, prompt: bytes, prompt_tokens: int, terms: _Terms) -> Choice:
    settings, sampling = terms.settings, terms.sampling
    longest = settings.longest_tokens(terms.priority)
    limit = _output_limit(terms.fields, longest, prompt_tokens, is_chat=terms.is_chat)
    if sampling.min_tokens > limit:
        raise RequestError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {sampling.min_tokens}.",
            param="min_tokens",
        )
    salt = _salt(prompt, settings.flags.seed, sampling.seed, index % sampling.n)
    natural = limit if terms.pin or sampling.ignore_eos else _natural_length(salt, settings)
    natural = max(natural, sampling.min_tokens)
    tokens, ends_by_stop = min(natural, limit), natural < limit
    stop = find_stop(
        salt,
        sampling.stop,
        sampling.stop_ids,
        min_tokens=sampling.min_tokens,
        is_shown=sampling.shows_stop,
    )
    if stop is not None and stop.tokens <= tokens:
        return Choice(index, prompt, prompt_tokens, stop.tokens, True, salt, stop.text_bytes, stop.reason)
    return Choice(index, prompt, prompt_tokens, tokens, ends_by_stop, salt, tokens * BYTES_PER_TOKEN)


def _salt(prompt: bytes, worker_seed: int, seed: int, number: int) -> int:
    """Return what chooses the words; another seed, or another answer to the same prompt, has others."""
    salt = xxhash.xxh3_64_intdigest(prompt, worker_seed)
    if not seed and not number:
        return salt
    return xxhash.xxh3_64_intdigest(f"{salt} {seed} {number}".encode())


def _chat(fields: Mapping[str, Any]) -> bytes:
    asks = fields.get("add_generation_prompt")
    return chat_prompt(fields.get("messages"), read_tools(fields), asks_for_answer=asks is not False)


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


def _check_model(fields: Mapping[str, Any], settings: ServeSettings) -> None:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestError("model must be a string.", param="model")
    if model is not None and model not in settings.served_names:
        raise RequestError(
            f"The model `{model[:256]}` does not exist. Valid aliases: {', '.join(settings.served_names)}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )


def _output_limit(fields: Mapping[str, Any], longest: int, prompt_tokens: int, *, is_chat: bool) -> int:
    room = longest - prompt_tokens
    if room < 0:
        raise RequestError(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if room == 0:
        raise too_small("max_tokens", 0)
    asked = integer(fields, "max_completion_tokens", lowest=1) if is_chat else None
    if asked is None:
        asked = integer(fields, "max_tokens", lowest=1)
    if asked is None:
        return room if is_chat else min(room, DEFAULT_COMPLETION_TOKENS)
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


def _priority(fields: Mapping[str, Any], settings: ServeSettings) -> int:
    priority = integer(fields, "priority") or 0
    if priority and not settings.by_priority:
        raise RequestError(
            f"Got priority {priority} but Priority scheduling is not enabled.", param="priority"
        )
    return priority


def _usage(fields: Mapping[str, Any]) -> Usage:
    options = mapping(fields, "stream_options")
    if options and not flag(fields, "stream"):
        raise RequestError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    if not flag(options, "include_usage"):
        return Usage.NONE
    return Usage.EVERY_EVENT if flag(options, "continuous_usage_stats") else Usage.LAST_EVENT


def rejected_remote(body: bytes, settings: ServeSettings) -> RemoteKv | None:
    """Return the KV that a refused request was to fetch for decode; None if it names none.

    Nobody else will fetch it, so its blocks can be freed. Source: vLLM 0.32, ``_with_kv_transfer_rejection_cleanup``.
    """
    if settings.engine.role is not EngineRole.DECODE or b"do_remote_prefill" not in body:
        return None
    try:
        params = mapping(_read_object(body), "kv_transfer_params")
        return _remote_of(params, settings)
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
    engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    host, port = params.get("remote_host"), params.get("remote_port")
    is_number = type(port) is int or (isinstance(port, str) and port.isdecimal() and len(port) <= 5)
    number = int(port) if is_number and port is not None else 0
    texts = (engine_id, request_id, host)
    if not all(isinstance(text, str) and text for text in texts) or not 0 < number < 65536:
        raise RequestError(
            "kv_transfer_params: a remote prompt needs remote_engine_id, remote_request_id, remote_host and "
            "remote_port, as the other worker's answer gave them.",
            param="kv_transfer_params",
        )
    is_from_decode = settings.engine.role is EngineRole.PREFILL
    return RemoteKv(
        str(engine_id),
        str(request_id),
        str(host),
        number,
        _remote_ranks(params, settings.engine.ranks),
        integer(params, "remote_num_tokens", lowest=0) if is_from_decode else None,
        None if is_from_decode else _whole(params.get("remote_prefill_cached_tokens")),
    )


def _remote_ranks(params: Mapping[str, Any], own: int) -> int:
    ranks = integer(params, "tp_size", lowest=1) or 1
    if ranks > MAX_RANKS or max(ranks, own) % min(ranks, own):
        raise RequestError(
            f"kv_transfer_params: tp_size {ranks} and this worker's {own} cannot be joined; one must divide the other.",
            param="kv_transfer_params",
        )
    return ranks


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
