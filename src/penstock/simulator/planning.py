"""Drives the planner's core in virtual time; decides nothing itself.

The ledger is not modelled: a planner with one comes back from a restart with everything it knew, an autoscaler
without one with nothing. Scale-ups are rolled back by a planner with a ledger only, as autoscalers know none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock.planner.core.messages import (
    DecisionRecorded,
    Effect,
    Event,
    Notify,
    ObserveAt,
    Observed,
    Pulled,
    ReadMetrics,
    RecordDecision,
    Scale,
    Scaled,
    Started,
    TargetUnavailable,
)
from penstock.planner.core.planner import PlannerCore
from penstock.planner.core.records import Change
from penstock.planner.core.state import CoreSettings, begin
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import Demand, Observation, PoolCounts, Pull, summarise
from penstock.planner.decide.reading import Reading, assess

_SOURCE = "simulator"
_TIMELINE = "simulated"

ScalePool = Callable[[Change], str | None]
"""Carries a change of a pool out; returns why it was refused, None if it was not."""

MAX_AGE_S = 10.0
"""Oldest fresh reading; the default of the planner's ``--metrics-max-age``."""

DEADLINE_S = 600.0
"""The default of the planner's ``--adjustment-deadline``."""


@dataclass(frozen=True, slots=True)
class SimulatedObservation:
    """What one tick sees.

    Attributes:
        pools: Counts by role.
        is_adjusting: A replica asked for is not ready yet, or one is draining; a dead one that comes back is
            no adjustment.
        kv: KV usage fraction by ready decode (or aggregated) worker; None when not scraped yet.
        waiting: Requests that wait for prefill, NaN when unknown; None in aggregated simulations.
        age_s: Age of the readings.
        demand: At the frontend since the last pull; None when unknown.
        worker_waiting: Requests that wait inside, by ready decode (or aggregated) worker; None when unknown.
        never_ready: Why a replica of the role will not become ready, by role.
    """

    pools: Mapping[Role, PoolCounts]
    is_adjusting: bool
    kv: Mapping[str, float | None]
    waiting: float | None
    age_s: float
    demand: Demand | None = None
    worker_waiting: Mapping[str, float | None] | None = None
    never_ready: Mapping[Role, str] = field(default_factory=dict)

    def pull(self, now_s: float) -> Pull:
        """Return the metrics as the live loop would have read them at ``now_s``."""

        def reading(value: float | None, upper: float | None = None) -> Reading:
            return assess(value, age_s=self.age_s, max_age_s=MAX_AGE_S, source=_SOURCE, upper=upper)

        inside = self.worker_waiting
        return summarise(
            Observation(
                now_s,
                self.pools,
                {name: reading(value, 1.0) for name, value in self.kv.items()},
                None if self.waiting is None else reading(self.waiting),
                self.demand,
                None if inside is None else {name: reading(count) for name, count in inside.items()},
            )
        )


class VirtualPlanner:
    """One planner.

    Attributes:
        decisions: Every decision, holds included.
        next_s: When `tick` is due.
    """

    __slots__ = ("_core", "_state", "decisions", "next_s")

    def __init__(self, config: DecideConfig, *, deadline_s: float = DEADLINE_S) -> None:
        """Begin at time 0.

        Args:
            config: The rules' settings.
            deadline_s: Longest wait for an adjustment, virtual seconds.
        """
        self._core = PlannerCore(
            CoreSettings(config, deadline_s, _TIMELINE, rolls_back=config.policy.has_ledger)
        )
        self.decisions: list[Decision] = []
        self._start(0.0, first_sequence=0)

    def tick(self, now_s: float, seen: SimulatedObservation, scale: ScalePool) -> None:
        """Do what is due.

        Args:
            now_s: Virtual seconds.
            seen: What the planner observes and reads now.
            scale: Carries a change out; returns why it was refused, None if it was not.
        """
        event: Event | None = Observed(seen.pools, seen.is_adjusting, never_ready=seen.never_ready)
        while event is not None:
            match self._step(event, now_s):
                case ReadMetrics():
                    event = Pulled(seen.pull(now_s))
                case RecordDecision() as asked:
                    event = DecisionRecorded(asked, is_written=True)
                case Scale(change):
                    event = Scaled(scale(change))
                case _:
                    event = None

    def restart(self, now_s: float) -> None:
        """Replace the process: one with a ledger goes on, one without begins from nothing."""
        if not self._core.settings.config.policy.has_ledger:
            self._start(now_s, first_sequence=self._state.decided.sequence)

    def miss(self, now_s: float) -> None:
        """Let a tick pass unused: the process is away, and what it did not keep is gone."""
        self.restart(now_s)
        self._step(TargetUnavailable(), now_s)

    def set_budget(self, gpus: int) -> None:
        """Plan with another GPU budget from now on."""
        settings = self._core.settings
        config = replace(settings.config, max_gpu_budget=gpus)
        self._core = PlannerCore(replace(settings, config=config))

    def _start(self, now_s: float, *, first_sequence: int) -> None:
        self._state = begin(self._core.settings, now_s)
        self._step(Started(first_sequence=first_sequence), now_s)

    def _step(self, event: Event, now_s: float) -> Effect:
        """Take one step; return its last effect."""
        self._state, effects = self._core.step(self._state, event, now_s)
        self.decisions += [effect.decision for effect in effects if isinstance(effect, Notify)]
        if isinstance(effects[-1], ObserveAt):
            self.next_s = effects[-1].at_s
        return effects[-1]
