"""What the planner is doing, as its metrics and status show it."""

from __future__ import annotations

from enum import StrEnum


class PlannerPhase(StrEnum):
    """What the planner is doing."""

    OBSERVING = "observing"
    ADJUSTING = "adjusting"
    TARGET_UNAVAILABLE = "target_unavailable"
