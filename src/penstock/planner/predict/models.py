"""The libraries' models: mean values of equal steps in, as many ahead as asked for out.

Each is bounded in its iterations and raises where it found no optimum. Libraries are imported when they are first needed:
statsmodels takes seconds, and may not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from penstock.api import Predictor

ITERATIONS = 100
"""Chosen: what converges at all has by then, in less than half a second."""

ARIMA_ORDER = (1, 1, 1)
"""Chosen: the smallest that has every part; with two hours of data more could be told apart, with twenty minutes not."""

Model = Callable[[Sequence[float], int, float], Sequence[float]]
"""Takes the values, how many more, and the seconds of a step."""


class NoFitError(Exception):
    """A model found no optimum."""


def _holt_winters(values: Sequence[float], steps: int, step_s: float) -> Sequence[float]:
    """Return Holt-Winters' forecast with a damped trend and no season: none is known."""
    del step_s
    from statsmodels.tsa.holtwinters import ExponentialSmoothing  # noqa: PLC0415 - see above

    model = ExponentialSmoothing(
        values, trend="add", damped_trend=True, initialization_method="estimated"
    ).fit(minimize_kwargs={"options": {"maxiter": ITERATIONS}})
    _refuse(is_converged=bool(model.mle_retvals.success))
    return _floats(model.forecast(steps))


def _arima(values: Sequence[float], steps: int, step_s: float) -> Sequence[float]:
    """Return the forecast of an ARIMA of `ARIMA_ORDER`."""
    del step_s
    from statsmodels.tsa.arima.model import ARIMA  # noqa: PLC0415 - see above

    model = ARIMA(values, order=ARIMA_ORDER).fit(method_kwargs={"maxiter": ITERATIONS})
    _refuse(is_converged=bool(model.mle_retvals["converged"]))
    return _floats(model.forecast(steps))


def _kalman(values: Sequence[float], steps: int, step_s: float) -> Sequence[float]:
    """Return the Kalman filter's forecast of a level and a slope that both wander."""
    del step_s
    from statsmodels.tsa.statespace.structural import UnobservedComponents  # noqa: PLC0415 - see above

    model = UnobservedComponents(values, level="local linear trend").fit(disp=False, maxiter=ITERATIONS)
    _refuse(is_converged=bool(model.mle_retvals["converged"]))
    return _floats(model.forecast(steps))


def _prophet(values: Sequence[float], steps: int, step_s: float) -> Sequence[float]:
    """Return Prophet's forecast without its calendar's seasons, which minutes do not show."""
    _quieten()
    import pandas as pd  # noqa: PLC0415 - see above
    from prophet import Prophet  # noqa: PLC0415 - see above

    times = pd.to_datetime([place * step_s for place in range(len(values) + steps)], unit="s")
    model = Prophet(
        daily_seasonality=False, weekly_seasonality=False, yearly_seasonality=False, uncertainty_samples=0
    )
    model.fit(pd.DataFrame({"ds": times[: len(values)], "y": values}), iter=10 * ITERATIONS)
    return _floats(model.predict(pd.DataFrame({"ds": times[len(values) :]}))["yhat"])


def _quieten() -> None:
    """Silence Prophet: it says at its import that plotly is missing, and of each fit that it begins and ends."""
    for name in ("prophet.plot", "cmdstanpy"):
        logging.getLogger(name).disabled = True


def _refuse(*, is_converged: bool) -> None:
    if not is_converged:
        raise NoFitError(f"no optimum in {ITERATIONS} iterations")


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]


MODELS: Mapping[Predictor, Model] = {
    Predictor.HOLT_WINTERS: _holt_winters,
    Predictor.ARIMA: _arima,
    Predictor.KALMAN: _kalman,
    Predictor.PROPHET: _prophet,
}
"""Every predictor that is fitted."""

_MODULES: Mapping[Predictor, str] = {
    Predictor.HOLT_WINTERS: "statsmodels.tsa.holtwinters",
    Predictor.ARIMA: "statsmodels.tsa.arima.model",
    Predictor.KALMAN: "statsmodels.tsa.statespace.structural",
    Predictor.PROPHET: "prophet",
}


def load(predictor: Predictor) -> None:
    """Import what a predictor's fits need.

    Raises:
        ImportError: it is not installed, or cannot be imported.
    """
    _quieten()
    import_module(_MODULES[predictor])
