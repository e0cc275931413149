"""The way of one request: one stage (aggregated) or two (prefill, then decode), with retries before the first byte.

Called by ``app`` with a parsed request; answers it whatever happens, except when the client is gone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from penstock.api import Role
from penstock.core.errors import (
    ClientDisconnected,
    SaturatedError,
    StreamBroken,
    UpstreamConnectError,
    UpstreamError,
    WrongAnswer,
)
from penstock.core.http.client import StreamingResponse, Timeouts
from penstock.core.http.messages import EVENT_STREAM, JSON
from penstock.core.http.sse import encode_event
from penstock.core.http.streaming import relay
from penstock.core.kv_transfers import TransferResult
from penstock.core.logs import get_logger
from penstock.router.admission import AdmissionError
from penstock.router.context import RouterContext
from penstock.router.core.retries import FailedTry, KvLease, KvTransfer, RefusalReason, RetryRules, RetryScope
from penstock.router.policy.arrival import Arrival
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.failures import (
    AT_CAPACITY,
    NOT_TAKEN,
    QUEUE_TIMEOUT,
    SATURATED,
    ErrorReply,
    ErrorResponse,
    StageFailed,
    failed_stage,
    refusal,
    retry_after,
    retry_scope_of,
    saturated,
)
from penstock.router.proxy.kv_transfer import (
    KvTransfers,
    Prefilled,
    decode_body,
    prefill_body,
    read_prefill_answer,
    read_usage,
    with_cached_tokens,
)
from penstock.router.proxy.rest import StreamRests
from penstock.router.proxy.stream import RelayMeter, encoded_again, read_completion, read_preamble

log = get_logger(__name__)

_BACKOFF_REAL_S = 0.05
"""Chosen: the pause before the same worker is tried again, times the number of retries so far; a worker
that has just been replaced listens within a few of these."""
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Chosen: a complete answer with logprobs of 100,000 tokens stays below; a runaway worker is cut off."""
_MAX_ERROR_BYTES = 1024 * 1024

_LAST_STEP_REAL_S = 2.0
"""How long a prefill goes on whose client has left. Chosen: longer than a step of a prompt, so that one in its last step
ends and says where its KV is. Broken off then, it would end all the same and keep its blocks for a lease."""

_Take = Callable[[CompletionCall], Awaitable[None]]
"""What becomes of a worker's response of status 200."""


class CompletionHandler:
    """Serves completion requests, within the limits, and keeps the workers' circuits informed.

    Attributes:
        retry_after_s: Least Retry-After of refusals, real seconds; it may change while requests are under way.
    """

    def __init__(self, context: RouterContext, transfers: KvTransfers) -> None:
        settings, clock = context.settings, context.clock
        limits = settings.config.limits
        self._pool = context.pool
        self._admission = context.admission
        self._entry = context.admission.core.entry
        self._transfers = transfers
        self._metrics = context.metrics
        self._retries = RetryRules(context.admission.core.pool, settings.config.retries, clock.now_s())
        self._rests = StreamRests(settings.config.retries, settings.graph, context.metrics)
        self._estimator = context.estimator
        self._clock = clock
        self._request_real_s = clock.to_real_s(limits.request_timeout_seconds)
        self._phases_real_s = (
            limits.connect_timeout_real_seconds,
            clock.to_real_s(limits.first_byte_timeout_seconds),
            clock.to_real_s(limits.idle_timeout_seconds),
        )
        self.retry_after_s = settings.admission(settings.config.admission).retry_after_seconds

    async def serve(self, call: CompletionCall) -> None:
        """Answer one request; every error but a vanished client becomes an answer."""
        self._metrics.arrivals += 1
        self._metrics.arrived_tokens += call.prompt_tokens
        self._retries.budget.request_arrived()
        try:
            while True:
                try:
                    await self._attempt(call)
                except StageFailed as failure:
                    await self._prepare_retry(call, failure)
                    if call.is_delivered:
                        return
                else:
                    return
        except StageFailed as failure:
            call.error = "request_fault" if self._settle(call) else failure.failure.reason
            self._end_with(call, failure.response)
        except AdmissionError as exc:
            response = refusal(exc)
            call.error = response.reason
            self._end_with(call, response)
        except SaturatedError as exc:
            # This router's own want: it says nothing of the worker.
            log.warning("request refused", problem=str(exc))
            call.error = SATURATED
            self._end_with(call, saturated())
        finally:
            self._settle(call)
            if call.begun is not None:
                call.begun.kept.drop()

    def _end_with(self, call: CompletionCall, response: ErrorResponse) -> None:
        if call.responder.started:
            # It must not look complete.
            call.responder.write(encode_event(response.body))
            call.responder.break_off()
        else:
            self._refuse(call, response)

    def _settle(self, call: CompletionCall) -> bool:
        """Withdraw unproven failures at the end of a request; returns whether it failed on several workers."""
        workers = self._retries.settle(call.tries, self._clock.now_s())
        if workers:
            log.debug("request failed on several workers: counted against none", workers=workers)
        return bool(workers)

    async def _prepare_retry(self, call: CompletionCall, stage: StageFailed) -> None:
        """Return once the request may be tried again, or the rest of its stream; at once where another worker can take it.

        Raises:
            StageFailed: this one is final.
        """
        is_rest = call.responder.started
        if is_rest and not self._rests.prepare(call, stage):
            call.responder.end()
            call.is_delivered = True
            return
        left_s = self._clock.to_model_s(self._retry_real_s(call))
        pauses = self._retries.retry(call.tries, stage.failure, self._clock.now_s(), left_s=left_s)
        if pauses is None:
            raise stage
        if is_rest:
            self._rests.go_on(call, stage.failure.reason)
        else:
            self._metrics.retries[stage.failure.reason] += 1
        if pauses:
            await asyncio.sleep(_BACKOFF_REAL_S * pauses)

    def _retry_real_s(self, call: CompletionCall) -> float:
        return self._request_real_s - call.age_real_s()

    # ------------------------------------------------------------------ stages

    def _attempt(self, call: CompletionCall) -> Awaitable[None]:
        request = call.request
        take = self._stream if request.stream else self._send_complete
        if self._entry is not Role.PREFILL:
            return self._stage(call, self._entry, request.raw, take)
        if request.is_single:
            return self._prefill_and_decode(call, take)
        # A KV transfer carries the blocks of one prompt; several are computed where they are decoded.
        if not call.tries.retries:
            self._admission.check_tier(call.tier)
        self._admission.check_capacity(Role.DECODE)
        return self._stage(call, Role.DECODE, request.raw, take)

    async def _prefill_and_decode(self, call: CompletionCall, take: _Take) -> None:
        request = call.request
        try:
            await self._stage(call, self._entry, prefill_body(request), self._take_prefilled)
        except StageFailed as failure:
            _check_present(call, failure)
            raise
        transfer = call.transfer
        try:
            _check_present(call)
            body = request.raw if transfer is None else decode_body(request, transfer)
            await self._stage(call, Role.DECODE, body, take)
        except AdmissionError as exc:
            if exc.reason is not RefusalReason.QUEUE_TIMEOUT:
                raise
            # Its lease is not renewed here. The first stage's queue waits for a decode worker without one.
            raise StageFailed(FailedTry(QUEUE_TIMEOUT, RetryScope.ANYWHERE), refusal(exc)) from exc
        finally:
            if transfer is not None and not transfer.is_taken:
                self._transfers.release(transfer, call.upstream_headers)

    async def _stage(self, call: CompletionCall, role: Role, body: bytes, take: _Take) -> None:
        """Have a worker of a role answer; another one while workers refuse the request for lack of room.

        Such a refusal is no failure: it costs no retry budget, and does not count against the worker.
        """
        admission, is_entry = self._admission, role is self._entry
        while True:
            is_admitted = is_entry and bool(call.tries.retries or call.tries.avoid)
            if call.trace is not None:
                call.trace.waits(role.value)
            assignment = await admission.wait(role, self._arrival(call, role), again=is_admitted)
            call.assignment, worker = assignment, assignment.worker
            try:
                call.queued_s += assignment.queued_s
                if call.trace is not None:
                    call.trace.assigned(assignment, self._clock.to_real_s(assignment.queued_s))
                if is_entry:
                    self._metrics.queue_time.observe(assignment.queued_s)
                if role is Role.PREFILL:
                    call.prefill_worker = worker.name
                else:
                    call.worker = worker.name
                await self._round_trip(call, body, take)
            except StageFailed as stage:
                if stage.failure.reason != AT_CAPACITY:
                    raise
                refused = stage
            else:
                return
            finally:
                admission.release(assignment)
            admission.refused_at_capacity(worker)
            self._metrics.retries[AT_CAPACITY] += 1
            if worker.name in call.tries.avoid:
                raise admission.all_busy(role) from refused
            call.tries.avoid |= {worker.name}

    def _arrival(self, call: CompletionCall, role: Role) -> Arrival:
        """Return a call as a stage's policy sees it; that of decode reads no prompt."""
        keyed, is_complete = call.keyed, not call.request.stream
        avoid = call.tries.avoid | self._transfers.unpaired(role, call.transfer)
        tenant = "" if call.identity is None else call.identity.tenant
        if role is Role.DECODE or keyed is None:
            is_complete = is_complete and role is Role.DECODE
            return Arrival(
                (), call.prompt_tokens, avoid, is_non_streaming=is_complete, tier=call.tier, tenant=tenant
            )
        return Arrival(
            keyed.chain,
            call.prompt_tokens,
            avoid,
            keyed.block_tokens(self._estimator.bytes_per_token),
            keyed.sub_block_keys,
            call.session,
            # A prefill's own answer shows it; so does a stream's first token.
            is_non_streaming=is_complete and role is not Role.PREFILL,
            tier=call.tier,
            tenant=tenant,
        )

    async def _round_trip(self, call: CompletionCall, body: bytes, take: _Take) -> None:
        """Send a request to its worker and have the response taken; an unfinished response is aborted."""
        prefilled = None
        if call.assignment.role is Role.DECODE:
            prefilled = call.transfer = self._transfers.within_version(call.transfer, call.assignment.worker)
            body = call.request.raw if prefilled is None else body
        if prefilled is not None:
            self._transfers.check_wait(call.assignment.queued_s)
            prefilled.is_taken = True
        response = None
        call.responder.patience_s = _LAST_STEP_REAL_S if call.assignment.role is Role.PREFILL else 0.0
        try:
            left_real_s = self._request_real_s - call.age_real_s()
            timeouts = Timeouts(*self._phases_real_s, max(0.001, left_real_s))
            if call.trace is not None:
                call.trace.sent(call)
            response = call.response = await self._send(call, body, timeouts)
            if response.status != 200:
                raise await _error_reply(response, call.assignment.worker.name)
            await take(call)
        except (ErrorReply, UpstreamError) as problem:
            failed = self._failed(call, prefilled, problem)
            if prefilled is not None and failed.failure.reason in NOT_TAKEN:
                prefilled.is_taken = False
            raise failed from problem
        finally:
            call.responder.patience_s = 0.0
            if response is not None:
                response.abort()
            if call.trace is not None:
                call.trace.answered(sys.exception())

    def _send(self, call: CompletionCall, body: bytes, timeouts: Timeouts) -> Awaitable[StreamingResponse]:
        url = call.assignment.worker.spec.url + call.request.path
        return self._pool.stream("POST", url, body=body, headers=call.upstream_headers, timeouts=timeouts)

    def _failed(
        self, call: CompletionCall, prefilled: Prefilled | None, problem: ErrorReply | UpstreamError
    ) -> StageFailed:
        assignment, worker, now_s = call.assignment, call.assignment.worker, self._clock.now_s()
        if isinstance(problem, UpstreamError):
            if isinstance(problem, UpstreamConnectError):
                worker.suspect("refused a connection")
            assignment.failed(now_s, str(problem))
            return failed_stage(problem, worker)
        response, is_error_object = problem.shown()
        if prefilled is not None and problem.is_kv_lost:
            transfer = KvTransfer(prefilled.lease.worker, worker)
            transfer.lost()
            self._transfers.count(TransferResult.LOST)
            call.tries.lost_transfers = (*call.tries.lost_transfers, transfer)
            ends = (worker, transfer.prefill)
            return StageFailed(FailedTry("kv_lost", RetryScope.ANYWHERE, ends), response)
        if problem.is_at_capacity:
            return StageFailed(FailedTry(AT_CAPACITY, RetryScope.ELSEWHERE, (worker,)), response)
        scope = retry_scope_of(
            problem.status,
            endpoint=call.request.endpoint,
            is_error_object=is_error_object,
            sent_credentials=any(name == b"authorization" for name, _ in call.upstream_headers),
        )
        if scope is RetryScope.NOWHERE:
            assignment.succeeded()
            return StageFailed(FailedTry(response.reason, scope, (worker,)), response)
        shown = "" if is_error_object else " without an error object"
        assignment.failed(now_s, f"answered {problem.status}{shown}", proven=False)
        failure = FailedTry(response.reason, scope, (worker,), unproven=assignment)
        return StageFailed(failure, response)

    # ------------------------------------------------------------------ responses

    async def _take_prefilled(self, call: CompletionCall) -> None:
        worker = call.assignment.worker
        content = await call.response.read(limit_bytes=_MAX_ANSWER_BYTES)
        lease = KvLease(worker, self._clock.now_s(), worker.expired_leases)
        answer = read_completion(content, _type_of(call.response), worker.name)
        prefilled = read_prefill_answer(answer, lease)
        call.assignment.succeeded()
        self._admission.prefilled(call.assignment, prefilled.cached_tokens)
        self._retries.served(call.tries, worker, self._clock.now_s())
        self._count_prompt(call, prefilled.prompt_tokens)
        call.cached_tokens = prefilled.cached_tokens
        call.transfer = prefilled if prefilled.params else None
        if call.transfer is None:
            self._transfers.count(TransferResult.NONE)

    async def _confirm(self, call: CompletionCall) -> None:
        """Return if the beginning of an answer may be sent.

        Raises:
            StageFailed: its text may be wrong, because its KV transfer came too late.
        """
        call.assignment.proved()
        worker = call.assignment.worker
        if call.transfer is not None:
            lease = call.transfer.lease
            await self._transfers.confirm(lease)
            transfer = KvTransfer(lease.worker, worker)
            transfer.arrived(call.tries.lost_transfers, self._clock.now_s())
        self._retries.served(call.tries, worker, self._clock.now_s())

    async def _stream(self, call: CompletionCall) -> None:
        assignment, response, responder = call.assignment, call.response, call.responder
        name, content_type = assignment.worker.name, _type_of(response)
        if not content_type.lower().startswith(EVENT_STREAM.encode()):
            shown = content_type.decode("latin-1") or "no content type"
            raise WrongAnswer(f"{name} answered a stream with {shown}")
        preamble = await read_preamble(response, name)
        await self._confirm(call)
        begun = self._rests.begin(call)
        meter = RelayMeter(
            self._metrics,
            assignment,
            on_first_token=partial(self._note_first_token, call),
            arrived_real_s=call.arrived_real_s,
            speed=self._clock.speed,
            prefilled=call.transfer,
            may_go_on=begun is not None,
        )
        observe = meter.observe if begun is None else self._rests.follow(begun, meter, call.ttft_s)
        try:
            if responder.started:
                self._admission.prefilled(assignment)
            else:
                responder.start(200, content_type=EVENT_STREAM, headers=call.headers)
            responder.write(observe(preamble, 0))
            await relay(response, responder, observe=observe)
            if not meter.is_complete:
                raise StreamBroken(f"{name} ended its stream without [DONE]")
            responder.write(meter.rest())
            responder.end()
            self._settle_stream(call, meter)
        except (asyncio.CancelledError, ClientDisconnected):
            if meter.is_done:
                # Many clients close at [DONE], without waiting for the end of the body.
                call.is_delivered = True
                self._settle_stream(call, meter)
            raise
        except UpstreamError:
            if meter.is_done:
                responder.end()
                self._settle_stream(call, meter)
                return
            if meter.is_mid_event and call.transfer is None and begun is None:
                # The client has the beginning of an event; what follows must not become part of it.
                responder.write(b"\n\n")
            raise
        finally:
            call.ttft_s = meter.ttft_s
            usage, tokens = (meter.usage, meter.tokens) if begun is None else self._rests.said(begun, meter)
            self._note_usage(call, usage)
            call.output_tokens = max(call.output_tokens, tokens)

    def _settle_stream(self, call: CompletionCall, meter: RelayMeter) -> None:
        """Record a stream that came to its end, which may be an error of the worker's own."""
        if meter.has_error:
            call.error = "upstream_broken"
            call.assignment.failed(self._clock.now_s(), "ended a stream by an error event")
        else:
            call.assignment.succeeded()

    async def _send_complete(self, call: CompletionCall) -> None:
        content = await call.response.read(limit_bytes=_MAX_ANSWER_BYTES)
        call.assignment.is_computed = True
        answer = read_completion(content, _type_of(call.response), call.assignment.worker.name)
        usage = answer.get("usage")
        if call.transfer is not None and isinstance(usage, dict):
            with_cached_tokens(usage, call.transfer.cached_tokens)
            content = encoded_again(answer)
        await self._confirm(call)
        call.assignment.succeeded()
        self._note_usage(call, usage)
        call.responder.send(200, content, content_type=JSON, headers=call.headers)

    # ------------------------------------------------------------------ counting

    def _note_first_token(self, call: CompletionCall) -> None:
        self._admission.prefilled(call.assignment)
        if call.trace is not None:
            call.trace.first_token()
        if self._admission.core.tiers is not None:
            ttft_s = self._clock.to_model_s(call.age_real_s())
            self._admission.record_tier_event(call.tier, ttft_s=ttft_s)

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

    def _refuse(self, call: CompletionCall, response: ErrorResponse) -> None:
        wait = response.retry_after
        if wait is None and response.wants_retry:
            expected_s = response.retry_after_s
            expected_real_s = None if expected_s is None else self._clock.to_real_s(expected_s)
            wait = retry_after(expected_real_s, floor_s=self.retry_after_s, is_rate=response.is_rate)
        headers = call.headers if wait is None else (*call.headers, (b"retry-after", wait))
        call.responder.send(response.status, response.body, headers=headers)


def _check_present(call: CompletionCall, failure: StageFailed | None = None) -> None:
    """Return while the client waits; one that left during the prefill was not noticed until its end."""
    if call.responder.disconnected:
        raise ClientDisconnected("the client left during the prefill") from failure


async def _error_reply(response: StreamingResponse, worker: str) -> ErrorReply:
    status = response.status
    if not 400 <= status < 600:
        raise WrongAnswer(f"{worker} answered {status}, which is neither success nor error")
    content = await response.read(limit_bytes=_MAX_ERROR_BYTES)
    return ErrorReply(status, content, response.headers.get(b"retry-after"))


def _type_of(response: StreamingResponse) -> bytes:
    return response.headers.get(b"content-type", b"")
