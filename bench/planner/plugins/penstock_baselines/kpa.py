"""Knative's pod autoscaler: a stable window of 60 s, and a panic window of 6 s that only ever grows.

Source: Knative Serving 1.19, ``pkg/autoscaler/scaling/autoscaler.go``, and its documentation of the KPA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Pull, Window
from penstock_planner.decide.policies.drafting import drafted, proposed, waiting_requests
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, PolicyState

TARGETS = {Role.DECODE: 0.7, Role.PREFILL: 2.0, Role.AGGREGATED: 8.0}
"""KV usage of a decode replica, Knative's target utilisation; requests of a prefill replica, one that runs and one that
waits, and of an aggregated one."""

TICK_S = 2.0
"""``tick-interval``."""
STABLE_S, PANIC_S = 60.0, 6.0
"""``stable-window`` and 10% of it, ``panic-window-percentage``."""
PANIC_THRESHOLD = 2.0
"""``panic-threshold-percentage``: 200% of what the ready pods are to carry."""
MAX_UP, MAX_DOWN = 1000.0, 2.0
"""``max-scale-up-rate`` and ``max-scale-down-rate``."""


@dataclass(frozen=True, slots=True)
class Panic:
    """Memory between ticks.

    Attributes:
        since_s: Last time that the load was above the panic threshold; None: no panic.
        pods: Most pods asked for in this panic.
    """

    since_s: float | None = None
    pods: int = 0


@dataclass(frozen=True, slots=True)
class KpaState(PolicyState):
    """What each role's KPA keeps between ticks.

    Attributes:
        panics: Panic of each role.
        seen: Time and load of each reading in the stable window, by role.
    """

    KEY: ClassVar[str] = "kpa"

    panics: Mapping[Role, Panic] = field(default_factory=dict)
    seen: Mapping[Role, tuple[tuple[float, float], ...]] = field(default_factory=dict)


def started(now_s: float, pods: int) -> Panic:
    """Return the memory after a start: with more than one pod it begins in panic at their number."""
    return Panic(now_s, pods) if pods > 1 else Panic()


def scaled(
    stable: float | None, panic: float | None, *, target: float, ready: int, now_s: float, memory: Panic
) -> tuple[int | None, Panic]:
    """Return the pods that are wanted and the next memory; no data, no change.

    Args:
        stable: Mean of the metric's sum over all pods in the stable window; None without data.
        panic: The same in the panic window.
        target: Of one pod, > 0.
        ready: Ready pods.
        now_s: Simulated seconds.
        memory: Of the tick before.

    Example: 10 ready pods at a target of 10 and 100 in both windows want 10; 250 in the panic window want 25 at once.
    """
    if stable is None or panic is None:
        return None, memory
    pods = max(1, ready)
    most, least = math.ceil(MAX_UP * pods), math.floor(pods / MAX_DOWN)
    wanted = min(max(_ceil(stable / target), least), most)
    wanted_now = min(max(_ceil(panic / target), least), most)
    is_over = _ceil(panic / target) / pods >= PANIC_THRESHOLD
    if is_over:
        memory = replace(memory, since_s=now_s)
    elif memory.since_s is not None and memory.since_s + STABLE_S < now_s:
        memory = Panic()
    if memory.since_s is None:
        return wanted, memory
    memory = replace(memory, pods=max(memory.pods, wanted, wanted_now))
    return memory.pods, memory


def kpa(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what a KPA per role asks for: requests at prefill and aggregated workers, KV usage of decode."""
    pull = window.pulls[-1]
    proposals, kept = [], KpaState.read(state.learned)
    panics, seen = dict(kept.panics), dict(kept.seen)
    for role, pool in pull.pools.items():
        points = list(seen.get(role, ()))
        points += [(each.at_s, load) for each in window.pulls if (load := _load(each, role)) is not None]
        points = [point for point in points if point[0] > pull.at_s - STABLE_S]
        before = panics.get(role) or started(pull.at_s, pool.ready)
        stable, panic = _mean(points, pull.at_s - STABLE_S), _mean(points, pull.at_s - PANIC_S)
        target = TARGETS[role]
        desired, after = scaled(
            stable, panic, target=target, ready=pool.ready, now_s=pull.at_s, memory=before
        )
        panics[role], seen[role] = after, tuple(points)
        mode = "stable" if after.since_s is None else "panic"
        inputs = {"stable": stable, "panic": panic, "target": target, "ready": pool.ready}
        step = Step("kpa", inputs, target, f"{mode}: asks for {desired}")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state, KpaState(panics, seen))


def _load(pull: Pull, role: Role) -> float | None:
    if role is Role.DECODE:
        return pull.kv.total if pull.kv.fresh else None
    demand = pull.demand
    waiting = waiting_requests(pull, role) if role is Role.PREFILL else 0.0
    if demand is None or waiting is None:
        return None
    return demand.in_flight.get(role, 0.0) + demand.waiting


def _mean(points: Sequence[tuple[float, float]], after_s: float) -> float | None:
    values = [value for at_s, value in points if at_s > after_s]
    return sum(values) / len(values) if values else None


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


POLICY = PlannerPolicy(kpa, has_ledger=False, interval_s=TICK_S, max_step=None)
