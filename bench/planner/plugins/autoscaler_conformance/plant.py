"""A fleet and its load as a fluid, one second at a time: small enough to say by hand what is right.

A prefill worker answers `PREFILL_RPS` prompts a second; a decode worker holds `DECODE_SLOTS` answers, each for the
situation's ``hold_s``; an aggregated one does both. What does not fit waits at the frontend, beyond ``max_queue`` it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.api import Role
from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable
from penstock.simulator.planning import UNPLACED, UNPLACED_AFTER_S, SimulatedObservation
from penstock.simulator.scenario import Fault, Faults
from penstock_planner.decide.demand.observation import Demand, PoolCounts

PREFILL_RPS = 2.0
DECODE_SLOTS = 50.0
PROMPT_TOKENS = 8000.0
OUTPUT_TOKENS = 300.0
DRAIN_S = 10.0


def steady(rps: float) -> Callable[[float], float]:
    """Return a rate that never changes."""
    return lambda _: rps


@dataclass(frozen=True, slots=True)
class Edit:
    """A person sets a pool's replicas.

    Attributes:
        at_s: When.
        role: Which pool.
        replicas: To what.
    """

    at_s: float
    role: Role
    replicas: int


@dataclass(frozen=True, slots=True)
class Situation:
    """What happens, in seconds from 0.

    Attributes:
        fleet: Ready replicas at 0.
        rps: Arrivals over time.
        length_s: How long it lasts.
        hold_s: How long an answer is decoded.
        start_s: From asking for a replica until it serves.
        budget: GPUs.
        gpus: Of one replica.
        max_queue: Requests that may wait; more are refused.
        config: Further settings of the decision.
        faults: What goes wrong; ``node_gpus`` too.
        edits: By hand.
        crashes: (when, role): all ready replicas of the role restart and are back after ``start_s``.
        metrics: Changes what is seen at a time; None: what is true.
    """

    fleet: Mapping[Role, int]
    rps: Callable[[float], float]
    length_s: float = 900.0
    hold_s: float = 10.0
    start_s: float = 30.0
    budget: int = 8
    gpus: int = 1
    max_queue: float = 1e9
    config: Mapping[str, Any] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    edits: Sequence[Edit] = ()
    crashes: Sequence[tuple[float, Role]] = ()
    metrics: Callable[[float, SimulatedObservation], SimulatedObservation] | None = None


def performance_of(situation: Situation) -> PerformanceProfile:
    """Return the true profile of a situation's workers: none is slower for having company."""
    context = PROMPT_TOKENS + OUTPUT_TOKENS / 2
    itl_s = situation.hold_s / OUTPUT_TOKENS
    usage = tuple(percent / 100 for percent in range(2, 101, 2))
    rates = tuple(share * DECODE_SLOTS / itl_s for share in usage)
    prompts = (PROMPT_TOKENS / 10, PROMPT_TOKENS * 10)
    return PerformanceProfile(
        PrefillTable(prompts, tuple(tokens / PROMPT_TOKENS / PREFILL_RPS for tokens in prompts)),
        DecodeTable((context,), usage, ((itl_s,) * len(usage),), (rates,), DECODE_SLOTS * context),
        prefill_gpus=situation.gpus,
        decode_gpus=situation.gpus,
    )


@dataclass(slots=True)
class _Replica:
    joined_s: float
    ready_s: float
    is_placed: bool = True
    gone_s: float | None = None
    was_ready: bool = False


class Plant:
    """The fleet and its load.

    Attributes:
        refused: Requests so far.
        queue: Requests that wait.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._pools: dict[Role, list[_Replica]] = {
            role: [_Replica(0.0, 0.0, was_ready=True) for _ in range(count)]
            for role, count in situation.fleet.items()
        }
        self._sums = dict.fromkeys(("arrivals", "served", "completed", "refused"), 0.0)
        self._before = dict(self._sums)
        self._taken_s = self._now_s = 0.0
        self._queued_since_s: float | None = None
        self.queue = 0.0
        self.running = 0.0
        self.refused = 0.0
        self._known: SimulatedObservation | None = None

    # -- the fleet ------------------------------------------------------------------------------------

    def counts(self, role: Role) -> PoolCounts:
        """Return a pool as the backend reports it."""
        alive = [each for each in self._pools[role] if each.gone_s is None]
        ready = sum(each.ready_s <= self._now_s for each in alive)
        draining = len(self._pools[role]) - len(alive)
        return PoolCounts(ready, len(alive) - ready, draining, self._situation.gpus)

    def gpus(self) -> int:
        """Return the GPUs of all replicas, starting and draining ones included."""
        return self._situation.gpus * sum(len(pool) for pool in self._pools.values())

    def scale(self, role: Role, replicas: int) -> None:
        """Set a pool's size: joins start, leaves drain, those that do not serve go first."""
        now_s, situation = self._now_s, self._situation
        alive = [each for each in self._pools[role] if each.gone_s is None]
        for _ in range(replicas - len(alive)):
            nodes = situation.faults.node_gpus
            is_placed = nodes is None or self.gpus() + situation.gpus <= nodes
            is_lost = not is_placed or situation.faults.is_on(Fault.NEVER_READY, now_s)
            ready_s = float("inf") if is_lost else now_s + situation.start_s
            self._pools[role].append(_Replica(now_s, ready_s, is_placed))
        alive.sort(key=lambda each: (each.ready_s, each.joined_s))
        for each in alive[replicas:]:
            each.gone_s = now_s + DRAIN_S if each.ready_s <= now_s else now_s

    # -- a second -------------------------------------------------------------------------------------

    def step(self, now_s: float) -> None:
        """Let a second pass that ends at ``now_s``."""
        self._now_s = now_s
        for role, pool in self._pools.items():
            self._pools[role] = [each for each in pool if each.gone_s is None or each.gone_s > now_s]
        for edit in self._situation.edits:
            if edit.at_s == now_s:
                self.scale(edit.role, edit.replicas)
        for at_s, role in self._situation.crashes:
            if at_s == now_s:
                for each in self._pools[role]:
                    each.ready_s = now_s + self._situation.start_s
        self._serve(now_s)

    def _serve(self, now_s: float) -> None:
        situation, sums = self._situation, self._sums
        arrivals = situation.rps(now_s)
        is_away = situation.faults.is_on(Fault.ROUTER_DOWN, now_s)
        ended = self.running / situation.hold_s
        self.running -= ended
        sums["completed"] += ended
        if is_away:
            return
        sums["arrivals"] += arrivals
        waiting = self.queue + arrivals
        served = max(0.0, min(waiting, self._prefill_rps(), self._slots() - self.running))
        waiting -= served
        refused = max(0.0, waiting - situation.max_queue)
        self.queue = waiting - refused
        self.running += served
        sums["served"] += served
        sums["refused"] += refused
        self.refused += refused
        if self.queue < 0.5:
            self._queued_since_s = None
        elif self._queued_since_s is None:
            self._queued_since_s = now_s

    def _ready(self, *roles: Role) -> int:
        return sum(self.counts(role).ready for role in roles if role in self._pools)

    def _prefill_rps(self) -> float:
        return PREFILL_RPS * self._ready(Role.PREFILL, Role.AGGREGATED)

    def _slots(self) -> float:
        return DECODE_SLOTS * self._ready(Role.DECODE, Role.AGGREGATED)

    # -- what is seen ---------------------------------------------------------------------------------

    def observe(self, now_s: float) -> SimulatedObservation:
        """Return what a pull sees, faults and scripted metrics included."""
        true = self._true_observation(now_s)
        faults = self._situation.faults
        blind = replace(true, demand=None, worker_waiting=None)
        nan = float("nan") if true.waiting is not None else None
        if faults.is_on(Fault.METRICS_STALE, now_s) and self._known is not None:
            since_s = faults.since_s(Fault.METRICS_STALE, now_s) or 0.0
            kept = {name: self._known.kv.get(name) for name in true.kv}
            return replace(blind, kv=kept, waiting=self._known.waiting, age_s=now_s - since_s)
        if faults.is_on(Fault.METRICS_MISSING, now_s):
            return replace(blind, kv=dict.fromkeys(true.kv), waiting=nan)
        if faults.is_on(Fault.METRICS_NAN, now_s):
            return replace(blind, kv=dict.fromkeys(true.kv, float("nan")), waiting=nan)
        if faults.is_on(Fault.METRICS_ZERO, now_s):
            zero = None if true.waiting is None else 0.0
            return replace(blind, kv=dict.fromkeys(true.kv, 0.0), waiting=zero)
        if faults.is_on(Fault.ROUTER_DOWN, now_s):
            true = replace(true, waiting=nan, demand=None)
        else:
            self._known = true
        script = self._situation.metrics
        return true if script is None else script(now_s, true)

    def _true_observation(self, now_s: float) -> SimulatedObservation:
        pools = {role: self.counts(role) for role in self._pools}
        kv_role = Role.AGGREGATED if Role.AGGREGATED in pools else Role.DECODE
        ready = pools[kv_role].ready
        fraction = min(1.0, self.running / (DECODE_SLOTS * ready)) if ready else 0.0
        return SimulatedObservation(
            pools=pools,
            is_adjusting=any(self._is_adjusting(role) for role in pools),
            kv={f"{kv_role.value}-{i}": fraction for i in range(ready)},
            waiting=self.queue if Role.PREFILL in pools else None,
            age_s=0.0,
            demand=self._demand(now_s),
            worker_waiting={f"{kv_role.value}-{i}": 0.0 for i in range(ready)},
            never_ready=self._never_ready(now_s),
        )

    def _is_adjusting(self, role: Role) -> bool:
        return any(
            each.gone_s is not None or (each.ready_s > self._now_s and not each.was_ready)
            for each in self._pools[role]
        )

    def _never_ready(self, now_s: float) -> dict[Role, str]:
        return {
            role: UNPLACED
            for role, pool in self._pools.items()
            if any(not each.is_placed and now_s - each.joined_s >= UNPLACED_AFTER_S for each in pool)
        }

    def _demand(self, now_s: float) -> Demand | None:
        period_s = now_s - self._taken_s
        if period_s <= 0:
            return None
        new = {name: value - self._before[name] for name, value in self._sums.items()}
        self._taken_s, self._before = now_s, dict(self._sums)
        entry = Role.PREFILL if Role.PREFILL in self._pools else Role.AGGREGATED
        holder = Role.DECODE if Role.DECODE in self._pools else Role.AGGREGATED
        waited_s = None if self._queued_since_s is None else self._wait_s(now_s)
        return Demand(
            period_s=period_s,
            arrivals=new["arrivals"],
            prompt_tokens=new["arrivals"] * PROMPT_TOKENS,
            uncached_tokens=new["arrivals"] * PROMPT_TOKENS,
            refused=new["refused"],
            completed=new["completed"],
            output_tokens=new["completed"] * OUTPUT_TOKENS,
            prefilled_tokens=new["served"] * PROMPT_TOKENS,
            ttft_sum_s=new["served"] * (0.5 + (waited_s or 0.0)),
            ttft_count=new["served"],
            waiting=self.queue,
            waiting_tokens=self.queue * PROMPT_TOKENS,
            oldest_wait_s=waited_s,
            in_flight={entry: min(1.0, new["served"]), holder: self.running},
            prefilling_workers=self._busy(entry, new["served"] / period_s),
        )

    def _busy(self, entry: Role, served_rps: float) -> float:
        """Return the workers that compute prompts: as many as the served rate takes, all while requests wait."""
        ready = self.counts(entry).ready
        return float(ready) if self.queue >= 0.5 else min(float(ready), served_rps / PREFILL_RPS)

    def _wait_s(self, now_s: float) -> float:
        """Return how long the oldest has waited: the time that what waits takes to be served, and no longer than it waits."""
        rps = max(0.1, min(self._prefill_rps(), self._situation.rps(now_s)))
        since_s = self._queued_since_s if self._queued_since_s is not None else now_s
        return min(now_s - since_s, self.queue / rps)
