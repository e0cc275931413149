"""Determines which streams another worker cannot resume, and why: the table of docs/router.md. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.messages import chat_of, is_plain
from penstock.router.proxy.prompt_parts import MEDIA
from penstock.router.proxy.routes import ApiEndpoint

MAX_PROMPT_IDS: Final = 262_144
"""Chosen: their ids take at most 2 MiB, half of the largest event that the router reads."""
_MIN_BYTES_PER_TOKEN: Final = 2
"""Chosen: Chinese text has about three; code and digits two at least on average."""

CHAT_LIMITS: Final = ("max_completion_tokens", "max_tokens")
"""Keys of the maximum number of tokens of a chat's answer; the first one that is given holds."""
WITH_IDS: Final = "return_token_ids"
"""Key of a request whose events contain their tokens' ids, and whose first event contains the prompt's, as in vLLM."""


@dataclass(frozen=True, slots=True)
class NotResumable:
    """One reason for which another worker cannot resume a stream.

    A stream is resumed by text (the next worker's prompt ends with the text so far) or by tokens (it ends with their ids).

    Attributes:
        what: Description of the requests or streams to which the reason applies, as in the table of docs/router.md.
        why: Why another worker cannot continue such a stream exactly.
        holds: Returns whether the reason applies to a request; None if it depends on what the worker has sent.
        binds_tokens: Whether the reason prevents the stream from being resumed by tokens as well; if False, only by text.
    """

    what: str
    why: str
    holds: Callable[[CompletionRequest], bool] | None = None
    binds_tokens: bool = True

    def __str__(self) -> str:
        """Return the description and the reason, as the log shows them."""
        return f"{self.what}: {self.why}"

    @property
    def row(self) -> str:
        """Text of the reason for the table in docs/router.md: `what` and `why`, and whether the stream can be resumed by tokens."""
        return str(self) if self.binds_tokens else f"{self} (not with `continueBy: tokens`)"


def _has(*keys: str) -> Callable[[CompletionRequest], bool]:
    return lambda request: any(request.body.get(key) for key in keys)


def _is_shaped(request: CompletionRequest) -> bool:
    shape = request.body.get("response_format")
    return isinstance(shape, dict) and shape.get("type") not in {None, "text"}


def _must_call(request: CompletionRequest) -> bool:
    choice = request.body.get("tool_choice")
    return isinstance(choice, Mapping) or choice == "required"


def _is_plain(request: CompletionRequest) -> bool:
    prompts = (request.body.get(key) for key in ("messages", "input", "prompt"))
    return any(isinstance(each, str | list) for each in prompts)


def _is_open(request: CompletionRequest) -> bool:
    body = request.body
    return body.get("add_generation_prompt") is False and not body.get("continue_final_message")


def _is_plain_chat(body: Mapping[str, Any]) -> bool:
    """Return whether a request to /v1/messages is a chat of texts that ends with the user's."""
    if any(body.get(key) for key in ("tools", "thinking", "output_config", "stop_sequences")):
        return False
    roles = [each.get("role") for each in body["messages"]]
    return roles[-1] == "user" and "system" not in roles and is_plain(chat_of(body))


def _shows_media(request: CompletionRequest) -> bool:
    return any(part.kind.partition("/")[0] in MEDIA for part in request.parts)


def _is_more_than_text(body: Mapping[str, Any]) -> bool:
    text = body.get("text")
    shape = text.get("format") if isinstance(text, Mapping) else None
    is_shaped = isinstance(shape, Mapping) and shape.get("type") not in {None, "text"}
    keys = ("tools", "top_logprobs", "previous_response_id", "previous_input_messages")
    return is_shaped or any(body.get(key) for key in keys)


_GRAMMAR: Final = "its grammar begins with the answer"
_UNSEEN: Final = "they count only what a worker said itself"

OF_REQUEST: Final = (
    NotResumable(
        "`/v1/responses` with tools, `text.format`, `top_logprobs` or an earlier response",
        "its last events repeat all of it",
        lambda request: request.endpoint is ApiEndpoint.RESPONSES and _is_more_than_text(request.body),
    ),
    NotResumable(
        "`/v1/messages` with tools, `thinking`, `output_config`, `stop_sequences` or more than text",
        "its rest is a chat, which only text makes exactly; tokens whose text is held back have no events",
        lambda request: request.endpoint is ApiEndpoint.MESSAGES and not _is_plain_chat(request.body),
    ),
    NotResumable(
        "`n`, `best_of`, several prompts",
        "one stream mixes several answers",
        lambda request: not request.is_single,
    ),
    NotResumable("`use_beam_search`", "it searches several answers at once", _has("use_beam_search")),
    NotResumable("`response_format`", _GRAMMAR, _is_shaped),
    NotResumable(
        "`structured_outputs`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`",
        _GRAMMAR,
        _has("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ),
    NotResumable("`tool_choice` that requires a call", _GRAMMAR, _must_call),
    NotResumable(
        "`presence_penalty`, `frequency_penalty`, `bad_words`",
        _UNSEEN,
        _has("presence_penalty", "frequency_penalty", "bad_words"),
    ),
    NotResumable("`echo`", "it would repeat the prompt in the middle", _has("echo")),
    NotResumable("`suffix`", "it follows the text, not what was said", _has("suffix")),
    NotResumable("`prompt_logprobs`", "they came with the beginning", _has("prompt_logprobs")),
    NotResumable(
        "`truncate_prompt_tokens`",
        "the cut would fall elsewhere",
        _has("truncate_prompt_tokens"),
        binds_tokens=False,
    ),
    NotResumable(
        "`stop` with `include_stop_str_in_output`",
        "half a stop string may have been said",
        lambda request: bool(request.body.get("stop") and request.body.get("include_stop_str_in_output")),
        binds_tokens=False,
    ),
    NotResumable(
        f"`stop` with `{WITH_IDS}`",
        "text that is held back would be lost",
        lambda request: bool(request.body.get("stop") and request.body.get(WITH_IDS)),
        binds_tokens=False,
    ),
    NotResumable(
        f"a chat's `{WITH_IDS}`",
        "its rest is asked for as text, whose ids may differ",
        lambda request: request.endpoint is ApiEndpoint.CHAT and bool(request.body.get(WITH_IDS)),
        binds_tokens=False,
    ),
    NotResumable("`prompt_embeds`", "text cannot follow them", lambda request: not _is_plain(request)),
    NotResumable(
        f"a prompt of token ids without `{WITH_IDS}`",
        "what was said is text",
        lambda request: request.prompt_ids > 0 and not request.body.get(WITH_IDS),
        binds_tokens=False,
    ),
    NotResumable(
        "`add_generation_prompt: false`",
        "the answer has no message that could be left open",
        _is_open,
        binds_tokens=False,
    ),
    NotResumable(
        "`include_reasoning: false`",
        "the thoughts are not shown",
        lambda request: request.body.get("include_reasoning") is False,
    ),
)
"""Reasons that depend on the request; the first one that applies counts."""

BY_TEXT: Final = (
    NotResumable(
        "`/v1/responses` and `/v1/messages`",
        "their events carry no ids",
        lambda request: request.endpoint in {ApiEndpoint.RESPONSES, ApiEndpoint.MESSAGES},
    ),
    NotResumable(
        "a chat with `tools`, unless `tool_choice` is `none`",
        "only the engine's chat layer finds the calls in an answer",
        lambda request: bool(request.body.get("tools")) and request.body.get("tool_choice") != "none",
    ),
    NotResumable("images, audio, video and files", "their ids alone do not stand for them", _shows_media),
    NotResumable(
        "a chat's `logprobs`",
        "those of a completion have another form",
        lambda request: request.endpoint is ApiEndpoint.CHAT and bool(request.body.get("logprobs")),
    ),
    NotResumable(
        "`stop` at a temperature other than 0",
        "what the worker held back would be drawn again",
        lambda request: bool(request.body.get("stop")) and request.body.get("temperature") != 0,
    ),
    NotResumable(
        f"a prompt of more than {MAX_PROMPT_IDS:,} tokens",
        "its ids make too large an event",
        lambda request: (request.prompt_bytes // _MIN_BYTES_PER_TOKEN or request.prompt_ids) > MAX_PROMPT_IDS,
    ),
)
"""Reasons for which a stream is resumed by text even if the router resumes streams by tokens."""

STARTED_PART: Final = NotResumable("a tool call or reasoning that has begun", "no API takes up half of it")
NO_IDS: Final = NotResumable(f"`{WITH_IDS}` without ids in the stream", "the worker gives none")
ENDING: Final = NotResumable(
    "a response whose last events have begun", "the worker alone has the rest of them"
)
NOT_KEPT: Final = NotResumable("a stream beyond the 64 MiB kept of all", "what was said is forgotten")

UNKNOWN: Final = NotResumable(
    "an event of a form that the router does not know", "what it says cannot be continued"
)

OF_STREAM: Final = (STARTED_PART, ENDING, NO_IDS, NOT_KEPT, UNKNOWN)
"""Reasons that depend on what the worker has sent."""


def refusal_of(request: CompletionRequest) -> str:
    """Return why another worker could not resume a request's stream by its text; an empty text if one could.

    Only what the request shows is checked, and not what its stream contains.
    """
    if request.endpoint.is_relayed:
        return "its answer is complete at once"
    return next((str(each) for each in OF_REQUEST if each.holds is not None and each.holds(request)), "")


def takes_tokens(request: CompletionRequest, context_tokens: int | None) -> bool:
    """Return whether another worker could resume a request's stream by the ids of its tokens, if workers send these.

    Args:
        request: The client's request.
        context_tokens: Context length of the model in tokens; None if unknown. A chat without a limit on its response is
            resumed as a completion request, which needs this length as its limit, because a completion without a limit ends
            after 16 tokens.
    """
    if request.endpoint.is_relayed:
        return False
    binding = (*(each for each in OF_REQUEST if each.binds_tokens), *BY_TEXT)
    if any(each.holds is not None and each.holds(request) for each in binding):
        return False
    is_bounded = request.endpoint is not ApiEndpoint.CHAT or context_tokens is not None
    return is_bounded or any(isinstance(request.body.get(key), int) for key in CHAT_LIMITS)
