"""The router's HTTP calls to workers: send the request, read the first part of the response, and classify failures.

If prefill and decode run concurrently, the call to the prefill worker runs in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from penstock.api import Role
from penstock.core.errors import (
    ClientDisconnected,
    SaturatedError,
    UpstreamConnectError,
    UpstreamError,
    WrongAnswer,
)
from penstock.core.http.client import StreamingResponse, Timeouts
from penstock.core.http.messages import EVENT_STREAM
from penstock.core.logs import get_logger
from penstock.router.admission import LiveAssignment
from penstock.router.context import RouterContext
from penstock.router.core.request_steps import (
    PrefillFailed,
    PrefillOutcome,
    PrefillStarted,
    Problem,
    PromptComputed,
    ResponseStarted,
    SendRequest,
    StepResult,
)
from penstock.router.core.retries import FailedTry, KvLease, RetryScope
from penstock.router.proxy.call import CompletionCall, StartedResponse
from penstock.router.proxy.failures import ErrorReply, TryFailure, failed_try, retry_scope_of
from penstock.router.proxy.hidden_ids import with_ids
from penstock.router.proxy.kv_transfer import (
    PrefillResponse,
    decode_body,
    prefill_body,
    read_prefill_response,
    read_usage,
    source_of,
    with_cached_tokens,
)
from penstock.router.proxy.stream import read_completion, read_preamble, reencode
from penstock.runtimes.kv_transfer import KvSource

log = get_logger(__name__)

_MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
"""Chosen: a complete response with logprobs of 100,000 tokens is smaller; a runaway worker is cut off."""
_MAX_ERROR_BYTES: Final = 1024 * 1024

_LAST_STEP_REAL_S: Final = 2.0
"""Time for which a prefill continues after its client has disconnected. Chosen: longer than one engine step, so that a prefill in
its last step ends and returns the location of its KV, which can then be released. If it were aborted then, it would end
nevertheless and its blocks would be held for a lease."""

_SETTLE_REAL_S: Final = 5.0
"""Chosen: a prefill worker answers within one engine step of its decode's first token."""

_Read = Callable[[CompletionCall, LiveAssignment, StreamingResponse], Awaitable[StepResult]]


class WorkerCalls:
    """Sends the requests of one router to workers, and reports to each worker's circuit breaker whether its response was correct.

    ``context`` contains the objects that the parts of the router share. ``can_resume`` is called when a stream starts, and
    returns whether another worker could resume it; ``on_prefill_end`` is called with the outcome of each prefill that runs
    concurrently with decode.

    Attributes:
        request_real_s: Total timeout of a request in real seconds.
    """

    def __init__(
        self,
        context: RouterContext,
        *,
        can_resume: Callable[[CompletionCall], bool],
        on_prefill_end: Callable[[CompletionCall, PrefillOutcome], None],
    ) -> None:
        clock = context.clock
        limits = context.settings.config.limits
        self._pool = context.pool
        self._kv_transfer = context.settings.kv_transfer
        self._prompt_costs = context.prompt_costs
        self._clock = clock
        self._metrics = context.metrics
        self._can_resume, self._on_prefill_end = can_resume, on_prefill_end
        self.request_real_s = clock.to_real_s(limits.request_timeout_seconds)
        self._phases_real_s = (
            limits.connect_timeout_real_seconds,
            clock.to_real_s(limits.first_byte_timeout_seconds),
            clock.to_real_s(limits.idle_timeout_seconds),
        )

    async def send(self, call: CompletionCall, step: SendRequest) -> StepResult:
        """Send a request to its assigned worker, and read the first part of the response.

        Returns that the prompt was computed (`PromptComputed`), that the response has started (`ResponseStarted`), or why
        neither is so (`Problem`, `FailedTry`). If ``step`` is a prefill that runs concurrently with decode, it is only
        started (`PrefillStarted`).

        Raises:
            ClientDisconnected: the client disconnected during a prefill that failed.
        """
        request, assignment = call.request, step.assignment
        if step.role is Role.PREFILL:
            source = source_of(assignment.worker)
            body = prefill_body(request, self._kv_transfer, source)
            if self._kv_transfer.is_concurrent:
                return self._start_prefill(call, assignment, source, body)
            return await self._prefill(call, assignment, source, body)
        if call.requests_token_ids:
            request = with_ids(request)
        body = request.raw if step.kv is None else decode_body(request, step.kv)
        read = self._start_stream if request.stream else self._read_complete
        decoding = self._call_worker(
            call, assignment, body, partial(read, step), reads_kv=step.kv is not None
        )
        return await (decoding if step.prefill is None else self._decode_with_prefill(step.prefill, decoding))

    async def _prefill(
        self, call: CompletionCall, assignment: LiveAssignment, source: KvSource, body: bytes
    ) -> StepResult:
        call.responder.patience_s = _LAST_STEP_REAL_S
        try:
            outcome = await self._call_worker(call, assignment, body, partial(self._read_prefilled, source))
        finally:
            call.responder.patience_s = 0.0
        if not isinstance(outcome, PromptComputed) and outcome is not Problem.SATURATED:
            check_client_connected(call)
        return outcome

    async def _call_worker(
        self,
        call: CompletionCall,
        assignment: LiveAssignment,
        body: bytes,
        read: _Read,
        *,
        reads_kv: bool = False,
        is_concurrent: bool = False,
    ) -> StepResult:
        try:
            left_real_s = self.request_real_s - call.age_real_s()
            timeouts = Timeouts(*self._phases_real_s, max(0.001, left_real_s))
            if call.trace is not None and not is_concurrent:
                call.trace.sent(call, assignment)
            response = await self._send_request(call, assignment, body, timeouts)
            try:
                if response.status != 200:
                    await _raise_error_reply(response, assignment.worker.name)
                return await read(call, assignment, response)
            except BaseException:
                response.abort()
                raise
        except (ErrorReply, UpstreamError) as problem:
            return self.failed(call, assignment, problem, reads_kv=reads_kv)
        except SaturatedError as exc:
            # The router itself lacks connections; this is not the worker's fault.
            log.warning("request refused", problem=str(exc))
            return Problem.SATURATED

    def _send_request(
        self, call: CompletionCall, assignment: LiveAssignment, body: bytes, timeouts: Timeouts
    ) -> Awaitable[StreamingResponse]:
        url = assignment.worker.spec.url + call.request.path
        return self._pool.stream("POST", url, body=body, headers=call.upstream_headers, timeouts=timeouts)

    def failed(
        self,
        call: CompletionCall,
        assignment: LiveAssignment,
        problem: ErrorReply | UpstreamError,
        *,
        reads_kv: bool = False,
    ) -> FailedTry | Problem:
        """Report to a worker's circuit breaker that the worker failed to answer, and return what this means for the request.

        ``problem`` is the worker's error response, or the reason for which there is no complete response; ``reads_kv`` says
        that the worker was asked to fetch the prompt's KV. The result is a `FailedTry` (which says where the request may be
        retried), or a `Problem` that does not count against the worker alone.
        """
        worker, now_s = assignment.worker, self._clock.now_s()
        if isinstance(problem, UpstreamError):
            if isinstance(problem, UpstreamConnectError):
                worker.suspect("refused a connection")
            assignment.failed(now_s, str(problem))
            failure, response = failed_try(problem, worker)
            call.failure = TryFailure(problem, response)
            return failure
        response, is_error_object = problem.shown(call.request.path)
        call.failure = TryFailure(problem, response)
        if reads_kv and problem.is_kv_lost:
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
            return FailedTry(response.reason, scope, (worker,))
        assignment.failed(now_s, _cause(call, problem, is_error_object=is_error_object), proven=False)
        return FailedTry(response.reason, scope, (worker,), unproven=assignment)

    # ------------------------------------------------------------------ a prefill alongside its decode

    def _start_prefill(
        self, call: CompletionCall, assignment: LiveAssignment, source: KvSource, body: bytes
    ) -> PrefillStarted:
        lease = KvLease(assignment.worker, self._clock.now_s(), None)
        kv = PrefillResponse(self._kv_transfer.decode_fields(source, None), None, None, lease)
        task = asyncio.create_task(self._prefill_concurrently(call, assignment, body, kv), name="prefill")
        return PrefillStarted(kv, task)

    async def _prefill_concurrently(
        self, call: CompletionCall, assignment: LiveAssignment, body: bytes, kv: PrefillResponse
    ) -> PrefillOutcome:
        read = partial(self._read_concurrent_prefill, kv)
        outcome = await self._call_worker(call, assignment, body, read, is_concurrent=True)
        assert isinstance(outcome, PromptComputed | FailedTry | Problem)  # noqa: S101 - what the reader and failures give
        self._on_prefill_end(call, outcome)
        return outcome

    async def _read_concurrent_prefill(
        self,
        kv: PrefillResponse,
        call: CompletionCall,
        assignment: LiveAssignment,
        response: StreamingResponse,
    ) -> PromptComputed:
        content = await response.read(limit_bytes=_MAX_RESPONSE_BYTES)
        answer = read_completion(content, _type_of(response), assignment.worker.name, call.request.endpoint)
        prompt_tokens, _, cached_tokens = read_usage(answer.get("usage"))
        self._count_computed(call, prompt_tokens)
        call.cached_tokens = kv.cached_tokens = cached_tokens
        return PromptComputed(cached_tokens, kv)

    async def _decode_with_prefill(
        self, prefill: asyncio.Task[PrefillOutcome], decoding: Coroutine[Any, Any, StepResult]
    ) -> StepResult:
        """Return decode's result, or the failure of the prefill if that fails before decode's first token."""
        decode = asyncio.create_task(decoding, name="decode")
        try:
            await asyncio.wait((decode, prefill), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and not isinstance(outcome := prefill.result(), PromptComputed):
                return PrefillFailed(outcome)
            return await decode
        finally:
            if not decode.done():
                decode.cancel()
                with suppress(asyncio.CancelledError):
                    await decode

    # ------------------------------------------------------------------ the first parts of responses

    async def _read_prefilled(
        self,
        source: KvSource,
        call: CompletionCall,
        assignment: LiveAssignment,
        response: StreamingResponse,
    ) -> StepResult:
        worker = assignment.worker
        content = await response.read(limit_bytes=_MAX_RESPONSE_BYTES)
        lease = KvLease(worker, self._clock.now_s(), worker.expired_leases)
        answer = read_completion(content, _type_of(response), worker.name, call.request.endpoint)
        fields = self._kv_transfer.decode_fields(source, answer)
        prefilled = read_prefill_response(answer, fields, lease)
        self._count_computed(call, prefilled.prompt_tokens)
        call.cached_tokens = prefilled.cached_tokens
        return PromptComputed(prefilled.cached_tokens, prefilled if fields else None)

    async def _start_stream(
        self, step: SendRequest, call: CompletionCall, assignment: LiveAssignment, response: StreamingResponse
    ) -> StepResult:
        name, content_type = assignment.worker.name, _type_of(response)
        if not content_type.lower().startswith(EVENT_STREAM.encode()):
            shown = content_type.decode("latin-1") or "no content type"
            raise WrongAnswer(f"{name} answered a stream with {shown}")
        first_part = await read_preamble(response, name, call.request.endpoint)
        started = StartedResponse(response, first_part, step.kv)
        return ResponseStarted(True, self._can_resume(call), started)

    async def _read_complete(
        self, step: SendRequest, call: CompletionCall, assignment: LiveAssignment, response: StreamingResponse
    ) -> StepResult:
        content = await response.read(limit_bytes=_MAX_RESPONSE_BYTES)
        assignment.is_computed = True
        answer = read_completion(content, _type_of(response), assignment.worker.name, call.request.endpoint)
        usage = answer.get("usage")
        if step.kv is not None and isinstance(usage, dict):
            if step.prefill is not None:
                await wait_for_prefill(step.prefill)  # its answer has the count
            with_cached_tokens(usage, step.kv.cached_tokens)
            content = reencode(answer)
        started = StartedResponse(response, content, step.kv, usage)
        return ResponseStarted(False, False, started)

    # ------------------------------------------------------------------ counting

    def record_usage(self, call: CompletionCall, usage: Any) -> None:
        """Store the prompt, cached and output tokens that a worker has counted in the call.

        ``usage`` is the usage object of the worker's response; nothing is stored if it is not a JSON object.
        """
        prompt_tokens, output_tokens, cached_tokens = read_usage(usage)
        self._count_prompt(call, prompt_tokens)
        if output_tokens is not None:
            call.output_tokens = output_tokens
        if cached_tokens is not None:
            call.cached_tokens = cached_tokens

    def _count_computed(self, call: CompletionCall, prompt_tokens: int | None) -> None:
        """Record a prefill worker's prompt count, which includes the part of the response that a resumed stream's prompt ends with."""
        if prompt_tokens is not None:
            self._count_prompt(call, max(0, prompt_tokens - call.emitted_tokens))

    def _count_prompt(self, call: CompletionCall, prompt_tokens: int | None) -> None:
        """Record a worker's count of the client's prompt, the first time only, and adapt the estimates of prompt sizes to it."""
        if prompt_tokens is None or call.is_prompt_counted:
            return
        if prompt_tokens > 0:
            self._metrics.prompt_estimate.observe(call.prompt_tokens / prompt_tokens)
        call.prompt_tokens = prompt_tokens
        call.is_prompt_counted = True
        request = call.request if call.resumable is None else call.resumable.request
        if not request.prompt_ids and not request.endpoint.is_relayed:
            self._prompt_costs.learn(request.prompt_bytes, request.parts, prompt_tokens)


async def wait_for_prefill(prefill: asyncio.Task[PrefillOutcome]) -> None:
    """Wait until the task ``prefill`` has ended, but at most 5 real seconds; the task continues if it takes longer.

    The prefill runs concurrently with a decode that has ended already, so that it should end soon as well.
    """
    await asyncio.wait((prefill,), timeout=_SETTLE_REAL_S)


def check_client_connected(call: CompletionCall) -> None:
    """Check that a request's client is still connected; called at the end of a prefill.

    A disconnection during the prefill is not noticed otherwise.

    Raises:
        ClientDisconnected: the client has disconnected.
    """
    if call.responder.disconnected:
        raise ClientDisconnected("the client left during the prefill")


def _cause(call: CompletionCall, problem: ErrorReply, *, is_error_object: bool) -> str:
    """Return the cause that logs and ``/workers`` show for a worker with this error response."""
    if problem.is_of_model:
        return f"it does not serve the model {call.request.body.get('model')}"
    return f"it answers {problem.status}" + ("" if is_error_object else " without an error object")


async def _raise_error_reply(response: StreamingResponse, worker: str) -> NoReturn:
    status = response.status
    if not 400 <= status < 600:
        raise WrongAnswer(f"{worker} answered {status}, which is neither success nor error")
    content = await response.read(limit_bytes=_MAX_ERROR_BYTES)
    raise ErrorReply(status, content, response.headers.get(b"retry-after"))


def _type_of(response: StreamingResponse) -> bytes:
    return response.headers.get(b"content-type", b"")
