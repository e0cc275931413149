"""What a recorded decision expected to come and could have computed: for explanations, dashboards and reports.

Read from the steps of a decision, live or out of a ledger; a mode that forecasts nothing has no such step. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_STEP: Final = "demand"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prompt tokens that a role's workers were expected to be given, and what they could compute.

    Attributes:
        horizon_s: How far ahead of the decision, simulated seconds, >= 0.
        tokens_per_s: Uncached tokens/s expected to arrive then, >= 0.
        workers: Replicas by then, those that start included, >= 0.
        supply_tokens_per_s: What those compute, tokens/s; None before any throughput was seen.
    """

    horizon_s: float
    tokens_per_s: float
    workers: int
    supply_tokens_per_s: float | None

    def __str__(self) -> str:
        """Return it in words."""
        can = "unknown" if self.supply_tokens_per_s is None else f"{self.supply_tokens_per_s:,.0f}"
        return (
            f"{self.tokens_per_s:,.0f} uncached tokens/s in {self.horizon_s:.0f} s; {can} is what"
            f" {self.workers} can compute"
        )


def forecast_of(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> Forecast | None:
    """Return the forecast among a role's steps; None where the rule was not asked or knew nothing.

    Args:
        steps: Name and inputs of each.
    """
    for name, inputs in steps:
        horizon_s, ahead = inputs.get("horizon_s"), inputs.get("tokens_per_s_ahead")
        workers, speed = inputs.get("workers"), inputs.get("worker_tokens_per_s")
        if name == _STEP and horizon_s is not None and ahead is not None and workers is not None:
            return Forecast(horizon_s, max(0.0, ahead), workers, None if speed is None else workers * speed)
    return None
