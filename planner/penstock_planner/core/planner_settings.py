"""Settings of one planner. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.state import Learned


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Settings of one planner.

    Some settings are used by the core of the planner, which makes the decisions; others by its driver, which is the
    real-time loop or a simulator and carries them out. Simulated seconds are the seconds of the driver's clock: real ones
    multiplied by the speed of the graph (1 with real engines), or those of a simulation.

    Attributes:
        config: Configuration of the decisions.
        adjustment_deadline_s: Maximum simulated seconds to wait until started replicas are ready and draining ones are
            gone. After that the change is rolled back or not waited for any longer.
        timeline: Name of that clock. Times of different clocks cannot be compared.
        memory: Learned state of another graph's planner, used if the ledger (the decision log) contains none.
        max_age_s: Age up to which a metric counts as fresh, in simulated seconds.
        about: Facts about the planner by name, which are written to the ledger's header for its readers.
        first_sequence: Number of decisions known to have been made even if the ledger was lost. The ids of new
            decisions continue after it.
    """

    config: DecideConfig
    adjustment_deadline_s: float
    timeline: str
    memory: Learned = field(default_factory=dict)
    max_age_s: float = 10.0
    about: Mapping[str, Any] = field(default_factory=dict)
    first_sequence: int = 0
