"""A schedule of replicas by someone who knows every arrival: the yardstick of planners, not a planner.

The load is a fluid: prefill seconds per second of arrivals, and KV tokens held by those who are being decoded. How
many replicas that needs at each second follows from two utilisations, which a search sets (bench/planner). Each
replica is asked for its start-up time before it is needed, and is kept through a gap in which stopping and starting
again would hold its GPUs for longer than the gap lasts. So for given needs no schedule costs less; the needs
themselves are an approximation, and a true optimum can lie below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock_api import Role
from penstock_engine import profiles
from penstock_engine.core.latency import LatencyModel
from penstock_simulator.observer import Floats
from penstock_simulator.scenario import ProfiledModel, Resize, Scenario
from penstock_workload.traces import TraceRequest

DRAIN_S = 10.0
"""Chosen: a leaving replica's GPUs are held for about one answer longer."""
REPEAT_S = 10.0
"""Chosen: numbers are set again this often, so that what the budget refused while others drained is asked for again."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How full the schedule lets replicas be.

    Attributes:
        prefill: Share of the time that they compute prompts, > 0; the lower, the shorter the queue.
        kv: Share of the KV cache in use, > 0.
    """

    prefill: float
    kv: float


def needs(requests: Sequence[TraceRequest], scenario: Scenario, at: Utilisation) -> dict[Role, Floats]:
    """Return the replicas that each role needs, shape (seconds,), not rounded.

    Args:
        requests: In order of arrival.
        scenario: Pools with profiles, targets.
        at: See `Utilisation`.
    """
    entry = scenario.pool(scenario.entry_role)
    latency, _ = _engine(scenario, entry.role)
    work = np.array([latency.prefill.ttft_s(request.input_tokens) for request in requests])
    arrivals = np.array([request.arrival_s for request in requests])
    length = math.ceil(float(arrivals[-1]) + 600.0)
    by_second = np.bincount(arrivals.astype(np.int64), weights=work, minlength=length).astype(np.float64)
    busy = _smoothed(by_second, scenario.slo_s)
    prefill = busy / at.prefill
    decode = _decode_need(requests, arrivals + work, scenario, at, length)
    if scenario.is_disaggregated:
        return {Role.PREFILL: prefill, Role.DECODE: decode}
    # One worker does both: what decoding leaves of its time goes to prompts.
    return {Role.AGGREGATED: prefill + decode}


def schedule(requests: Sequence[TraceRequest], scenario: Scenario, at: Utilisation) -> tuple[Resize, ...]:
    """Return the sizes of every pool over time, inside the budget."""
    counts = {
        role: _with_start_up(np.maximum(1, np.ceil(need)).astype(np.int64), scenario.cold_start_s)
        for role, need in needs(requests, scenario, at).items()
    }
    counts = _within_budget(counts, scenario)
    resizes = [
        Resize(float(second), role, int(values[second]))
        for role, values in counts.items()
        for second in range(len(values))
        if second % REPEAT_S == 0 or values[second] != values[second - 1]
    ]
    return tuple(sorted(resizes, key=lambda resize: resize.at_s))


def _engine(scenario: Scenario, role: Role) -> tuple[LatencyModel, int]:
    """Return the latency model and the KV tokens of a role's replica."""
    model = scenario.pool(role).model
    assert isinstance(model, ProfiledModel)  # noqa: S101 - the simple server has no KV to plan for
    profile = profiles.load(model.profile)
    return profile.latency(), model.kv_tokens or profile.kv_capacity_tokens


def _decode_need(
    requests: Sequence[TraceRequest], starts: Floats, scenario: Scenario, at: Utilisation, length: int
) -> Floats:
    role = Role.DECODE if scenario.is_disaggregated else Role.AGGREGATED
    latency, kv_tokens = _engine(scenario, role)
    outputs = np.array([request.output_tokens for request in requests], dtype=np.float64)
    held = np.array([request.input_tokens for request in requests]) + outputs / 2
    batch = max(1.0, min(256.0, at.kv * kv_tokens / float(held.mean())))
    if scenario.itl_slo_s is not None:
        batch = _largest_batch(latency, float(held.mean()), batch, scenario.itl_slo_s)
    ends = starts + outputs * latency.decode.step_s(batch, batch * float(held.mean()))
    tokens = _held(starts, ends, held, length)
    running = _held(starts, ends, np.ones_like(held), length)
    return np.maximum(tokens / (at.kv * kv_tokens), running / batch)


def _largest_batch(latency: LatencyModel, held: float, most: float, itl_slo_s: float) -> float:
    batch = most
    while batch > 1 and latency.decode.step_s(batch, batch * held) > itl_slo_s:
        batch *= 0.95
    return max(1.0, batch)


def _held(starts: Floats, ends: Floats, weights: Floats, length: int) -> Floats:
    """Return the weight of what has begun and not ended, by second."""
    begun = np.bincount(np.minimum(starts, length - 1).astype(np.int64), weights=weights, minlength=length)
    ended = np.bincount(np.minimum(ends, length - 1).astype(np.int64), weights=weights, minlength=length)
    return np.asarray(np.cumsum(begun - ended)[:length])


def _smoothed(values: Floats, slo_s: float) -> Floats:
    """Return the mean over the seconds in which work may wait and still be in time."""
    width = max(2, round(slo_s))
    return np.asarray(np.convolve(values, np.ones(width) / width)[: len(values)])


def _with_start_up(need: np.ndarray[tuple[int, ...], np.dtype[np.int64]], cold_start_s: float) -> Floats:
    """Return the replicas to have asked for, by second: each level early by its start-up, gaps kept where cheaper."""
    lead = math.ceil(cold_start_s)
    total = np.zeros(len(need))
    for level in range(1, int(need.max()) + 1):
        is_on = need >= level
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_on, [False])).astype(np.int8)))
        spans: list[list[int]] = []
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            begin = max(0, int(start) - lead)
            if spans and begin - spans[-1][1] <= DRAIN_S:
                spans[-1][1] = int(end)
            else:
                spans.append([begin, int(end)])
        for begin, end in spans:
            total[begin:end] += 1
    return total


def _within_budget(counts: dict[Role, Floats], scenario: Scenario) -> dict[Role, Floats]:
    """Return the counts with one replica at a time taken from the largest pool where the budget is exceeded."""
    if scenario.max_gpus is None:
        return counts
    gpus = {role: scenario.pool(role).gpus for role in counts}
    counts = {role: values.copy() for role, values in counts.items()}
    while True:
        used = sum(values * gpus[role] for role, values in counts.items())
        over = np.flatnonzero(np.asarray(used) > scenario.max_gpus)
        if not over.size:
            return counts
        roles = list(counts)
        largest = np.argmax(np.stack([counts[role][over] for role in roles]), axis=0)
        for place, role in enumerate(roles):
            counts[role][over[largest == place]] -= 1
