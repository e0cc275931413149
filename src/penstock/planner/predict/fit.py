"""One fit: a history in, a forecast out, or why there is none. Never raises."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from dataclasses import dataclass
from typing import Final

from penstock.api import Predictor
from penstock.planner.decide.demand_forecast import DemandForecast
from penstock.planner.predict.models import MODELS, load
from penstock.runtimes.extras import predictor_extra

POINTS_LEAST = 12
"""Chosen: two minutes; fewer tell no trend from noise."""

STEPS_AHEAD: Final = (1, 2, 3, 4, 6, 9, 12, 18, 24, 30, 45, 60)
"""Chosen: forecasts bend ever less, so points may lie ever further apart; ten minutes cover a start-up, and back."""

DIGITS = 4
"""Decimals of a rate that are kept: the ledger has every forecast."""

_ONE_AT_A_TIME = threading.Lock()
"""Silencing warnings is the process's affair, not a thread's; it also leaves the other cores to the rest."""


def prepare(predictor: Predictor) -> None:
    """Import a predictor's library, which takes seconds; one that cannot be imported is said by each fit."""
    with _ONE_AT_A_TIME, warnings.catch_warnings(record=True), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        load(predictor)


@dataclass(frozen=True, slots=True)
class Fit:
    """What to fit.

    Attributes:
        predictor: One of `MODELS`.
        rates: Requests/s of equal steps, oldest first, >= 0.
        end_s: End of the newest, simulated seconds.
        step_s: Length of each.
    """

    predictor: Predictor
    rates: tuple[float, ...]
    end_s: float
    step_s: float

    def run(self) -> DemandForecast:
        """Return the forecast, or one without points and the reason."""
        if len(self.rates) < POINTS_LEAST:
            return self._failed(f"{len(self.rates)} of {POINTS_LEAST} steps of {self.step_s:g} s seen")
        try:
            # Recorded, too: statsmodels sets filters of its own when it is imported.
            with _ONE_AT_A_TIME, warnings.catch_warnings(record=True):
                warnings.simplefilter("ignore")
                values = MODELS[self.predictor](self.rates, STEPS_AHEAD[-1], self.step_s)
        except ImportError as exc:
            extra, _ = predictor_extra(self.predictor)
            return self._failed(f"{exc.name or exc} is not installed; pip install 'penstock[{extra}]'")
        except Exception as exc:  # noqa: BLE001 - a library's fit fails in many ways, all of them leave the trend
            return self._failed(f"the fit failed: {type(exc).__name__}: {exc}")
        if len(values) < STEPS_AHEAD[-1] or not all(map(math.isfinite, values)):
            return self._failed("the fit gave values that are no numbers")
        # The mean of a step stands in its middle. A falling line may cross zero; demand does not.
        points = tuple(
            ((step - 0.5) * self.step_s, round(max(0.0, values[step - 1]), DIGITS)) for step in STEPS_AHEAD
        )
        return DemandForecast(self.end_s, self.predictor, points)

    def _failed(self, why: str) -> DemandForecast:
        return DemandForecast(self.end_s, self.predictor, why=why)
