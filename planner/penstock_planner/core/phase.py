"""Activity of the planner, as shown in its metrics and its status."""

from __future__ import annotations

from enum import StrEnum


class PlannerPhase(StrEnum):
    """Activity of the planner.

    Attributes:
        OBSERVING: The planner scrapes metrics and makes decisions.
        ADJUSTING: The planner waits for replicas to start or drain, or carries out changes.
        TARGET_UNAVAILABLE: The backend cannot be read, so no decisions are made.
    """

    OBSERVING = "observing"
    ADJUSTING = "adjusting"
    TARGET_UNAVAILABLE = "target_unavailable"
