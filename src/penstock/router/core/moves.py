"""Whether a stream leaves a worker that drains and continues on another one. Pure; `penstock.router.proxy.moves` asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from penstock.router.core.speeds import SpeedCounts
from penstock.router.core.worker import Worker, WorkerPool
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.routing_policy import WorkerQueue

MOST_AT_ONCE: Final = 8
"""Streams of one router that have left a worker and show no token at the next. Chosen: their prompts are computed alongside those
of new requests, which wait for no more than a few of them."""

MAX_LOOKUPS: Final = 32
"""Prompts that a router looks up in its prefix index in one tick. Chosen: each takes some 20 us."""


@dataclass(frozen=True, slots=True)
class StreamLeft:
    """What a stream has said and may still say.

    Attributes:
        prompt_tokens: Of its request.
        said_tokens: Of the answer, that the client has.
        limit_tokens: Maximum of the answer; None: only the model's context bounds it.
        cached_tokens: Of the prompt, expected in the cache of the worker that would compute it; 0 to ``prompt_tokens``.
    """

    prompt_tokens: int
    said_tokens: int
    limit_tokens: int | None
    cached_tokens: int = 0


def is_draining(worker: Worker, pool: WorkerPool) -> bool:
    """Return whether a worker finishes what it has and gets nothing new; one that discovery has dropped does."""
    return worker.spec.draining or worker.drained or pool.get(worker.name) is not worker


def prefill_token_s(prefill: Iterable[SpeedCounts]) -> float | None:
    """Return the seconds in which workers compute a prompt token that is not cached; None: nothing was measured.

    Args:
        prefill: What those have done that would compute the prompt.
    """
    counts = [each for each in prefill if each.prefill_s > 0]
    tokens = sum(each.prompt_tokens for each in counts)
    return sum(each.prefill_s for each in counts) / tokens if tokens else None


def is_worth_moving(left: StreamLeft, decode: SpeedCounts, token_s: float | None) -> bool:
    """Return whether a stream has more left than it costs to compute its prompt and what was said at another worker.

    What nothing is known of is not a reason to stay: a drain that waits for an answer may wait for hours.

    Args:
        left: The stream.
        decode: What its worker has done.
        token_s: Of `prefill_token_s`.
    """
    if left.limit_tokens is None or not decode.output_tokens or token_s is None:
        return True
    left_s = (left.limit_tokens - left.said_tokens) * decode.decode_s / decode.output_tokens
    return left_s > (left.prompt_tokens - left.cached_tokens + left.said_tokens) * token_s


def cached_tokens(arrival: Arrival, others: Iterable[WorkerQueue[Any]]) -> int:
    """Return the tokens of a prompt that the worker holds which holds most of it; 0 where there is no worker."""
    return arrival.tokens - min((each.uncached(arrival) for each in others), default=arrival.tokens)
