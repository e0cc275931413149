"""Loads a tokenizer for exact prefix keys: a model's, with the extra ``penstock[tokenizer]``, or simulated workers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_core.errors import ConfigError
from penstock_core.simulated_tokens import SIMULATED, token_ids


def load_tokenizer(path: str) -> Callable[[str], Sequence[int]]:
    """Return what turns a text into the model's token ids, special tokens included; any thread may call it.

    Args:
        path: Of a ``tokenizer.json``, or ``simulated``.

    Raises:
        ConfigError: the library is not installed, or the file is none.
    """
    if path == SIMULATED:
        return lambda text: token_ids(text.encode())
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

    def tokenize(text: str) -> Sequence[int]:
        # Unlike encode, the batch call releases the interpreter's lock, so that the event loop goes on.
        (encoding,) = tokenizer.encode_batch([text])
        ids: list[int] = encoding.ids
        return ids

    return tokenize
