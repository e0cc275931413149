"""Mooncake's KV transfer in vLLM: the router numbers a transfer, and decode finds the prefill engine at its bootstrap server. Pure.

Source: vLLM 0.32, ``kv_connector/v1/mooncake/mooncake_connector.py`` and its example proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from penstock.runtimes.kv_transfer import KvSource, KvTransferProtocol

_PARAMS: Final = "kv_transfer_params"
_FIRST_RANK: Final = "0"


class Mooncake(KvTransferProtocol):
    """A prompt's KV waits under the number that both of its requests carry."""

    is_given_back: ClassVar[bool] = False
    is_leased: ClassVar[bool] = False
    introduction_path: ClassVar[str | None] = "/query"

    def engine_of(self, introduction: Any) -> str | None:
        """Return the engine of the first data-parallel rank; None: it has not registered yet."""
        entry = introduction.get(_FIRST_RANK) if isinstance(introduction, dict) else None
        engine = entry.get("engine_id") if isinstance(entry, dict) else None
        return engine if isinstance(engine, str) else None

    def prefill_fields(self, source: KvSource) -> dict[str, Any]:
        """Ask the worker to keep the KV under a number; of an engine that is not known none could fetch it."""
        if source.engine is None:
            return {}
        return {
            _PARAMS: {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer(source)}
        }

    def decode_fields(self, source: KvSource, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return where that KV is; a prompt whose one token ended the text was freed."""
        if source.engine is None or answer is None or not _was_cut_short(answer):
            return None
        return {
            _PARAMS: {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": f"http://{source.address}",
                "remote_engine_id": source.engine,
                "transfer_id": _transfer(source),
            }
        }


MOONCAKE: Final = Mooncake()


def _transfer(source: KvSource) -> str:
    return f"xfer-{source.number:016x}"


def _was_cut_short(answer: Mapping[str, Any]) -> bool:
    """Whether its limit ended it, by OpenAI's word or Anthropic's."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    ended = choice.get("finish_reason") if isinstance(choice, dict) else answer.get("stop_reason")
    return ended in {"length", "max_tokens"}
