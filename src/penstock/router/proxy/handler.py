"""Drives the machine of each request (`penstock.router.core.request`) over HTTP: choose, send, relay, retry, end.

Called by ``app`` with a parsed request; answers it whatever happens, except when the client is gone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
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
from penstock.core.logs import get_logger
from penstock.router.admission import AdmissionError
from penstock.router.context import RouterContext
from penstock.router.core.request import (
    BROKEN,
    COMPLETE,
    Answer,
    Asked,
    Began,
    Choose,
    Computed,
    Confirm,
    CountTransfer,
    Deliver,
    End,
    EndKind,
    GiveBack,
    Lost,
    Problem,
    PromptComputed,
    ReadRest,
    Relay,
    Release,
    RequestMachine,
    RequestPlan,
    Retry,
    Send,
    Told,
    TurnedAway,
)
from penstock.router.core.retries import FailedTry, KvLease, RetryRules, RetryScope
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.deadly import DeadlyRequests
from penstock.router.proxy.failures import (
    AT_CAPACITY,
    ErrorReply,
    ErrorResponse,
    failed_try,
    no_usable_answer,
    refusal,
    retry_after,
    retry_scope_of,
    saturated,
)
from penstock.router.proxy.kv_transfer import (
    KvTransfers,
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


class CompletionHandler:
    """Serves completion requests, within the limits, and keeps the workers' circuits informed.

    Attributes:
        retry_after_s: Least Retry-After of refusals, real seconds; it may change while requests are under way.
        deadly: What broke workers off, refused for a while.
    """

    def __init__(self, context: RouterContext, transfers: KvTransfers) -> None:
        settings, clock = context.settings, context.clock
        limits = settings.config.limits
        self._pool = context.pool
        self._admission = context.admission
        self._entry = context.admission.core.entry
        self._transfers = transfers
        self._metrics = context.metrics
        most, lease_s = settings.config.retries.max_continuations, settings.lease_s
        # A KV transfer carries the blocks of one prompt; several are computed where they are decoded.
        self._plans = {
            is_single: RequestPlan(self._entry, is_single and self._entry is Role.PREFILL, lease_s, most)
            for is_single in (False, True)
        }
        self._retries = RetryRules(context.admission.core.pool, settings.config.retries, clock.now_s())
        self.deadly = DeadlyRequests(clock.now_s)
        self._rests = StreamRests(settings.config.retries, settings.graph, context.metrics, self.deadly)
        # Each raises ClientDisconnected where nobody is there to get an answer.
        self._ask: Mapping[type[Asked], Callable[[CompletionCall, Any], Awaitable[Answer]]] = {
            Choose: self._choose,
            Send: self._send_to,
            Confirm: self._confirm,
            Relay: self._stream,
            Retry: self._retry,
            ReadRest: self._read_rest,
        }
        self._do: Mapping[type[Told], Callable[[CompletionCall, Any], None]] = {
            Computed: self._computed,
            Deliver: self._deliver,
            Release: self._release,
            TurnedAway: self._turned_away,
            CountTransfer: self._count_transfer,
            GiveBack: self._give_back,
            Lost: self._rests.lose,
        }
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
        if call.request.endpoint.runs_model:
            self._metrics.arrivals += 1
            self._metrics.arrived_tokens += call.prompt_tokens
        self._retries.budget.request_arrived()
        machine = call.machine = RequestMachine(
            self._plans[call.request.is_single],
            self._retries,
            call.tries,
            self._clock.now_s,
            deadline_s=self._clock.to_model_s(call.arrived_real_s + self._request_real_s),
        )
        try:
            step = machine.answer(None)
            while not isinstance(step, End):
                step = machine.answer(await self._ask[type(step)](call, step))
                if machine.steps:
                    self._do_told(call)
            if step.kind is not EndKind.SERVED:
                self._answer_failure(call, step)
        except BaseException:
            # Whatever it was, what the request holds is given back.
            if call.is_delivered:
                machine.answer(None)
            else:
                machine.leave()
            self._do_told(call)
            raise
        finally:
            if call.begun is not None:
                call.begun.kept.drop()

    def _answer_failure(self, call: CompletionCall, end: End) -> None:
        """Answer a request that was not served."""
        if end.failed_on:
            log.debug("request failed on several workers: counted against none", workers=end.failed_on)
        response, reason = call.refusal, None
        if end.kind is EndKind.ALL_BUSY and end.role is not None:
            response = refusal(self._admission.all_busy(end.role))
        elif end.kind is EndKind.SATURATED:
            response = saturated()
        elif end.failure is not None:
            reason = "request_fault" if end.failed_on else end.failure.reason
            response = response or no_usable_answer(end.failure.reason)
        assert response is not None  # noqa: S101 - a refusal was kept with its answer
        call.error = reason or response.reason
        if call.responder.started:
            # It must not look complete.
            call.responder.write(encode_event(response.body))
            call.responder.break_off()
        else:
            self._refuse(call, response)

    # ------------------------------------------------------------------ steps

    def _do_told(self, call: CompletionCall) -> None:
        """Carry out the machine's steps that ask for no answer; nothing here waits."""
        steps = call.machine.steps
        while steps:
            step = steps.pop(0)
            self._do[type(step)](call, step)

    def _release(self, call: CompletionCall, _: Release) -> None:
        response, call.response = call.response, None
        if response is not None:
            response.abort()
        if call.trace is not None:
            call.trace.answered(sys.exception() or call.problem)
        self._admission.release(call.assignment)

    def _computed(self, call: CompletionCall, step: Computed) -> None:
        self._admission.prefilled(call.assignment, step.cached_tokens)

    def _deliver(self, call: CompletionCall, _: Deliver) -> None:
        self._note_usage(call, call.usage)
        call.responder.send(200, call.beginning, content_type=JSON, headers=call.headers)

    def _turned_away(self, _: CompletionCall, step: TurnedAway) -> None:
        self._admission.refused_at_capacity(step.worker)
        self._metrics.retries[AT_CAPACITY] += 1

    def _count_transfer(self, _: CompletionCall, step: CountTransfer) -> None:
        self._transfers.count(step.result)

    def _give_back(self, call: CompletionCall, _: GiveBack) -> None:
        if call.transfer is not None:
            self._transfers.release(call.transfer, call.upstream_headers)

    async def _retry(self, call: CompletionCall, step: Retry) -> None:
        if step.is_rest:
            self._rests.go_on(call, step.reason)
        else:
            self._metrics.retries[step.reason] += 1
        if step.pauses:
            await asyncio.sleep(_BACKOFF_REAL_S * step.pauses)

    async def _read_rest(self, call: CompletionCall, _: ReadRest) -> Answer:
        return self._rests.read(call)

    async def _choose(self, call: CompletionCall, step: Choose) -> Answer:
        role, admission = step.role, self._admission
        if role is not self._entry:
            # One that left during the prefill was not noticed until its end.
            _check_present(call)
        if call.trace is not None:
            call.trace.waits(role.value)
        try:
            if step.is_admission:
                if not call.tries.retries:
                    admission.check_tier(call.tier)
                admission.check_capacity(role)
            unpaired = self._transfers.unpaired(role, call.transfer)
            arrival = call.arrival(role, unpaired, self._estimator.bytes_per_token)
            assignment = await admission.wait(role, arrival, again=step.again)
        except AdmissionError as exc:
            call.refusal = refusal(exc)
            return exc.reason
        call.assignment, call.refusal, call.problem = assignment, None, None
        call.queued_s += assignment.queued_s
        if call.trace is not None:
            call.trace.assigned(assignment, self._clock.to_real_s(assignment.queued_s))
        if role is self._entry:
            self._metrics.queue_time.observe(assignment.queued_s)
        if role is Role.PREFILL:
            call.prefill_worker = assignment.worker.name
        else:
            call.worker = assignment.worker.name
        return assignment

    async def _send_to(self, call: CompletionCall, step: Send) -> Answer:
        """Send a request to its worker, and read the answer's beginning."""
        request, is_prefill = call.request, step.role is Role.PREFILL
        if is_prefill:
            body = prefill_body(request)
        elif step.reads_kv and call.transfer is not None:
            body = decode_body(request, call.transfer)
        else:
            body = request.raw
        call.reads_kv = step.reads_kv
        call.responder.patience_s = _LAST_STEP_REAL_S if is_prefill else 0.0
        try:
            left_real_s = self._request_real_s - call.age_real_s()
            timeouts = Timeouts(*self._phases_real_s, max(0.001, left_real_s))
            if call.trace is not None:
                call.trace.sent(call)
            response = call.response = await self._send(call, body, timeouts)
            if response.status != 200:
                raise await _error_reply(response, call.assignment.worker.name)
            if request.stream and not is_prefill:
                return await self._begin_stream(call, response)
            content = await response.read(limit_bytes=_MAX_ANSWER_BYTES)
            return (self._read_prefilled if is_prefill else self._read_complete)(call, response, content)
        except (ErrorReply, UpstreamError) as problem:
            failed = self._failed(call, problem)
            if is_prefill:
                _check_present(call, problem)
            return failed
        except SaturatedError as exc:
            # This router's own want: it says nothing of the worker.
            log.warning("request refused", problem=str(exc))
            return Problem.SATURATED
        finally:
            call.responder.patience_s = 0.0

    def _send(self, call: CompletionCall, body: bytes, timeouts: Timeouts) -> Awaitable[StreamingResponse]:
        url = call.assignment.worker.spec.url + call.request.path
        return self._pool.stream("POST", url, body=body, headers=call.upstream_headers, timeouts=timeouts)

    def _failed(self, call: CompletionCall, problem: ErrorReply | UpstreamError) -> FailedTry | Problem:
        """Tell the worker's circuit what its answer says of it, and return what that means for the request."""
        assignment, worker, now_s = call.assignment, call.assignment.worker, self._clock.now_s()
        call.problem = problem
        if isinstance(problem, UpstreamError):
            if isinstance(problem, UpstreamConnectError):
                worker.suspect("refused a connection")
            assignment.failed(now_s, str(problem))
            failure, call.refusal = failed_try(problem, worker)
            return failure
        call.refusal, is_error_object = problem.shown(call.request.path)
        if call.reads_kv and problem.is_kv_lost:
            return Problem.KV_LOST
        if problem.is_at_capacity:
            return Problem.AT_CAPACITY
        scope = retry_scope_of(
            problem.status,
            endpoint=call.request.endpoint,
            is_error_object=is_error_object,
            sent_credentials=any(name == b"authorization" for name, _ in call.upstream_headers),
        )
        if scope is RetryScope.NOWHERE:
            assignment.succeeded()
            return FailedTry(call.refusal.reason, scope, (worker,))
        shown = "" if is_error_object else " without an error object"
        assignment.failed(now_s, f"answered {problem.status}{shown}", proven=False)
        return FailedTry(call.refusal.reason, scope, (worker,), unproven=assignment)

    # ------------------------------------------------------------------ responses

    def _read_prefilled(self, call: CompletionCall, response: StreamingResponse, content: bytes) -> Answer:
        worker = call.assignment.worker
        lease = KvLease(worker, self._clock.now_s(), worker.expired_leases)
        answer = read_completion(content, _type_of(response), worker.name, call.request.endpoint)
        prefilled = read_prefill_answer(answer, lease)
        self._count_prompt(call, prefilled.prompt_tokens)
        call.cached_tokens = prefilled.cached_tokens
        call.transfer = prefilled if prefilled.params else None
        return PromptComputed(prefilled.cached_tokens, call.transfer is not None)

    async def _confirm(self, call: CompletionCall, _: Confirm) -> bool:
        """Return whether the beginning of an answer may be sent: its text may be wrong if its KV came too late."""
        assert call.transfer is not None  # noqa: S101 - its decode worker was asked to fetch it
        is_intact = await self._transfers.confirm(call.transfer.lease)
        if not is_intact:
            call.problem = StreamBroken("the KV may have been read after its lease")
        return is_intact

    async def _begin_stream(self, call: CompletionCall, response: StreamingResponse) -> Answer:
        name, content_type = call.assignment.worker.name, _type_of(response)
        if not content_type.lower().startswith(EVENT_STREAM.encode()):
            shown = content_type.decode("latin-1") or "no content type"
            raise WrongAnswer(f"{name} answered a stream with {shown}")
        call.beginning = await read_preamble(response, name)
        return Began(is_stream=True, may_go_on=self._rests.begin(call) is not None)

    async def _stream(self, call: CompletionCall, _: Relay) -> FailedTry | None:
        """Relay a stream; return None at its end, which may be an error of the worker's own."""
        response, responder, begun = call.response, call.responder, call.begun
        assert response is not None  # noqa: S101 - it has begun
        meter = RelayMeter(
            self._metrics,
            call.assignment,
            on_first_token=partial(self._note_first_token, call),
            arrived_real_s=call.arrived_real_s,
            speed=self._clock.speed,
            prefilled=call.transfer if call.reads_kv else None,
            may_go_on=begun is not None,
        )
        observe = meter.observe if begun is None else self._rests.follow(begun, meter, call.ttft_s)
        try:
            if not responder.started:
                responder.start(200, content_type=EVENT_STREAM, headers=call.headers)
            responder.write(observe(call.beginning, 0))
            await relay(response, responder, observe=observe)
            if not meter.is_complete:
                raise StreamBroken(f"{call.assignment.worker.name} ended its stream without [DONE]")
            responder.write(meter.rest())
            responder.end()
        except (asyncio.CancelledError, ClientDisconnected):
            # Many clients close at [DONE], without waiting for the end of the body.
            call.is_delivered = meter.is_done
            if meter.is_done:
                self._note_own_error(call, meter)
            raise
        except UpstreamError as problem:
            if not meter.is_done:
                if meter.is_mid_event and not call.reads_kv and begun is None:
                    # The client has the beginning of an event; what follows must not become part of it.
                    responder.write(b"\n\n")
                failed = self._failed(call, problem)
                assert isinstance(failed, FailedTry)  # noqa: S101 - it is no error reply
                return failed
            responder.end()
        finally:
            call.ttft_s = meter.ttft_s
            usage, tokens = (meter.usage, meter.tokens) if begun is None else self._rests.said(begun, meter)
            self._note_usage(call, usage)
            call.output_tokens = max(call.output_tokens, tokens)
        self._note_own_error(call, meter)
        return None

    def _note_own_error(self, call: CompletionCall, meter: RelayMeter) -> None:
        """Count a stream that ended in an error of the worker's own."""
        if meter.has_error:
            call.error = BROKEN
            call.assignment.failed(self._clock.now_s(), "ended a stream by an error event")

    def _read_complete(self, call: CompletionCall, response: StreamingResponse, content: bytes) -> Answer:
        call.assignment.is_computed = True
        answer = read_completion(
            content, _type_of(response), call.assignment.worker.name, call.request.endpoint
        )
        usage = answer.get("usage")
        if call.reads_kv and call.transfer is not None and isinstance(usage, dict):
            with_cached_tokens(usage, call.transfer.cached_tokens)
            content = encoded_again(answer)
        call.beginning, call.usage = content, usage
        return COMPLETE

    # ------------------------------------------------------------------ counting

    def _note_first_token(self, call: CompletionCall) -> None:
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
        request = call.request
        if request.prompt_bytes and not request.prompt_ids and not request.endpoint.is_relayed:
            self._estimator.learn(request.prompt_bytes, prompt_tokens)

    # ------------------------------------------------------------------ answers other than success

    def _refuse(self, call: CompletionCall, response: ErrorResponse) -> None:
        wait = response.retry_after
        if wait is None and response.wants_retry:
            expected_s = response.retry_after_s
            expected_real_s = None if expected_s is None else self._clock.to_real_s(expected_s)
            wait = retry_after(expected_real_s, floor_s=self.retry_after_s, is_rate=response.is_rate)
        headers = call.headers if wait is None else (*call.headers, (b"retry-after", wait))
        call.responder.send(response.status, response.body, headers=headers)


def _check_present(call: CompletionCall, failure: Exception | None = None) -> None:
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
