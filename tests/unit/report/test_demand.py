"""Demand over a run: what came, what was turned away, the oldest wait, and how well it was foreseen."""

import pytest

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.observation import Demand
from penstock.planner.decision_steps import Forecast
from penstock.report.analysis import demand_bins, demand_line, demand_summary
from penstock.report.ledger_view import DecisionMark, LedgerSample, PlannerRun, RoleChange


def _sample(at_s, demand):
    return LedgerSample(float(at_s), {}, 2, None, None, demand)


def _decision(at_s, tokens_per_s):
    forecast = Forecast(10.0, tokens_per_s, 1, 2000.0)
    part = RoleChange(Role.PREFILL, 1, 1, "hold", "r", "s", None, "not asked", forecast)
    return DecisionMark("d", float(at_s), "adjustment", no_operation=False, roles=(part,), gpus_after=2)


def _run(samples, decisions=()):
    return PlannerRun(DecideConfig(), tuple(samples), tuple(decisions), (), 100.0, ())


def _steady(**changes):
    return Demand(**{"period_s": 1.0, "arrivals": 2.0, "uncached_tokens": 1000.0, **changes})


def test_a_run_sums_what_came_and_what_was_turned_away():
    """Over the span only; the longest wait that any pull saw; a pull without demand is not one without requests."""
    samples = [_sample(-5, _steady()), _sample(1, _steady(refused=1.0)), _sample(2, None)]
    samples += [_sample(3, _steady(timed_out=2.0, oldest_wait_s=7.5)), _sample(4, _steady(oldest_wait_s=1.0))]

    found = demand_summary(_run(samples), start_s=0, end_s=10)

    assert (found.arrivals, found.rejected, found.oldest_wait_s, found.unknown_pulls) == (6.0, 3.0, 7.5, 1)
    assert found.forecast_error is None
    assert demand_line(found) == (
        "demand: 6 requests came, 3 were rejected, the oldest wait was 7.5 s; 1 pulls knew nothing of it"
    )


def test_the_picture_shows_means_of_bins_and_the_longest_wait():
    """Single prompts of each second hide what matters; where no pull knew anything there is a gap."""
    samples = [_sample(second, _steady(refused=1.0, prefilled_tokens=500.0)) for second in (1, 2, 3, 4)]
    samples += [_sample(5, None), _sample(9, _steady(arrivals=0.0, oldest_wait_s=7.5))]

    found = demand_bins(samples, 2.0)

    assert found.edges.tolist() == [0, 2, 4, 6, 8, 10]
    gap = pytest.approx(float("nan"), nan_ok=True)
    assert found.arrivals.tolist() == [2, 2, gap, gap, 0]
    assert found.rejected.tolist() == [1, 1, gap, gap, 0]
    assert found.computed_tokens.tolist() == [500, 500, gap, gap, 0]
    assert found.oldest_wait_s.tolist() == [0, 0, gap, gap, 7.5]


@pytest.mark.parametrize(("forecasts", "error"), [([1000.0], 0.0), ([1200.0, 700.0, 1000.0], 0.2)])
def test_forecasts_are_held_against_what_came_at_their_time(forecasts, error):
    """1,000 tokens/s all the time: the median of what each was off by."""
    samples = [_sample(second, _steady()) for second in range(101)]
    decisions = [_decision(30 + place, tokens) for place, tokens in enumerate(forecasts)]

    found = demand_summary(_run(samples, decisions), start_s=0, end_s=100)

    assert found.forecast_error == pytest.approx(error)
    assert "the forecast of tokens/s was off by" in demand_line(found)
