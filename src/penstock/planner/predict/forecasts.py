"""Forecasts from pulls: fitted at once where time is virtual, in a thread where it is not. One body for both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from penstock.core.logs import get_logger
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.demand_forecast import DemandForecast
from penstock.planner.decide.observation import Pull
from penstock.planner.predict.fit import Fit, prepare
from penstock.planner.predict.history import BUCKET_S, History
from penstock.runtimes.extras import predictor_needs

ArgumentT = TypeVar("ArgumentT")

log = get_logger(__name__)

REST = 3.0
"""Chosen: a thread rests three times as long as its last fit took, so that fits cost a quarter of a core at most, however
fast simulated time passes."""


class Forecasts(Protocol):
    """Makes forecasts of demand."""

    @property
    def span_s(self) -> float:
        """Return how far back pulls matter, simulated seconds."""
        ...

    def resume(self, pulls: Iterable[Pull]) -> None:
        """Take the pulls of the process before, oldest first, before any other."""
        ...

    def forecast(self, pull: Pull) -> DemandForecast | None:
        """Take a pull; return the newest forecast that was not returned before, None without a new one."""
        ...


class DueFits:
    """Gathers demand and says when a fit is due: whenever a step of the history has become full.

    Attributes:
        predictor: To fit.
    """

    __slots__ = ("_history", "predictor")

    def __init__(self, config: DecideConfig) -> None:
        self.predictor = config.predictor
        self._history = History(max(BUCKET_S, config.metric_pulling_interval_s))

    @property
    def span_s(self) -> float:
        """See `Forecasts`."""
        return self._history.span_s

    def resume(self, pulls: Iterable[Pull]) -> Fit | None:
        """Take the pulls of the process before; return the fit that was the last to be due, None without any."""
        was_due = False
        for pull in pulls:
            was_due = self._history.add(pull) or was_due
        return self._fit() if was_due else None

    def after(self, pull: Pull) -> Fit | None:
        """Return the fit that is due after a pull; None: none is."""
        return self._fit() if self._history.add(pull) else None

    def _fit(self) -> Fit:
        history = self._history
        return Fit(self.predictor, history.rates(), history.end_s, history.bucket_s)


class FitsAtOnce:
    """Implements `Forecasts` for virtual time: each fit takes none of it."""

    __slots__ = ("_due",)

    def __init__(self, due: DueFits) -> None:
        self._due = due

    @property
    def span_s(self) -> float:
        """See `Forecasts`."""
        return self._due.span_s

    def resume(self, pulls: Iterable[Pull]) -> None:
        """Take the pulls of the process before; what they made is in its ledger."""
        self._due.resume(pulls)

    def forecast(self, pull: Pull) -> DemandForecast | None:
        """Return the forecast of a step that has become full with this pull."""
        fit = self._due.after(pull)
        return None if fit is None else fit.run()


class FitsInThread:
    """Implements `Forecasts` beside an event loop: one fit at a time, of the newest history.

    A fit that hangs leaves the forecast to grow old, which the decision notices. The thread is a daemon: it keeps no
    process from ending. Its first work is to import the library, while the history is still too short to fit.
    """

    __slots__ = ("_due", "_made", "_next", "_not_before_s", "_real_now_s", "_thread")

    def __init__(self, due: DueFits, *, real_now_s: Callable[[], float] = time.monotonic) -> None:
        self._due = due
        self._real_now_s = real_now_s
        self._made: SimpleQueue[tuple[DemandForecast, float]] = SimpleQueue()
        self._next: Fit | None = None
        self._not_before_s = real_now_s()
        self._thread = self._started(prepare, due.predictor)

    @property
    def span_s(self) -> float:
        """See `Forecasts`."""
        return self._due.span_s

    def resume(self, pulls: Iterable[Pull]) -> None:
        """Take the pulls of the process before, whose last fit may have died with it: it is made again."""
        self._next = self._due.resume(pulls)

    def forecast(self, pull: Pull) -> DemandForecast | None:
        """Return the forecast whose fit has ended since the last pull."""
        made = self._newest()
        self._next = self._due.after(pull) or self._next
        is_rested = not self._thread.is_alive() and self._real_now_s() >= self._not_before_s
        if self._next is not None and is_rested:
            self._thread = self._started(self._run, self._next)
            self._next = None
        return made

    @staticmethod
    def _started(work: Callable[[ArgumentT], None], argument: ArgumentT) -> threading.Thread:
        thread = threading.Thread(target=work, args=(argument,), name="forecast", daemon=True)
        thread.start()
        return thread

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
