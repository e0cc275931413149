"""The KV transfer from prefill to decode: the bodies of both requests, the lease, and the release of unused KV.

The fields of the bodies are defined by the runtime (`penstock.runtimes.kv_transfer`); leases, salts and releases are vLLM's.

Between prefill and decode, the client can disconnect, or every decode worker can refuse. Prefill workers accept no release
message from a router, but a decode worker sends one: if it refuses a request before the engine has it, it informs the prefill
worker that the KV will not be read (vLLM 0.32, ``notify_kv_transfer_request_rejected``; simulated workers do the same). So
the router sends the prompt's transfer parameters to any decode worker, in a request for a model that does not exist.
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
from penstock.router.proxy.not_resumable import WITH_IDS
from penstock.runtimes.kv_transfer import KvSource, KvTransferProtocol

log = get_logger(__name__)

REFUSED_MODEL: Final = "penstock-kv-release"
"""Model name of a release request; no worker serves it."""
_RELEASE_TIMEOUTS: Final = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=5.0)
"""Real seconds; chosen: a refusal needs no engine step, and the lease ends soon afterwards anyway."""
_PATIENCE_REAL_S: Final = 10.0
"""Chosen: a busy vLLM takes seconds to return its metrics page, and without the page the prompt would be computed again."""
_DROPPED: Final = ("min_tokens", "stream_options", WITH_IDS)
_COMPLETIONS_USAGE: Final = ("prompt_tokens", "completion_tokens", "prompt_tokens_details")
_RESPONSES_USAGE: Final = ("input_tokens", "output_tokens", "input_tokens_details")


@dataclass(slots=True)
class PrefillResponse:
    """Response of a prefill worker, and how the decode worker gets its KV.

    Attributes:
        fields: Fields to add to the decode request, by which the decode worker fetches the KV. None if the prefill worker
            holds no blocks (its one token ended the text, or the prompt is shorter than a block); decode then computes the
            prompt itself.
        prompt_tokens: Number of prompt tokens as counted by the prefill worker; None if not reported.
        cached_tokens: Number of prompt tokens found in the prefill worker's own cache; None if not reported.
        lease: Lease under which the prefill worker holds the blocks.
    """

    fields: dict[str, Any] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    lease: KvLease


def source_of(worker: Worker) -> KvSource:
    """Return how a decode worker finds a prompt's KV at the prefill worker ``worker``.

    The result contains the address of ``worker``, and a random id that identifies the transfer at both workers; each call
    makes a new one.
    """
    host = urlsplit(worker.spec.url).hostname or ""
    return KvSource(host, worker.spec.side_channel_port, secrets.randbits(63), worker.kv_engine)


def prefill_body(request: CompletionRequest, kv_transfer: KvTransferProtocol, source: KvSource) -> bytes:
    """Return the body of the request to a prefill worker: no stream, one token, and the KV transfer's fields.

    Args:
        request: Request of the client.
        kv_transfer: How the graph's runtime (such as vLLM) transfers KV.
        source: The prefill worker, from `source_of`.
    """
    kept = {key: value for key, value in request.body.items() if key not in _DROPPED}
    return encoded({**kept, "stream": False, **kv_transfer.limits, **kv_transfer.prefill_fields(source)})


def decode_body(request: CompletionRequest, prefilled: PrefillResponse) -> bytes:
    """Return the body of the request to a decode worker: the client's bytes plus the KV transfer's fields and a cache salt.

    ``prefilled`` is the prefill worker's response. Returns the client's bytes unchanged if that worker holds no blocks.
    """
    if prefilled.fields is None:
        return request.raw
    added, params = dict(prefilled.fields), prefilled.fields.get("kv_transfer_params")
    epoch = None if params is None else _epoch(params, prefilled.lease.expired_before)
    if epoch is not None:
        own = request.body.get("cache_salt") or ""
        # vLLM accepts at most 128 characters, and not every character.
        added["cache_salt"] = hashlib.sha256(f"{own}\0{epoch}".encode()).hexdigest()
    return changed_body(request, added)


def _epoch(params: dict[str, Any], expired_leases: float | None) -> str | None:
    """Return a key that separates this transfer's cache entries from those of transfers that may have been read after their lease.

    A vLLM 0.32 decode worker caches such blocks as the prompt's, and would find them again. A new process of the prefill
    worker, or a change of its count of expired leases, makes a new key; without a count each transfer has its own. Returns
    None if the parameters contain no id.
    """
    engine, prompt = params.get("remote_engine_id"), params.get("remote_request_id")
    if expired_leases is not None and isinstance(engine, str):
        return f"{engine}/{int(expired_leases)}"
    return prompt if isinstance(prompt, str) and prompt else None


def read_prefill_response(
    answer: dict[str, Any], fields: dict[str, Any] | None, lease: KvLease
) -> PrefillResponse:
    """Return what the router needs from a prefill worker's response: token counts, and how decode gets the prompt's KV.

    Args:
        answer: Completion object that the prefill worker returned.
        fields: Fields to add to the decode request, by which the decode worker fetches the KV; None if the prefill worker
            holds no blocks.
        lease: Lease of the held blocks.
    """
    prompt_tokens, _, cached_tokens = read_usage(answer.get("usage"))
    return PrefillResponse(fields, prompt_tokens, cached_tokens, lease)


def read_usage(usage: Any) -> tuple[int | None, int | None, int | None]:
    """Return the prompt, completion and cached tokens of a ``usage`` object; None for each count that is missing.

    The names of the Responses API (``input_tokens``, ``output_tokens``) are read as well. All three are None if ``usage``
    is not an object.
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
    """Replace, in place, the cached-token count in the ``usage`` of a decode worker by the count of the prefill worker.

    ``usage`` is the usage object of a response (OpenAI's or Anthropic's API), as the client is to see it. Decode counts every
    transferred token as cached, which is not the prompt's cache hit. If the prefill worker reports no count
    (``cached_tokens`` is None), the field becomes null: unknown, not zero.
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
    """Confirms that decode workers have read a prompt's KV before the response is sent to the client.

    If a prefill worker may have freed the KV blocks too early, the prompt is computed again. ``context`` contains the objects
    that the parts of the router share. The class also tells prefill workers to free the KV of prompts that no decode worker
    fetches.
    """

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._workers = context.admission.core.pool
        self._clock = context.clock
        self._lease_s, self._is_leased = context.settings.lease_s, context.settings.kv_transfer.is_leased
        self._must_be_released = context.settings.kv_transfer.is_given_back
        wait_real_s = context.settings.config.health.timeout_real_seconds
        self._page_timeouts = Timeouts.each(max(wait_real_s, _PATIENCE_REAL_S))
        self._tasks: set[asyncio.Task[None]] = set()

    def unpaired(self, role: Role, transfer: PrefillResponse | None) -> frozenset[str]:
        """Return the names of the workers of ``role`` that cannot take part in a KV transfer, because the engine versions differ.

        For prefill, these are the workers whose version no decode worker has; for decode, the workers whose version differs
        from that of the prefill worker of ``transfer``. Returns an empty set if all versions are equal, or for decode if
        ``transfer`` is None.
        """
        pool = self._workers
        if not pool.versions_differ:
            return versions.NONE
        if role is Role.PREFILL:
            return versions.unpaired_prefills(pool, pool.routable(Role.DECODE, self._clock.now_s()))
        return versions.NONE if transfer is None else versions.unpaired_decodes(pool, transfer.lease.worker)

    def count(self, result: TransferResult) -> None:
        """Add one prompt whose KV transfer ended with ``result`` (done, none or lost) to the counters of the router's metrics."""
        self._context.metrics.kv_transfers[result] += 1

    async def confirm(self, lease: KvLease) -> bool:
        """Return whether the prefill worker certainly held the KV blocks under ``lease`` until the decode worker had read them.

        Called after decode's first token. If this returns False, the prompt has to be computed again. May read the
        prefill worker's metrics. The outcome of the transfer is counted in the router's metrics.
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
        """Wait until the requests to prefill workers to free KV blocks, which run in the background, have ended; each has a timeout."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def release(self, prefilled: PrefillResponse, headers: Headers) -> None:
        """Tell a prefill worker in the background that no decode worker fetches a prompt's KV, so that it frees the blocks.

        If this fails, the blocks are freed when their lease ends.

        Args:
            prefilled: Response of the prefill worker that holds the KV.
            headers: Upstream headers of the request, for workers that require a key.
        """
        if not self._must_be_released:
            return
        task = asyncio.create_task(self._release(prefilled.fields or {}, headers), name="KV release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, fields: dict[str, Any], headers: Headers) -> None:
        counts = self._context.metrics.kv_releases
        # A worker that takes no requests now may still be able to forward the release.
        candidates = self._workers.routable(Role.DECODE, self._clock.now_s()) or [
            each for each in self._workers if each.spec.role is Role.DECODE
        ]
        if not candidates:
            counts["no_worker"] += 1
            return
        # An idle vLLM that has not transferred from this prefill worker before only forwards the release with its next
        # request.
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
