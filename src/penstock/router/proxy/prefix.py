"""Reads from a request what policies that use prefixes need: prefix keys, and the number of tokens per key.

`read_prompt` is pure; `PromptReader` calls it for the router. By default neither the model's tokenizer nor its chat template
is needed: prompts with a common prefix have common keys, which is all that keys must show. With a tokenizer, keys are made
from tokens and prompts are counted exactly, and chats are rendered by the model's template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.core.errors import ConfigError
from penstock.core.simulated_tokens import SIMULATED, token_ids
from penstock.router.chat_template import load_chat_template
from penstock.router.policy.prefixes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MAX_BYTES,
    SUB_BLOCK_KEYS,
    prompt_keys,
    render_chat,
    space_seed,
    token_keys,
)
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.messages import chat_of, is_plain
from penstock.router.proxy.routes import ApiEndpoint


class PromptTokenizer(NamedTuple):
    """Converts prompts to the tokens that workers see; can be called from any thread.

    Attributes:
        text: Returns the ids of a text, special tokens included.
        chat: Returns the ids of a chat, given the body of its request and the maximum number of characters of its prompt;
            returns None if its prompt cannot be determined. The attribute is None if no chat's prompt can be determined.
    """

    text: Callable[[str], Sequence[int]]
    chat: Callable[[Mapping[str, Any], int], Sequence[int] | None] | None = None


def load_tokenizer(path: str) -> PromptTokenizer:
    """Return a model's tokenizer, with its chat template if that is in the same folder.

    Args:
        path: Path of a ``tokenizer.json``, or `SIMULATED` for the tokenizer of simulated workers.

    Raises:
        ConfigError: a library is not installed, or a file cannot be read.
    """
    if path == SIMULATED:
        return PromptTokenizer(lambda text: token_ids(text.encode()))
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

        tokenizer = Tokenizer.from_file(path)
    except ImportError as exc:
        raise ConfigError(
            "router.tokenizer: needs the package tokenizers; pip install 'penstock[tokenizer]'"
        ) from exc
    except Exception as exc:  # the library raises bare Exception
        raise ConfigError(f"router.tokenizer: {path}: {exc}") from exc

    def encode(text: str, *, special: bool) -> Sequence[int]:
        # Unlike encode, the batch call releases the global interpreter lock, so that the event loop is not blocked.
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def encode_text(text: str) -> Sequence[int]:
        return encode(text, special=True)

    def encode_chat(body: Mapping[str, Any], characters: int) -> Sequence[int] | None:
        prompt = None if template is None else template.render(body)
        if prompt is None:
            return None
        # Templates contain the special tokens; vLLM adds more only on request.
        return encode(prompt[:characters], special=body.get("add_special_tokens") is True)

    template = load_chat_template(Path(path))
    return PromptTokenizer(encode_text, None if template is None else encode_chat)


_THREADS: Final = 2
"""Chosen: one long prompt does not delay the next; more threads would take CPU from the relay."""
_AT_ONCE_BYTES: Final = 1024
"""Maximum size of a prompt that is tokenized on the event loop: about a millisecond at a microsecond per byte, as much as a thread
can cost on a busy machine."""
_AT_ONCE_BODY_BYTES: Final = 4096
"""The same for the body, which contains more than text."""
_AT_ONCE_ITEMS: Final = 512
"""Maximum number of messages of a chat that is rendered on the event loop: a few milliseconds."""


_TEMPLATE_KEYS: Final = (
    *("chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs", "media_io_kwargs"),
    *("reasoning_effort", "reasoning", "thinking", "output_config"),
)
"""Fields of a request besides messages and tools that can change the first tokens of a prompt."""
_HISTORY_KEYS: Final = ("previous_response_id", "previous_input_messages", "conversation")
"""Fields of the Responses API that name messages, which the router does not know, before those of the request."""


class ExactKeys(NamedTuple):
    """How prefix keys (hashes of the blocks of a prompt, by which policies recognize common prefixes) are made from tokens.

    Attributes:
        tokenizer: Tokenizer of the model; None if keys are made from tokens only for prompts that clients send as token
            ids.
        engine_block_tokens: Number of tokens per KV block of a worker, so that the same keys can be made from the KV events
            of workers; None if workers send no events.
    """

    tokenizer: PromptTokenizer | None = None
    engine_block_tokens: int | None = None


class Keyed(NamedTuple):
    """The prefix keys of a prompt, one for each block of it, by which routing policies recognize common prefixes.

    Attributes:
        chain: Chained keys, made from bytes (``is_text``) or from tokens; empty if the prompt cannot be read.
        tokens: Number of prompt tokens, if it was counted exactly; else None.
        is_text: Whether the keys are made from bytes.
    """

    chain: tuple[int, ...]
    tokens: int | None = None
    is_text: bool = False

    @property
    def sub_block_keys(self) -> int:
        """Number of prefix keys that together represent the prompt's first block: 8 if they are made from bytes, else 1."""
        return SUB_BLOCK_KEYS if self.is_text else 1

    def block_tokens(self, bytes_per_token: float) -> float:
        """Return the number of prompt tokens per block: 512, or 2,048 / ``bytes_per_token`` if the keys are made from bytes."""
        return BLOCK_BYTES / bytes_per_token if self.is_text else BLOCK_TOKENS


def read_prompt(request: CompletionRequest, exact: ExactKeys | None = None) -> Keyed:
    """Return the prefix keys of a request's prompt, and the number of its tokens if they were counted exactly.

    The keys are made from tokens if the prompt was sent as token ids or if ``exact`` contains a tokenizer; otherwise from
    bytes. They are empty if the prompt has no readable form.

    Args:
        request: The request.
        exact: How keys are made from tokens; None makes keys from bytes, except for prompts sent as token ids.
    """
    body = request.body
    seed = _key_space(request)
    engine_block_tokens = None if exact is None else exact.engine_block_tokens
    ids = None if exact is None else _chat_ids(request, exact.tokenizer)
    if ids is not None:
        chain = token_keys(ids, engine_block_tokens=engine_block_tokens, seed=seed)
        return Keyed(chain, len(ids) if request.prompt_bytes <= MAX_BYTES else None)
    text = _text_of(request)
    if text is not None:
        seed = _key_space(request, from_text=True)
        if exact is None or exact.tokenizer is None:
            return Keyed(prompt_keys(text, seed=seed), is_text=True)
        # A chat without its template only resembles the worker's prompt, but chats still share keys with each other.
        decoded = text.decode("utf-8", "ignore")
        ids = exact.tokenizer.text(decoded)
        chain = token_keys(ids, engine_block_tokens=engine_block_tokens, seed=seed)
        is_complete = request.endpoint is ApiEndpoint.COMPLETIONS and request.prompt_bytes <= len(text)
        return Keyed(chain, len(ids) if is_complete else None)
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return Keyed(())
    try:
        ids = prompt[0] if isinstance(prompt[0], list) else prompt
        return Keyed(token_keys(ids, engine_block_tokens=engine_block_tokens, seed=seed))
    except (OverflowError, TypeError):
        # These are not token ids of any model; the worker will reject the request.
        return Keyed(())


_CUTTING_KEYS: Final = ("truncate_prompt_tokens", "truncation_side")
"""Fields of a request by which the engine cuts the prompt, usually at its start."""


def _has_unusual_start(request: CompletionRequest) -> bool:
    """Return whether the special tokens before a prompt are not those that requests to its API usually have.

    The engine adds them to completions; templates of chats contain them. vLLM 0.32 adds them to chats of the Responses API too.
    """
    if request.endpoint is ApiEndpoint.RESPONSES:
        return True
    usual = request.endpoint is ApiEndpoint.COMPLETIONS
    return request.body.get("add_special_tokens") not in {None, usual}


def _key_space(request: CompletionRequest, *, from_text: bool = False) -> int:
    """Return the seed of a request's keys: they are equal only for equal adapters, cache salts and ways to make tokens.

    Args:
        request: The request.
        from_text: Whether the keys are made from the text, in which special tokens that the engine adds do not appear.
    """
    body = request.body
    salt = body.get("cache_salt")
    salts = (salt,) if isinstance(salt, str) else ()
    ways = [(key, body[key]) for key in _CUTTING_KEYS if body.get(key) is not None]
    if from_text and _has_unusual_start(request):
        ways.append(("add_special_tokens", True))
    if ways:
        return space_seed("", request.adapter or "", *(salts or ("",)), repr(ways))
    return space_seed(*salts) if request.adapter is None else space_seed("", request.adapter, *salts)


def _chat_ids(request: CompletionRequest, tokenizer: PromptTokenizer | None) -> Sequence[int] | None:
    if tokenizer is None or tokenizer.chat is None or request.endpoint is ApiEndpoint.COMPLETIONS:
        return None
    body = request.body
    if request.endpoint is not ApiEndpoint.CHAT:
        if any(body.get(key) for key in ("tools", "thinking", "output_config", *_HISTORY_KEYS)):
            return None
        messages = _messages(request)
        if request.endpoint is ApiEndpoint.MESSAGES and not is_plain(messages):
            return None
        body = {"messages": messages, "chat_template_kwargs": body.get("chat_template_kwargs")}
        if request.endpoint is ApiEndpoint.RESPONSES:
            reasoning = request.body.get("reasoning")
            body["reasoning_effort"] = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
            body["add_special_tokens"] = True  # see `_has_unusual_start`
    return tokenizer.chat(body, MAX_BYTES)


def _text_of(request: CompletionRequest) -> bytes | None:
    body = request.body
    if request.endpoint is not ApiEndpoint.COMPLETIONS:
        options = {key: body[key] for key in (*_TEMPLATE_KEYS, *_HISTORY_KEYS) if body.get(key)}
        return render_chat(_messages(request), body.get("tools"), options)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = "".join(prompt)
    if not isinstance(prompt, str):
        return None
    return prompt[:MAX_BYTES].encode("utf-8", "surrogatepass")[:MAX_BYTES]


def _messages(request: CompletionRequest) -> Sequence[Mapping[str, Any]]:
    body = request.body
    if request.endpoint is ApiEndpoint.CHAT:
        messages: list[Mapping[str, Any]] = body["messages"]
        return messages
    if request.endpoint is ApiEndpoint.MESSAGES:
        return chat_of(body)
    instructions, given = body.get("instructions"), body["input"]
    head = [{"role": "system", "content": instructions}] if instructions else []
    return [*head, *([{"role": "user", "content": given}] if isinstance(given, str) else given)]


class PromptReader:
    """Makes the prefix keys of prompts without blocking the event loop: those of long prompts in threads.

    A prefix key is the hash of one block of a prompt and of all that precedes it; routing policies recognize common prefixes
    by these keys.

    ``exact`` says how keys are made from tokens; None makes them from bytes, except for prompts sent as token ids.
    """

    def __init__(self, exact: ExactKeys | None) -> None:
        self._exact = exact
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")

    def read_at_once(self, request: CompletionRequest) -> Keyed | None:
        """Return the prefix keys of a request's prompt; None if the prompt is so long that making them would delay other requests.

        The caller must then await `read`, which makes them in a thread.
        """
        if self._exact is not None and self._exact.tokenizer is not None:
            # A template includes tools and tool calls in the prompt as well.
            is_short = request.prompt_bytes <= _AT_ONCE_BYTES and len(request.raw) <= _AT_ONCE_BODY_BYTES
        else:
            items = request.body.get("input" if request.endpoint is ApiEndpoint.RESPONSES else "messages")
            is_short = not isinstance(items, list) or len(items) <= _AT_ONCE_ITEMS
        return read_prompt(request, self._exact) if is_short else None

    async def read(self, request: CompletionRequest) -> Keyed:
        """Return the prefix keys of a long prompt, and its number of tokens if exactly known; they are made in a thread.

        If the call is cancelled before the thread has started with it, the prompt is not read.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, read_prompt, request, self._exact)

    def close(self) -> None:
        """Drop the prompts that wait for a thread; those that a thread reads now are finished, which takes a limited time."""
        self._threads.shutdown(wait=False, cancel_futures=True)
