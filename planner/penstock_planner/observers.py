"""Observers of the planner's ticks and decisions, and the view that they receive: metrics, state.json, dashboard, statuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.api import Role
from penstock.core.logs import get_logger
from penstock_planner.core.ledger_history import LearnedStateInfo
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import PoolCounts, Pull
from penstock_planner.decide.state import Learned
from penstock_planner.sources.base import Buckets

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannerView:
    """State of the planner at one tick. Times and durations are in simulated seconds unless stated otherwise.

    Attributes:
        at_s: Time of the tick.
        origin_s: Time at which the planner first started on this clock, so that ``at_s - origin_s`` is the time since
            that start, which people are shown.
        wall_s: Wall-clock time, real seconds since 1970.
        phase: Activity of the planner: observing; adjusting (a replica change is in progress, no decisions); or
            target_unavailable (the backend, Kubernetes or local processes, cannot be read).
        pools: Replica counts by role; empty if the backend cannot be read.
        desired: Desired number of replicas by role.
        gpus: GPUs of existing workers, draining ones included.
        max_gpu_budget: GPU budget that applies, which is the grant if the graph is in a GPU pool; None if there is no
            limit.
        pull: Metrics scraped at this tick; None if none were.
        latency: Cumulative latency histograms by name (``ttft``, ``itl``, ``dispatched_ttft``).
        next_decision_s: Time of the next decision; None while a replica change is in progress.
        lag_p99_s: 99th percentile of how long after their planned times the last ticks began; None before the first
            tick.
        ledger_errors: Number of records that could not be written to the ledger (the decision log).
        overdue: Whether the planner decides again although a replica change did not finish within its deadline.
        startup_s: Time from the decision until the newest replica was ready, by role.
        other_writers: Name of the client, other than the planner, that sets a role's replicas, by role; a role that
            only the planner sets is absent.
        failures: Newest reason for which a replica of a role failed, by role.
        ledger_problem: Error of the newest ledger record; empty if that record was written.
        failed_sources: Error of each metrics source that this scrape needed and that did not answer, by name.
        remembered: Learned state that an earlier run left in the ledger; None if there is none.
        scheduled: Active entries of the schedule with their end times, as text.
        memory: Learned state (such as demand and throughput) after the newest decision.
        grant: GPUs that a GPU pool grants to the graph; None if it is in no pool.
        guaranteed: GPUs that the pool guarantees to the graph; None if it is in no pool or the guarantee is unknown.
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
    other_writers: Mapping[Role, str] = field(default_factory=dict)
    failures: Mapping[Role, str] = field(default_factory=dict)
    ledger_problem: str = ""
    failed_sources: Mapping[str, str] = field(default_factory=dict)
    remembered: LearnedStateInfo | None = None
    scheduled: tuple[str, ...] = ()
    memory: Learned = field(default_factory=dict)
    grant: int | None = None
    guaranteed: int | None = None


class Observer(Protocol):
    """Interface of an object that the planner loop notifies of its ticks (metrics scrapes) and decisions.

    The methods must not block.
    """

    def tick(self, view: PlannerView) -> None:
        """Handle a tick (metrics scrape).

        Args:
            view: State of the planner at the tick.
        """
        ...

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Handle a decision that was recorded in the ledger (the decision log) and is not carried out yet.

        Args:
            decision: The decision.
            view: State of the planner at the newest tick (metrics scrape).
        """
        ...


class Observers:
    """Notifies several observers. The first error of an observer is logged; no error stops the planner or the other observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._failed: set[int] = set()

    def tick(self, view: PlannerView) -> None:
        """Notify all observers of a tick (metrics scrape)."""
        self._notify(lambda observer: observer.tick(view))

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Notify all observers of a decision.

        Args:
            decision: The decision, which is recorded and not carried out yet.
            view: State of the planner at the newest tick (metrics scrape).
        """
        self._notify(lambda observer: observer.decided(decision, view))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception as exc:  # noqa: BLE001 - a failing observer must not stop decisions
                if id(observer) not in self._failed:
                    self._failed.add(id(observer))
                    log.warning("observer failed", observer=type(observer).__name__, error=repr(exc))
