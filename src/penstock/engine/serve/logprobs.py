"""Log probabilities in the forms of both APIs, from the simulated distribution of `vocabulary.alternatives`. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.serve.protocol import Choice
from penstock.engine.serve.vocabulary import LOG_HALF, alternatives, words


def for_chat(choice: Choice, start: int, stop: int, count: int) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's output tokens [start, stop).

    Args:
        choice: The answer.
        start: First token.
        stop: After the last.
        count: Alternatives per token, >= 0.
    """
    return {
        "content": [
            {
                **_entry(word, LOG_HALF),
                "top_logprobs": [_entry(*each) for each in alternatives(word, count)],
            }
            for word in words(choice.salt, start, stop)
        ]
    }


def for_completion(
    choice: Choice, start: int, stop: int, count: int, *, echo: bool = False
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's output tokens [start, stop).

    Args:
        choice: The answer.
        start: First token.
        stop: After the last.
        count: Alternatives per token, >= 0.
        echo: The text begins with the prompt; its tokens come before token 0.
    """
    shown = _pieces(choice.prompt) if echo and start == 0 else []
    offset = start * BYTES_PER_TOKEN + (_characters(choice.prompt) if echo and start else 0)
    tokens = shown + [word.decode() for word in words(choice.salt, start, stop)]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    has_first = not shown
    return {
        "text_offset": offsets,
        # Nothing comes before the first token of a prompt, so that it has no probability.
        "token_logprobs": [LOG_HALF if has_first or at else None for at in range(len(tokens))],
        "tokens": tokens,
        "top_logprobs": [_top(token, count) if has_first or at else None for at, token in enumerate(tokens)],
    }


def prompt_text(choice: Choice) -> str:
    """Return the prompt as text; ids that are none are replaced."""
    return "".join(_pieces(choice.prompt))


@lru_cache(maxsize=64)
def _characters(prompt: bytes) -> int:
    """Return the length of a prompt's text; a stream asks at every token."""
    return sum(map(len, _pieces(prompt)))


def _pieces(prompt: bytes) -> list[str]:
    return [
        prompt[at : at + BYTES_PER_TOKEN].decode("utf-8", "replace")
        for at in range(0, len(prompt), BYTES_PER_TOKEN)
    ]


def _top(token: str, count: int) -> dict[str, float]:
    return {
        word.decode("utf-8", "replace"): value for word, value in alternatives(token.encode(), max(count, 1))
    }


def _entry(word: bytes, value: float) -> dict[str, Any]:
    return {"token": word.decode(), "logprob": value, "bytes": list(word)}
