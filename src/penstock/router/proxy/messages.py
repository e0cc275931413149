"""Anthropic's Messages API as far as routing needs it: token counts, the equivalent chat, usage and events. Pure.

Workers support the API themselves, including KV transfer (vLLM 0.32, ``AnthropicMessagesRequest.kv_transfer_params``), so
that nothing is translated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_BILLING: Final = "x-anthropic-billing-header"
"""First characters of a system block of Claude Code that contains a hash of each request; vLLM 0.32 leaves the block out of the
prompt."""
EVENTS: Final = (b"event: message", b"event: content_block", b"event: ping", b"event: error")
"""First bytes of the API's events."""
_DELTA: Final = b"event: content_block_delta"
_STOP: Final = b"event: message_stop"
_ERROR: Final = b"event: error"
_CACHE_KEYS: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")


def is_delta(event: bytes) -> bool:
    """Return whether an event of Anthropic's Messages API contains a token."""
    return event.startswith(_DELTA)


def is_stop(event: bytes) -> bool:
    """Return whether an event of Anthropic's Messages API is the last one of a stream."""
    return event.startswith(_STOP)


def is_error(event: bytes) -> bool:
    """Return whether an event of Anthropic's Messages API ends a stream with an error."""
    return event.startswith(_ERROR)


def chat_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the body of a request to Anthropic's Messages API to chat messages, as vLLM does: the system prompt is the first.

    Each message has the keys ``role`` and ``content`` of OpenAI's chat API. The content is one text if it consists of
    text only, else the list of Anthropic's content blocks, unchanged.
    """
    system = _plain(body.get("system"))
    head = [{"role": "system", "content": system}] if system else []
    return [*head, *({**each, "content": _plain(each.get("content"))} for each in body["messages"])]


def _plain(content: Any) -> Any:
    """Return content as one text if it consists of text blocks only, else the list of blocks."""
    if not isinstance(content, list):
        return content
    kept = [each for each in content if not _text(each).startswith(_BILLING)]
    if all(isinstance(each, dict) and each.get("type") == "text" for each in kept):
        return "".join(map(_text, kept))
    return kept


def is_plain(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all messages of a chat from `chat_of` have one text as their content.

    The model's chat template then makes the same prompt in the router as on the workers.
    """
    return all(isinstance(each["content"], str) for each in chat)


def _text(block: Any) -> str:
    text = block.get("text") if isinstance(block, dict) else None
    return text if isinstance(text, str) else ""


def read_usage(usage: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the numbers of prompt tokens and of cached prompt tokens in a usage object of Anthropic's Messages API.

    A number is None if it is missing. The API reports cached tokens separately from ``input_tokens``; they are included in
    the returned number of prompt tokens.
    """
    total = usage.get("input_tokens")
    if type(total) is int:
        total += sum(cached for key in _CACHE_KEYS if type(cached := usage.get(key)) is int)
    return total, usage.get(_CACHE_KEYS[0])


def with_cached_tokens(usage: dict[str, Any], cached_tokens: int | None) -> None:
    """Replace, in place, the number of cached tokens in a decode worker's usage object by that of the prefill worker.

    A decode worker counts the tokens whose KV it fetched as cached, although the prompt was not found in a cache. The
    object is one of Anthropic's Messages API. If the prefill worker reports no number (``cached_tokens`` is None), all prompt
    tokens are counted as ``input_tokens``, and the number of cached tokens is left out.
    """
    total, _ = read_usage(usage)
    for key in _CACHE_KEYS:
        usage.pop(key, None)
    if type(total) is not int:
        return
    usage["input_tokens"] = total - (cached_tokens or 0)
    if cached_tokens is not None:
        usage[_CACHE_KEYS[0]] = cached_tokens


def usage_of(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the usage object of an event of Anthropic's Messages API, or of the message in the event; None if neither has one."""
    message = event.get("message")
    usage = message.get("usage") if isinstance(message, dict) else event.get("usage")
    return usage if isinstance(usage, dict) else None
