"""Chooses what to measure: phases, prompt lengths, contexts and numbers of requests in flight. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.performance.recommend import Targets
from penstock.performance.sweep import DecodePoint

PREFILL_POINTS = 12
"""Prompt lengths. Chosen: neighbours are then less than twice apart up to 64,000 tokens."""
CONTEXTS = 5
"""Contexts. Chosen: neighbours are then about two and a half times apart up to 16,000 tokens."""
BATCHES = 6
"""Numbers of requests in flight per context, before the target's is refined; Dynamo's own granularity."""
LEAST_PROMPT = 128
LEAST_CONTEXT = 512
"""Chosen: shorter ones are all overhead, and planning holds the nearest."""
DEFAULT_MAX_CONTEXT = 16_384
"""Dynamo's default, for the longest prompt and context that is measured."""
OUTPUT_TOKENS = 64
"""Tokens that each request decodes while ITL is measured. Chosen: enough for a mean, few against the context."""
_BLOCK_TOKENS = 16
"""A request's last block is rarely full; vLLM's default size."""
_REFINED = 0.08
"""Refining stops where two numbers of requests are this close, relatively. Chosen: below the noise of real engines."""


PHASES: Final = (Role.PREFILL, Role.DECODE)
"""What an engine is measured for: TTFT of prompts alone, and ITL of batches."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of one engine, before its batches at the target's context are refined.

    Attributes:
        prompts: Lengths whose TTFT is measured, the target's among them.
        batches: Requests in flight whose ITL is measured, by context.
        target: Context of the target's requests, in whole tokens that fit.
    """

    prompts: list[int]
    batches: dict[int, list[int]]
    target: int

    @property
    def count(self) -> int:
        """How many points these are."""
        return len(self.prompts) + sum(map(len, self.batches.values()))


def grid_of(targets: Targets, *, kv_tokens: int, max_concurrency: int, max_context: int) -> Grid:
    """Return the points for targets.

    Args:
        targets: What requests look like.
        kv_tokens: KV cache of the engine, tokens, >= 1.
        max_concurrency: Most requests that it runs at once, >= 1.
        max_context: Longest prompt plus output to measure, tokens.

    Raises:
        ConfigError: a request of the target's lengths does not fit.
    """
    longest = min(max_context, kv_tokens)
    if targets.isl + targets.osl > longest:
        raise ConfigError(
            f"--isl {targets.isl} and --osl {targets.osl}: {targets.isl + targets.osl:,} tokens, but the cache holds"
            f" {kv_tokens:,} tokens and at most {max_context:,} are measured; ask for less, or raise --max-context"
        )
    highest = max(1, longest - OUTPUT_TOKENS)
    target = min(round(targets.context), highest)

    def most(context: int) -> int:
        per_request = context + OUTPUT_TOKENS // 2 + _BLOCK_TOKENS
        return max(1, min(max_concurrency, kv_tokens // per_request))

    contexts = spaced(LEAST_CONTEXT, highest, target, CONTEXTS)
    return Grid(
        spaced(LEAST_PROMPT, longest - 1, targets.isl, PREFILL_POINTS),
        {context: batch_sizes(most(context)) for context in contexts},
        target,
    )


def spaced(low: int, high: int, wanted: int, count: int) -> list[int]:
    """Return about ``count`` integers from ``low`` to ``high``, evenly spaced by ratio, with ``wanted`` among them.

    Where ``wanted`` or ``high`` is below ``low``, they begin there.
    """
    low = max(1, min(low, wanted, high))
    if low == high:
        return [low]
    ratio = (high / low) ** (1 / (count - 1))
    grid = [round(low * ratio**place) for place in range(count)]
    nearest = min(range(count), key=lambda place: abs(math.log(grid[place] / wanted)))
    if 0 < nearest < count - 1:
        grid[nearest] = wanted
    else:
        grid.append(wanted)
    return sorted({*grid, low, high})


def batch_sizes(most: int) -> list[int]:
    """Return numbers of requests in flight from 1 to ``most``, evenly spaced."""
    if most <= BATCHES:
        return list(range(1, most + 1))
    return sorted({round(1 + (most - 1) * place / (BATCHES - 1)) for place in range(BATCHES)})


def refinement(row: Sequence[DecodePoint], itl_s: float) -> int | None:
    """Return the next number of requests to measure at the target's context, so that the target is closely met.

    It halves the step between the most requests within the target and the next more.

    None: it is close enough, or nothing is on both sides of the target.
    """
    within = [point.concurrency for point in row if point.itl_s <= itl_s]
    if not within:
        return None
    low = max(within)
    beyond = [point.concurrency for point in row if point.concurrency > low]
    if not beyond or min(beyond) - low <= max(1.0, _REFINED * low):
        return None
    return round((low + min(beyond)) / 2)
