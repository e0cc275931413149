"""Reads where on another worker the KV of a prompt is, from a request's ``kv_transfer_params``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.engine.core.lease import MAX_RANKS
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.fields import RequestError, read_object
from penstock.engine.serve.settings import ServeSettings


class RemoteKv(BaseModel):
    """Location of a prompt's KV on another worker, from the ``kv_transfer_params`` of its response; a port may be a string.

    Attributes:
        engine_id: ID of the process that keeps the KV.
        request_id: ID of the request at that process.
        host: Host of that process.
        port: Port of that process.
        ranks: Number of GPUs that share the KV in that process (its tensor parallelism).
        tokens: Number of the prompt's leading tokens whose KV is kept there; None means all.
        cached_tokens: Number of prompt tokens that the prefill worker found in its own cache; None if unknown.
    """

    model_config = ConfigDict(frozen=True)

    engine_id: str = Field(min_length=1, alias="remote_engine_id")
    request_id: str = Field(min_length=1, alias="remote_request_id")
    host: str = Field(min_length=1, alias="remote_host")
    port: int = Field(ge=1, le=65535, alias="remote_port")
    ranks: int = Field(default=1, ge=1, le=MAX_RANKS, alias="tp_size")
    tokens: int | None = Field(default=None, ge=0, alias="remote_num_tokens")
    cached_tokens: int | None = Field(default=None, ge=0, alias="remote_prefill_cached_tokens")

    def notify_url(self, scheme: str) -> str:
        """Return the URL of that process for heartbeats and reads, with ``scheme`` ``http`` or ``https``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/kv/notify"


def rejected_remote(body: bytes, settings: ServeSettings) -> RemoteKv | None:
    """Return the KV that a refused request should have fetched; None if the request names no KV or cannot be read.

    No other worker will fetch that KV, so its blocks can be released. Source: vLLM 0.32,
    ``_with_kv_transfer_rejection_cleanup``.
    """
    if not settings.engine.role.fetches or b"do_remote_prefill" not in body:
        return None
    try:
        params = read_object(body).get("kv_transfer_params")
        return remote_of(params, settings) if isinstance(params, dict) else None
    except RequestError:
        return None


def remote_of(params: Mapping[str, Any], settings: ServeSettings) -> RemoteKv | None:
    """Return the KV to fetch: a prompt's from prefill, or the conversation so far from decode; None if there is none."""
    role = settings.engine.role
    if role.fetches and params.get("do_remote_prefill") is True:
        return _remote(params, settings).model_copy(update={"tokens": None})
    is_next_turn = params.get("do_remote_decode") is True and params.get("remote_block_ids")
    if role is EngineRole.PREFILL and settings.is_bidirectional and is_next_turn:
        remote = _remote(params, settings).model_copy(update={"cached_tokens": None})
        return remote if remote.tokens else None
    return None


def _remote(params: Mapping[str, Any], settings: ServeSettings) -> RemoteKv:
    try:
        remote = RemoteKv.model_validate(params)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise RequestError(
            "kv_transfer_params: a remote prompt needs remote_engine_id, remote_request_id, remote_host and "
            f"remote_port, as the other worker's answer gave them; {first['loc'][0]}: {first['msg']}.",
            param="kv_transfer_params",
        ) from exc
    own = settings.engine.ranks
    if max(remote.ranks, own) % min(remote.ranks, own):
        raise RequestError(
            f"kv_transfer_params: tp_size {remote.ranks} and this worker's {own} cannot be joined; one must divide "
            "the other.",
            param="kv_transfer_params",
        )
    return remote
