"""The way of one request: one stage (aggregated) or two (prefill, then decode), with retries before the first byte.

Called by ``app`` with a parsed request; answers it whatever happens, except when the client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from penstock_core.clock import ModelClock
from penstock_core.errors import NoEndpointsError, PenstockError, StreamBroken, UpstreamError
from penstock_core.logs import get_logger
from penstock_router.fleet import InFlight
from penstock_router.gate import Entrance, Picker
from penstock_router.metrics import RouterMetrics
from penstock_router.policy.arrival import Arrival
from penstock_router.policy.retry_budget import RetryBudget
from penstock_router.policy.token_estimate import TokenEstimator
from penstock_router.proxy.call import Call
from penstock_router.proxy.failures import Problem, StageFailed, problem_of
from penstock_router.proxy.handover import (
    Prefilled,
    decode_body,
    prefill_body,
    read_prefill_answer,
    read_usage,
    with_cached_tokens,
)
from penstock_router.proxy.lease_guard import Lease, LeaseGuard
from penstock_router.proxy.opening import read_opening
from penstock_router.proxy.prefix import ExactKeys
from penstock_router.proxy.stream_meter import Correction, StreamMeter
from penstock_router.proxy.upstream import Exchanger, read_whole
from penstock_wire.client import StreamingResponse
from penstock_wire.problem import EVENT_STREAM, JSON
from penstock_wire.relay import relay
from penstock_wire.sse import encode_event

log = get_logger(__name__)

_BACKOFF_REAL_S = 0.05
"""Chosen: the pause before the same worker is tried again, times the number of retries so far; a worker
that has just been replaced listens within a few of these."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a decode answer that rests on another worker's KV needs.

    Attributes:
        correction: How to rewrite its usage.
        lease: What must have held for its text to be trusted.
    """

    correction: Correction
    lease: Lease


class Dispatcher:
    """Serves completion requests."""

    def __init__(
        self,
        *,
        exchanger: Exchanger,
        gate: Entrance,
        decode: Picker | None,
        leases: LeaseGuard,
        metrics: RouterMetrics,
        budget: RetryBudget,
        max_retries: int,
        estimator: TokenEstimator,
        clock: ModelClock,
        is_alone: Callable[[str], bool],
        retry_after_s: int,
        exact: ExactKeys | None = None,
    ) -> None:
        """Tie the parts.

        Args:
            exchanger: Calls workers.
            gate: The way into the first stage.
            decode: Chooses the second stage's worker; None in an aggregated graph.
            leases: Confirms hand-overs.
            metrics: Counts.
            budget: Allows retries.
            max_retries: Most retries of one request.
            estimator: Learns from prompts that workers have counted.
            clock: Modelled time.
            is_alone: Whether no other worker can stand in for the one named.
            retry_after_s: Retry-After of refusals, seconds.
            exact: Makes prefix keys of tokens; None: of bytes.
        """
        self._exchanger = exchanger
        self._gate = gate
        self._decode = decode
        self._leases = leases
        self._metrics = metrics
        self._budget = budget
        self._max_retries = max_retries
        self._estimator = estimator
        self._clock = clock
        self._is_alone = is_alone
        self._exact = exact
        self._retry_after = (b"retry-after", str(retry_after_s).encode())

    async def serve(self, call: Call) -> None:
        """Answer one request; every error but a vanished client becomes an answer."""
        self._budget.request_arrived()
        try:
            await self._until_answered(call)
        except StageFailed as failure:
            call.error = failure.reason
            if call.responder.started:
                self._break_off(call, problem_of(failure))
            elif failure.answer is not None:
                self._pass_on(call, failure)
            else:
                self._refuse(call, problem_of(failure))
        except PenstockError as exc:
            if call.responder.disconnected or call.responder.started:
                raise
            problem = problem_of(exc)
            call.error = problem.reason
            self._refuse(call, problem)

    async def _until_answered(self, call: Call) -> None:
        tried = False
        while True:
            try:
                await self._try(call, again=tried)
            except StageFailed as failure:
                await self._before_retry(call, failure)
                tried = True
            else:
                return

    async def _try(self, call: Call, *, again: bool) -> None:
        if self._decode is None:
            inflight = await self._enter(call, again=again)
            call.worker = inflight.worker.name
            await self._answer(call, inflight, call.request.raw, hand_over=None)
        elif not call.request.is_single:
            # A hand-over carries the blocks of one prompt; several are computed where they are decoded.
            await self._answer(call, self._pick_decode(call), call.request.raw, hand_over=None)
        else:
            prefilled, lease = await self._prefill(call, again=again)
            body = decode_body(call.request, prefilled.params, expired_leases=lease.expired_before)
            hand_over = HandOver(Correction(prefilled.cached_tokens), lease) if prefilled.params else None
            await self._answer(call, self._pick_decode(call), body, hand_over=hand_over)

    # ------------------------------------------------------------------ stages

    async def _enter(self, call: Call, *, again: bool) -> InFlight:
        stay = await self._gate.enter(self._arrival(call), again=again)
        call.queued_s += stay.queued_s
        self._metrics.queue_time.observe(stay.queued_s)
        return stay.inflight

    def _arrival(self, call: Call) -> Arrival:
        if not self._gate.reads_prompts:
            return Arrival((), call.prompt_tokens, call.avoid)
        keyed = call.prefix(self._exact)
        return Arrival(
            keyed.chain,
            call.prompt_tokens,
            call.avoid,
            keyed.block_tokens(self._estimator.bytes_per_token),
            keyed.head_parts,
            call.session,
            # A prefill's own answer tells; a stream's first token does.
            is_silent=self._decode is None and not call.request.stream,
        )

    async def _prefill(self, call: Call, *, again: bool) -> tuple[Prefilled, Lease]:
        inflight = await self._enter(call, again=again)
        worker = inflight.worker
        name = call.prefill_worker = worker.name
        async with self._exchanger.open(call, inflight, prefill_body(call.request)) as response:
            content = await read_whole(response)
            lease = self._leases.granted(worker)
            try:
                prefilled = read_prefill_answer(content)
            except ValueError as exc:
                error = StreamBroken(f"{name} answered a prefill with what is not JSON: {exc}")
                raise StageFailed("upstream_broken", worker=name, may_retry=True, error=error) from exc
            inflight.computed(prefilled.cached_tokens)
            inflight.succeeded()
        self._count_prompt(call, prefilled.prompt_tokens)
        call.cached_tokens = prefilled.cached_tokens
        return prefilled, lease

    def _pick_decode(self, call: Call) -> InFlight:
        assert self._decode is not None  # noqa: S101 - only called in a disaggregated graph
        picked = self._decode.pick(call.prompt_tokens, now_s=self._clock.now_s(), avoid=call.avoid)
        if picked is None:
            # It left during the prefill; the gate holds the next try until one can be routed to.
            gone = NoEndpointsError("no decode worker can take the request; retry later")
            raise StageFailed("no_worker", worker="", may_retry=call.request.is_single, error=gone)
        inflight, choice = picked
        call.worker = inflight.worker.name
        log.debug("decode worker chosen", worker=call.worker, reason=choice.reason)
        return inflight

    async def _answer(
        self, call: Call, inflight: InFlight, body: bytes, *, hand_over: HandOver | None
    ) -> None:
        is_handed_over = hand_over is not None
        async with self._exchanger.open(call, inflight, body, is_handed_over=is_handed_over) as response:
            content_type = response.headers.get(b"content-type", b"")
            if call.request.stream and content_type.startswith(b"text/event-stream"):
                await self._stream(call, inflight, response, hand_over)
            else:
                await self._send_whole(call, inflight, response, hand_over)

    async def _opening(
        self, inflight: InFlight, response: StreamingResponse, hand_over: HandOver | None
    ) -> bytes:
        """Return the first bytes that may be sent; until then another worker can still be tried."""
        if hand_over is not None:
            opening = await read_opening(response, inflight.worker.name)
            await self._leases.confirm(hand_over.lease)
            return opening
        first = await anext(response, None)
        if first is None:
            raise StreamBroken(f"{inflight.worker.name} ended its stream before the first event")
        return first

    async def _stream(
        self, call: Call, inflight: InFlight, response: StreamingResponse, hand_over: HandOver | None
    ) -> None:
        responder = call.responder
        opening = await self._opening(inflight, response, hand_over)
        correction = None if hand_over is None else hand_over.correction
        meter = StreamMeter(
            self._metrics,
            inflight,
            arrived_real_s=call.arrived_real_s,
            speed=self._clock.speed,
            correction=correction,
        )
        try:
            responder.start(200, content_type=EVENT_STREAM, headers=call.headers)
            responder.write(meter.observe(opening))
            await relay(response, responder, observe=meter.observe)
            responder.write(meter.rest())
            responder.end()
            inflight.succeeded()
        except UpstreamError:
            if meter.is_mid_event and correction is None:
                # The client has the beginning of an event; what follows must not become part of it.
                responder.write(b"\n\n")
            raise
        finally:
            self._note_stream(call, meter)

    async def _send_whole(
        self, call: Call, inflight: InFlight, response: StreamingResponse, hand_over: HandOver | None
    ) -> None:
        content = await read_whole(response)
        inflight.computed(measured=False)
        inflight.succeeded()
        if hand_over is not None:
            await self._leases.confirm(hand_over.lease)
        try:
            answer: Any = orjson.loads(content)
        except orjson.JSONDecodeError as exc:
            raise StreamBroken(f"{inflight.worker.name} answered with what is not JSON") from exc
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if hand_over is not None and isinstance(usage, dict):
            with_cached_tokens(usage, hand_over.correction.cached_tokens)
            content = orjson.dumps(answer)
        self._note_usage(call, usage)
        call.responder.send(200, content, content_type=JSON, headers=call.headers)

    # ------------------------------------------------------------------ counting

    def _note_stream(self, call: Call, meter: StreamMeter) -> None:
        call.ttft_s = meter.ttft_s
        self._note_usage(call, meter.usage)
        call.output_tokens = max(call.output_tokens, meter.tokens)

    def _note_usage(self, call: Call, usage: Any) -> None:
        prompt_tokens, output_tokens, cached_tokens = read_usage(usage)
        self._count_prompt(call, prompt_tokens)
        if output_tokens is not None:
            call.output_tokens = output_tokens
        if cached_tokens is not None:
            call.cached_tokens = cached_tokens

    def _count_prompt(self, call: Call, prompt_tokens: int | None) -> None:
        if prompt_tokens is None or call.prompt_counted:
            return
        call.prompt_tokens = prompt_tokens
        call.prompt_counted = True
        if call.request.prompt_bytes and not call.request.prompt_ids:
            self._estimator.learn(call.request.prompt_bytes, prompt_tokens)

    # ------------------------------------------------------------------ retries

    async def _before_retry(self, call: Call, failure: StageFailed) -> None:
        """Return if the request may be tried again, after a pause where there is no other worker.

        Raises:
            StageFailed: the same failure, which is then final.
        """
        call.timeouts += failure.timed_out
        if (
            call.responder.started
            or not failure.may_retry
            or call.retries >= self._max_retries
            or (failure.timed_out and call.timeouts > 1)
            or self._exchanger.left_s(call) <= 0
            or not self._budget.take(self._clock.now_s())
        ):
            raise failure
        call.retries += 1
        self._metrics.retries[failure.reason] += 1
        if failure.worker:
            call.avoid |= {failure.worker}
            if self._is_alone(failure.worker):
                await asyncio.sleep(_BACKOFF_REAL_S * call.retries)

    # ------------------------------------------------------------------ answers other than success

    def _refuse(self, call: Call, problem: Problem) -> None:
        headers = (*call.headers, self._retry_after) if problem.retry_after else call.headers
        call.responder.send(problem.status, problem.body(), headers=headers)

    def _pass_on(self, call: Call, failure: StageFailed) -> None:
        answer = failure.answer
        assert answer is not None  # noqa: S101 - the caller has looked
        headers = call.headers
        if answer.retry_after is not None:
            headers = (*headers, (b"retry-after", answer.retry_after))
        elif answer.status == 503:
            headers = (*headers, self._retry_after)
        call.responder.send(answer.status, answer.body, content_type=answer.content_type, headers=headers)

    def _break_off(self, call: Call, problem: Problem) -> None:
        """Tell a client in mid-stream that its stream is broken, and close: it must not look complete."""
        responder = call.responder
        responder.keep_alive = False
        responder.write(encode_event(problem.body()))
        responder.end()
