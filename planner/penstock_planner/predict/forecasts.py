"""Forecasts from pulls: fitted at once where time is virtual, in a thread where it is not. One body for both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock_core.logs import get_logger
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand_forecast import DemandForecast
from penstock_planner.decide.observation import Pull
from penstock_planner.predict.fit import Fit
from penstock_planner.predict.history import BUCKET_S, History
from penstock_runtimes.extras import predictor_needs

log = get_logger(__name__)

REST = 3.0
"""Chosen: a thread rests three times as long as its last fit took, so that fits cost a quarter of a core at most, however
fast simulated time passes."""


class Forecasts(Protocol):
    """Makes forecasts of demand."""

    def forecast(self, pull: Pull) -> DemandForecast | None:
        """Take a pull; return the newest forecast that was not returned before, None without a new one."""
        ...


class DueFits:
    """Gathers demand and says when a fit is due: whenever a step of the history has become full."""

    __slots__ = ("_history", "_predictor")

    def __init__(self, config: DecideConfig) -> None:
        self._predictor = config.predictor
        self._history = History(max(BUCKET_S, config.metric_pulling_interval_s))

    def after(self, pull: Pull) -> Fit | None:
        """Return the fit that is due after a pull; None: none is."""
        history = self._history
        if not history.add(pull):
            return None
        return Fit(self._predictor, history.rates(), history.end_s, history.bucket_s)


class FitsAtOnce:
    """Implements `Forecasts` for virtual time: each fit takes none of it."""

    __slots__ = ("_due",)

    def __init__(self, due: DueFits) -> None:
        self._due = due

    def forecast(self, pull: Pull) -> DemandForecast | None:
        """Return the forecast of a step that has become full with this pull."""
        fit = self._due.after(pull)
        return None if fit is None else fit.run()


class FitsInThread:
    """Implements `Forecasts` beside an event loop: one fit at a time, of the newest history.

    A fit that hangs leaves the forecast to grow old, which the decision notices. The thread is a daemon: it keeps no
    process from ending.
    """

    __slots__ = ("_due", "_made", "_next", "_not_before_s", "_real_now_s", "_thread")

    def __init__(self, due: DueFits, *, real_now_s: Callable[[], float] = time.monotonic) -> None:
        self._due = due
        self._real_now_s = real_now_s
        self._made: SimpleQueue[tuple[DemandForecast, float]] = SimpleQueue()
        self._next: Fit | None = None
        self._thread: threading.Thread | None = None
        self._not_before_s = real_now_s()

    def forecast(self, pull: Pull) -> DemandForecast | None:
        """Return the forecast whose fit has ended since the last pull."""
        made = self._newest()
        self._next = self._due.after(pull) or self._next
        is_running = self._thread is not None and self._thread.is_alive()
        if self._next is not None and not is_running and self._real_now_s() >= self._not_before_s:
            self._thread = threading.Thread(
                target=self._run, args=(self._next,), name="forecast", daemon=True
            )
            self._next = None
            self._thread.start()
        return made

    def _newest(self) -> DemandForecast | None:
        try:
            made, took_s = self._made.get_nowait()
        except Empty:
            return None
        self._not_before_s = self._real_now_s() + REST * took_s
        return made

    def _run(self, fit: Fit) -> None:
        begun_s = self._real_now_s()
        made = fit.run()
        self._made.put((made, self._real_now_s() - begun_s))


def fits_at_once(config: DecideConfig) -> Forecasts | None:
    """Return what forecasts in virtual time; None where the mode or the predictor needs no fit."""
    return FitsAtOnce(DueFits(config)) if _is_fitted(config) else None


def fits_in_thread(config: DecideConfig) -> Forecasts | None:
    """Return what forecasts beside an event loop; None where the mode or the predictor needs no fit.

    A library that is not installed is said once in the log, and again by every decision.
    """
    if not _is_fitted(config):
        return None
    for need in predictor_needs("planner.sla.predictor", config.predictor):
        if need.missing:
            problem = need.problem()
            log.warning(problem.message, setting=problem.path)
    return FitsInThread(DueFits(config))


def with_forecast(pull: Pull, forecasts: Forecasts | None) -> Pull:
    """Return the pull with the forecast that has been made since the last one."""
    return pull if forecasts is None else replace(pull, forecast=forecasts.forecast(pull))


def _is_fitted(config: DecideConfig) -> bool:
    return config.mode is Mode.SLA and config.predictor.is_fitted
