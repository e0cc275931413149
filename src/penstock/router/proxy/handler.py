"""The way of one request: one stage (aggregated) or two (prefill, then decode), with retries before the first byte.

Called by ``app`` with a parsed request; answers it whatever happens, except when the client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.api import Role
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ClientDisconnected, PenstockError, StreamBroken, UpstreamError, WrongAnswer
from penstock.core.http.client import StreamingResponse
from penstock.core.http.problem import EVENT_STREAM, JSON
from penstock.core.http.relay import relay
from penstock.core.http.sse import encode_event
from penstock.core.logs import get_logger
from penstock.router.admission import (
    Admission,
    AssignmentContext,
    LiveAssignment,
    QueueTimeout,
    TierFirstToken,
)
from penstock.router.core.retries import FailedTry, RetryRules, RetryScope
from penstock.router.core.transfers import KvLease, KvTransfer, grant
from penstock.router.metrics import RouterMetrics
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.token_estimate import TokenEstimator
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.capacity import asking_others
from penstock.router.proxy.failures import (
    NOT_TAKEN,
    QUEUE_TIMEOUT,
    ErrorResponse,
    StageFailed,
    error_response_of,
)
from penstock.router.proxy.kv_release import KvReleases, KvTransferState
from penstock.router.proxy.kv_transfer import (
    Prefilled,
    decode_body,
    prefill_body,
    read_prefill_answer,
    read_usage,
    with_cached_tokens,
)
from penstock.router.proxy.lease_guard import LeaseGuard
from penstock.router.proxy.retry_after import retry_after
from penstock.router.proxy.stream_meter import Correction, RelayMeter
from penstock.router.proxy.stream_preamble import read_preamble
from penstock.router.proxy.upstream import UpstreamClient, read_complete
from penstock.router.proxy.worker_answer import encoded_again, read_completion

log = get_logger(__name__)

R = TypeVar("R")

_BACKOFF_REAL_S = 0.05
"""Chosen: the pause before the same worker is tried again, times the number of retries so far; a worker
that has just been replaced listens within a few of these."""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """What a decode answer needs whose KV came from another worker.

    Attributes:
        correction: How to rewrite its usage.
        lease: What must have held for its text to be trusted.
        hand_over: Knows whether a decode worker was asked for it.
    """

    correction: Correction
    lease: KvLease
    hand_over: KvTransferState


class CompletionHandler:
    """Serves completion requests.

    Attributes:
        retry_after_s: Least Retry-After of refusals, real seconds; it may change while requests are under way.
    """

    def __init__(
        self,
        *,
        upstream: UpstreamClient,
        admission: Admission,
        leases: LeaseGuard,
        releases: KvReleases,
        metrics: RouterMetrics,
        retries: RetryRules,
        estimator: TokenEstimator,
        clock: SimulatedClock,
        retry_after_s: int,
    ) -> None:
        """Tie the parts.

        Args:
            upstream: Calls workers.
            admission: Gives requests their workers.
            leases: Confirms KV transfers.
            releases: Gives back KV that nobody fetches.
            metrics: Counts.
            retries: Allows retries.
            estimator: Learns from prompts that workers have counted.
            clock: Simulated time.
            retry_after_s: Least Retry-After of refusals, real seconds.
        """
        self._upstream = upstream
        self._admission = admission
        self._entry = admission.core.entry
        self._is_disaggregated = self._entry is Role.PREFILL
        self._leases = leases
        self._releases = releases
        self._metrics = metrics
        self._retries = retries
        self._estimator = estimator
        self._clock = clock
        self.retry_after_s = retry_after_s

    async def serve(self, call: CompletionCall) -> None:
        """Answer one request; every error but a vanished client becomes an answer."""
        self._metrics.arrivals += 1
        self._metrics.arrived_tokens += call.prompt_tokens
        self._retries.arrived()
        try:
            await self._until_answered(call)
        except StageFailed as failure:
            call.error = "request_fault" if self._settle(call) else failure.failure.reason
            if call.responder.started:
                self._break_off(call, error_response_of(failure))
            elif failure.answer is not None:
                self._pass_on(call, failure)
            else:
                self._refuse(call, error_response_of(failure))
        except PenstockError as exc:
            if call.responder.disconnected or call.responder.started:
                raise
            problem = error_response_of(exc)
            call.error = problem.reason
            self._refuse(call, problem)
        finally:
            self._settle(call)

    def _settle(self, call: CompletionCall) -> bool:
        """Take back unproven failures at the end of a request; returns whether it failed on several workers."""
        workers = self._retries.settle(call.tries, self._clock.now_s())
        if workers:
            log.debug("request failed on several workers: counted against none", workers=workers)
        return bool(workers)

    async def _until_answered(self, call: CompletionCall) -> None:
        tried = False
        while True:
            try:
                await self._try(call, again=tried)
            except StageFailed as failure:
                await self._before_retry(call, failure)
                tried = True
            else:
                return

    async def _before_retry(self, call: CompletionCall, stage: StageFailed) -> None:
        """Return if the request may be tried again, after a pause where there is no other worker.

        Raises:
            StageFailed: the same failure, which is then final.
        """
        failure = stage.failure
        pauses = None
        if not call.responder.started:
            left_s = self._upstream.left_s(call)
            pauses = self._retries.retry(call.tries, failure, self._clock.now_s(), left_s=left_s)
        if pauses is None:
            raise stage
        self._metrics.retries[failure.reason] += 1
        if pauses:
            await asyncio.sleep(_BACKOFF_REAL_S * pauses)

    async def _try(self, call: CompletionCall, *, again: bool) -> None:
        if not self._is_disaggregated:
            await self._asking_others(call, self._entry, lambda: self._aggregated(call, again=again))
            return
        if call.request.is_single:
            prefilled, lease = await self._asking_others(
                call, self._entry, lambda: self._prefill(call, again=again)
            )
            await self._hand_over(call, prefilled, lease)
            return
        # A KV transfer carries the blocks of one prompt; several are computed where they are decoded.
        if not again:
            self._admission.check_tier(call.tier)
        self._admission.check_capacity(Role.DECODE)
        await self._asking_others(call, Role.DECODE, lambda: self._decode(call, call.request.raw, None))

    async def _hand_over(self, call: CompletionCall, prefilled: Prefilled, lease: KvLease) -> None:
        with self._releases.unless_taken(prefilled.params, call.upstream_headers) as hand_over:
            body = decode_body(call.request, prefilled.params, expired_leases=lease.expired_before)
            remote = None
            if prefilled.params:
                remote = RemotePrefill(Correction(prefilled.cached_tokens), lease, hand_over)
            try:
                await self._asking_others(call, Role.DECODE, lambda: self._decode(call, body, remote))
            except QueueTimeout as exc:
                # Here nobody renews its lease. The first stage's queue waits for a decode worker without one.
                raise StageFailed(FailedTry(QUEUE_TIMEOUT, RetryScope.ANYWHERE), error=exc) from exc

    async def _asking_others(
        self, call: CompletionCall, role: Role, attempt: Callable[[], Awaitable[R]]
    ) -> R:
        return await asking_others(call, role, attempt, admission=self._admission, metrics=self._metrics)

    async def _aggregated(self, call: CompletionCall, *, again: bool) -> None:
        async with self._acquire_entry(call, again=again) as assignment:
            self._count_wait(call, assignment)
            call.worker = assignment.worker.name
            await self._answer(call, assignment, call.request.raw, remote=None)

    async def _decode(self, call: CompletionCall, body: bytes, remote: RemotePrefill | None) -> None:
        tenant = "" if call.identity is None else call.identity.tenant
        arrival = Arrival(
            (),
            call.prompt_tokens,
            call.tries.avoid,
            is_non_streaming=not call.request.stream,
            tier=call.tier,
            tenant=tenant,
        )
        if call.trace is not None:
            call.trace.waits(Role.DECODE.value)
        async with self._admission.acquire(Role.DECODE, arrival) as assignment:
            call.queued_s += assignment.queued_s
            self._note_assigned(call, assignment)
            call.worker = assignment.worker.name
            log.debug("decode worker chosen", worker=call.worker, reason=assignment.reason)
            await self._answer(call, assignment, body, remote=remote)

    # ------------------------------------------------------------------ stages

    def _acquire_entry(self, call: CompletionCall, *, again: bool) -> AssignmentContext:
        """Return what waits for a worker of the first stage, which keeps the request for the block and no longer."""
        again = again or bool(call.tries.avoid)
        if call.trace is not None:
            call.trace.waits(self._entry.value)
        return self._admission.acquire(self._entry, self._arrival(call), again=again)

    def _count_wait(self, call: CompletionCall, assignment: LiveAssignment) -> None:
        call.queued_s += assignment.queued_s
        self._metrics.queue_time.observe(assignment.queued_s)
        self._note_assigned(call, assignment)

    def _note_assigned(self, call: CompletionCall, assignment: LiveAssignment) -> None:
        if call.trace is not None:
            call.trace.assigned(assignment, queued_real_s=self._clock.to_real_s(assignment.queued_s))

    def _arrival(self, call: CompletionCall) -> Arrival:
        """Return a call as the first stage's policy sees it."""
        keyed = call.keyed
        tenant = "" if call.identity is None else call.identity.tenant
        if keyed is None:
            return Arrival((), call.prompt_tokens, call.tries.avoid, tier=call.tier, tenant=tenant)
        return Arrival(
            keyed.chain,
            call.prompt_tokens,
            call.tries.avoid,
            keyed.block_tokens(self._estimator.bytes_per_token),
            keyed.sub_block_keys,
            call.session,
            # A prefill's own answer tells; a stream's first token does.
            is_non_streaming=not self._is_disaggregated and not call.request.stream,
            tier=call.tier,
            tenant=tenant,
        )

    async def _prefill(self, call: CompletionCall, *, again: bool) -> tuple[Prefilled, KvLease]:
        async with self._acquire_entry(call, again=again) as assignment:
            self._count_wait(call, assignment)
            worker = assignment.worker
            call.prefill_worker = worker.name
            async with self._upstream.open(call, assignment, prefill_body(call.request)) as response:
                content = await read_complete(response)
                lease = grant(worker, self._clock.now_s())
                prefilled = read_prefill_answer(read_completion(content, _type_of(response), worker.name))
                assignment.succeeded()
                self._admission.prefilled(assignment, prefilled.cached_tokens)
        self._retries.served(call.tries, worker, self._clock.now_s())
        self._count_prompt(call, prefilled.prompt_tokens)
        call.cached_tokens = prefilled.cached_tokens
        return prefilled, lease

    async def _answer(
        self, call: CompletionCall, assignment: LiveAssignment, body: bytes, *, remote: RemotePrefill | None
    ) -> None:
        lease = None if remote is None else remote.lease
        if remote is not None:
            self._leases.check_wait(assignment.queued_s)
            remote.hand_over.is_taken = True
        try:
            async with self._upstream.open(call, assignment, body, lease=lease) as response:
                if call.request.stream:
                    await self._stream(call, assignment, response, remote)
                else:
                    await self._send_complete(call, assignment, response, remote)
        except StageFailed as stage:
            if remote is not None and stage.failure.reason in NOT_TAKEN:
                remote.hand_over.is_taken = False
            raise

    async def _trusted(
        self, call: CompletionCall, assignment: LiveAssignment, remote: RemotePrefill | None
    ) -> None:
        """Return if the beginning of an answer may be sent.

        Raises:
            StageFailed: its text may be wrong.
        """
        assignment.proved()
        if remote is not None:
            await self._leases.confirm(remote.lease)
            transfer = KvTransfer(remote.lease.worker, assignment.worker)
            transfer.arrived(call.tries.lost_transfers, self._clock.now_s())
        self._retries.served(call.tries, assignment.worker, self._clock.now_s())

    async def _stream(
        self,
        call: CompletionCall,
        assignment: LiveAssignment,
        response: StreamingResponse,
        remote: RemotePrefill | None,
    ) -> None:
        name, content_type = assignment.worker.name, _type_of(response)
        if not content_type.lower().startswith(EVENT_STREAM.encode()):
            shown = content_type.decode("latin-1") or "no content type"
            raise WrongAnswer(f"{name} answered a stream with {shown}")
        preamble = await read_preamble(response, name)
        await self._trusted(call, assignment, remote)
        responder = call.responder
        correction = None if remote is None else remote.correction
        meter = RelayMeter(
            self._metrics,
            assignment,
            on_first_token=lambda: self._note_first_token(call, assignment),
            arrived_real_s=call.arrived_real_s,
            speed=self._clock.speed,
            correction=correction,
        )
        try:
            responder.start(200, content_type=EVENT_STREAM, headers=call.headers)
            responder.write(meter.observe(preamble))
            await relay(response, responder, observe=meter.observe)
            if not meter.is_complete:
                raise StreamBroken(f"{name} ended its stream without [DONE]")
            responder.write(meter.rest())
            responder.end()
            self._settle_stream(call, assignment, meter)
        except (asyncio.CancelledError, ClientDisconnected):
            if meter.is_done:
                # Many clients close at [DONE], without waiting for the end of the body.
                call.is_delivered = True
                self._settle_stream(call, assignment, meter)
            raise
        except UpstreamError:
            if meter.is_done:
                responder.end()
                self._settle_stream(call, assignment, meter)
                return
            if meter.is_mid_event and correction is None:
                # The client has the beginning of an event; what follows must not become part of it.
                responder.write(b"\n\n")
            raise
        finally:
            self._note_stream(call, meter)

    def _settle_stream(self, call: CompletionCall, assignment: LiveAssignment, meter: RelayMeter) -> None:
        """Take note of a stream that came to its end, which may be an error of the worker's own."""
        if meter.has_error:
            call.error = "upstream_broken"
            assignment.failed(self._clock.now_s(), "ended a stream by an error event")
        else:
            assignment.succeeded()

    async def _send_complete(
        self,
        call: CompletionCall,
        assignment: LiveAssignment,
        response: StreamingResponse,
        remote: RemotePrefill | None,
    ) -> None:
        content = await read_complete(response)
        self._admission.prefilled(assignment, measured=False)
        answer = read_completion(content, _type_of(response), assignment.worker.name)
        usage = answer.get("usage")
        if remote is not None and isinstance(usage, dict):
            with_cached_tokens(usage, remote.correction.cached_tokens)
            content = encoded_again(answer)
        await self._trusted(call, assignment, remote)
        assignment.succeeded()
        self._note_usage(call, usage)
        call.responder.send(200, content, content_type=JSON, headers=call.headers)

    # ------------------------------------------------------------------ counting

    def _note_first_token(self, call: CompletionCall, assignment: LiveAssignment) -> None:
        self._admission.prefilled(assignment)
        if call.trace is not None:
            call.trace.first_token()
        if self._admission.core.tiers is not None:
            self._admission.record_tier_event(
                call.tier, TierFirstToken(self._clock.to_model_s(call.age_real_s()))
            )

    def _note_stream(self, call: CompletionCall, meter: RelayMeter) -> None:
        call.ttft_s = meter.ttft_s
        self._note_usage(call, meter.usage)
        call.output_tokens = max(call.output_tokens, meter.tokens)

    def _note_usage(self, call: CompletionCall, usage: Any) -> None:
        prompt_tokens, output_tokens, cached_tokens = read_usage(usage)
        self._count_prompt(call, prompt_tokens)
        if output_tokens is not None:
            call.output_tokens = output_tokens
        if cached_tokens is not None:
            call.cached_tokens = cached_tokens

    def _count_prompt(self, call: CompletionCall, prompt_tokens: int | None) -> None:
        if prompt_tokens is None or call.prompt_counted:
            return
        call.prompt_tokens = prompt_tokens
        call.prompt_counted = True
        if call.request.prompt_bytes and not call.request.prompt_ids:
            self._estimator.learn(call.request.prompt_bytes, prompt_tokens)

    # ------------------------------------------------------------------ answers other than success

    def _refuse(self, call: CompletionCall, problem: ErrorResponse) -> None:
        headers = call.headers
        if problem.retry_after:
            headers = (*headers, self._retry_after(problem.retry_after_s, is_rate=problem.is_rate))
        call.responder.send(problem.status, problem.body(), headers=headers)

    def _retry_after(self, expected_s: float | None, *, is_rate: bool = False) -> tuple[bytes, bytes]:
        expected_real_s = None if expected_s is None else self._clock.to_real_s(expected_s)
        value = retry_after(expected_real_s, floor_s=self.retry_after_s, is_rate=is_rate)
        return (b"retry-after", value)

    def _pass_on(self, call: CompletionCall, failure: StageFailed) -> None:
        answer = failure.answer
        assert answer is not None  # noqa: S101 - the caller has looked
        headers = call.headers
        if answer.retry_after is not None:
            headers = (*headers, (b"retry-after", answer.retry_after))
        elif answer.status == 503:
            headers = (*headers, self._retry_after(None))
        call.responder.send(answer.status, answer.body, headers=headers)

    def _break_off(self, call: CompletionCall, problem: ErrorResponse) -> None:
        """Tell a client in mid-stream that its stream is broken, and close: it must not look complete."""
        call.responder.write(encode_event(problem.body()))
        call.responder.break_off()


def _type_of(response: StreamingResponse) -> bytes:
    return response.headers.get(b"content-type", b"")
