"""Makes an observed fleet of a trace or an access log, step by step, as `reading` does of a Prometheus. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.assess.load import shared_prefixes
from penstock.assess.observed import Buckets, Floats, Observed
from penstock.core.errors import ConfigError
from penstock.workload.access_log import AccessLogFacts
from penstock.workload.traces import Trace, TraceRequest

STEP_S: Final = 60.0
_WORKERS_WITHIN: Final = 2
"""Steps before and after one in which a worker that answers counts as running. Chosen: a worker without a request for five
minutes is rare in a fleet that is needed."""
_TTFT_BOUNDS: Final = (*(0.001 * 1.1**power for power in range(130)), math.inf)
"""1 ms to 3 min, each bound a tenth above the one before."""


def observed_of_trace(trace: Trace, *, model: str, replicas: int | None, start_s: float) -> Observed:
    """Return a trace as a fleet served it, by minutes; what the trace does not say is unknown.

    Args:
        trace: With at least one request.
        model: For the result.
        replicas: That served it; None: the workers in an access log are counted.
        start_s: Real seconds since 1970 of the trace's zero, of one that does not know it.

    Raises:
        ConfigError: neither ``replicas`` nor the trace says how many replicas there were.
    """
    log = trace.log
    arrivals = np.array([request.arrival_s for request in trace.requests])
    steps = max(1, math.ceil(float(arrivals[-1] + 1e-9) / STEP_S))
    places = np.minimum((arrivals // STEP_S).astype(np.int64), steps - 1)

    def lengths(values: list[int]) -> Buckets:
        sums = np.bincount(places, weights=values, minlength=steps).astype(np.float64)
        return Buckets((math.inf,), counts[:, None], sums)

    counts = np.bincount(places, minlength=steps).astype(np.float64)
    fleet = _fleet(log, trace.requests, steps) if replicas is None else np.full(steps, float(replicas))
    if fleet is None:
        raise ConfigError(
            f"--replicas: required with --{'trace' if log is None else 'access-log'}, which does not say how many replicas"
            " served it"
        )
    found = Observed(
        model=model,
        runtime=f"a trace ({trace.name})" if log is None else f"an access log of {log.format}",
        start_s=start_s if log is None else log.start_s,
        step_s=STEP_S,
        arrivals=counts,
        prompts=lengths([request.input_tokens for request in trace.requests]),
        answers=lengths([request.output_tokens for request in trace.requests]),
        ttft=None,
        gaps=None,
        replicas=fleet,
        replica_step_s=STEP_S,
        notes=(_TRACE_NOTE,),
    )
    return found if log is None else _with_latencies(found, log, trace.requests, is_counted=replicas is None)


_TRACE_NOTE: Final = (
    "a trace says neither what was served nor with how many replicas: the fleet that ran is --replicas, and the"
    " engine's speed the profile's, compared with nothing"
)


def _fleet(log: AccessLogFacts | None, requests: tuple[TraceRequest, ...], steps: int) -> Floats | None:
    """Return how many workers answered around each step; None: the log names none."""
    if log is None:
        return None
    seen: list[set[str]] = [set() for _ in range(steps)]
    for request in requests:
        answered = log.answered[request.line]
        if answered.worker is not None:
            first = int(request.arrival_s // STEP_S)
            last = int((request.arrival_s + answered.e2e_s) // STEP_S)
            for step in range(max(0, first - _WORKERS_WITHIN), min(steps, last + _WORKERS_WITHIN + 1)):
                seen[step].add(answered.worker)
    if not any(seen):
        return None
    return np.array([float(len(each)) if each else math.nan for each in seen])


def _with_latencies(
    observed: Observed, log: AccessLogFacts, requests: tuple[TraceRequest, ...], *, is_counted: bool
) -> Observed:
    """Return the fleet with the times to first token, gaps and cache hits that the log has, and notes of what it lacks."""
    notes = []
    for why, count in log.left_out.items():
        notes.append(f"{count:,} requests {why} are left out")
    for what, count in log.estimated.items():
        notes.append(f"{count:,} requests have estimated {what}")
    if is_counted:
        notes.append("replicas are the workers that answered around each minute; an idle one is not seen")
    steps = observed.steps
    table = np.zeros((steps, len(_TTFT_BOUNDS)))
    ttft_sums, gaps, gap_sums = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    prompts, cached = np.zeros(steps), np.zeros(steps)
    knows_cache = False
    for request in requests:
        answered = log.answered[request.line]
        step = min(int(request.arrival_s // STEP_S), steps - 1)
        if answered.cached_tokens is not None:
            knows_cache = True
            prompts[step] += request.input_tokens
            cached[step] += min(answered.cached_tokens, request.input_tokens)
        if answered.ttft_s is not None:
            table[step, int(np.searchsorted(_TTFT_BOUNDS, answered.ttft_s))] += 1
            ttft_sums[step] += answered.ttft_s
            if request.output_tokens > 1 and answered.e2e_s > answered.ttft_s:
                gaps[step] += request.output_tokens - 1
                gap_sums[step] += answered.e2e_s - answered.ttft_s
    has_ttft = bool(table.sum())
    if not has_ttft:
        notes.append(
            "no time to first token in the log: the engine's speed is the profile's, and compared with nothing"
        )
    if not knows_cache:
        notes.append(
            "no cached tokens in the log: every prompt counts as its own, so that more is computed than was"
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        hit_rate = np.where(prompts > 0, cached / prompts, math.nan)
    return replace(
        observed,
        ttft=Buckets(_TTFT_BOUNDS, table, ttft_sums) if has_ttft else None,
        gaps=Buckets((math.inf,), gaps[:, None], gap_sums) if gaps.sum() else None,
        hit_rate=hit_rate if knows_cache else None,
        notes=tuple(notes),
    )


def with_prefixes(trace: Trace) -> Trace:
    """Return an access log's trace in which prompts share as many tokens as were found in the prefix cache."""
    if trace.log is None:
        return trace
    answered = trace.log.answered
    cached = [answered[request.line].cached_tokens for request in trace.requests]
    if all(each is None for each in cached):
        return trace
    prompts = np.array([request.input_tokens for request in trace.requests])
    shares = np.array([float(each or 0) for each in cached]) / prompts
    ids = shared_prefixes(prompts, np.clip(shares, 0.0, 1.0), np.random.default_rng([0, 5]))
    kept = [replace(request, block_ids=own) for request, own in zip(trace.requests, ids, strict=True)]
    return replace(trace, requests=tuple(kept))


def within(trace: Trace, observed: Observed, window: Observed) -> Trace:
    """Return the requests of the window, from its beginning."""
    zero_s = window.start_s - observed.start_s
    kept: list[TraceRequest] = [
        replace(request, arrival_s=request.arrival_s - zero_s)
        for request in trace.requests
        if zero_s <= request.arrival_s < zero_s + window.duration_s
    ]
    return replace(trace, requests=tuple(kept))
