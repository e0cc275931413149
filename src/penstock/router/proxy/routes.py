"""The paths that the router relays to workers, and the properties of each API endpoint. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from penstock.core.http.anthropic import MESSAGES


class ApiEndpoint(StrEnum):
    """Endpoints in metrics; a fixed set, so that paths invented by clients add no time series.

    Attributes:
        is_relayed: Whether one worker answers a request completely without generating tokens: there is no separate prefill,
            no stream, and there are no prefix keys.
        is_optional: Whether a worker of the right model may lack the endpoint, because the engine, its version or the model
            does not support it.
        runs_model: Whether the model runs for a request; False for the tokenizer's endpoints, whose response times say
            nothing about the model's load.
    """

    is_relayed: bool
    is_optional: bool
    runs_model: bool

    COMPLETIONS = "completions"
    CHAT = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    POOLING = "pooling"
    CLASSIFY = "classify"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    MODELS = "models"
    WORKERS = "workers"
    OTHER = "other"


_OF_TOKENIZER: Final = frozenset({ApiEndpoint.TOKENIZE, ApiEndpoint.DETOKENIZE, ApiEndpoint.COUNT_TOKENS})
_RELAYED: Final = _OF_TOKENIZER | {
    ApiEndpoint.EMBEDDINGS,
    ApiEndpoint.RERANK,
    ApiEndpoint.SCORE,
    ApiEndpoint.POOLING,
    ApiEndpoint.CLASSIFY,
}
_OPTIONAL: Final = _RELAYED | {ApiEndpoint.RESPONSES, ApiEndpoint.MESSAGES}
for _each in ApiEndpoint:
    # Read several times for each request, so these are attributes and not properties.
    _each.is_relayed, _each.is_optional = _each in _RELAYED, _each in _OPTIONAL
    _each.runs_model = _each not in _OF_TOKENIZER

PATHS: Final[dict[str, ApiEndpoint]] = {
    "/v1/completions": ApiEndpoint.COMPLETIONS,
    "/v1/chat/completions": ApiEndpoint.CHAT,
    "/v1/responses": ApiEndpoint.RESPONSES,
    MESSAGES: ApiEndpoint.MESSAGES,
    f"{MESSAGES}/count_tokens": ApiEndpoint.COUNT_TOKENS,
    "/v1/embeddings": ApiEndpoint.EMBEDDINGS,
    "/rerank": ApiEndpoint.RERANK,
    "/v1/rerank": ApiEndpoint.RERANK,
    "/v2/rerank": ApiEndpoint.RERANK,
    "/score": ApiEndpoint.SCORE,
    "/v1/score": ApiEndpoint.SCORE,
    "/pooling": ApiEndpoint.POOLING,
    "/classify": ApiEndpoint.CLASSIFY,
    "/tokenize": ApiEndpoint.TOKENIZE,
    "/detokenize": ApiEndpoint.DETOKENIZE,
}
"""API endpoint of each path. Source of the paths: vLLM 0.32, ``vllm/entrypoints``."""


def not_served_by_worker(path: str) -> str:
    """Return the error message for a path that the router relays but the model's workers do not serve."""
    endpoint = PATHS[path]
    others = ", ".join(each for each, other in PATHS.items() if other is not endpoint)
    return (
        f"path: the workers of this model do not serve {path}; the model or its engine lacks it. The router relays "
        f"{others}, each where the model's workers serve it"
    )
