"""Tracing spans of one request in a simulated worker, named as in vLLM; simulated times are converted to wall-clock times."""

from __future__ import annotations

import time
from typing import Final

from penstock.core.clock import SimulatedClock
from penstock.core.http.server import Request
from penstock.core.tracing import TraceSpan, Tracing
from penstock.engine.core.requests import RequestState
from penstock.engine.serve.streams import Reply

_NS: Final = 1e9


class EngineTrace:
    """Creates the spans of a worker's requests."""

    def __init__(self, tracing: Tracing, clock: SimulatedClock, *, role: str) -> None:
        """Prepare for a worker.

        Args:
            tracing: Tracer of the process.
            clock: Simulated clock of the worker.
            role: Role of the worker, an attribute of each span.
        """
        self._tracing = tracing
        self._clock = clock
        self._role = {"penstock.role": role}

    def begin(self, request: Request) -> TraceSpan:
        """Return a new span for an accepted request, a child of the router's span."""
        return self._tracing.begin(
            "llm_request", request.headers, began_ns=time.time_ns(), attributes=self._role
        )

    def end(self, span: TraceSpan, reply: Reply) -> None:
        """End the span of a request, with attributes and child spans for queue time, KV transfer, prefill and decode."""
        state = reply.state
        if state is None or state.finished_s is None:
            span.fail("aborted")
        else:
            self._add_stages(span, reply, state)
        span.end()

    def _add_stages(self, span: TraceSpan, reply: Reply, state: RequestState) -> None:
        arrived_s, first_s = state.request.arrival_s, state.first_token_s
        transfer = reply.transfer_s
        if transfer is not None:
            began_s, ended_s = transfer
            moved = span.child("kv transfer", {}, began_ns=self._real_ns(began_s))
            moved.end(self._real_ns(ended_s))
        span.set(
            {
                "gen_ai.usage.prompt_tokens": state.request.prompt_tokens,
                "gen_ai.usage.completion_tokens": state.outputs,
                "gen_ai.latency.time_in_queue": _between(arrived_s, state.first_scheduled_s),
                "gen_ai.latency.time_to_first_token": _between(arrived_s, first_s),
                "gen_ai.latency.e2e": _between(arrived_s, state.finished_s),
                "penstock.cached_tokens": state.cached_tokens,
                "penstock.preemptions": state.preemptions,
            }
        )

    def _real_ns(self, at_s: float) -> int:
        ago_s = self._clock.to_real_s(self._clock.now_s() - at_s)
        return time.time_ns() - int(ago_s * _NS)


def _between(began_s: float, ended_s: float | None) -> float | None:
    return None if ended_s is None else ended_s - began_s
