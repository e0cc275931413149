"""Whether a planner's process is ready: its loops tick, and their backend can be read.

Metrics that are missing are not its fault: it holds the last decision, says so in the graph's status, and stays ready. A loop
that fails is reported there, too, and started again. What is left is a loop that hangs, which nothing else shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.decision import Decision
from penstock_planner.loop import TARGET_TIMEOUT_S
from penstock_planner.observers import View

LATE_S: Final = 5 * TARGET_TIMEOUT_S
"""Real seconds beyond its interval after which a loop hangs. Chosen: a tick reads metrics and makes up to four calls of its
backend, and each call is given up in time."""


@dataclass(slots=True)
class LoopTicks:
    """An `Observer` that records when one loop ticked last; times of the readiness's own clock."""

    now_s: Callable[[], float]
    interval_s: float
    ticked_s: float
    can_read: bool = True

    def tick(self, view: View) -> None:
        """Record a tick."""
        self.ticked_s = self.now_s()
        self.can_read = view.phase is not PlannerPhase.TARGET_UNAVAILABLE

    def decided(self, decision: Decision, view: View) -> None:
        """Leave it at the tick."""


class Readiness:
    """The loops of one process."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Prepare; ``now_s`` returns real seconds."""
        self._now_s = now_s
        self._loops: dict[tuple[str, str], LoopTicks] = {}

    def begin(self, namespace: str, graph: str, *, interval_s: float) -> LoopTicks:
        """Return what observes a loop that begins now.

        Args:
            namespace: Of the graph.
            graph: Its name.
            interval_s: Real seconds between two ticks, > 0.
        """
        loop = LoopTicks(self._now_s, interval_s, self._now_s())
        self._loops[namespace, graph] = loop
        return loop

    def end(self, namespace: str, graph: str) -> None:
        """Forget a loop that has ended."""
        self._loops.pop((namespace, graph), None)

    def problem(self) -> str | None:
        """Return why the process is not ready: a loop hangs, or no loop can read its backend; None: it is ready."""
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
