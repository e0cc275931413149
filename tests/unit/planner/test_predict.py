"""Predictors that a library fits: what goes in, what comes out, and what becomes of every failure. Demand is synthetic."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from penstock.api import Predictor
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.demand_forecast import DemandForecast
from penstock.planner.decide.observation import NO_WORKERS, Demand, Pull
from penstock.planner.predict import models
from penstock.planner.predict.fit import POINTS_LEAST, STEPS_AHEAD, Fit
from penstock.planner.predict.forecasts import fits_at_once, fits_in_thread, with_forecast
from penstock.planner.predict.history import BUCKET_S, GAP_MOST, POINTS_MOST, History

OF_STATSMODELS = [Predictor.HOLT_WINTERS, Predictor.ARIMA, Predictor.KALMAN]
CONFIG = DecideConfig(mode=Mode.SLA, predictor=Predictor.KALMAN)
WAIT_S = 30.0
"""Real seconds that a thread may take here."""


def _pull(at_s, arrivals=2.0, period_s=1.0):
    demand = None if arrivals is None else Demand(period_s, arrivals=arrivals)
    return Pull(float(at_s), {}, NO_WORKERS, None, demand)


def _history(rate, *, seconds):
    """Return the history of ``rate(at_s)`` requests/s, None: unknown, over so many seconds of pulls."""
    history = History(BUCKET_S)
    for at_s in range(1, seconds + 1):
        history.add(_pull(at_s, rate(at_s)))
    return history


def _fit(predictor, rates):
    return Fit(predictor, tuple(rates), 10.0 * len(rates), 10.0)


def _noisy(rate, steps):
    """Return synthetic steps of ten seconds: ``rate(at_s)`` requests/s, off by up to a tenth."""
    random = Random(0)
    return [rate(10.0 * step) * random.uniform(0.9, 1.1) for step in range(steps)]


# -- history ----------------------------------------------------------------------------------------------


def test_arrivals_are_gathered_into_steps_of_time():
    """Two full steps of ten seconds; the third is under way."""
    history = _history(lambda at_s: 2.0 if at_s <= 10 else 5.0, seconds=25)
    assert history.rates() == pytest.approx((2.0, 5.0))
    assert history.end_s == 20.0


def test_arrivals_count_in_the_time_that_they_were_counted_in():
    """A difference of counters over fifteen seconds lies in two steps."""
    history = History(BUCKET_S)
    history.add(_pull(5, 10.0, period_s=5.0))
    history.add(_pull(20, 60.0, period_s=15.0))
    assert history.rates() == pytest.approx((3.0, 4.0))


def test_a_short_gap_is_bridged_and_is_not_zero():
    """Unknown is not nothing: a step without demand lies between its neighbours."""
    history = _history(lambda at_s: None if 10 < at_s <= 20 else (2.0 if at_s <= 10 else 4.0), seconds=30)
    assert history.rates() == pytest.approx((2.0, 3.0, 4.0))


def test_what_lies_before_a_long_gap_counts_no_more():
    """More unknown steps in a row than may be bridged, then two known ones."""
    gap_s = 10 * (GAP_MOST + 1)
    history = _history(lambda at_s: None if 20 < at_s <= 20 + gap_s else 2.0, seconds=40 + gap_s)
    assert history.rates() == pytest.approx((2.0, 2.0))


def test_without_newest_demand_there_is_nothing_to_fit():
    """The newest full step is unknown: a forecast from before it would be stale."""
    assert _history(lambda at_s: None if at_s > 30 else 2.0, seconds=50).rates() == ()


def test_the_history_is_bounded():
    """Hours of pulls, and a gap of days: neither grows it."""
    history = _history(lambda _: 2.0, seconds=(POINTS_MOST + 20) * 10)
    assert len(history.rates()) == POINTS_MOST
    history.add(_pull(1_000_000))
    history.add(_pull(1_000_011, 22.0, period_s=11.0))
    assert history.rates() == pytest.approx((2.0,))


# -- fits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictor", OF_STATSMODELS)
def test_a_synthetic_step_is_expected_to_stay(predictor):
    """Half of the time 2 requests/s, then 6: half a minute on it is 6."""
    made = _fit(predictor, _noisy(lambda at_s: 2.0 if at_s < 300 else 6.0, 60)).run()
    assert made.why == ""
    assert made.at(30.0) == pytest.approx(6.0, rel=0.2)
    assert [lead_s for lead_s, _ in made.points] == [(step - 0.5) * 10.0 for step in STEPS_AHEAD]


@pytest.mark.parametrize("predictor", [Predictor.HOLT_WINTERS, Predictor.KALMAN])
def test_a_synthetic_rising_sine_is_expected_to_rise(predictor):
    """A quarter of a period before its peak, those that know a slope go on along it."""
    made = _fit(predictor, _noisy(lambda at_s: 4 + 3 * math.sin(2 * math.pi * at_s / 1200), 121)).run()
    assert made.why == ""
    assert made.at(55.0) > made.at(5.0) > 3.5


def test_a_falling_line_is_not_followed_below_zero():
    """Demand of a slope that would cross zero within the points."""
    made = _fit(Predictor.KALMAN, _noisy(lambda at_s: 6.0 - at_s / 100, 55)).run()
    assert made.why == ""
    assert min(rate for _, rate in made.points) == 0.0


@pytest.mark.parametrize("predictor", [each for each in Predictor if each.is_fitted])
def test_a_library_that_is_not_installed_is_named_with_the_command_that_installs_it(predictor, monkeypatch):
    """No crash: a forecast without points, and pip's words."""
    for name in list(sys.modules):
        if name.split(".")[0] in {"statsmodels", "prophet"}:
            monkeypatch.delitem(sys.modules, name)
    for name in ("statsmodels", "prophet"):
        monkeypatch.setitem(sys.modules, name, None)
    made = _fit(predictor, [2.0] * 30).run()
    extra = "prophet" if predictor is Predictor.PROPHET else "forecast"
    assert made.points == ()
    assert f"is not installed; pip install 'penstock[{extra}]'" in made.why


def _raises(values, steps, step_s):
    raise ValueError("matrix is singular")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (_raises, "the fit failed: ValueError: matrix is singular"),
        (lambda _values, steps, _step_s: [math.nan] * steps, "no numbers"),
        (lambda _values, steps, _step_s: [math.inf] * steps, "no numbers"),
        (lambda _values, steps, _step_s: [1.0] * (steps - 1), "no numbers"),
    ],
)
def test_a_fit_that_fails_says_so(model, why, monkeypatch):
    """Whatever a library raises or returns, what comes out is a forecast without points."""
    monkeypatch.setitem(models.MODELS, Predictor.ARIMA, model)
    made = _fit(Predictor.ARIMA, [2.0] * 30).run()
    assert made.points == ()
    assert why in made.why


@pytest.mark.parametrize("predictor", OF_STATSMODELS)
def test_a_fit_without_an_optimum_is_refused(predictor):
    """Nothing but zeros, or nothing but NaN: no forecast is made of what did not converge, and nothing is raised."""
    for values in ([0.0] * 30, [math.nan] * 30):
        made = _fit(predictor, values).run()
        assert made.why or all(rate == 0.0 for _, rate in made.points)


def test_too_short_a_history_is_no_fit():
    """Two minutes at least."""
    assert "11 of 12 steps" in _fit(Predictor.KALMAN, [2.0] * (POINTS_LEAST - 1)).run().why


@pytest.mark.parametrize("last", range(1, 40, 3))
def test_a_history_gathered_again_from_its_last_pulls_is_the_same(last):
    """Pulls that keep to no grid, unknown ones among them, over an hour: whatever the newest one, to the last bit."""
    random = Random(last)
    at_s, pulls = 1000.0, []
    for _ in range(3600 + last):
        period_s = random.uniform(0.7, 1.4)
        at_s += period_s
        pulls.append(_pull(at_s, None if random.random() < 0.05 else random.uniform(0, 5), period_s))
    first, again = History(BUCKET_S), History(BUCKET_S)
    for pull in pulls:
        first.add(pull)
    for pull in (each for each in pulls if each.at_s >= at_s - again.span_s):
        again.add(pull)
    assert (again.rates(), again.end_s) == (first.rates(), first.end_s)
    assert len(first.rates()) > 100


# -- when it is fitted ------------------------------------------------------------------------------------


def _flat(values, steps, _step_s):
    return [values[-1]] * steps


@pytest.mark.parametrize("make", [fits_at_once, fits_in_thread])
def test_nothing_is_fitted_where_nothing_reads_it(make):
    """Another mode, and predictors that are part of the decision."""
    assert make(replace(CONFIG, mode=Mode.ADAPTIVE)) is None
    assert make(replace(CONFIG, predictor=Predictor.TREND)) is None
    assert make(replace(CONFIG, predictor=Predictor.CONSTANT)) is None


def test_in_virtual_time_a_forecast_comes_with_the_pull_that_completes_a_step(monkeypatch):
    """One per ten seconds."""
    monkeypatch.setitem(models.MODELS, Predictor.KALMAN, _flat)
    forecasts = fits_at_once(CONFIG)
    made = [with_forecast(_pull(at_s), forecasts).forecast for at_s in range(1, 161)]
    at = [place + 1 for place, each in enumerate(made) if each is not None]
    assert at == list(range(10, 161, 10))
    assert "steps of 10 s seen" in made[99].why
    assert (made[159].made_s, made[159].at(30.0)) == (160.0, 2.0)


def test_a_thread_fits_the_newest_history_while_pulls_go_on(monkeypatch):
    """A fit that takes long holds no pull up; one at a time, and the next is of the newest history."""
    running, go_on = [], threading.Event()

    def slow(values, steps, step_s):
        running.append(len(values))
        assert go_on.wait(WAIT_S)
        return _flat(values, steps, step_s)

    monkeypatch.setitem(models.MODELS, Predictor.KALMAN, slow)
    # Real time stands still, so that a fit takes none of it and nothing has to rest.
    monkeypatch.setattr("penstock.planner.predict.forecasts.time.monotonic", lambda: 0.0)
    forecasts = fits_in_thread(CONFIG)
    until_s = time.perf_counter() + WAIT_S
    at_s = 0
    while not running and time.perf_counter() < until_s:
        at_s += 1
        forecasts.forecast(_pull(at_s))
    for _ in range(50):
        at_s += 1
        assert forecasts.forecast(_pull(at_s)) is None
    assert len(running) == 1
    go_on.set()
    made = None
    while (made is None or made.made_s < at_s - 20) and time.perf_counter() < until_s:
        made = forecasts.forecast(_pull(at_s := at_s + 1)) or made
        time.sleep(0.001)
    assert made is not None
    assert made.points


def test_a_thread_begins_with_the_fit_that_the_process_before_may_not_have_finished(monkeypatch):
    """Its recorded pulls suffice: a forecast comes at once, and not after two minutes."""
    monkeypatch.setitem(models.MODELS, Predictor.KALMAN, _flat)
    monkeypatch.setattr("penstock.planner.predict.forecasts.time.monotonic", lambda: 0.0)
    forecasts = fits_in_thread(CONFIG)
    forecasts.resume(_pull(at_s) for at_s in range(1, 156))
    until_s = time.perf_counter() + WAIT_S
    made = None
    while made is None and time.perf_counter() < until_s:
        made = forecasts.forecast(_pull(156))
        time.sleep(0.001)
    assert made is not None
    assert (made.made_s, made.at(30.0)) == (150.0, 2.0)


def test_a_missing_library_is_said_when_a_planner_starts(monkeypatch):
    """Before the first decision, with the remedy; the planner runs."""
    monkeypatch.setattr("penstock.runtimes.extras.find_spec", lambda _name: None)
    said = []
    monkeypatch.setattr(
        "penstock.planner.predict.forecasts.log",
        SimpleNamespace(warning=lambda *words, **_: said.extend(words)),
    )
    assert fits_in_thread(CONFIG) is not None
    (words,) = said
    assert words == (
        "the planner needs statsmodels, not installed here for kalman: it goes by its own trend;"
        " pip install 'penstock[forecast]'"
    )


def test_a_forecast_is_read_on_lines_between_its_points():
    """Held before the first and beyond the last."""
    forecast = DemandForecast(0.0, Predictor.KALMAN, ((10.0, 2.0), (20.0, 3.0)))
    assert [forecast.at(lead_s) for lead_s in (5.0, 15.0, 60.0)] == [2.0, 2.5, 3.0]
