"""What a load asks of each role: prefill seconds per second, and KV tokens held, as a fluid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.api import Role
from penstock.engine import profiles
from penstock.engine.core.latency import LatencyModel
from penstock.simulator.observer import Floats
from penstock.simulator.scenario import ProfiledModel, Scenario
from penstock.workload.traces import TraceRequest

AFTER_S = 600.0
"""Chosen: needs, and so schedules, end so long after the last arrival."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How full fluid needs let replicas be.

    Attributes:
        prefill: Share of the time that they compute prompts, > 0; the lower, the shorter the queue.
        kv: Share of the KV cache in use, > 0.
        smoothing_s: Prompts' work is averaged over the TTFT target and this long around it.
    """

    prefill: float
    kv: float
    smoothing_s: float = 0.0


def needs(requests: Sequence[TraceRequest], scenario: Scenario, at: Utilisation) -> dict[Role, Floats]:
    """Return the replicas that each role needs, shape (seconds,), not rounded.

    Args:
        requests: In order of arrival.
        scenario: Pools with profiles, targets.
        at: See `Utilisation`.
    """
    work = prefill_s(requests, scenario)
    arrivals = np.array([request.arrival_s for request in requests])
    length = math.ceil(float(arrivals[-1]) + AFTER_S)
    by_second = np.bincount(arrivals.astype(np.int64), weights=work, minlength=length).astype(np.float64)
    prefill = _smoothed(by_second, scenario.slo_s, at.smoothing_s, int(arrivals[-1]) + 1) / at.prefill
    decode = _decode_need(requests, arrivals + work, scenario, at, length)
    if scenario.is_disaggregated:
        return {Role.PREFILL: prefill, Role.DECODE: decode}
    # One worker does both: what decoding leaves of its time goes to prompts.
    return {Role.AGGREGATED: prefill + decode}


def prefill_s(requests: Sequence[TraceRequest], scenario: Scenario) -> Floats:
    """Return how long each prompt takes alone on an entry worker, nothing cached."""
    latency, _ = _engine(scenario, scenario.entry_role)
    return np.array([latency.prefill.ttft_s(request.input_tokens) for request in requests])


def busy_s(requests: Sequence[TraceRequest], scenario: Scenario, kv: float) -> Floats:
    """Return how long each request keeps an entry worker busy: its prompt; its share of the decode steps as well."""
    work = prefill_s(requests, scenario)
    if scenario.is_disaggregated:
        return work
    batch, step_s, outputs, _ = _decoding(requests, scenario, kv)
    return np.asarray(work + outputs * step_s / batch)


def _decoding(
    requests: Sequence[TraceRequest], scenario: Scenario, kv: float
) -> tuple[float, float, Floats, Floats]:
    """Return (batch, step in seconds, output tokens, mean tokens held) of a decode worker at that KV usage."""
    latency, kv_tokens = _engine(scenario, Role.DECODE if scenario.is_disaggregated else Role.AGGREGATED)
    outputs = np.array([request.output_tokens for request in requests], dtype=np.float64)
    held = np.array([request.input_tokens for request in requests]) + outputs / 2
    mean = float(held.mean())
    batch = max(1.0, min(256.0, kv * kv_tokens / mean))
    if scenario.itl_slo_s is not None:
        batch = _largest_batch(latency, mean, batch, scenario.itl_slo_s)
    return batch, latency.decode.step_s(batch, batch * mean), outputs, held


def _decode_need(
    requests: Sequence[TraceRequest], starts: Floats, scenario: Scenario, at: Utilisation, length: int
) -> Floats:
    _, kv_tokens = _engine(scenario, Role.DECODE if scenario.is_disaggregated else Role.AGGREGATED)
    batch, step_s, outputs, held = _decoding(requests, scenario, at.kv)
    ends = starts + outputs * step_s
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


def _smoothed(values: Floats, slo_s: float, more_s: float, busy: int) -> Floats:
    """Return the mean over the seconds in which work may wait and still be in time, and ``more_s`` around them.

    Args:
        values: By second; 0 from second ``busy`` on.
        slo_s: Seconds that work may wait.
        more_s: Seconds, half of them before and half after; infinite: one mean for all.
        busy: Seconds with arrivals.
    """
    if math.isinf(more_s):
        return np.where(np.arange(len(values)) < busy, values[:busy].mean(), 0.0)
    width = max(2, round(slo_s + more_s))
    total = np.concatenate((np.zeros(width), np.cumsum(values)))
    trailing = (total[width:] - total[: len(values)]) / width
    ahead = round(more_s / 2)
    return np.asarray(np.concatenate((trailing[ahead:], np.zeros(ahead))))


def _engine(scenario: Scenario, role: Role) -> tuple[LatencyModel, int]:
    """Return the latency model and the KV tokens of a role's replica."""
    model = scenario.pool(role).model
    assert isinstance(model, ProfiledModel)  # noqa: S101 - `baselines.configured` refuses the simple server
    profile = profiles.load(model.profile)
    return profile.latency(), model.kv_tokens or profile.kv_capacity_tokens
