"""The KV transfer from prefill to decode, as vLLM's own proxies spell it. Pure.

Source: vLLM 0.32, NixlConnector: the prefill request asks for remote decode and one token; what the
prefill worker returns in ``kv_transfer_params`` goes unread into the decode request.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.refusal import RequestRefused

_PREFILL_PARAMS: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_DROPPED: Final = ("min_tokens", "stream_options")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill worker answered.

    Attributes:
        params: ``kv_transfer_params`` for decode; None when it kept no blocks (its one token ended the
            text, or the prompt is shorter than a block), and decode then computes the prompt itself.
        prompt_tokens: The prompt's length as the worker counted it, or None.
        cached_tokens: Prompt tokens found in the prefill worker's own cache, or None when it does not say.
    """

    params: dict[str, Any] | None
    prompt_tokens: int | None
    cached_tokens: int | None


def prefill_body(request: CompletionRequest) -> bytes:
    """Return the request that a prefill worker gets: no stream, one token, KV kept for a remote decode.

    Raises:
        RequestRefused: the body can be read and not written: it is nested deeper than orjson
            writes, which is 254 levels.
    """
    body = dict(request.body)
    for key in _DROPPED:
        body.pop(key, None)
    body["stream"] = False
    body["max_tokens"] = 1
    body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = _PREFILL_PARAMS
    return encoded(body)


def decode_body(
    request: CompletionRequest, params: dict[str, Any] | None, *, expired_leases: float | None = None
) -> bytes:
    """Return the client's own bytes with the prefill worker's parameters and a cache salt spliced in at the end.

    Args:
        request: The client's.
        params: From `Prefilled`.
        expired_leases: The prefill worker's count; None when it is not known.

    Raises:
        RequestRefused: see `prefill_body`.
    """
    if params is None:
        return request.raw
    added: dict[str, Any] = {"kv_transfer_params": params}
    epoch = _epoch(params, expired_leases)
    if epoch is not None:
        own = request.body.get("cache_salt")
        # vLLM takes 128 characters at most, and not all of them.
        added["cache_salt"] = hashlib.sha256(f"{own or ''}\0{epoch}".encode()).hexdigest()
        if own is not None:
            # Of a key that comes twice, not every reader takes the last.
            return encoded({**request.body, **added})
    # The body is an object with at least a model, so its last byte is the brace to move.
    return request.raw.rstrip()[:-1] + b"," + orjson.dumps(added)[1:]


def encoded(body: dict[str, Any]) -> bytes:
    """Return a body in bytes.

    Raises:
        RequestRefused: see `prefill_body`.
    """
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as exc:
        raise RequestRefused(
            400, f"body: cannot be passed on: {exc}; nest it 250 levels deep at most", code="invalid_request"
        ) from exc


def _epoch(params: dict[str, Any], expired_leases: float | None) -> str | None:
    """Return what tells transfers from those whose blocks may have been read after their lease; None: nothing does.

    A vLLM 0.32 decode worker caches them as the prompt's, and would find them again. Another process of the prefill
    worker and another count of its expired leases make another epoch; without a count each transfer is its own.
    """
    engine, prompt = params.get("remote_engine_id"), params.get("remote_request_id")
    if expired_leases is not None and isinstance(engine, str):
        return f"{engine}/{int(expired_leases)}"
    return prompt if isinstance(prompt, str) and prompt else None


def read_prefill_answer(answer: dict[str, Any]) -> Prefilled:
    """Read a prefill worker's completion object."""
    params = answer.get("kv_transfer_params")
    prompt_tokens, _, cached_tokens = read_usage(answer.get("usage"))
    return Prefilled(params if isinstance(params, dict) and params else None, prompt_tokens, cached_tokens)


def read_usage(usage: Any) -> tuple[int | None, int | None, int | None]:
    """Return prompt, completion and cached tokens of a ``usage`` object; None for what it does not say.

    The Responses API calls them input and output.
    """
    if not isinstance(usage, dict):
        return None, None, None
    prompt, completion = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    details = usage.get(f"{prompt}_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(usage.get(f"{prompt}_tokens")), _count(usage.get(f"{completion}_tokens")), _count(cached)


def with_cached_tokens(usage: dict[str, Any], cached_tokens: int | None) -> None:
    """Put the prefill's cached-token count into decode's ``usage``, in place.

    Decode counts every transferred token as cached, which says nothing about the prompt; when prefill
    does not tell its count, the field is null: unknown, not zero.
    """
    if cached_tokens is None:
        usage["prompt_tokens_details"] = None
        return
    details = usage.get("prompt_tokens_details")
    kept = details if isinstance(details, dict) else {}
    usage["prompt_tokens_details"] = {**kept, "cached_tokens": cached_tokens}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
