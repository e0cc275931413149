"""What placing policies are told of a request: prefix keys, and how many tokens a key stands for. Pure.

By default nothing here needs the model's tokenizer or template: prompts that share their beginning share their keys,
and that is all that keys must tell. With a tokenizer, keys are made of tokens and prompts are counted exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock_router.policy.keys import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    HEAD_PARTS,
    MAX_BLOCKS,
    exact_keys,
    prompt_keys,
    render_chat,
    space_seed,
    token_keys,
)
from penstock_router.proxy.completion import CompletionRequest, Endpoint

_MOST_TEXT: Final = MAX_BLOCKS * BLOCK_BYTES
"""Characters of which any key could be made."""


@dataclass(frozen=True, slots=True)
class ExactKeys:
    """How keys are made of tokens.

    Attributes:
        tokenize: Returns the ids of a text; None where only prompts sent as ids are told apart by tokens.
        unit_tokens: Tokens of a worker's KV block, so that KV events make the same keys; None without events.
    """

    tokenize: Callable[[str], Sequence[int]] | None = None
    unit_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Keyed:
    """A prompt as policies see it.

    Attributes:
        chain: Chained keys; empty where the prompt cannot be read, as with embeddings.
        tokens: Prompt tokens, where they were counted here.
        is_text: Keys were made of bytes, not of tokens.
    """

    chain: tuple[int, ...]
    tokens: int | None = None
    is_text: bool = False

    @property
    def head_parts(self) -> int:
        """Keys that stand for the first block together."""
        return HEAD_PARTS if self.is_text else 1

    def block_tokens(self, bytes_per_token: float) -> float:
        """Return the prompt tokens that a block stands for."""
        return BLOCK_BYTES / bytes_per_token if self.is_text else BLOCK_TOKENS


def read_prompt(request: CompletionRequest, exact: ExactKeys | None = None) -> Keyed:
    """Return a request's keys.

    Args:
        request: The request.
        exact: Makes keys of tokens; None: of bytes, unless the prompt came as ids.
    """
    body = request.body
    salt = body.get("cache_salt")
    seed = space_seed(salt if isinstance(salt, str) else "")
    unit_tokens = None if exact is None else exact.unit_tokens
    text = _text_of(request)
    if text is not None:
        if exact is None or exact.tokenize is None:
            return Keyed(prompt_keys(text, seed=seed), is_text=True)
        # Without the model's template a chat is only like what the worker sees: its keys agree among themselves.
        decoded = text.decode("utf-8", "replace")
        tokens, chain = exact_keys(decoded, exact.tokenize, unit_tokens=unit_tokens, seed=seed)
        return Keyed(chain, tokens if request.endpoint is not Endpoint.CHAT else None)
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return Keyed(())
    try:
        ids = prompt[0] if isinstance(prompt[0], list) else prompt
        return Keyed(token_keys(ids, unit_tokens=unit_tokens, seed=seed))
    except (OverflowError, TypeError):
        # No token of any model; the worker will say so.
        return Keyed(())


def _text_of(request: CompletionRequest) -> bytes | None:
    body = request.body
    if request.endpoint is Endpoint.CHAT:
        return render_chat(body["messages"], body.get("tools"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = "".join(prompt)
    return prompt[:_MOST_TEXT].encode("utf-8", "surrogatepass") if isinstance(prompt, str) else None
