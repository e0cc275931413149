"""Demand beyond a graph's limits, for its status: said when a limit begins to bind, and steady while the same one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.planner.decide.decision import Decision

STEADY_S: Final = 60.0
"""Simulated seconds for which what was said stands. Chosen: figures that change with every decision would be a write each."""

_STEP: Final = "limit"


@dataclass(slots=True)
class BeyondLimits:
    """What is said of the limits that bind.

    Attributes:
        words: Per role what binds and what to expect; empty while demand is within the limits.
    """

    words: str = ""
    _binding: tuple[object, ...] = field(default=(), repr=False)
    _since_s: float = field(default=0.0, repr=False)
    _seen_s: float = field(default=0.0, repr=False)

    def decided(self, decision: Decision) -> None:
        """Follow one decision."""
        found = [(role, step) for role in decision.roles for step in role.steps if step.name == _STEP]
        if not found:
            if decision.at_s - self._seen_s >= STEADY_S:
                self.words, self._binding = "", ()
            return
        self._seen_s = decision.at_s
        binding = tuple((role.role, step.inputs.get("binds")) for role, step in found)
        if binding == self._binding or (self.words and decision.at_s - self._since_s < STEADY_S):
            return
        self.words = "; ".join(f"{role.role.value}: {step.outcome}" for role, step in found)
        self._binding, self._since_s = binding, decision.at_s
