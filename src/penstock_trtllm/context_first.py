"""TensorRT-LLM's KV transfer: the context server's answer says where the KV is, with the first token that it made.

Source: TensorRT-LLM 1.3, ``serve/openai_disagg_service.py`` (schedule style context_first) and ``serve/openai_protocol.py``,
whose models refuse keys that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from penstock.runtimes.kv_transfer import KvSource, KvTransferProtocol

_PARAMS: Final = "disaggregated_params"
_FIRST_GLOBAL_ID: Final = 1 << 42
"""Lower numbers are those that each server gives its own requests."""
_GOES_ON: Final = frozenset({"length", "not_finished"})
"""Why a context request ended whose text is not at its end."""


class ContextFirst(KvTransferProtocol):
    """The context server computes the prompt and its first token; the generation server fetches both."""

    is_leased: ClassVar[bool] = False
    keys: ClassVar[frozenset[str]] = frozenset({_PARAMS})
    paths: ClassVar[frozenset[str] | None] = frozenset({"/v1/completions", "/v1/chat/completions"})
    limits: ClassVar[Mapping[str, int]] = {}
    is_given_back: ClassVar[bool] = False

    def prefill_fields(self, source: KvSource) -> dict[str, Any]:
        """Ask for the prompt and one token, by a number that no other prompt under way has."""
        number = source.number | _FIRST_GLOBAL_ID
        return {_PARAMS: {"request_type": "context_only", "disagg_request_id": number}}

    def decode_fields(self, source: KvSource, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the server's parameters, unread; None where its one token ended the text."""
        del source
        choices = None if answer is None else answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or choice.get("finish_reason") not in _GOES_ON:
            return None
        params = choice.get(_PARAMS)
        return {_PARAMS: {**params, "request_type": "generation_only"}} if isinstance(params, dict) else None
