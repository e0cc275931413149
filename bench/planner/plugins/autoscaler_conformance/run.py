"""Puts one policy into one situation and notes what it does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from autoscaler_conformance.plant import Plant, Situation, performance_of

from penstock.api import Role
from penstock.simulator.planning import VirtualPlanner
from penstock.simulator.scenario import Fault
from penstock_planner.core.effects import Scale, Switch
from penstock_planner.decide.config import DecideConfig, Mode


@dataclass(frozen=True, slots=True)
class PoolChange:
    """One change of a pool that the policy asked for.

    Attributes:
        at_s: When.
        role: Which.
        before, after: Ready and starting replicas.
    """

    at_s: float
    role: Role
    before: int
    after: int


@dataclass(slots=True)
class SituationHistory:
    """What happened, by second.

    Attributes:
        changes: In order.
        replicas: Ready and starting, by role.
        ready: By role.
        gpus: Of all replicas, draining ones included.
        budget: That applied.
        queue: Requests waiting.
        refused: In all.
    """

    changes: list[PoolChange] = field(default_factory=list)
    replicas: dict[Role, list[int]] = field(default_factory=dict)
    ready: dict[Role, list[int]] = field(default_factory=dict)
    gpus: list[int] = field(default_factory=list)
    budget: list[int] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    refused: float = 0.0

    def shrinks(self, role: Role | None = None, from_s: float = 0.0, to_s: float = float("inf")) -> int:
        """Return how often a role (None: any) was made smaller in a time."""
        return sum(
            change.after < change.before
            for change in self.changes
            if role in {None, change.role} and from_s <= change.at_s <= to_s
        )

    def grows(self, role: Role | None = None, from_s: float = 0.0, to_s: float = float("inf")) -> int:
        """Return how often a role (None: any) was made larger in a time."""
        return sum(
            change.after > change.before
            for change in self.changes
            if role in {None, change.role} and from_s <= change.at_s <= to_s
        )

    def reversals(self) -> int:
        """Return how often a role's change went against its change before."""
        count = 0
        for role in self.replicas:
            signs = [change.after > change.before for change in self.changes if change.role is role]
            count += sum(one != other for one, other in pairwise(signs))
        return count

    def is_within_budget(self) -> bool:
        """Tell whether no second has more GPUs than were there or allowed."""
        return all(
            used <= max(allowed, before)
            for used, allowed, before in zip(self.gpus[1:], self.budget[1:], self.gpus, strict=False)
        )


def play(mode: str, situation: Situation) -> SituationHistory:
    """Return what a policy does in a situation.

    Args:
        mode: Of a policy in the registry.
        situation: From second 0 to its end.
    """
    base = DecideConfig(
        max_gpu_budget=situation.budget,
        prefill_gpus=situation.gpus,
        decode_gpus=situation.gpus,
        performance=performance_of(situation) if mode == Mode.SLA else None,
    )
    planner = VirtualPlanner(replace(base, **situation.config).in_mode(mode), lambda _decision: None)
    plant = Plant(situation)
    history = SituationHistory(
        replicas={role: [] for role in situation.fleet}, ready={role: [] for role in situation.fleet}
    )
    budget = situation.budget
    for second in range(1, int(situation.length_s) + 1):
        now_s = float(second)
        plant.step(now_s)
        for change in situation.faults.budget:
            if change.at_s == now_s:
                budget = change.gpus
                planner.set_budget(budget)
        if now_s in situation.faults.restarts:
            planner.restart(now_s)
        if planner.next_s <= now_s and situation.faults.is_on(Fault.PLANNER_DOWN, now_s):
            planner.skip_tick(now_s)
        elif planner.next_s <= now_s:
            _tick(planner, plant, now_s, history)
        _note(history, plant, situation, budget)
    history.refused = plant.refused
    return history


def _tick(planner: VirtualPlanner, plant: Plant, now_s: float, history: SituationHistory) -> None:
    def scale(asked: Scale | Switch) -> None:
        for change in asked.changes:
            before = plant.counts(change.role).replicas
            plant.scale(change.role, change.desired)
            history.changes.append(PoolChange(now_s, change.role, before, change.desired))

    planner.tick(now_s, plant.observe(now_s), scale)


def _note(history: SituationHistory, plant: Plant, situation: Situation, budget: int) -> None:
    for role in situation.fleet:
        counts = plant.counts(role)
        history.replicas[role].append(counts.replicas)
        history.ready[role].append(counts.ready)
    history.gpus.append(plant.gpus())
    history.budget.append(budget)
    history.queue.append(plant.queue)
