"""What a recorded decision of mode sla took from its profile: for dashboards and reports.

Read from the steps of a decision, live or out of a ledger; a decision of another mode has no such steps. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_PROFILE: Final = "profile"
_NEEDED: Final = "needed"

_EDGES: Final = (
    ("uncached_isl", "profile_isl_least", "profile_isl_most"),
    ("context", "profile_context_least", "profile_context_most"),
)


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
    """Return what a role's steps say of the profile; None where none was asked.

    Args:
        steps: Name and inputs of each.
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
