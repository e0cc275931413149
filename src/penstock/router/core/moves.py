"""Whether a stream leaves a worker that drains and goes on at another one. Pure; `penstock.router.proxy.moves` asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.router.core.speeds import SpeedCounts
from penstock.router.core.worker import Worker, WorkerPool

MOST_AT_ONCE: Final = 8
"""Streams of one router that have left a worker and show no token at the next. Chosen: their prompts are computed beside those
of new requests, which wait for no more than a few of them."""


@dataclass(frozen=True, slots=True)
class StreamLeft:
    """What a stream has said and may still say.

    Attributes:
        prompt_tokens: Of its request.
        said_tokens: That the client has.
        limit_tokens: Most of the answer; None: the model's context alone bounds it.
    """

    prompt_tokens: int
    said_tokens: int
    limit_tokens: int | None


def is_draining(worker: Worker, pool: WorkerPool) -> bool:
    """Return whether a worker finishes what it has and gets nothing new; one that discovery has dropped does."""
    return worker.spec.draining or worker.drained or pool.get(worker.name) is not worker


def is_worth_moving(left: StreamLeft, decode: SpeedCounts, prefill: Iterable[SpeedCounts]) -> bool:
    """Return whether a stream has more left than it costs to compute its prompt and what was said at another worker.

    What nothing is known of is no reason to stay: a drain that waits for an answer may wait for hours.

    Args:
        left: The stream.
        decode: What its worker has done.
        prefill: What those have done that would compute the prompt.
    """
    counts = [each for each in prefill if each.prefill_s > 0]
    prompt_tokens, prefill_s = (
        sum(each.prompt_tokens for each in counts),
        sum(each.prefill_s for each in counts),
    )
    if left.limit_tokens is None or not decode.output_tokens or not prompt_tokens:
        return True
    left_s = (left.limit_tokens - left.said_tokens) * decode.decode_s / decode.output_tokens
    return left_s > (left.prompt_tokens + left.said_tokens) * prefill_s / prompt_tokens
