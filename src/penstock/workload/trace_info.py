"""What a trace asks for: its rate, its lengths, and what its prompts share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.api import Tier
from penstock.core.histogram import percentile
from penstock.workload.arrivals import mean_rate
from penstock.workload.traces import BLOCK_TOKENS, Trace, TraceRequest

WINDOWS: Final = 60
"""Windows of equal length over the trace. Chosen: a line of a terminal shows as many."""


def ideal_hits(requests: Sequence[TraceRequest]) -> list[int]:
    """Return each prompt's tokens in a prefix that any earlier one had: one endless cache for everybody.

    The last token of a prompt is always computed, so that a repeated prompt has all but one. Of a block that an earlier prompt
    ended in, only its tokens count.
    """
    # A node is (its parent's number, id), 0 the root; known: its number and the most of its tokens that a prompt had.
    nodes: dict[tuple[int, int], tuple[int, int]] = {}
    found = []
    for request in requests:
        parent, hits, is_known = 0, 0, True
        for place, block_id in enumerate(request.block_ids or ()):
            tokens = min(BLOCK_TOKENS, request.input_tokens - place * BLOCK_TOKENS)
            number, known_tokens = nodes.get((parent, block_id), (len(nodes) + 1, 0))
            hits += min(tokens, known_tokens) if is_known else 0
            is_known = is_known and known_tokens == BLOCK_TOKENS
            nodes[parent, block_id] = number, max(tokens, known_tokens)
            parent = number
        found.append(min(hits, request.input_tokens - 1))
    return found


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of all prompts, or of all answers; percentiles by nearest rank."""

    total: int
    mean: float
    p50: int
    p90: int
    p99: int
    most: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """What prompts share by whole blocks of 512 tokens, as one endless cache would find it.

    Attributes:
        tokens_fraction: Share of all prompt tokens that an earlier prompt began with, 0-1.
        requests_fraction: Share of the requests that have any, 0-1.
        distinct_tokens: KV of all prompts together, each shared block once, tokens.
    """

    tokens_fraction: float
    requests_fraction: float
    distinct_tokens: int


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """One of `WINDOWS` equal parts of a trace.

    Attributes:
        reused_fraction: Share of its prompt tokens that any earlier prompt began with; None without requests or ids.
    """

    start_s: float
    rps: float
    reused_fraction: float | None


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What a trace asks for; times in seconds.

    Attributes:
        span_s: From the first to the last arrival.
        rate_rps: Mean; None where all arrive at once.
        gap_cv: Coefficient of variation of the times between arrivals, 1 for Poisson; None below three requests.
        windows: Empty where all arrive at once.
        reuse: None where no request has ids, so that it is not known.
        tiers: Number of requests by the name of the tier that they ask for, the highest tier first; empty if none asks for one.
    """

    requests: int
    span_s: float
    rate_rps: float | None
    gap_cv: float | None
    windows: tuple[TraceWindow, ...]
    prompts: Lengths
    answers: Lengths
    reuse: Reuse | None
    tiers: Mapping[str, int]

    @property
    def peak_rps(self) -> float | None:
        """Rate of the busiest window."""
        return max((each.rps for each in self.windows), default=None)


def describe_trace(trace: Trace) -> TraceInfo:
    """Return what the requests of a trace ask for."""
    requests = trace.requests
    hits = ideal_hits(requests)
    has_ids = any(request.block_ids is not None for request in requests)
    asked = Counter(request.tier for request in requests)
    arrivals = np.array([request.arrival_s for request in requests])
    gaps = np.diff(arrivals)
    mean_gap_s = float(gaps.mean()) if len(gaps) > 1 else 0.0
    return TraceInfo(
        len(requests),
        float(arrivals[-1] - arrivals[0]),
        mean_rate(requests),
        float(gaps.std()) / mean_gap_s if mean_gap_s > 0 else None,
        _windows(requests, hits, has_ids=has_ids),
        _lengths([request.input_tokens for request in requests]),
        _lengths([request.output_tokens for request in requests]),
        _reuse(requests, hits) if has_ids else None,
        {tier.value: asked[tier] for tier in Tier if asked[tier]},
    )


def _lengths(values: Sequence[int]) -> Lengths:
    p50, p90, p99 = (int(percentile(values, share) or 0) for share in (50, 90, 99))
    total = sum(values)
    return Lengths(total, total / len(values), p50, p90, p99, max(values))


def _reuse(requests: Sequence[TraceRequest], hits: Sequence[int]) -> Reuse:
    prompt_tokens = sum(request.input_tokens for request in requests)
    reused = sum(hits)
    return Reuse(reused / prompt_tokens, sum(map(bool, hits)) / len(requests), prompt_tokens - reused)


def _windows(
    requests: Sequence[TraceRequest], hits: Sequence[int], *, has_ids: bool
) -> tuple[TraceWindow, ...]:
    first_s = requests[0].arrival_s
    length_s = (requests[-1].arrival_s - first_s) / WINDOWS
    if length_s <= 0:
        return ()
    counts, tokens, reused = [0] * WINDOWS, [0] * WINDOWS, [0] * WINDOWS
    for request, hit in zip(requests, hits, strict=True):
        place = min(WINDOWS - 1, int((request.arrival_s - first_s) / length_s))
        counts[place] += 1
        tokens[place] += request.input_tokens
        reused[place] += hit
    return tuple(
        TraceWindow(
            first_s + place * length_s,
            counts[place] / length_s,
            reused[place] / tokens[place] if has_ids and tokens[place] else None,
        )
        for place in range(WINDOWS)
    )
