"""What a predictor outside of the decision expects to arrive; it comes with a pull, so that replay needs no predictor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.api import Predictor


@dataclass(frozen=True, slots=True)
class DemandForecast:
    """One fit's forecast, or why there is none.

    Attributes:
        made_s: End of what it was fitted to, simulated seconds.
        predictor: Which was fitted.
        points: (seconds after ``made_s``, requests/s), leads rising from above 0; empty where the fit failed.
        why: Why it failed; empty where it did not.
    """

    made_s: float
    predictor: Predictor
    points: tuple[tuple[float, float], ...] = ()
    why: str = ""

    def at(self, lead_s: float) -> float:
        """Return the requests/s so long after ``made_s``, on lines between the points and held beyond them.

        Example: points (10, 2.0) and (20, 3.0): 2.0 at 5, 2.5 at 15, 3.0 at 60.
        """
        first, last = self.points[0], self.points[-1]
        if lead_s <= first[0]:
            return first[1]
        for (left_s, left), (right_s, right) in pairwise(self.points):
            if lead_s <= right_s:
                return left + (right - left) * (lead_s - left_s) / (right_s - left_s)
        return last[1]


def forecast_from(plain: Mapping[str, Any]) -> DemandForecast:
    """Return the forecast whose fields are given, as a ledger has them.

    Raises:
        KeyError, TypeError, ValueError: the data is not a forecast.
    """
    points = tuple((float(lead_s), float(rate)) for lead_s, rate in plain.get("points", ()))
    return DemandForecast(plain["made_s"], Predictor(plain["predictor"]), points, plain.get("why", ""))
