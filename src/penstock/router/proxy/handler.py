"""Drives the state machine of each request (`penstock.router.core.request`) over HTTP: choose, send, relay, retry, end.

``app`` calls it with a parsed request; it sends a response in every case, unless the client has disconnected.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

from penstock.api import Role
from penstock.core.errors import (
    ClientDisconnected,
    StreamBroken,
    StreamMoved,
    UpstreamError,
)
from penstock.core.http.anthropic import error_body_for
from penstock.core.http.messages import EVENT_STREAM, JSON
from penstock.core.http.streaming import Observe, relay
from penstock.core.logs import get_logger
from penstock.router.admission import AdmissionError, LiveAssignment
from penstock.router.context import RouterContext
from penstock.router.core.request import BROKEN, MOVED, RequestMachine, RequestPlan
from penstock.router.core.request_steps import (
    CLIENT_DISCONNECTED,
    AcquireWorker,
    AwaitOutage,
    AwaitPrefill,
    BuildContinuation,
    ConcurrentPrefillEnded,
    ConcurrentPrefillFinished,
    ConfirmLease,
    Continuation,
    CountTransfer,
    End,
    EndKind,
    Notification,
    PrefillFinished,
    PrefillOutcome,
    QueryOfDeath,
    RefusedAtCapacity,
    RelayStream,
    ReleaseKv,
    ReleasePrefillWorker,
    ReleaseWorker,
    Retry,
    SendEnding,
    SendRequest,
    SendResponse,
    Step,
    StepResult,
    StreamEnding,
    StreamLost,
)
from penstock.router.core.retries import FailedTry, RefusalReason, RetryRules, RetryScope
from penstock.router.core.suspects import CLEARED_TOKENS
from penstock.router.proxy.call import CompletionCall, StartedResponse
from penstock.router.proxy.completion import CompletionRequest, RequestRefused
from penstock.router.proxy.decode_only import decode_only_reason
from penstock.router.proxy.failures import (
    AT_CAPACITY,
    ErrorResponse,
    TryFailure,
    error_event_of,
    internal_error,
    no_usable_answer,
    refusal,
    retry_after,
    saturated,
)
from penstock.router.proxy.kv_transfer import (
    KvTransfers,
)
from penstock.router.proxy.moves import StreamMoves
from penstock.router.proxy.query_of_death import QueriesOfDeath
from penstock.router.proxy.stream import RelayMeter
from penstock.router.proxy.stream_continuations import StreamContinuations
from penstock.router.proxy.wait_comments import WaitComments
from penstock.router.proxy.worker_calls import WorkerCalls, check_client_connected, wait_for_prefill

log = get_logger(__name__)

_BACKOFF_REAL_S = 0.05
"""Back-off pause in real seconds before the same worker is tried again, multiplied by the number of retries so far. Chosen: a
worker that has just been replaced listens within a few of these."""
_OUTAGE_REAL_S = 5.0
"""Chosen: three consecutive health checks take this long, after which a worker that died is known to be gone; real seconds."""
_ASKED_REAL_S = 0.1
"""Chosen: a process that died takes longer than this to restart; real seconds."""
_ONE_PROMPT = (
    "n, best_of, several prompts, prompt_logprobs, echo with logprobs, use_beam_search, /v1/responses, /v1/messages: decode workers of this "
    "graph compute no prompts, and a KV transfer carries one prompt for one answer; send one per request, without these keys, to "
    "/v1/completions or /v1/chat/completions"
)


class CompletionHandler:
    """Serves completion requests within the router's limits, and reports outcomes to the workers' circuit breakers.

    ``context`` contains the objects that the parts of the router share, and ``transfers`` confirms KV transfers.

    Attributes:
        worker_calls_type: Class that calls workers and reports the outcomes; a subclass of this class can set another one.
        retry_after_s: Minimum value of the Retry-After header of rejections, in real seconds; can change while requests are
            in flight.
        queries_of_death: Requests that have crashed workers, repeats of which are rejected for 10 simulated minutes.
        moves: Moves streams from draining workers to other ones.
    """

    worker_calls_type: ClassVar[type[WorkerCalls]] = WorkerCalls

    def __init__(self, context: RouterContext, transfers: KvTransfers) -> None:
        settings, clock = context.settings, context.clock
        self._admission = context.admission
        self._entry = context.admission.core.entry
        self._transfers = transfers
        self._metrics = context.metrics
        retries = settings.config.retries
        # A KV transfer contains the blocks of one prompt; several prompts are computed on the decode worker.
        kv_transfer, is_split = settings.kv_transfer, self._entry is Role.PREFILL
        self._plans = {
            is_single: RequestPlan(
                self._entry,
                is_single and is_split,
                kv_transfer.is_concurrent,
                settings.lease_s,
                retries.max_continuations,
                settings.worker_wait_s,
            )
            for is_single in (False, True)
        }
        self._is_split = is_split
        self._needs_prefill = is_split and not kv_transfer.decodes_alone
        self._transfer_paths = kv_transfer.paths
        self._retries = RetryRules(context.admission.core.pool, retries, clock.now_s())
        self.queries_of_death = QueriesOfDeath(clock.now_s)
        self._continuations = StreamContinuations(
            retries, settings.graph, context.metrics, self.queries_of_death
        )
        self._builds_continuation = asyncio.Lock()
        self.moves = StreamMoves(context, self._continuations)
        keep_alive_s = settings.config.keep_alive_seconds
        self._wait_comments = WaitComments(None if keep_alive_s is None else clock.to_real_s(keep_alive_s))
        self._worker_calls = self.worker_calls_type(
            context,
            can_resume=self.can_resume,
            on_prefill_end=self._concurrent_prefill_ended,
        )
        # Each raises ClientDisconnected if the client has disconnected.
        self._step_handlers: Mapping[type[Step], Callable[[CompletionCall, Any], Awaitable[StepResult]]] = {
            AcquireWorker: self._acquire,
            SendRequest: self._worker_calls.send,
            ConfirmLease: self._confirm_lease,
            RelayStream: self._relay_stream,
            AwaitPrefill: self._await_prefill,
            AwaitOutage: self._await_outage,
            Retry: self._retry,
            BuildContinuation: self._build_continuation,
        }
        self._notification_handlers: Mapping[type[Notification], Callable[[CompletionCall, Any], None]] = {
            PrefillFinished: self._prefill_finished,
            SendResponse: self._send_response,
            SendEnding: self._send_ending,
            ReleaseWorker: self._release_worker,
            ConcurrentPrefillFinished: self._prefill_finished,
            ReleasePrefillWorker: self._release_prefill_worker,
            RefusedAtCapacity: self._refused_at_capacity,
            CountTransfer: self._count_transfer,
            ReleaseKv: self._release_kv,
            StreamLost: self._continuations.record_lost,
            QueryOfDeath: self._continuations.reject_repeats,
        }
        self._prompt_costs = context.prompt_costs
        self._clock = clock
        self.retry_after_s = settings.admission(settings.config.admission).retry_after_seconds

    async def serve(self, call: CompletionCall) -> None:
        """Serve one request; every failure is answered with an error response, unless the client has disconnected.

        Raises:
            RequestRefused: 400, the KV of the request's prompt cannot be transferred, and the decode workers of this graph
                compute no prompts.
        """
        self._check_kv_transfer(call.request)
        if call.request.endpoint.runs_model:
            self._metrics.arrivals += 1
            self._metrics.arrived_tokens += call.prompt_tokens
        self._retries.budget.request_arrived()
        machine = call.machine = RequestMachine(
            self._plans[self._is_split and self._can_transfer(call.request)],
            self._retries,
            call.tries,
            self._clock.now_s,
            deadline_s=self._clock.to_simulated_s(call.arrived_real_s + self._worker_calls.request_real_s),
        )
        if call.request.stream and self.writes_stream(call):
            self._wait_comments.arrive(call)
            call.requests_token_ids = self._continuations.requests_token_ids(call.request)
        try:
            step = machine.advance(None)
            while not isinstance(step, End):
                step = machine.advance(await self._step_handlers[type(step)](call, step))
                if machine.steps:
                    self._do_notifications(call)
            if step.kind is not EndKind.SERVED:
                self._send_failure(call, step)
        except BaseException as problem:
            # Release everything that the request occupies, whatever the problem was.
            machine.advance(None if call.is_delivered else CLIENT_DISCONNECTED)
            self._do_notifications(call)
            if isinstance(problem, Exception) and not isinstance(problem, ClientDisconnected):
                self._fail_started_stream(call, problem)
            raise
        finally:
            self._wait_comments.end(call)
            if call.resumable is not None:
                call.resumable.record.drop()
                self.moves.end(call)

    def can_resume(self, call: CompletionCall) -> bool:
        """Return whether another worker could resume the stream of ``call``, which starts now, if it breaks off.

        If so, the stream's events are recorded from now on.
        """
        return self._continuations.resumable_stream_of(call) is not None

    def writes_stream(self, call: CompletionCall) -> bool:  # noqa: ARG002 - gateways need it
        """Return True: this router writes the client's stream itself, so that it can start it before a worker has answered.

        A subclass for gateways returns False for streams that Envoy relays.
        """
        return True

    def _check_kv_transfer(self, request: CompletionRequest) -> None:
        if not self._needs_prefill or request.endpoint.is_relayed:
            return
        if not self._can_transfer(request):
            raise RequestRefused(400, _ONE_PROMPT, code="not_handed_over")

    def _can_transfer(self, request: CompletionRequest) -> bool:
        """Whether the KV of a request's prompt can be transferred."""
        is_on_path = self._transfer_paths is None or request.path in self._transfer_paths
        return is_on_path and decode_only_reason(request) is None

    def _send_failure(self, call: CompletionCall, end: End) -> None:
        """Send the response to a request that was not served."""
        if end.failed_on:
            log.debug("request failed on several workers: counted against none", workers=end.failed_on)
        response = None if call.failure is None else call.failure.response
        reason = None
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
            self._end_in_error(call, response)
        else:
            self._refuse(call, response)

    def _fail_started_stream(self, call: CompletionCall, problem: Exception) -> None:
        """End a stream that has started with an error event, so that a fault of the router does not look like a complete response."""
        if call.responder.started and not call.responder.closed:
            response = internal_error()
            if isinstance(problem, RequestRefused):
                response = ErrorResponse(problem.status, problem.code, problem.body)
            # The client may have an incomplete event, which must not become part of the error event.
            call.responder.write(b"\n\n")
            self._end_in_error(call, response)

    def _end_in_error(self, call: CompletionCall, response: ErrorResponse) -> None:
        """End a stream whose head was sent with an error event, so that it does not look complete."""
        if call.has_only_comments:
            call.failed_status = response.status
        # The rest of a stream may be requested by another API than the client's.
        request = call.request if call.resumable is None else call.resumable.request
        call.responder.write(error_event_of(request.path, response))
        call.responder.break_off()

    # ------------------------------------------------------------------ steps

    def _do_notifications(self, call: CompletionCall) -> None:
        """Carry out the state machine's notifications; none of them waits."""
        steps = call.machine.steps
        while steps:
            step = steps.pop(0)
            self._notification_handlers[type(step)](call, step)

    def _release_worker(self, call: CompletionCall, step: ReleaseWorker) -> None:
        if step.response is not None:
            step.response.response.abort()
        if call.trace is not None:
            call.trace.answered(sys.exception() or (call.failure and call.failure.problem))
        self._admission.release(step.assignment)

    def _prefill_finished(self, _: CompletionCall, step: PrefillFinished | ConcurrentPrefillFinished) -> None:
        self._admission.prefilled(step.assignment, step.cached_tokens)

    def _send_response(self, call: CompletionCall, step: SendResponse) -> None:
        started: StartedResponse = step.response
        self._worker_calls.record_usage(call, started.usage)
        call.responder.send(200, started.first_part, content_type=JSON, headers=call.headers)

    def _send_ending(self, call: CompletionCall, step: SendEnding) -> None:
        call.responder.write(step.events)
        call.responder.end()
        call.is_delivered = True

    def _concurrent_prefill_ended(self, call: CompletionCall, outcome: PrefillOutcome) -> None:
        call.machine.advance(ConcurrentPrefillEnded(outcome))
        self._do_notifications(call)

    def _release_prefill_worker(self, _: CompletionCall, step: ReleasePrefillWorker) -> None:
        if step.prefill is not None and step.prefill is not asyncio.current_task():
            step.prefill.cancel()
        self._admission.release(step.assignment)

    async def _await_prefill(self, _: CompletionCall, step: AwaitPrefill) -> None:
        await wait_for_prefill(step.prefill)

    async def _await_outage(self, _call: CompletionCall, step: AwaitOutage) -> None:
        """Connect to the worker's port until it refuses, which shows that the process is gone, or for as long as health checks take."""
        worker, address = step.worker, urlsplit(step.worker.spec.url)
        outages, until_real_s = worker.outages, time.monotonic() + _OUTAGE_REAL_S
        while worker.outages == outages and time.monotonic() < until_real_s:
            try:
                async with asyncio.timeout(_OUTAGE_REAL_S):
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.close()
            except ConnectionRefusedError:
                worker.suspect("refused a connection")
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(_ASKED_REAL_S)

    def _refused_at_capacity(self, _: CompletionCall, step: RefusedAtCapacity) -> None:
        self._admission.refused_at_capacity(step.worker)
        self._metrics.retries[AT_CAPACITY] += 1

    def _count_transfer(self, _: CompletionCall, step: CountTransfer) -> None:
        self._transfers.count(step.result)

    def _release_kv(self, call: CompletionCall, step: ReleaseKv) -> None:
        self._transfers.release(step.kv, call.upstream_headers)

    async def _retry(self, call: CompletionCall, step: Retry) -> None:
        if step.is_continuation:
            self._continuations.count_resumed(call, step.reason)
            self._wait_comments.begin(call)
        else:
            self._metrics.retries[step.reason] += 1
        if step.pauses:
            await asyncio.sleep(_BACKOFF_REAL_S * step.pauses)

    async def _build_continuation(self, call: CompletionCall, _: BuildContinuation) -> StepResult:
        # A dead worker breaks many streams at once. One stream is read per turn of the event loop, so that other tasks do not
        # wait for all of them.
        resumable = call.resumable
        assert resumable is not None  # noqa: S101 - only a stream that another worker could resume is asked for its rest
        async with self._builds_continuation:
            counted = call.prompt_tokens if call.is_prompt_counted else None
            built = self._continuations.build(resumable, counted)
            await asyncio.sleep(0)
        if built is None:
            return Continuation.IMPOSSIBLE
        if isinstance(built, StreamEnding):
            return built
        call.request = built
        return Continuation.READY

    async def _acquire(self, call: CompletionCall, step: AcquireWorker) -> StepResult:
        role, admission = step.role, self._admission
        if role is not self._entry:
            # A client that disconnects during the prefill is only noticed at its end.
            check_client_connected(call)
        if call.trace is not None:
            call.trace.waits(role.value)
        try:
            if step.is_admission:
                admission.check_tier(call.tier)
                admission.check_capacity(role)
            unpaired = self._transfers.unpaired(role, step.kv)
            arrival = call.arrival(role, unpaired, self._prompt_costs.bytes_per_token)
            waiting = admission.wait(role, arrival, is_retry=step.is_retry)
            assignment = await (waiting if call.resumable is None else self._wait_in_time(call, waiting))
        except AdmissionError as exc:
            call.failure = TryFailure(exc, refusal(exc))
            return exc.reason
        except TimeoutError:
            return RefusalReason.QUEUE_TIMEOUT
        call.failure = None
        call.queued_s += assignment.queued_s
        if call.trace is not None:
            call.trace.assigned(assignment, self._clock.to_real_s(assignment.queued_s))
        if role is self._entry or step.kv is None:
            call.dispatched_real_s = time.monotonic()
        if role is self._entry:
            self._metrics.queue_time.observe(assignment.queued_s)
        if assignment.role is Role.PREFILL:
            call.prefill_worker = assignment.worker.name
        else:
            call.worker = assignment.worker.name
        return assignment

    async def _wait_in_time(
        self, call: CompletionCall, waiting: Coroutine[Any, Any, LiveAssignment]
    ) -> LiveAssignment:
        """Wait for the next worker of a stream that is resumed, within the stream's limit.

        Raises:
            TimeoutError: no worker was assigned in time.
        """
        left_s = call.machine.waits_until_s - self._clock.now_s()
        async with asyncio.timeout(max(0.0, self._clock.to_real_s(left_s))):
            return await waiting

    # ------------------------------------------------------------------ responses

    async def _confirm_lease(self, call: CompletionCall, step: ConfirmLease) -> bool:
        """Return whether the first part of a response may be sent: its text may be wrong if its KV was read too late."""
        is_intact = await self._transfers.confirm(step.kv.lease)
        if not is_intact:
            call.failure = TryFailure(StreamBroken("the KV may have been read after its lease"))
        return is_intact

    async def _relay_stream(self, call: CompletionCall, step: RelayStream) -> FailedTry | None:
        """Relay a stream; return None at its end, which can be an error event of the worker, else the failure."""
        started: StartedResponse = step.response
        assignment, responder, resumable = step.assignment, call.responder, call.resumable
        meter = RelayMeter(
            self._metrics,
            assignment,
            on_first_token=partial(self._note_first_token, call),
            arrived_real_s=call.arrived_real_s,
            dispatched_real_s=call.dispatched_real_s,
            speed=self._clock.speed,
            prefilled=started.kv,
            can_resume=resumable is not None,
            is_single=(call.request if resumable is None else resumable.request).is_single,
        )
        observe = (
            meter.observe
            if resumable is None
            else self._continuations.observer_of(resumable, meter, call.ttft_s)
        )
        if call.machine.alone_at:
            observe = partial(_observe_suspect, call, meter, observe)
        self.moves.follow(call, meter, started.response)
        self._wait_comments.end(call)
        try:
            if not responder.started:
                responder.start(200, content_type=EVENT_STREAM, headers=call.headers)
            call.has_only_comments = False
            responder.write(observe(started.first_part, 0))
            await relay(started.response, responder, observe=observe)
            if not meter.is_complete:
                raise StreamBroken(f"{assignment.worker.name} ended its stream without [DONE]")
            responder.write(meter.take_remaining())
            responder.end()
        except (asyncio.CancelledError, ClientDisconnected):
            # Many clients disconnect at [DONE], without waiting for the end of the body.
            call.is_delivered = meter.is_done
            if meter.is_done:
                self._count_error_event(call, meter)
            raise
        except UpstreamError as problem:
            if not meter.is_done:
                if meter.is_mid_event and started.kv is None and resumable is None:
                    # The client has the first part of an event; the following data must not become part of it.
                    responder.write(b"\n\n")
                if isinstance(problem, StreamMoved):
                    call.failure = TryFailure(problem)
                    return FailedTry(MOVED, RetryScope.ANYWHERE, (assignment.worker,))
                failed = self._worker_calls.failed(call, assignment, problem)
                assert isinstance(failed, FailedTry)  # noqa: S101 - it is not an error reply
                return failed
            responder.end()
        finally:
            self.moves.leave(call, assignment.worker)
            call.ttft_s = meter.ttft_s
            usage, tokens = (
                (meter.usage, meter.tokens)
                if resumable is None
                else self._continuations.totals_of(resumable, meter)
            )
            self._worker_calls.record_usage(call, usage)
            call.output_tokens = max(call.output_tokens, tokens)
        self._count_error_event(call, meter)
        return None

    def _count_error_event(self, call: CompletionCall, meter: RelayMeter) -> None:
        """Count a stream that ended with an error event of the worker."""
        if meter.has_error:
            call.error = BROKEN
            meter.assignment.failed(self._clock.now_s(), "ended a stream by an error event")

    # ------------------------------------------------------------------ counting

    def _note_first_token(self, call: CompletionCall) -> None:
        if call.trace is not None:
            call.trace.first_token()
        if self._admission.core.tiers is not None:
            ttft_s = self._clock.to_simulated_s(call.age_real_s())
            self._admission.record_tier_event(call.tier, ttft_s=ttft_s)

    # ------------------------------------------------------------------ answers other than success

    def _refuse(self, call: CompletionCall, response: ErrorResponse) -> None:
        wait = response.retry_after
        if wait is None and response.wants_retry:
            expected_s = response.retry_after_s
            expected_real_s = None if expected_s is None else self._clock.to_real_s(expected_s)
            wait = retry_after(expected_real_s, floor_s=self.retry_after_s, is_rate=response.is_rate)
        headers = call.headers if wait is None else (*call.headers, (b"retry-after", wait))
        body = error_body_for(call.request.path, response.status, response.body)
        call.responder.send(response.status, body, headers=headers)


def _observe_suspect(
    call: CompletionCall, meter: RelayMeter, observe: Observe, data: bytes, at: int = 0
) -> bytes:
    """Process one read of a suspect's stream, and clear the suspect once it has run alone for long enough."""
    sent = observe(data, at)
    if call.machine.alone_at and meter.tokens >= CLEARED_TOKENS:
        call.machine.clear()
    return sent
