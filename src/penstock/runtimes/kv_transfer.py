"""How a runtime's prefill workers hand a prompt's KV to decode workers: what either request gets alongside the client's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol


@dataclass(frozen=True, slots=True)
class KvSource:
    """The prefill worker of one prompt.

    Attributes:
        host: At which other workers reach it.
        port: On which its transfers are arranged; None: not known.
        number: Of this prompt, 0 to 2^63 - 1, random: no two under way have the same.
        engine: By which its engine introduced itself, see `KvTransferProtocol.introduction_path`; None: not known.
    """

    host: str
    port: int | None
    number: int
    engine: str | None = None

    @property
    def address(self) -> str:
        """Host and port as within a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


class KvTransferProtocol(Protocol):
    """What the requests of one prompt carry.

    Attributes:
        limits: Of prefill's request, so that it makes one token.
        is_given_back: A decode worker tells the prefill worker of a prompt that none will fetch, when it refuses a request with
            these fields for a model that it has not.
        is_leased: Prefill workers free KV that is not read in time, and still answer who reads it.
        introduction_path: At `KvSource.port` of a prefill worker, JSON by which `engine_of` names its engine; None: not needed.
        is_concurrent: Both workers get the request at once and meet; else decode's follows prefill's answer.
        decodes_alone: A decode worker computes a prompt that none passes on.
        paths: Whose requests can carry the fields; None: all that generate text.
        keys: By which its workers take another worker's KV, in a request and in ``vllm_xargs``; no client may set them. Those of
            vLLM 0.32 where a runtime says nothing.
    """

    limits: ClassVar[Mapping[str, int]] = {"max_tokens": 1, "max_completion_tokens": 1}
    is_given_back: ClassVar[bool] = True
    is_leased: ClassVar[bool] = True
    introduction_path: ClassVar[str | None] = None
    is_concurrent: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True
    paths: ClassVar[frozenset[str] | None] = None
    keys: ClassVar[frozenset[str]] = frozenset({"kv_transfer_params", "ec_transfer_params"})

    def engine_of(self, introduction: Any) -> str | None:
        """Return the engine that an introduction names; None: none."""
        del introduction
        return None

    def prefill_fields(self, source: KvSource) -> dict[str, Any]:
        """Return what the prefill worker's request gets, alongside one token and no stream."""
        ...

    def decode_fields(self, source: KvSource, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return what the decode worker's request gets; None: the prefill worker kept nothing.

        Args:
            source: Of the prompt.
            answer: The prefill worker's completion object; None where both get the request at once.
        """
        ...


class Nixl(KvTransferProtocol):
    """vLLM's: the prefill worker's answer says where the KV is.

    Source: vLLM 0.32, NixlConnector, and vLLM's own proxies.
    """

    _REMOTE_DECODE: Final[dict[str, Any]] = {
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    }

    def prefill_fields(self, source: KvSource) -> dict[str, Any]:
        """Ask the worker to keep the KV for a remote decode."""
        del source
        return self._REMOTE_DECODE

    def decode_fields(self, source: KvSource, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the worker's parameters, unread."""
        del source
        params = None if answer is None else answer.get("kv_transfer_params")
        return {"kv_transfer_params": params} if isinstance(params, dict) and params else None


NIXL: Final = Nixl()
