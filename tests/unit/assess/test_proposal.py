"""Floors, ceilings, schedule and threshold of the recommended graph."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml
from observed_fleets import observed

from penstock.api import Role, SloConfig
from penstock.api.manifests import parse_manifests
from penstock.assess.manifest import GraphPlan
from penstock.assess.proposal import DailyShape, daily_shape, proposed
from penstock.simulator.observer import RunSample

MONDAY_S = 1_704_067_200.0
"""2024-01-01 00:00 UTC."""
PLAN = GraphPlan("llama", SloConfig(ttft="2s"), 1, is_disaggregated=False, replicas=2, max_gpus=16)


def days(count, *, night=60.0, day=600.0, weekend=None, busy=range(8, 18)):
    """Requests of each minute of days that begin on a Monday."""
    found = []
    for number in range(count):
        for hour in range(24):
            rate = day if hour in busy else night
            rate = rate if weekend is None or number % 7 < 5 else weekend
            found += [rate] * 60
    return observed(found, start_s=MONDAY_S)


def samples(*counts, role=Role.AGGREGATED):
    """One sample a minute."""
    return [RunSample(60.0 * at, (), {role: (count, 0, 0)}, count) for at, count in enumerate(counts)]


def test_a_clear_day_is_found_with_its_hours_and_its_quiet_quarter():
    """Nights and days of other rates; a busy time may cross midnight."""
    assert daily_shape(days(3)) == DailyShape(8, 10, 10.0, is_workdays=False)
    assert daily_shape(days(3, busy=[22, 23, 0, 1])) == DailyShape(22, 4, 10.0, is_workdays=False)
    assert daily_shape(days(14, weekend=60.0)) == DailyShape(8, 10, 10.0, is_workdays=True)


def test_no_shape_is_claimed_of_a_short_or_shapeless_history():
    """One day shows nothing, an even or an erratic load has none, and an hour that is never known decides nothing."""
    assert daily_shape(days(1)) is None
    assert daily_shape(days(3, night=500.0)) is None
    assert daily_shape(days(3, night=600.0)) is None
    rng = np.random.default_rng(0)
    erratic = np.repeat(rng.gamma(1.0, 100.0, 24 * 5), 60)
    assert daily_shape(observed(erratic, start_s=MONDAY_S)) is None
    known = days(3)
    known.arrivals[(np.arange(len(known.arrivals)) // 60) % 24 == 3] = math.nan
    assert daily_shape(known) is None


def propose(plan, history, found, **changes):
    """Propose on an even load of ten requests a second."""
    given = {
        "rates": np.full(len(found), 10.0),
        "step_s": 60.0,
        "cold_start_s": 120.0,
        "prefill_tokens_per_s": 10_500.0,
    }
    return proposed(plan, history, found, **(given | changes))


def test_bounds_come_from_the_simulation_and_the_schedule_from_the_history():
    """The peak and a quarter more, the quiet twentieth, a floor for the busy hours that begins before them; and it validates."""
    found = propose(PLAN, days(14, weekend=60.0), samples(*[2] * 10, *[8] * 90))
    assert found.bounds == {Role.AGGREGATED: (2, 10)}
    assert found.prefill_threshold == 42_000
    assert found.schedule == (
        {
            "name": "busy-hours",
            "cron": "58 7 * * 1-5",
            "timeZone": "UTC",
            "durationSeconds": 36_120,
            "aggregated": {"minReplicas": 7},
        },
    )
    manifest = found.manifest()
    _, problems = parse_manifests(yaml.safe_dump(manifest))
    assert problems == []
    assert manifest["spec"]["services"]["worker"]["scaling"] == {"minReplicas": 2, "maxReplicas": 10}
    assert manifest["spec"]["services"]["worker"]["startupSeconds"] == 120
    assert manifest["spec"]["router"] == {"admission": {"activePrefillTokensThreshold": 42_000}}


def test_two_roles_stay_within_the_budget_and_without_a_shape_there_is_no_schedule():
    """A replica of the other role always fits."""
    apart = GraphPlan("llama", SloConfig(), 2, is_disaggregated=True, replicas=2, max_gpus=8)
    both = [
        RunSample(60.0 * at, (), {Role.PREFILL: (1, 0, 0), Role.DECODE: (3, 0, 0)}, 8) for at in range(10)
    ]
    found = propose(apart, days(1), both, prefill_tokens_per_s=None)
    assert found.bounds == {Role.PREFILL: (1, 2), Role.DECODE: (3, 3)}
    assert (found.schedule, found.prefill_threshold) == ((), None)
    _, problems = parse_manifests(yaml.safe_dump(found.manifest()))
    assert problems == []


@pytest.mark.parametrize(("first", "cron"), [(0, "58 23 * * 0-4"), (9, "58 8 * * 1-5")])
def test_a_busy_time_from_midnight_begins_on_the_evening_before(first, cron):
    """Also for working days."""
    history = days(14, weekend=60.0, busy=range(first, first + 6))
    found = propose(PLAN, history, samples(*[1] * 10, *[8] * 90))
    assert found.schedule[0]["cron"] == cron
