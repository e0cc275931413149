"""The record of one request on its way through the router, and its spans; access log and metrics are made from it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import Role, Tier
from penstock.core.errors import StreamMoved
from penstock.core.http.messages import Headers
from penstock.core.http.server import Request, Responder
from penstock.core.http.streaming import StreamingResponse
from penstock.core.tracing import TraceSpan, Tracing
from penstock.router.admission import LiveAssignment
from penstock.router.core.request import RequestMachine
from penstock.router.core.request_steps import PrefillEnd
from penstock.router.core.retries import RequestTries
from penstock.router.metrics import RouterMetrics
from penstock.router.policy.arrival import Arrival
from penstock.router.proxy.auth import TierIdentity
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.continuation import BegunStream
from penstock.router.proxy.failures import ErrorResponse
from penstock.router.proxy.kv_transfer import PrefillAnswer
from penstock.router.proxy.prefix import Keyed

_NS: Final = 1e9


@dataclass(slots=True, eq=False)
class PrefillBeside:
    """A prefill that runs alongside its decode.

    Attributes:
        response: The worker's; None: none is open.
    """

    assignment: LiveAssignment
    task: asyncio.Task[PrefillEnd]
    response: StreamingResponse | None = None

    def leave(self) -> None:
        """Break it off, if it still runs; its worker sees the connection close."""
        if self.task is not asyncio.current_task():
            self.task.cancel()
        if self.response is not None:
            self.response.abort()


@dataclass(slots=True, eq=False)
class CompletionCall:
    """One completion request.

    Attributes:
        arrived_real_s: ``time.monotonic()`` at arrival.
        prompt_tokens: Estimated, then as counted by a worker (``prompt_counted``).
        headers: Of the answer; the first is the request's id.
        machine: Its way; set once it is served.
        assignment: Of its newest stage.
        response: That worker's; None: none is open.
        prefill: That runs alongside its decode; None: none does.
        beginning: Of the answer, as that worker gave it: up to the first token, or all of it, with ``usage``.
        reads_kv: That worker fetches ``transfer``.
        refusal: What the client gets if the newest try was the last; None: no worker says.
        problem: What the newest try failed by.
        session: Value of the header that ties requests together; empty without one.
        identity: None where there are no tiers.
        cached_tokens: Prompt tokens that prefill found in its cache; None: not known.
        queued_s: Time in the router's queue, simulated seconds, all stays together.
        dispatched_real_s: ``time.monotonic()`` when its prompt was dispatched to the worker that computes it, by the last try.
        ttft_s: Simulated seconds; None for complete answers.
        is_delivered: The complete answer was written; a client that closes then has not left early.
        transfer: Its prompt, as a prefill worker keeps it for decode; None: none does.
        keyed: None where the policy reads no prompts.
        worker: Name of the last one of the answering stage.
        has_comments_alone: The client has the head of its stream, and of what follows only comments.
        failed_status: Of its error, where the client has the head of a 200 and no token; 0: the head says it.
        begun: What the client has of a stream that another worker could continue; None: nothing, or none could.
    """

    request: CompletionRequest
    responder: Responder
    arrived_real_s: float
    prompt_tokens: int
    headers: Headers
    upstream_headers: Headers
    machine: RequestMachine = field(init=False)
    assignment: LiveAssignment = field(init=False)
    session: str = ""
    identity: TierIdentity | None = None
    prompt_counted: bool = False
    cached_tokens: int | None = None
    output_tokens: int = 0
    queued_s: float = 0.0
    dispatched_real_s: float = 0.0
    ttft_s: float | None = None
    tries: RequestTries = field(default_factory=RequestTries)
    is_delivered: bool = False
    transfer: PrefillAnswer | None = None
    keyed: Keyed | None = None
    prefill_worker: str | None = None
    worker: str | None = None
    error: str | None = None
    has_comments_alone: bool = False
    failed_status: int = 0
    begun: BegunStream | None = None
    response: StreamingResponse | None = None
    prefill: PrefillBeside | None = None
    beginning: bytes = b""
    usage: Any = None
    reads_kv: bool = False
    refusal: ErrorResponse | None = None
    problem: Exception | None = None
    trace: RequestTrace | None = None

    def take_keys(self, keyed: Keyed) -> None:
        """Keep the prefix keys, and the number of tokens where they show it."""
        self.keyed = keyed
        if keyed.tokens is not None and not self.prompt_counted:
            self.prompt_tokens = keyed.tokens

    def shown(self) -> dict[str, Any]:
        """Return what the access log says of it, besides its end."""
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
    def is_rest(self) -> bool:
        """Whether the newest try asks for the rest of a stream."""
        return self.begun is not None and self.begun.said is not None

    @property
    def said_tokens(self) -> int:
        """Return the tokens of the answer that the prompt of the newest try ends with."""
        return 0 if self.begun is None or self.begun.said is None else self.begun.said.tokens

    @property
    def tier(self) -> Tier:
        """Return the request's tier; standard where there are none."""
        return Tier.STANDARD if self.identity is None else self.identity.tier

    def arrival(self, role: Role, unpaired: frozenset[str], bytes_per_token: float) -> Arrival:
        """Return it as a stage's policy sees it; that of decode reads no prompt. ``unpaired`` cannot fetch its KV."""
        keyed, is_complete, avoid = self.keyed, not self.request.stream, self.tries.avoid | unpaired
        tokens = self.prompt_tokens + self.said_tokens
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
                is_rest=self.is_rest,
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
            is_rest=self.is_rest,
            alone_at=self.machine.alone_at,
        )

    def age_real_s(self) -> float:
        """Return real seconds since arrival."""
        return time.monotonic() - self.arrived_real_s


class RequestTrace:
    """One request's spans; calls come in the order of its stages, and again with each retry."""

    __slots__ = ("_broken", "_call", "_role", "_span", "_waits_ns")

    def __init__(self, tracing: Tracing, request: Request, call: CompletionCall) -> None:
        """Begin when the request arrived."""
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
        """Note that it waits for a worker of a role."""
        self._role, self._waits_ns = role, time.time_ns()

    def assigned(self, assignment: LiveAssignment, queued_real_s: float) -> None:
        """Note that it has a worker: it was queued for this long, and the rest of the wait took the pick."""
        began_ns, now_ns = self._waits_ns, time.time_ns()
        if began_ns is None or not self._span.is_recorded:
            return
        self._waits_ns = None
        picked_ns = min(now_ns, began_ns + int(queued_real_s * _NS))
        role = {"penstock.role": self._role}
        self._span.child("queue", role, began_ns=began_ns).end(picked_ns)
        chosen = {**role, "penstock.worker": assignment.worker.name, "penstock.reason": assignment.reason}
        self._span.child("pick", chosen, began_ns=picked_ns).end(now_ns)

    def sent(self, call: CompletionCall) -> None:
        """Begin the span of a call to a worker, whose headers let the worker continue the trace."""
        attributes: dict[str, str | int | float | bool] = {"penstock.worker": call.assignment.worker.name}
        if call.tries.retries:
            attributes["penstock.retries"] = call.tries.retries
        is_rest = call.machine.continuations > 0
        if is_rest:
            attributes["penstock.continuations"] = call.machine.continuations
        self._call = self._span.child(call.assignment.role.value, attributes, is_call=True)
        if is_rest and self._broken is not None:
            self._call.link(self._broken, "continues")
        others = [each for each in call.upstream_headers if each[0] != b"traceparent"]
        call.upstream_headers = (*others, (b"traceparent", self._call.traceparent))

    def first_token(self) -> None:
        """Note the first token of a stream."""
        if self._call is not None:
            self._call.note("first token")

    def answered(self, error: BaseException | None) -> None:
        """End the span of a call, with its failure; a client that left is none."""
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
        """End the request's span; a recorded one is an exemplar of the latencies that the metrics have of it."""
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
