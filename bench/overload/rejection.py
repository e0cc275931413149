"""Rejection on and off, from half to five times what four workers serve: the simulator with the live router's core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.api import AdmissionConfig, AdmissionMode, QueueOrder, Role, RouterConfig, SloConfig
from penstock.api.router_queues import PrefillQueueConfig
from penstock.simulator.observer import Requests
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

PROFILE = "a100-llama-70b-bf16-tp8"
WORKERS = 4
PROMPT_TOKENS, PROMPT_SPREAD = 2048, 0.2
OUTPUT_TOKENS, OUTPUT_SPREAD = 200, 0.5
"""Means and sigmas of log-normal lengths, chosen: documents to summarise."""

RATE = 14.0
"""Requests/s that count as 1x, chosen: a little less than the workers serve where all that they cannot is rejected."""

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
UNLOADED_FACTOR, UNLOADED_S = 0.02, 3000.0
"""One request each 3.6 s for four workers: hardly any meets another."""

THRESHOLDS = AdmissionConfig(
    mode=AdmissionMode.TOKEN_CAPACITY,
    active_decode_blocks_threshold=0.9,
    active_prefill_tokens_threshold=0,
)
"""A worker is busy while it computes any prompt: an accepted request never waits for another's."""

TARGET_S = SloConfig().ttft_seconds
PRODUCT = RouterConfig(admission=AdmissionConfig(mode=AdmissionMode.TOKEN_CAPACITY))
"""What a graph has that sets ``router.admission.mode: token-capacity`` and nothing else."""

ROUTERS = (
    unbounded_router("least-loaded"),
    unbounded_router("least-loaded", admission=THRESHOLDS),
    PRODUCT,
    RouterConfig(admission=PRODUCT.admission, prefill_queue=PrefillQueueConfig(order=QueueOrder.ARRIVAL)),
)

MOST_TTFT = 1.2
"""Times the unloaded p99 that an accepted request's p99 may take, and that counts as in time."""

LOOSE_S = 1.0
"""A looser target, chosen to show what the threshold costs who can wait."""


@dataclass(frozen=True, slots=True)
class Point:
    """One load with or without rejection.

    Attributes:
        factor: Multiple of `RATE`.
        p99: TTFT of the accepted, as a multiple of the unloaded p99.
        goodput_rps: Requests/s whose TTFT was at most `MOST_TTFT` times the unloaded p99.
        loose_rps: Requests/s whose TTFT was at most `LOOSE_S`.
        target_rps: Requests/s whose TTFT was at most `TARGET_S`.
        rejected: Share of the arrivals.
    """

    factor: float
    p99: float
    goodput_rps: float
    loose_rps: float
    target_rps: float
    rejected: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """All loads.

    Attributes:
        unloaded_s: p99 TTFT without load, seconds.
        without, rejecting: By load, as `ROUTERS` have it.
        product: By load, with the queue and the thresholds that a graph has which sets nothing but the mode.
        by_arrival: The same in the order of arrival.
    """

    unloaded_s: float
    without: tuple[Point, ...]
    rejecting: tuple[Point, ...]
    product: tuple[Point, ...]
    by_arrival: tuple[Point, ...]


def sweep(seconds: float, note: Callable[[str], None]) -> Sweep:
    """Run every load for ``seconds`` of arrivals."""
    idle = _run(UNLOADED_FACTOR, ROUTERS[0], UNLOADED_S)
    unloaded_s = float(np.percentile(idle.ttft_s[idle.is_ok], 99))
    names = ("rejection off", "rejection on", "the product's defaults", "by arrival")
    found: list[list[Point]] = [[] for _ in ROUTERS]
    for factor in FACTORS:
        for router, name, points in zip(ROUTERS, names, found, strict=True):
            note(f"{name}, {factor:g}x")
            points.append(_point(factor, _run(factor, router, seconds), unloaded_s, seconds))
    return Sweep(unloaded_s, *map(tuple, found))


def _point(factor: float, requests: Requests, unloaded_s: float, seconds: float) -> Point:
    ttft_s = requests.ttft_s[requests.is_ok]
    in_time = int((ttft_s <= MOST_TTFT * unloaded_s).sum())
    p99 = float(np.percentile(ttft_s, 99)) / unloaded_s
    loose = int((ttft_s <= LOOSE_S).sum())
    target = int((ttft_s <= TARGET_S).sum())
    rejected = float(requests.is_rejected.mean())
    return Point(factor, p99, in_time / seconds, loose / seconds, target / seconds, rejected)


def _run(factor: float, router: RouterConfig, seconds: float) -> Requests:
    pool = PoolSpec(Role.AGGREGATED, WORKERS, ProfiledModel(PROFILE, block_size=16))
    return Simulation(Scenario([pool], router), _traffic(RATE * factor, seconds)).run().requests


def _traffic(rate: float, seconds: float) -> list[TraceRequest]:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.3) + 100))
    times = times[times < seconds]
    prompts = PROMPT_TOKENS * np.exp(rng.normal(-(PROMPT_SPREAD**2) / 2, PROMPT_SPREAD, times.size))
    outputs = OUTPUT_TOKENS * np.exp(rng.normal(-(OUTPUT_SPREAD**2) / 2, OUTPUT_SPREAD, times.size))
    return [
        TraceRequest(float(at_s), max(1, int(prompt)), max(1, int(output)), None, line)
        for line, (at_s, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True), 1)
    ]
