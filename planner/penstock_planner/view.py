"""What the loop shows to those who only look: dashboard, metrics endpoint, state file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock_core.logs import get_logger
from penstock_graph.models import Role
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Pull
from penstock_planner.sources.base import Buckets
from penstock_planner.targets.base import PoolState

log = get_logger(__name__)


class Phase(StrEnum):
    """What the loop is doing."""

    OBSERVING = "observing"
    ADJUSTING = "adjusting"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class View:
    """The planner at one tick. Times in modelled seconds.

    Attributes:
        at_s: Now.
        origin_s: When the planner first started.
        wall_s: Real seconds since 1970.
        phase: observing; adjusting (pulls and decisions blocked); blind (the backend cannot be read).
        pools: By role.
        desired: Replicas wanted by the last decision, by role.
        gpus: GPUs that existing workers hold, draining ones included.
        max_gpu_budget: None: no ceiling.
        pull: Newest pull; None while adjusting or blind.
        latency: The source's histograms, if it has any.
        next_decision_s: When the interval ends; None while adjusting.
        lag_p99_s: How late ticks start; None before the first.
        ledger_errors: Records that could not be written.
        overdue: An adjustment that never ended is being ignored.
    """

    at_s: float
    origin_s: float
    wall_s: float
    phase: Phase
    pools: Mapping[Role, PoolState]
    desired: Mapping[Role, int]
    gpus: int
    max_gpu_budget: int | None
    pull: Pull | None
    latency: Mapping[str, Buckets]
    next_decision_s: float | None
    lag_p99_s: float | None
    ledger_errors: int
    overdue: bool


class Listener(Protocol):
    """Somebody who looks. Neither method may block."""

    def tick(self, view: View) -> None:
        """Take note of a tick."""
        ...

    def decided(self, decision: Decision, view: View) -> None:
        """Take note of a recorded decision, before it is carried out."""
        ...


class Audience:
    """All listeners; one that fails is logged once and never stops the planner."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)
        self._failed: set[int] = set()

    def tick(self, view: View) -> None:
        """Tell everybody of a tick."""
        for listener in self._listeners:
            try:
                listener.tick(view)
            except Exception as exc:  # noqa: BLE001 - whatever a listener does wrong must not stop decisions
                self._note(listener, exc)

    def decided(self, decision: Decision, view: View) -> None:
        """Tell everybody of a decision."""
        for listener in self._listeners:
            try:
                listener.decided(decision, view)
            except Exception as exc:  # noqa: BLE001 - as above
                self._note(listener, exc)

    def _note(self, listener: Listener, exc: Exception) -> None:
        if id(listener) not in self._failed:
            self._failed.add(id(listener))
            log.warning("listener failed", listener=type(listener).__name__, error=repr(exc))
