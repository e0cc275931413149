"""What a decision's steps say of demand to come and of supply."""

import pytest

from penstock.planner.decision_steps import Forecast, forecast_of

INPUTS = {"horizon_s": 15.0, "tokens_per_s_ahead": 9000.0, "workers": 2, "worker_tokens_per_s": 4000.0}


def test_the_demand_step_holds_forecast_and_supply():
    """Two workers of 4,000 tokens/s each; other steps say nothing of it."""
    steps = [("late", {"workers": 2}), ("demand", INPUTS)]

    assert forecast_of(steps) == Forecast(15.0, 9000.0, 2, 8000.0)


def test_supply_is_unknown_before_any_throughput_was_seen():
    """Unknown is never zero, in words as well."""
    found = forecast_of([("demand", {**INPUTS, "worker_tokens_per_s": None})])

    assert found.supply_tokens_per_s is None
    assert str(found) == "9,000 uncached tokens/s in 15 s; unknown is what 2 can compute"


@pytest.mark.parametrize("missing", ["horizon_s", "tokens_per_s_ahead", "workers"])
def test_no_figure_is_made_up(missing):
    """A mode that forecasts nothing, or knew nothing, has none."""
    assert forecast_of([("demand", {**INPUTS, missing: None})]) is None
    assert forecast_of([("signal", INPUTS)]) is None
