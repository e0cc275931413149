"""Loads a tokenizer for exact prefix keys: a model's, with the extra ``penstock[tokenizer]``, or simulated workers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.simulated_tokens import SIMULATED, token_ids
from penstock.router.chat_template import load_chat_template


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """Turns prompts into the tokens that workers see; any thread may call it.

    Attributes:
        text: Returns a text's ids, special tokens included.
        chat: Returns a chat's ids, from the body of its request, and at most so many characters of its prompt; None
            where its prompt is not known. None in the place of the whole: no chat's prompt is.
    """

    text: Callable[[str], Sequence[int]]
    chat: Callable[[Mapping[str, Any], int], Sequence[int] | None] | None = None


def load_tokenizer(path: str) -> PromptTokenizer:
    """Return a model's tokenizer, and its chat template where that lies beside it.

    Args:
        path: Of a ``tokenizer.json``, or ``simulated``.

    Raises:
        ConfigError: a library is not installed, or a file is none.
    """
    if path == SIMULATED:
        return PromptTokenizer(lambda text: token_ids(text.encode()))
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            "router.tokenizer: needs the package tokenizers; pip install 'penstock[tokenizer]'"
        ) from exc
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as exc:  # the library raises bare Exception
        raise ConfigError(f"router.tokenizer: {path}: {exc}") from exc

    def encode(text: str, *, special: bool) -> Sequence[int]:
        # Unlike encode, the batch call releases the interpreter's lock, so that the event loop goes on.
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    template = load_chat_template(Path(path))
    if template is None:
        return PromptTokenizer(lambda text: encode(text, special=True))

    def encode_chat(body: Mapping[str, Any], characters: int) -> Sequence[int] | None:
        prompt = template.render(body)
        if prompt is None:
            return None
        # Templates write the special tokens themselves; vLLM adds more only where it is asked to.
        return encode(prompt[:characters], special=body.get("add_special_tokens") is True)

    return PromptTokenizer(lambda text: encode(text, special=True), encode_chat)
