"""Mode sla by a fitted predictor: what it reads from the window, what it refuses to believe, and replay without a library."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import orjson
import pytest

from penstock.api import Predictor, Role
from penstock.performance.profile import PerformanceProfile
from penstock.performance.tables import DecodeTable, PrefillTable
from penstock.planner import loop as looping
from penstock.planner.decide.codec import pull_from, to_plain
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.demand_forecast import DemandForecast
from penstock.planner.decide.observation import Demand, Observation, PoolCounts, Window, summarise
from penstock.planner.decide.pipeline import decide
from penstock.planner.decide.reading import judge
from penstock.planner.decide.sla import memory
from penstock.planner.decide.sla.expected_rate import PEAK_MOST, STALE_S
from penstock.planner.decide.state import PlannerState
from penstock.planner.ledger import read_ledger
from penstock.planner.predict.forecasts import fits_at_once
from penstock.planner.replay import replay

_PROFILE = PerformanceProfile(
    PrefillTable((100.0, 20_000.0), (0.01, 2.0)),
    DecodeTable((100.0, 20_000.0), (0.01, 1.0), ((0.01, 0.02),) * 2, ((100.0, 2000.0),) * 2, 100_000.0),
)
CONFIG = DecideConfig(mode=Mode.SLA, predictor=Predictor.KALMAN, max_gpu_budget=64, performance=_PROFILE)
ISL = 1000.0
RISING = DemandForecast(300.0, Predictor.KALMAN, ((15.0, 5.0), (55.0, 9.0), (595.0, 9.0)))


def _demand(rate):
    """Return one second's: ``rate`` requests/s of 1,000 tokens on workers of 10,000 tokens/s."""
    tokens = rate * ISL
    return Demand(
        1.0,
        arrivals=rate,
        prompt_tokens=tokens,
        uncached_tokens=tokens,
        prefilled_tokens=tokens,
        prefilling_workers=tokens / 10_000,
    )


def _pull(at_s, forecast=None, rate=4.0):
    pools = {Role.PREFILL: PoolCounts(2, gpus=1), Role.DECODE: PoolCounts(2, gpus=1)}
    kv = {name: judge(0.1, age_s=0, max_age_s=10, source="t", upper=1.0) for name in ("d0", "d1")}
    queue = judge(0.0, age_s=0, max_age_s=10, source="t")
    return replace(summarise(Observation(at_s, pools, kv, queue, _demand(rate))), forecast=forecast)


def _decided(forecast, config=CONFIG):
    """Return the prefill role's decision at 301 s, after five minutes of 4 requests/s, and the state."""
    state = PlannerState()
    for end in range(5, 301, 5):
        pulls = tuple(_pull(float(at_s)) for at_s in range(end - 4, end + 1))
        _, state = decide(Window(end - 5.0, float(end), pulls), state, config)
    decision, state = decide(Window(300.0, 301.0, (_pull(301.0, forecast),)), state, config)
    return next(each for each in decision.roles if each.role is Role.PREFILL), state


def _step(role, name):
    return next(step for step in role.steps if step.name == name)


def test_a_forecast_of_the_window_is_what_demand_is_expected_to_be():
    """16 s after it was made plus the horizon: on the line between its points, times the mean prompt."""
    role, _ = _decided(RISING)
    said, demand = _step(role, "forecast"), _step(role, "demand")
    horizon_s = demand.inputs["horizon_s"]
    assert said.outcome == "kalman"
    assert demand.inputs["tokens_per_s_ahead"] == pytest.approx(RISING.at(1.0 + horizon_s) * ISL)
    assert said.inputs["requests_per_s_ahead"] == pytest.approx(RISING.at(1.0 + said.inputs["horizon_s"]))


def test_a_forecast_stays_until_the_next_one_and_then_grows_old():
    """It came with one pull; later decisions go by it, until it is too old."""
    _, state = _decided(RISING)
    outcomes = {}
    for end in range(306, 420, 5):
        pulls = tuple(_pull(float(at_s)) for at_s in range(end - 4, end + 1))
        decision, state = decide(Window(end - 5.0, float(end), pulls), state, CONFIG)
        outcomes[end - RISING.made_s] = _step(decision.roles[0], "forecast").outcome
    assert {age_s for age_s, said in outcomes.items() if said == "kalman"} == {
        age_s for age_s in outcomes if age_s <= STALE_S
    }
    assert "old" in outcomes[max(outcomes)]


BAD = {
    "none yet": None,
    "another predictor's": replace(RISING, predictor=Predictor.ARIMA),
    "stale": replace(RISING, made_s=301.0 - STALE_S - 1),
    "of the future": replace(RISING, made_s=400.0),
    "failed": replace(RISING, points=(), why="the fit failed: LinAlgError: singular"),
    "empty": replace(RISING, points=()),
    "NaN": replace(RISING, points=((5.0, 4.0), (15.0, math.nan))),
    "infinite": replace(RISING, points=((5.0, 4.0), (15.0, math.inf))),
    "negative": replace(RISING, points=((5.0, -1.0), (15.0, 4.0))),
    "times that do not rise": replace(RISING, points=((15.0, 4.0), (15.0, 5.0))),
    "a time that is none": replace(RISING, points=((math.nan, 4.0),)),
    "implausible": replace(RISING, points=((5.0, 4.0), (15.0, 4.0 * PEAK_MOST + 1))),
}


@pytest.mark.parametrize("forecast", BAD.values(), ids=BAD)
def test_what_cannot_be_believed_leaves_the_trend_and_is_named(forecast):
    """The decision is the trend's, number by number, and the step says why."""
    role, _ = _decided(forecast)
    by_trend, _ = _decided(None, replace(CONFIG, predictor=Predictor.TREND))
    said = _step(role, "forecast").outcome
    assert said.startswith("trend: ")
    assert len(said) > len("trend: ")
    assert _step(role, "demand") == _step(by_trend, "demand")
    assert (role.action, role.desired) == (by_trend.action, by_trend.desired)


def test_the_reason_of_a_failed_fit_is_passed_on():
    """Whoever reads the decision learns what to do."""
    why = "statsmodels is not installed; pip install 'penstock[forecast]'"
    role, _ = _decided(replace(RISING, points=(), why=why))
    assert _step(role, "forecast").outcome == f"trend: {why}"


@pytest.mark.parametrize("predictor", [Predictor.TREND, Predictor.CONSTANT])
def test_a_predictor_that_is_not_fitted_reads_no_forecast(predictor):
    """A ledger of another setting holds one: it changes nothing."""
    config = replace(CONFIG, predictor=predictor)
    role, _ = _decided(RISING, config)
    without, _ = _decided(None, config)
    assert role == without


def test_pull_and_memory_survive_json():
    """And a pull of an older ledger has no forecast."""
    plain = orjson.loads(orjson.dumps(to_plain(_pull(1.0, RISING))))
    assert pull_from(plain).forecast == RISING
    del plain["forecast"]
    assert pull_from(plain).forecast is None
    _, state = _decided(RISING)
    assert memory.read(orjson.loads(orjson.dumps(to_plain(state.memory)))).forecast == RISING
    older = {key: value for key, value in state.memory["sla"].items() if key != "forecast"}
    assert memory.read({"sla": older}).forecast is None


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_ledger_replays_where_the_library_is_not_installed(world, monkeypatch):
    """Live decisions by Holt-Winters on a synthetic sine come out bit for bit the same without statsmodels."""
    monkeypatch.setattr(looping, "fits_in_thread", fits_at_once)
    world.config = replace(CONFIG, predictor=Predictor.HOLT_WINTERS, adjustment_interval_s=5.0)
    world.load.demand = lambda now_s: _demand(4.0 + 3.0 * math.sin(now_s / 60.0))
    await world.run_until(240)
    outcomes = [
        step.outcome
        for decision in world.watcher.decisions
        for step in decision.roles[0].steps
        if step.name == "forecast"
    ]
    assert "holt-winters" in outcomes
    assert any(said.startswith("trend: ") for said in outcomes)
    for name in list(sys.modules):
        if name.split(".")[0] == "statsmodels":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    found = replay(read_ledger(world.folder / "ledger.jsonl"))
    assert found.decisions == len(world.watcher.decisions) > 20
    assert found.differences == ()
