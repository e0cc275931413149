"""SGLang's KV transfer: prefill and decode get the request at once, and meet in a room that the router numbers.

Source: SGLang 0.5.23, ``disaggregation/common/conn.py``, and the fields of its OpenAI protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from penstock.runtimes.kv_transfer import KvSource, KvTransferProtocol

_DEFAULT_PORT: Final = 8998
"""SGLang's own, of ``--disaggregation-bootstrap-port``."""


class Bootstrap(KvTransferProtocol):
    """The prefill worker's bootstrap server introduces the two."""

    is_concurrent: ClassVar[bool] = True
    decodes_alone: ClassVar[bool] = False
    is_leased: ClassVar[bool] = False
    keys: ClassVar[frozenset[str]] = frozenset(
        {"bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"}
    )
    paths: ClassVar[frozenset[str] | None] = frozenset({"/v1/completions", "/v1/chat/completions"})

    def prefill_fields(self, source: KvSource) -> dict[str, Any]:
        """Return the room."""
        return {
            "bootstrap_host": source.host,
            "bootstrap_port": source.port or _DEFAULT_PORT,
            "bootstrap_room": source.number,
        }

    def decode_fields(self, source: KvSource, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the same room."""
        del answer
        return self.prefill_fields(source)
