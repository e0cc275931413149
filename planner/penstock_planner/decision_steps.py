"""Extracts the forecast demand and the profile values from a recorded decision, for explanations, dashboards and reports.

They are in the steps of a decision, live or from a ledger. A mode without a forecast, or without a profile, has no such step. Pure.
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
    """Forecast of the prompt tokens that arrive for a role, and the throughput of its workers.

    Attributes:
        horizon_s: Simulated seconds from the decision until the forecast time, >= 0.
        tokens_per_s: Forecast rate of uncached prompt tokens, tokens/s, >= 0.
        workers: Number of replicas that are ready at that time, starting ones included, >= 0.
        supply_tokens_per_s: Throughput of those replicas, tokens/s; None before any throughput was observed.
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
    """Return the demand forecast in one role's part of a decision; None if the rule that forecasts was not applied or lacked data.

    Args:
        steps: Rules that were applied to the role, as pairs of the rule's name and its input values.
    """
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
    """Values about the performance profile in one role's part of a decision.

    Attributes:
        factors: Observed time divided by the profile's time, > 0, by name: ``prefill``, ``ttft`` and ``itl``.
        is_outside: Whether prompts or contexts were outside the profile's range, so that values at its edge were used.
        needed: Number of replicas that the latency targets need according to the profile, >= 1; None if too little was observed.
        had: Number of replicas at the time of the decision, starting ones included; None if too little was observed.
        worker_tokens_per_s: Prompt tokens/s of one worker, > 0: the profile's throughput divided by
            ``factors['prefill']``. None if too little was observed.
    """

    factors: Mapping[str, float]
    is_outside: bool
    needed: int | None
    had: int | None
    worker_tokens_per_s: float | None


def profile_reading(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> ProfileReading | None:
    """Return the values about the performance profile in one role's part of a decision; None if no rule used a profile.

    Args:
        steps: Rules that were applied to the role, as pairs of the rule's name and its input values.
    """
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
