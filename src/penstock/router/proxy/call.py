"""The record of one request in the router, and its tracing spans; the access log and metrics are made from it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.api import Role, Tier
from penstock.core.errors import StreamMoved
from penstock.core.http.messages import Headers
from penstock.core.http.server import Request, Responder
from penstock.core.http.streaming import StreamingResponse
from penstock.core.tracing import TraceSpan, Tracing
from penstock.router.admission import LiveAssignment
from penstock.router.core.request import RequestMachine
from penstock.router.core.retries import RequestTries
from penstock.router.metrics import RouterMetrics
from penstock.router.policy.arrival import Arrival
from penstock.router.proxy.auth import TierIdentity
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.continuation import ResumableStream
from penstock.router.proxy.failures import TryFailure
from penstock.router.proxy.kv_transfer import PrefillResponse
from penstock.router.proxy.prefix import Keyed

_NS: Final = 1e9


class StartedResponse(NamedTuple):
    """The response of a worker, as far as it has been read before anything was sent to the client.

    Attributes:
        response: The HTTP response; the rest of a stream is read from it.
        first_part: First part of a stream, up to the first token; or the complete non-streaming response.
        kv: Response of the prefill worker whose KV the worker has fetched; None if it has computed the prompt.
        usage: Usage object of a non-streaming response; None if it has none.
    """

    response: StreamingResponse
    first_part: bytes
    kv: PrefillResponse | None
    usage: Any = None


@dataclass(slots=True, eq=False)
class CompletionCall:
    """One completion request and its progress in the router.

    The head of a response is its status line and headers; comments are lines of an event stream that clients ignore. A try is
    one attempt to have workers serve the request. The clock of simulated seconds runs ``speed`` times as fast as that of real
    seconds; both are equal in production.

    Attributes:
        request: Request to send to workers; if the stream is resumed, the request for the remaining part of the response.
        responder: Writes the response to the client.
        arrived_real_s: ``time.monotonic()`` at arrival.
        prompt_tokens: Number of prompt tokens: estimated, or counted by a worker if ``is_prompt_counted``.
        headers: Headers of the response to the client; the first is the request's id.
        upstream_headers: Headers of the requests to workers.
        machine: State machine of the request; set when `CompletionHandler.serve` starts.
        session: Value of the header that groups requests into a session; empty without one.
        identity: Tier and tenant of the request; None if tiers are disabled.
        is_prompt_counted: Whether `prompt_tokens` was counted by a worker.
        cached_tokens: Number of prompt tokens that prefill found in its cache; None if unknown.
        output_tokens: Number of output tokens.
        queued_s: Total time in the router's queues, in simulated seconds.
        dispatched_real_s: ``time.monotonic()`` when the prompt was dispatched, in the last try, to the worker that computes
            it.
        ttft_s: Time from arrival to first token, in simulated seconds; None for non-streaming responses.
        tries: Failures and retries of the request so far.
        is_delivered: Whether the complete response was written; a client that disconnects then has not left early.
        keyed: Prefix keys of the prompt; None if the policy does not use them.
        prefill_worker: Name of the last prefill worker; None if there was none.
        worker: Name of the last worker of the stage that generates the response; None if there was none.
        error: Reason for which the request failed; None if it has not failed.
        has_only_comments: Whether the client has received the head of the response with status 200 and only comments after
            it, but no token.
        failed_status: HTTP status that the error would have had, if the request failed after the head with status 200 but
            before any token; 0 otherwise.
        requests_token_ids: Whether workers are asked for token ids, so that another worker can resume the stream by them.
        resumable: State of a stream that another worker could resume; None if no token has arrived yet or no other worker could
            resume it.
        failure: Failure of the newest try, and the error response for the client if no other try follows; None if it has not
            failed.
        trace: Tracing spans; None if the request is not traced.
    """

    request: CompletionRequest
    responder: Responder
    arrived_real_s: float
    prompt_tokens: int
    headers: Headers
    upstream_headers: Headers
    machine: RequestMachine = field(init=False)
    session: str = ""
    identity: TierIdentity | None = None
    is_prompt_counted: bool = False
    cached_tokens: int | None = None
    output_tokens: int = 0
    queued_s: float = 0.0
    dispatched_real_s: float = 0.0
    ttft_s: float | None = None
    tries: RequestTries = field(default_factory=RequestTries)
    is_delivered: bool = False
    keyed: Keyed | None = None
    prefill_worker: str | None = None
    worker: str | None = None
    error: str | None = None
    has_only_comments: bool = False
    failed_status: int = 0
    requests_token_ids: bool = False
    resumable: ResumableStream | None = None
    failure: TryFailure | None = None
    trace: RequestTrace | None = None

    def set_keys(self, keyed: Keyed) -> None:
        """Store the prefix keys of the request's prompt, and its exact number of tokens unless a worker has counted them already.

        ``keyed`` contains both; the number is missing there (None) if the keys were made from bytes.
        """
        self.keyed = keyed
        if keyed.tokens is not None and not self.is_prompt_counted:
            self.prompt_tokens = keyed.tokens

    def shown(self) -> dict[str, Any]:
        """Return the request's entries of the access log, except those that are only known at its end (status, duration).

        Keys are the names of the entries, such as ``worker``; a value that is unknown is None. ``tier`` and ``tenant``
        are missing if tiers are disabled.
        """
        identity = {} if self.identity is None else {"tier": self.tier.value, "tenant": self.identity.tenant}
        return {
            **identity,
            "stream": self.request.stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queued_s": round(self.queued_s, 6),
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "prefill_worker": self.prefill_worker,
            "worker": self.worker,
            "retries": self.tries.retries,
            "error": self.error,
        }

    @property
    def is_continuation(self) -> bool:
        """Whether the request to the worker is for the remaining part of an interrupted stream, instead of the entire response."""
        return self.resumable is not None and self.resumable.emitted is not None

    @property
    def emitted_tokens(self) -> int:
        """Number of response tokens that the client has already, and that the worker gets with the prompt to resume the stream.

        0 unless an interrupted stream is resumed.
        """
        return (
            0 if self.resumable is None or self.resumable.emitted is None else self.resumable.emitted.tokens
        )

    @property
    def tier(self) -> Tier:
        """Tier of the request; standard if tiers are disabled."""
        return Tier.STANDARD if self.identity is None else self.identity.tier

    def arrival(self, role: Role, unpaired: frozenset[str], bytes_per_token: float) -> Arrival:
        """Return the request in the form in which the routing policy of ``role`` sees it; for decode, it has no prefix keys.

        Args:
            role: Role of the stage.
            unpaired: Names of workers of this role that cannot transfer KV to or from the worker of the other stage
                (prefill or decode), because their engine versions differ; they are avoided.
            bytes_per_token: Mean number of bytes per token, to convert between prefix keys and tokens.
        """
        keyed, is_complete, avoid = self.keyed, not self.request.stream, self.tries.avoid | unpaired
        tokens = self.prompt_tokens + self.emitted_tokens
        tier, tenant = self.tier, "" if self.identity is None else self.identity.tenant
        if role is Role.DECODE or keyed is None:
            is_complete = is_complete and role is Role.DECODE
            return Arrival(
                (),
                tokens,
                avoid,
                is_non_streaming=is_complete,
                tier=tier,
                tenant=tenant,
                is_continuation=self.is_continuation,
                alone_at=self.machine.alone_at,
            )
        return Arrival(
            keyed.chain,
            tokens,
            avoid,
            keyed.block_tokens(bytes_per_token),
            keyed.sub_block_keys,
            self.session,
            # A prefill's own answer shows it; so does a stream's first token.
            is_non_streaming=is_complete and role is not Role.PREFILL,
            tier=tier,
            tenant=tenant,
            is_continuation=self.is_continuation,
            alone_at=self.machine.alone_at,
        )

    def age_real_s(self) -> float:
        """Return the real seconds since the request's arrival."""
        return time.monotonic() - self.arrived_real_s


class RequestTrace:
    """Tracing spans of one request; its methods are called in the order of the stages, and again for each retry."""

    __slots__ = ("_broken", "_call", "_role", "_span", "_waits_ns")

    def __init__(self, tracing: Tracing, request: Request, call: CompletionCall) -> None:
        """Begin the request's span, at the time of its arrival."""
        attributes: dict[str, str | int | float | bool] = {
            "http.request.method": request.method,
            "url.path": request.path,
            "gen_ai.request.model": str(call.request.body.get("model")),
            "penstock.request_id": call.headers[0][1].decode(),
            "penstock.stream": call.request.stream,
        }
        if call.identity is not None:
            attributes["penstock.tier"] = call.tier.value
        name, began_ns = f"POST {request.path}", time.time_ns() - int(call.age_real_s() * _NS)
        self._span = tracing.begin(name, request.headers, began_ns=began_ns, attributes=attributes)
        self._call: TraceSpan | None = None
        self._broken: TraceSpan | None = None
        self._role = ""
        self._waits_ns: int | None = None

    def waits(self, role: str) -> None:
        """Record that the request starts to wait for a worker of ``role``; the span of the wait begins at this moment."""
        self._role, self._waits_ns = role, time.time_ns()

    def assigned(self, assignment: LiveAssignment, queued_real_s: float) -> None:
        """Record that the request has a worker, and add the spans of the wait and of the choice of the worker.

        ``queued_real_s`` is the part of the wait that was spent in the queue, in real seconds.
        """
        began_ns, now_ns = self._waits_ns, time.time_ns()
        if began_ns is None or not self._span.is_recorded:
            return
        self._waits_ns = None
        picked_ns = min(now_ns, began_ns + int(queued_real_s * _NS))
        role = {"penstock.role": self._role}
        self._span.child("queue", role, began_ns=began_ns).end(picked_ns)
        chosen = {**role, "penstock.worker": assignment.worker.name, "penstock.reason": assignment.reason}
        self._span.child("pick", chosen, began_ns=picked_ns).end(now_ns)

    def sent(self, call: CompletionCall, assignment: LiveAssignment) -> None:
        """Begin the span of a call to a worker, and add its id to the headers for the worker, so that the worker continues the trace."""
        attributes: dict[str, str | int | float | bool] = {"penstock.worker": assignment.worker.name}
        if call.tries.retries:
            attributes["penstock.retries"] = call.tries.retries
        is_continuation = call.machine.continuations > 0
        if is_continuation:
            attributes["penstock.continuations"] = call.machine.continuations
        self._call = self._span.child(assignment.role.value, attributes, is_call=True)
        if is_continuation and self._broken is not None:
            self._call.link(self._broken, "continues")
        others = [each for each in call.upstream_headers if each[0] != b"traceparent"]
        call.upstream_headers = (*others, (b"traceparent", self._call.traceparent))

    def first_token(self) -> None:
        """Record, in the span of the call to a worker, that the first token of its stream has arrived."""
        if self._call is not None:
            self._call.note("first token")

    def answered(self, error: BaseException | None) -> None:
        """End the span of a call to a worker.

        ``error`` is the failure of the call, None if it succeeded. A client that disconnected is not a failure.
        """
        call, self._call = self._call, None
        if call is None or call is self._span:
            return
        if isinstance(error, asyncio.CancelledError):
            call.set({"penstock.cancelled": True})
        elif isinstance(error, StreamMoved):
            call.set({"penstock.moved": True})
            self._broken = call
        elif error is not None:
            call.fail(error)
            self._broken = call
        call.end()

    def finish(self, call: CompletionCall, status: int, e2e_s: float, metrics: RouterMetrics) -> None:
        """End the request's span, and attach its trace id to the request's latencies in the metrics (exemplars).

        Args:
            call: The request.
            status: HTTP status of the response.
            e2e_s: Simulated seconds from arrival to the end.
            metrics: Metrics of the router.
        """
        span = self._span
        if span.is_recorded and status == 200 and call.error is None:
            metrics.e2e.exemplify(e2e_s, span.trace_id, time.time())
            if call.ttft_s is not None:
                metrics.ttft.exemplify(call.ttft_s, span.trace_id, time.time())
        if self._waits_ns is not None and span.is_recorded:
            queue = span.child("queue", {"penstock.role": self._role}, began_ns=self._waits_ns)
            queue.fail(call.error or str(status))
            queue.end()
        span.set(
            {
                "http.response.status_code": status,
                "error.type": call.error,
                "gen_ai.usage.input_tokens": call.prompt_tokens,
                "gen_ai.usage.output_tokens": call.output_tokens,
                "penstock.cached_tokens": call.cached_tokens,
                "penstock.queued_s": call.queued_s,
                "penstock.ttft_s": call.ttft_s,
                "penstock.retries": call.tries.retries,
            }
        )
        if status >= 500 or (status == 200 and call.error is not None):
            span.fail(call.error or str(status))
        span.end()
