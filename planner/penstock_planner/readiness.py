"""Readiness of a planner process: it is ready while its loops tick and their backend can be read.

Missing metrics do not make it unready: the planner keeps its last decision and reports them in the graph's status. A failed loop is
also reported there, and restarted. What remains is a loop that hangs, which only readiness detects.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.decision import Decision
from penstock_planner.loop import TARGET_TIMEOUT_S
from penstock_planner.observers import PlannerView

LATE_S: Final = 5 * TARGET_TIMEOUT_S
"""Real seconds beyond a loop's interval after which the loop counts as hanging.

Chosen: a tick scrapes metrics and makes up to four calls of its backend, each with a timeout.
"""


@dataclass(slots=True)
class LoopTicks:
    """Observer that records when the loop of one planner ticked last, and whether it could read its backend.

    Attributes:
        now_s: Function that returns the time of a monotonic clock, in real seconds.
        interval_s: Real seconds between two ticks.
        ticked_s: Time of the last tick (metrics scrape), as ``now_s`` returned it.
        can_read: Whether the backend could be read at the last tick.
    """

    now_s: Callable[[], float]
    interval_s: float
    ticked_s: float
    can_read: bool = True

    def tick(self, view: PlannerView) -> None:
        """Record that the planner loop ticked (scraped metrics) now, and whether it could read its backend."""
        self.ticked_s = self.now_s()
        self.can_read = view.phase is not PlannerPhase.TARGET_UNAVAILABLE

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Do nothing; decisions do not affect whether the process is ready."""


class Readiness:
    """Tracks the planner loops of one process, to detect loops that hang or cannot read their backend."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without loops; ``now_s`` is a monotonic clock in real seconds."""
        self._now_s = now_s
        self._loops: dict[tuple[str, str], LoopTicks] = {}

    def begin(self, namespace: str, graph: str, *, interval_s: float) -> LoopTicks:
        """Start tracking the planner loop of a graph, and return the observer that the loop must notify of its ticks.

        Args:
            namespace: Namespace of the graph.
            graph: Name of the graph.
            interval_s: Real seconds between two ticks (metrics scrapes), > 0.
        """
        loop = LoopTicks(self._now_s, interval_s, self._now_s())
        self._loops[namespace, graph] = loop
        return loop

    def end(self, namespace: str, graph: str) -> None:
        """Stop tracking the planner loop of a graph, because it has ended. Does nothing if no such loop is tracked."""
        self._loops.pop((namespace, graph), None)

    def problem(self) -> str | None:
        """Return the reason for which the process is not ready: a planner loop hangs, or none can read its backend.

        Returns None if it is ready.
        """
        now_s = self._now_s()
        for (namespace, graph), loop in self._loops.items():
            silent_s = now_s - loop.ticked_s
            if silent_s > loop.interval_s + LATE_S:
                bound = f"at most {loop.interval_s + LATE_S:g} s are expected"
                return f"{namespace}/{graph}: no tick for {silent_s:.0f} s, {bound}; see its log, restart it"
        if self._loops and not any(loop.can_read for loop in self._loops.values()):
            namespace, graph = next(iter(self._loops))
            return f"{namespace}/{graph}: no backend can be read, so no decisions are made; see the log"
        return None
