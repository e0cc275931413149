"""The KV transfer from prefill to decode: its bodies, its lease, and giving it back.

What the bodies carry is the runtime's (`penstock.runtimes.kv_transfer`); leases, salts and releases are vLLM's.

A client may leave, or every decode worker refuse, between prefill and decode. Prefill workers take no such message from
a router; a decode worker does: when it refuses a request before the engine has it, it informs the prefill worker
that no read will come (vLLM 0.32, ``notify_kv_transfer_request_rejected``; simulated workers do the same). So any decode
worker is sent the prompt's parameters in a request for a model that does not exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from penstock.api import Role
from penstock.core.errors import PenstockError
from penstock.core.http.client import Timeouts
from penstock.core.http.messages import Headers
from penstock.core.kv_transfers import TransferResult
from penstock.core.logs import get_logger
from penstock.router.context import RouterContext
from penstock.router.core import versions
from penstock.router.core.retries import KvLease
from penstock.router.core.worker import Worker
from penstock.router.discovery.watch import read_page
from penstock.router.proxy import messages
from penstock.router.proxy.completion import CompletionRequest, changed_body, encoded
from penstock.runtimes.kv_transfer import KvSource, KvTransferProtocol

log = get_logger(__name__)

REFUSED_MODEL: Final = "penstock-kv-release"
"""Served by no worker."""
_RELEASE_TIMEOUTS: Final = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=5.0)
"""Real seconds; chosen: a refusal needs no engine step, and the lease ends by itself soon after."""
_PATIENCE_REAL_S: Final = 10.0
"""Chosen: a busy vLLM takes seconds for its page, and without it the prompt would be computed once more."""
_DROPPED: Final = ("min_tokens", "stream_options")
_COMPLETIONS_USAGE: Final = ("prompt_tokens", "completion_tokens", "prompt_tokens_details")
_RESPONSES_USAGE: Final = ("input_tokens", "output_tokens", "input_tokens_details")


@dataclass(slots=True)
class PrefillAnswer:
    """What a prefill worker answered; its prompt's way to decode.

    Attributes:
        fields: What decode's request gets; None when the worker kept no blocks (its one token ended the
            text, or the prompt is shorter than a block), and decode then computes the prompt itself.
        cached_tokens: Prompt tokens found in the prefill worker's own cache, or None when it does not say.
    """

    fields: dict[str, Any] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    lease: KvLease


def source_of(worker: Worker) -> KvSource:
    """Return a prefill worker as the source of one more prompt's KV."""
    host = urlsplit(worker.spec.url).hostname or ""
    return KvSource(host, worker.spec.side_channel_port, secrets.randbits(63), worker.kv_engine)


def prefill_body(request: CompletionRequest, kv_transfer: KvTransferProtocol, source: KvSource) -> bytes:
    """Return the request that a prefill worker gets: no stream, one token, and the KV transfer's fields."""
    kept = {key: value for key, value in request.body.items() if key not in _DROPPED}
    return encoded({**kept, "stream": False, **kv_transfer.limits, **kv_transfer.prefill_fields(source)})


def decode_body(request: CompletionRequest, prefilled: PrefillAnswer) -> bytes:
    """Return the client's own bytes with the KV transfer's fields and a cache salt spliced in at the end."""
    if prefilled.fields is None:
        return request.raw
    added, params = dict(prefilled.fields), prefilled.fields.get("kv_transfer_params")
    epoch = None if params is None else _epoch(params, prefilled.lease.expired_before)
    if epoch is not None:
        own = request.body.get("cache_salt") or ""
        # vLLM takes 128 characters at most, and not all of them.
        added["cache_salt"] = hashlib.sha256(f"{own}\0{epoch}".encode()).hexdigest()
    return changed_body(request, added)


def _epoch(params: dict[str, Any], expired_leases: float | None) -> str | None:
    """Return what separates transfers from those whose blocks may have been read after their lease; None: nothing does.

    A vLLM 0.32 decode worker caches them as the prompt's, and would find them again. Another process of the prefill
    worker and another count of its expired leases make another epoch; without a count each transfer is its own.
    """
    engine, prompt = params.get("remote_engine_id"), params.get("remote_request_id")
    if expired_leases is not None and isinstance(engine, str):
        return f"{engine}/{int(expired_leases)}"
    return prompt if isinstance(prompt, str) and prompt else None


def read_prefill_answer(
    answer: dict[str, Any], fields: dict[str, Any] | None, lease: KvLease
) -> PrefillAnswer:
    """Read a prefill worker's completion object; ``lease`` is on the blocks that it kept, if decode gets fields."""
    prompt_tokens, _, cached_tokens = read_usage(answer.get("usage"))
    return PrefillAnswer(fields, prompt_tokens, cached_tokens, lease)


def read_usage(usage: Any) -> tuple[int | None, int | None, int | None]:
    """Return prompt, completion and cached tokens of a ``usage`` object; None for what it does not say.

    The Responses API calls them input and output.
    """
    if not isinstance(usage, dict):
        return None, None, None
    prompt, completion, details = _RESPONSES_USAGE if "input_tokens" in usage else _COMPLETIONS_USAGE
    known = usage.get(details)
    if isinstance(known, dict) or prompt == "prompt_tokens":
        total, cached = usage.get(prompt), known.get("cached_tokens") if isinstance(known, dict) else None
    else:
        total, cached = messages.read_usage(usage)
    return _count(total), _count(usage.get(completion)), _count(cached)


def with_cached_tokens(usage: dict[str, Any], cached_tokens: int | None) -> None:
    """Put the prefill's cached-token count into decode's ``usage``, in place.

    Decode counts every transferred token as cached, which is not the prompt's cache hit; when prefill
    does not report its count, the field is null: unknown, not zero.
    """
    if "input_tokens" in usage:
        messages.with_cached_tokens(usage, cached_tokens)
        return
    if cached_tokens is None:
        usage["prompt_tokens_details"] = None
        return
    details = usage.get("prompt_tokens_details")
    kept = details if isinstance(details, dict) else {}
    usage["prompt_tokens_details"] = {**kept, "cached_tokens": cached_tokens}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


class KvTransfers:
    """Confirms KV transfers before their text goes to the client, and releases prompts that no decode worker fetches."""

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._workers = context.admission.core.pool
        self._clock = context.clock
        self._lease_s, self._is_leased = context.settings.lease_s, context.settings.kv_transfer.is_leased
        self._is_given_back = context.settings.kv_transfer.is_given_back
        wait_real_s = context.settings.config.health.timeout_real_seconds
        self._page_timeouts = Timeouts.each(max(wait_real_s, _PATIENCE_REAL_S))
        self._tasks: set[asyncio.Task[None]] = set()

    def unpaired(self, role: Role, transfer: PrefillAnswer | None) -> frozenset[str]:
        """Return the names of the workers of a stage to or from which no KV can go, because their versions differ."""
        pool = self._workers
        if not pool.versions_differ:
            return versions.NONE
        if role is Role.PREFILL:
            return versions.unpaired_prefills(pool, pool.routable(Role.DECODE, self._clock.now_s()))
        return versions.NONE if transfer is None else versions.unpaired_decodes(pool, transfer.lease.worker)

    def count(self, result: TransferResult) -> None:
        """Count what became of one prompt's KV."""
        self._context.metrics.kv_transfers[result] += 1

    async def confirm(self, lease: KvLease) -> bool:
        """Return whether the blocks were held when they were read; called once decode has shown a token.

        If they may not have been, the prompt has to be prefilled again.
        """
        now_s = self._clock.now_s()
        expired = None
        if (
            not self._is_leased
            or lease.is_within(self._lease_s, now_s)
            or lease.is_intact(expired := await self._expired_leases(lease.worker))
        ):
            self.count(TransferResult.DONE)
            return True
        self.count(TransferResult.LOST)
        log.warning(
            "KV transfer distrusted: leases of its prefill worker have expired since",
            prefill_worker=lease.worker.name,
            age_s=round(now_s - lease.granted_s, 3),
            expired_before=lease.expired_before,
            expired=expired,
        )
        return False

    async def _expired_leases(self, worker: Worker) -> float | None:
        try:
            page = await read_page(
                self._context.probes,
                worker.spec.url + self._context.settings.metrics_path,
                self._page_timeouts,
                own_names=self._context.settings.metric_names,
            )
            worker.expired_leases = page.expired_leases
        except PenstockError as exc:
            log.debug("metrics not readable", worker=worker.name, problem=str(exc))
            worker.expired_leases = None
        return worker.expired_leases

    async def close(self) -> None:
        """Wait for the releases under way; each is bounded."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def release(self, prefilled: PrefillAnswer, headers: Headers) -> None:
        """Give back the KV of a prompt, alongside requests; a release that fails costs one lease and nothing more.

        ``headers`` are the request's, for workers that ask for a key.
        """
        if not self._is_given_back:
            return
        task = asyncio.create_task(self._release(prefilled.fields or {}, headers), name="KV release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, fields: dict[str, Any], headers: Headers) -> None:
        counts = self._context.metrics.kv_releases
        # One that takes no requests now may still be able to pass a message on.
        candidates = self._workers.routable(Role.DECODE, self._clock.now_s()) or [
            each for each in self._workers if each.spec.role is Role.DECODE
        ]
        if not candidates:
            counts["no_worker"] += 1
            return
        # An idle vLLM that never met the prefill worker passes the message on with its next request only.
        worker = min(candidates, key=lambda each: (each.inflight_requests == 0, each.inflight_requests))
        url = f"{worker.spec.url}/v1/completions"
        asked = {"model": REFUSED_MODEL, "prompt": "x", "max_tokens": 1, **fields}
        try:
            answer = await self._context.pool.request(
                "POST", url, body=orjson.dumps(asked), headers=headers, timeouts=_RELEASE_TIMEOUTS
            )
            problem = None if answer.status == 404 else f"status {answer.status}"
        except PenstockError as exc:
            problem = str(exc)
        counts["released" if problem is None else "failed"] += 1
        if problem is not None:
            log.warning("KV of an abandoned request not released", worker=worker.name, problem=problem)
