"""The demand that a recorded decision expected, and its profile values: for explanations, dashboards and reports.

Read from the steps of a decision, live or out of a ledger; a mode that forecasts nothing, or has no profile, has no such
step. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock_planner.decide.decision import count_of

_DEMAND: Final = "demand"
_PROFILE: Final = "profile"
_NEEDED: Final = "needed"

_EDGES: Final = (
    ("uncached_isl", "profile_isl_least", "profile_isl_most"),
    ("context", "profile_context_least", "profile_context_most"),
)


@dataclass(frozen=True, slots=True)
class DemandForecast:
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
        workers = count_of(self.workers, "worker")
        able = (
            f"what {workers} can compute is unknown"
            if self.supply_tokens_per_s is None
            else f"{workers} can compute {self.supply_tokens_per_s:,.0f}"
        )
        return f"{self.tokens_per_s:,.0f} uncached tokens/s in {self.horizon_s:.0f} s; {able}"


def forecast_of(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> DemandForecast | None:
    """Return the forecast among a role's steps; None where the rule did not run or lacked data."""
    for name, inputs in steps:
        horizon_s, ahead = inputs.get("horizon_s"), inputs.get("tokens_per_s_ahead")
        workers, speed = inputs.get("workers"), inputs.get("worker_tokens_per_s")
        if name == _DEMAND and horizon_s is not None and ahead is not None and workers is not None:
            return DemandForecast(
                horizon_s, max(0.0, ahead), workers, None if speed is None else workers * speed
            )
    return None


@dataclass(frozen=True, slots=True)
class ProfileReading:
    """One role's part of a decision.

    Attributes:
        factors: Seconds observed over seconds by the profile, > 0, by name: ``prefill``, ``ttft``, ``itl``.
        is_outside: Prompts or contexts lay outside the profile, so that its edge held.
        needed: Replicas that profile and targets ask for, >= 1; None while too little was seen to look it up.
        had: Replicas there were, those that start included; None likewise.
        worker_tokens_per_s: Prompt tokens that one worker computes by the corrected profile, > 0; None likewise.
    """

    factors: Mapping[str, float]
    is_outside: bool
    needed: int | None
    had: int | None
    worker_tokens_per_s: float | None


def profile_reading(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> ProfileReading | None:
    """Return the profile values in a role's steps; None where none did."""
    inputs = dict(steps)
    profile, needed = inputs.get(_PROFILE), inputs.get(_NEEDED, {})
    if profile is None:
        return None
    return ProfileReading(
        factors={name: profile[f"{name}_factor"] for name in ("prefill", "ttft", "itl")},
        is_outside=any(_is_outside(profile, *keys) for keys in _EDGES),
        needed=needed.get("replicas"),
        had=needed.get("replicas_now"),
        worker_tokens_per_s=needed.get("worker_tokens_per_s"),
    )


def _is_outside(inputs: Mapping[str, Any], key: str, least: str, most: str) -> bool:
    value, low, high = (inputs.get(each) for each in (key, least, most))
    return value is not None and low is not None and high is not None and not low <= value <= high
