"""What placing policies are told of a request: prefix keys, and how many tokens a key stands for. Pure.

Nothing here needs the model's tokenizer or template: prompts that share their beginning share their keys, and
that is all that keys must tell.
"""

from __future__ import annotations

from typing import Final

from penstock_router.policy.keys import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    HEAD_PARTS,
    MAX_BLOCKS,
    prompt_keys,
    render_chat,
    space_seed,
    token_keys,
)
from penstock_router.proxy.completion import CompletionRequest, Endpoint

_MOST_TEXT: Final = MAX_BLOCKS * BLOCK_BYTES
"""Characters of which any key could be made."""


def prefix_keys(request: CompletionRequest) -> tuple[int, ...]:
    """Return the chained keys of the prompt; empty where it cannot be read, as with embeddings."""
    body = request.body
    salt = body.get("cache_salt")
    seed = space_seed(salt if isinstance(salt, str) else "")
    if request.endpoint is Endpoint.CHAT:
        return prompt_keys(render_chat(body["messages"], body.get("tools")), seed=seed)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = "".join(prompt)
    if isinstance(prompt, str):
        return prompt_keys(prompt[:_MOST_TEXT].encode("utf-8", "surrogatepass"), seed=seed)
    if not isinstance(prompt, list) or not prompt:
        return ()
    try:
        return token_keys(prompt[0] if isinstance(prompt[0], list) else prompt, seed=seed)
    except (OverflowError, TypeError):
        # No token of any model; the worker will say so.
        return ()


def head_parts(request: CompletionRequest) -> int:
    """Return how many keys stand for the first block."""
    return 1 if request.prompt_ids else HEAD_PARTS


def block_tokens(request: CompletionRequest, bytes_per_token: float) -> float:
    """Return the prompt tokens that one key stands for."""
    return BLOCK_TOKENS if request.prompt_ids else BLOCK_BYTES / bytes_per_token
