"""Determines which requests the decode worker computes alone, including the prompt, and why: the table of docs/router.md. Pure.

A prefill worker would compute these prompts to no effect, because KV transfers do not support the request, or the decode
worker must compute the prompt itself. `penstock.router.proxy.handler` checks this before it chooses a prefill worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.routes import ApiEndpoint


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """One reason for which the decode worker computes a prompt itself, without a prefill worker.

    Attributes:
        what: Description of the requests to which the reason applies, as in the table of docs/router.md.
        why: Why a prefill worker cannot help.
        holds: Returns whether the reason applies to a request.
    """

    what: str
    why: str
    holds: Callable[[CompletionRequest], bool]


def _is_response(request: CompletionRequest) -> bool:
    return request.endpoint is ApiEndpoint.RESPONSES


def _has_several(request: CompletionRequest) -> bool:
    return not request.is_single


def _wants_prompt_logprobs(request: CompletionRequest) -> bool:
    return request.body.get("prompt_logprobs") is not None


def _echoes_logprobs(request: CompletionRequest) -> bool:
    body = request.body
    is_completion = request.endpoint is ApiEndpoint.COMPLETIONS
    return is_completion and bool(body.get("echo")) and body.get("logprobs") is not None


def _searches_beams(request: CompletionRequest) -> bool:
    return bool(request.body.get("use_beam_search"))


_IN_PROMPT: Final = "the log probabilities of the prompt's tokens come from computing it, not from its KV"

REASONS: Final = (
    DecodeOnly("`/v1/responses`", "the API has no key for a KV transfer", _is_response),
    DecodeOnly(
        "`n` or `best_of` above 1, several prompts",
        "a transfer carries one prompt for one answer",
        _has_several,
    ),
    DecodeOnly("`prompt_logprobs`", _IN_PROMPT, _wants_prompt_logprobs),
    DecodeOnly("`echo` with `logprobs`", _IN_PROMPT, _echoes_logprobs),
    DecodeOnly("`use_beam_search`", "each beam is a request of its own in the engine", _searches_beams),
)
"""All reasons; the first one that applies counts. Sources: vLLM's issue 50792 and its scheduler, which drops the transfer of a
request for prompt log probabilities; its `BeamSearchParams`, which have no `kv_transfer_params`."""

_KEYS: Final = frozenset({"prompt_logprobs", "echo", "use_beam_search"})


def decode_only_reason(request: CompletionRequest) -> DecodeOnly | None:
    """Return the first reason for which the decode worker has to compute a request's prompt itself, without a prefill worker.

    Returns None if a prefill worker can compute it. All reasons are in `REASONS`.
    """
    if request.is_single and not _is_response(request) and _KEYS.isdisjoint(request.body):
        return None
    return next((each for each in REASONS if each.holds(request)), None)
