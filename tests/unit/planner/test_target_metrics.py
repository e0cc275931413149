"""What /metrics shows of the targets: numbers of mode sla, and nothing where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from metrics_page import page_after

from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.observation import Demand

PROFILE = PerformanceProfile(
    PrefillTable((100.0, 20_000.0), (0.01, 2.0)),
    DecodeTable((100.0, 20_000.0), (0.01, 1.0), ((0.01, 0.02),) * 2, ((100.0, 2000.0),) * 2, 100_000.0),
)
SLA = DecideConfig(mode=Mode.SLA, performance=PROFILE, itl_slo_s=0.02, attainment=0.95)
DEMAND = Demand(
    1.0,
    arrivals=4.0,
    prompt_tokens=4000.0,
    uncached_tokens=4000.0,
    prefilled_tokens=4000.0,
    completed=4.0,
    output_tokens=400.0,
    prefilling_workers=0.4,
)


OF_TARGETS = {
    *("uncached_tokens_per_second", "forecast_tokens_per_second", "worker_tokens_per_second"),
    *("needed_replicas", "correction_factor", "target_seconds", "attainment_goal_fraction"),
    "attained_fraction",
}


async def _shown(world, config, seconds, demand=lambda _now: DEMAND):
    """Return the page's numbers of targets after so many seconds."""
    world.config = replace(config, adjustment_interval_s=10.0)
    world.load.demand = demand
    found = await page_after(world, seconds)
    return {key: value for key, value in found.items() if key[0] in OF_TARGETS}


async def test_mode_sla_shows_expected_beside_arrived_the_profile_and_the_targets(world):
    """Steady demand: what was expected for now is what arrives; nine of ten first tokens came in time."""
    world.measure_latency(
        lambda count: {"ttft": ((5.0, 0.9 * count), (10.0, count)), "itl": ((0.02, count), (0.1, count))}
    )
    found = await _shown(world, SLA, 120)
    assert found["uncached_tokens_per_second",] == 4000
    assert found["forecast_tokens_per_second",] == pytest.approx(4000, rel=0.05)
    assert found["worker_tokens_per_second",] == pytest.approx(10_000, rel=0.15)
    assert found["needed_replicas", "prefill"] == 1
    assert found["needed_replicas", "decode"] >= 1
    assert {key for key in found if key[0] == "correction_factor"} == {
        ("correction_factor", name) for name in ("prefill", "ttft", "itl")
    }
    assert (found["target_seconds", "ttft"], found["target_seconds", "itl"]) == (SLA.ttft_slo_s, 0.02)
    assert found["attainment_goal_fraction",] == 0.95
    assert found["attained_fraction", "ttft"] == pytest.approx(0.9)
    assert found["attained_fraction", "itl"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "more"), [(Mode.ADAPTIVE, {"forecast_tokens_per_second"}), (Mode.LOAD, set())]
)
async def test_other_modes_show_what_arrives_and_their_forecast(world, mode, more):
    """Mode adaptive expects demand and has no profile; mode load neither."""
    found = await _shown(world, DecideConfig(mode=mode), 90)
    assert {key[0] for key in found} == {"uncached_tokens_per_second", *more}
