"""What one planner is set to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Memory


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What one planner is set to; what the core does not read is for its driver.

    Attributes:
        adjustment_deadline_s: Longest wait for an adjustment before it is rolled back or ignored; simulated seconds.
        timeline: Names the clock: times of another timeline cannot be compared.
        rolls_back: Take back scale-ups that never become ready.
        memory: Of another graph's planner, to start from where the ledger has none.
        max_age_s: Oldest fresh metric; simulated seconds.
        about: For the ledger's header.
        first_sequence: Decisions known to have been made, even if the ledger is lost; ids continue after them.
    """

    config: DecideConfig
    adjustment_deadline_s: float
    timeline: str
    rolls_back: bool = True
    memory: Memory = field(default_factory=dict)
    max_age_s: float = 10.0
    about: Mapping[str, str | float | None] = field(default_factory=dict)
    first_sequence: int = 0
