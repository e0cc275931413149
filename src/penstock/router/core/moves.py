"""Decides whether a stream leaves a draining worker and is resumed on another one. Pure; called by `penstock.router.proxy.moves`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from penstock.router.core.speeds import SpeedCounts
from penstock.router.core.worker import Worker, WorkerPool
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.routing_policy import WorkerQueue

MAX_CONCURRENT_MOVES: Final = 8
"""Maximum number of a router's streams that have left a worker and have no token from the next one yet. Chosen: their prompts are
computed alongside those of new requests, which then wait for only a few of them."""

MAX_LOOKUPS: Final = 32
"""Maximum number of prompts that a router looks up in its prefix index per tick. Chosen: each lookup takes about 20 us."""


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """Progress and limits of a stream: the tokens generated so far, and the maximum.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        emitted_tokens: Number of response tokens that the client has received.
        max_tokens: Maximum number of response tokens; None if only the model's context limits them.
        cached_tokens: Number of prompt tokens expected in the cache of the worker that would compute the prompt again, 0 to
            ``prompt_tokens``.
    """

    prompt_tokens: int
    emitted_tokens: int
    max_tokens: int | None
    cached_tokens: int = 0


def is_draining(worker: Worker, pool: WorkerPool) -> bool:
    """Return whether a worker finishes its requests and gets no new ones; also True if discovery has removed the worker.

    A worker was removed if ``pool``, which contains the workers that discovery lists, does not list it any more.
    """
    return worker.spec.draining or worker.drained or pool.get(worker.name) is not worker


def prefill_token_s(prefill: Iterable[SpeedCounts]) -> float | None:
    """Return the mean simulated seconds in which the workers compute one uncached prompt token; None if nothing was measured.

    Args:
        prefill: Measured speeds of the workers that would compute the prompt.
    """
    counts = [each for each in prefill if each.prefill_s > 0]
    tokens = sum(each.prompt_tokens for each in counts)
    return sum(each.prefill_s for each in counts) / tokens if tokens else None


def is_worth_moving(progress: StreamProgress, decode: SpeedCounts, token_s: float | None) -> bool:
    """Return whether moving a stream to another worker is faster than waiting until its response is complete.

    It is if generating the remaining response takes longer than computing the prompt and the response so far on another
    worker. Returns True if either duration is unknown, because a draining worker that waits for its last response before it
    stops can take hours.

    Args:
        progress: Progress and limits of the stream.
        decode: Measured speed of the worker that generates the stream.
        token_s: Simulated seconds to compute one uncached prompt token, from `prefill_token_s`; None if unknown.
    """
    if progress.max_tokens is None or not decode.output_tokens or token_s is None:
        return True
    remaining_s = (progress.max_tokens - progress.emitted_tokens) * decode.decode_s / decode.output_tokens
    return remaining_s > (progress.prompt_tokens - progress.cached_tokens + progress.emitted_tokens) * token_s


def cached_tokens(arrival: Arrival, others: Iterable[WorkerQueue[Any]]) -> int:
    """Return the largest number of a prompt's tokens that any one worker has cached, so that it would not compute them again.

    Returns 0 if there are no workers.

    Args:
        arrival: The request: prefix keys and number of tokens of the prompt.
        others: Queues of the workers to which the stream could be moved, each with the worker's assumed cache contents.
    """
    return arrival.tokens - min((each.uncached(arrival) for each in others), default=arrival.tokens)
