"""Prefix cost: what a request costs at a worker, its recomputed tokens above what waits there. Pure."""

from __future__ import annotations

from typing import Any, Final

from penstock.router.policy.routing_policy import Arrival, Estimates
from penstock.router.policy.worker_queue import WorkerQueue

HIT_WEIGHT: Final = 4
"""Waiting tokens that one recomputed token is worth: one for its own time, which is longer on a slower worker, and three for
what it does to caches, which costs as much on any. Chosen: of 1, 1.5, 2, 3, 4, 6, 10 and 20 the smallest
behind which capacity no longer grows clearly, on all of bench/dualmap's workloads; 1 is min-TTFT."""


DECODE_WEIGHT: Final = 0.1
"""Waiting tokens that a prompt token is worth whose answer is being decoded, where workers do both. Chosen: on 8
simulated A100s at 4 Conversation requests/s, 0.05 to 0.25 bring P99 of the time per output token from 97 to 56-62 ms
and of whole requests from 35 to 24 s, with TTFT unchanged; 1 costs TTFT a third."""


def prefix_cost(worker: WorkerQueue[Any], arrival: Arrival, uncached: int, estimates: Estimates) -> float:
    """Return what a request costs at a worker, in waiting tokens: 4 x its own uncached tokens and what is before it.

    At a worker that takes s times as long for a token: (3 + s) x its own uncached tokens and s x what is before it.

    Args:
        worker: Where it would go.
        arrival: The request.
        uncached: Its tokens to compute there.
        estimates: Estimates.
    """
    before = estimates.pending_tokens(worker, arrival) + uncached
    prefill = before * estimates.relative_slowdown(worker) + (HIT_WEIGHT - 1) * uncached
    return prefill + DECODE_WEIGHT * worker.decoding_tokens
