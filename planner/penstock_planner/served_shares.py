"""The share of requests that was served in time alongside the share that the planner's model predicts for the same fleet.

Read from the steps of decisions, live, simulated or out of a ledger; for statuses, dashboards, reports and the scoreboard. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock_planner.decide.decision import Decision

WINDOW_S: Final = 600.0
"""Chosen: ten minutes, over which served and predicted share are compared."""

AGREE_WITHIN: Final = 0.01
"""Chosen: one point."""

LEAST_REQUESTS: Final = 100.0
"""Minimum requests in a window: with fewer a single late one moves the share by more than the point allowed, which says nothing of a model."""

_HINDSIGHT: Final = "hindsight"


@dataclass(frozen=True, slots=True)
class ServedShares:
    """What one decision knew.

    Attributes:
        served, predicted: Shares of about the last half hour's requests.
        requests: First tokens and requests turned away since the decision before.
        late: Those of them that were late.
        arrivals: Requests that came since then.
        predicted_late: Those of them that the model has late.
    """

    served: float
    predicted: float
    requests: float = 0.0
    late: float = 0.0
    arrivals: float = 0.0
    predicted_late: float = 0.0


def served_of(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> ServedShares | None:
    """Return both shares by a role's steps; None where they are not known, or the role is not the one that requests reach first."""
    for name, inputs in steps:
        served, predicted = inputs.get("served_in_time"), inputs.get("predicted_in_time")
        if name == _HINDSIGHT and served is not None and predicted is not None:
            counts = (inputs.get(key, 0.0) for key in ("requests", "late", "arrivals", "predicted_late"))
            return ServedShares(served, predicted, *counts)
    return None


def shares_of(decision: Decision) -> ServedShares | None:
    """Return both shares by a decision's steps; None where no role's are known."""
    found = (served_of((step.name, step.inputs) for step in role.steps) for role in decision.roles)
    return next((shares for shares in found if shares is not None), None)


@dataclass(frozen=True, slots=True)
class ShareWindow:
    """Ten minutes.

    Attributes:
        at_s: Their begin.
        requests: First tokens and requests turned away.
        served, predicted: Shares in time, in [0, 1].
    """

    at_s: float
    requests: float
    served: float
    predicted: float

    @property
    def agrees(self) -> bool:
        """Whether both shares differ by one point at most."""
        return abs(self.served - self.predicted) <= AGREE_WITHIN + 1e-9


def share_windows(found: Iterable[tuple[float, ServedShares]]) -> tuple[ShareWindow, ...]:
    """Return the windows of `WINDOW_S` from time 0 on that hold `LEAST_REQUESTS` at least.

    Args:
        found: (time in seconds, what the decision then knew).
    """
    sums: dict[int, list[float]] = {}
    for at_s, each in found:
        total = sums.setdefault(int(at_s // WINDOW_S), [0.0] * 4)
        for place, count in enumerate((each.requests, each.late, each.arrivals, each.predicted_late)):
            total[place] += count
    return tuple(
        ShareWindow(place * WINDOW_S, requests, 1.0 - late / requests, max(0.0, 1.0 - wrong / arrivals))
        for place, (requests, late, arrivals, wrong) in sorted(sums.items())
        if min(requests, arrivals) >= LEAST_REQUESTS
    )


def agreement(windows: Iterable[ShareWindow]) -> float | None:
    """Return the share of windows in which predicted and served share agree; None without any."""
    agreed = [each.agrees for each in windows]
    return sum(agreed) / len(agreed) if agreed else None
