"""What the planner shows of each tick and decision, and to whom: metrics, state.json, the dashboard, statuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.api import Role
from penstock.core.logs import get_logger
from penstock_planner.core.ledger_history import Remembered
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.decision import Decision, Memory
from penstock_planner.decide.observation import PoolCounts, Pull
from penstock_planner.sources.base import Buckets

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class View:
    """The planner at one tick. Times in simulated seconds.

    Attributes:
        origin_s: When the planner first started.
        wall_s: Real seconds since 1970.
        phase: observing; adjusting (pulls and decisions blocked); target_unavailable (the backend cannot be read).
        pull: Of this tick, the one that a decision was taken on included; None where nothing was pulled.
        next_decision_s: When the interval ends; None while adjusting.
        lag_p99_s: How late ticks start; None before the first.
        ledger_errors: Records that could not be written.
        ledger_problem: Why the newest could not; empty if it was written.
        gone_sources: Why sources that this pull needed gave nothing, by name.
        overdue: An adjustment that never ended is being ignored.
        startup_s: How long the newest replica of each role took from its decision to ready, by role.
        failures: The newest reason of a replica that was given up, by role.
        remembered: What a former run left in the ledger; None: nothing.
        scheduled: Entries of the schedule that hold, and until when, as text.
        memory: What the policy remembers after its newest decision.
        grant: GPUs that a pool lets the graph hold; None: it is in no pool.
        guaranteed: Of those, what it gets whenever it wants them; None likewise.
    """

    at_s: float
    origin_s: float
    wall_s: float
    phase: PlannerPhase
    pools: Mapping[Role, PoolCounts]
    desired: Mapping[Role, int]
    gpus: int
    max_gpu_budget: int | None
    pull: Pull | None
    latency: Mapping[str, Buckets]
    next_decision_s: float | None
    lag_p99_s: float | None
    ledger_errors: int
    overdue: bool
    startup_s: Mapping[Role, float]
    left_to: Mapping[Role, str] = field(default_factory=dict)
    failures: Mapping[Role, str] = field(default_factory=dict)
    ledger_problem: str = ""
    gone_sources: Mapping[str, str] = field(default_factory=dict)
    remembered: Remembered | None = None
    scheduled: tuple[str, ...] = ()
    memory: Memory = field(default_factory=dict)
    grant: int | None = None
    guaranteed: int | None = None


class Observer(Protocol):
    """Is notified of what the planner does. Neither method may block."""

    def tick(self, view: View) -> None:
        """Handle a tick."""
        ...

    def decided(self, decision: Decision, view: View) -> None:
        """Handle a recorded decision, before it is carried out."""
        ...


class Observers:
    """All observers; one that fails is logged once and never stops the planner."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._failed: set[int] = set()

    def tick(self, view: View) -> None:
        """Notify all of a tick."""
        self._notify(lambda observer: observer.tick(view))

    def decided(self, decision: Decision, view: View) -> None:
        """Notify all of a decision."""
        self._notify(lambda observer: observer.decided(decision, view))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception as exc:  # noqa: BLE001 - a failing observer must not stop decisions
                if id(observer) not in self._failed:
                    self._failed.add(id(observer))
                    log.warning("observer failed", observer=type(observer).__name__, error=repr(exc))
