"""Fraction of requests served on time, as observed and as the planner's latency model predicts it for the same workers.

Extracted from the steps of decisions (live, simulated or from a ledger) for statuses, dashboards, reports and the scoreboard. Pure.

On time means within the TTFT target. The latency model simulates which requests are late with a given number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock_planner.decide.decision import Decision

WINDOW_S: Final = 600.0
"""Simulated seconds over which the observed and the predicted fraction are compared: ten minutes. Chosen."""

AGREE_WITHIN: Final = 0.01
"""Maximum difference at which the two fractions agree: one percentage point. Chosen."""

LEAST_REQUESTS: Final = 100.0
"""Minimum number of requests in a window of ten minutes: 100.

With fewer, a single late request moves the fraction by more than a percentage point (`AGREE_WITHIN`)."""

_HINDSIGHT: Final = "hindsight"


@dataclass(frozen=True, slots=True)
class ServedShares:
    """Observed and predicted fraction of requests on time (within the TTFT target) in one decision.

    Attributes:
        served: Observed fraction, 0-1, of about the last half hour's requests that were on time.
        predicted: Fraction that the planner's latency model predicts for the same requests and workers.
        requests: Number of first tokens and rejected requests since the previous decision.
        late: Number of those requests that were late (rejected ones included).
        arrivals: Number of requests that arrived since the previous decision.
        predicted_late: Number of those arrivals that the latency model predicts to be late.
    """

    served: float
    predicted: float
    requests: float = 0.0
    late: float = 0.0
    arrivals: float = 0.0
    predicted_late: float = 0.0


def served_of(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> ServedShares | None:
    """Return the observed and predicted fractions of requests on time (within the TTFT target) in one role's part of a decision.

    Returns None if they are unknown, or if the role is not the one that requests reach first.

    Args:
        steps: Rules that were applied to the role, as pairs of the rule's name and its input values.
    """
    for name, inputs in steps:
        served, predicted = inputs.get("served_in_time"), inputs.get("predicted_in_time")
        if name == _HINDSIGHT and served is not None and predicted is not None:
            counts = (inputs.get(key, 0.0) for key in ("requests", "late", "arrivals", "predicted_late"))
            return ServedShares(served, predicted, *counts)
    return None


def shares_of(decision: Decision) -> ServedShares | None:
    """Return the observed and predicted fractions of requests on time (within the TTFT target) that a decision records.

    Returns None if it records none.
    """
    found = (served_of((step.name, step.inputs) for step in role.steps) for role in decision.roles)
    return next((shares for shares in found if shares is not None), None)


@dataclass(frozen=True, slots=True)
class ShareWindow:
    """Observed and predicted fraction of requests on time in one window of ten minutes (`WINDOW_S`).

    Attributes:
        at_s: Start of the window, in simulated seconds, counted from the same start as the times of the decisions.
        requests: Number of first tokens and rejected requests.
        served, predicted: Observed and predicted fraction on time, 0-1.
    """

    at_s: float
    requests: float
    served: float
    predicted: float

    @property
    def agrees(self) -> bool:
        """Whether the observed and the predicted fraction of requests on time are about equal.

        They differ by at most one percentage point (`AGREE_WITHIN`).
        """
        return abs(self.served - self.predicted) <= AGREE_WITHIN + 1e-9


def share_windows(found: Iterable[tuple[float, ServedShares]]) -> tuple[ShareWindow, ...]:
    """Return the observed and predicted fractions of requests on time, by windows of ten minutes from time 0 on.

    Windows with fewer than 100 requests (`LEAST_REQUESTS`) are left out.

    Args:
        found: Pairs of a decision's time in simulated seconds and the decision's fractions.
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
    """Return the fraction of windows of ten minutes in which the planner predicted well how many requests are on time.

    That is, the observed and predicted fractions of requests on time (within the TTFT target) differ by at most one
    percentage point. Returns None if there are no windows.
    """
    agreed = [each.agrees for each in windows]
    return sum(agreed) / len(agreed) if agreed else None
