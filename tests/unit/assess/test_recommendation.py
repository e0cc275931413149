"""What is recommended, when nothing is, and the files that go with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml
from observed_fleets import observed

from penstock.api import Role, SloConfig
from penstock.api.manifests import parse_manifests
from penstock.assess.assessment import AssessOptions, recommend
from penstock.assess.calibration import Calibration, ServedHour
from penstock.assess.engine_fit import EngineFit, Speeds, nearest, refined, scaled
from penstock.assess.fleets import Fleet, FleetKind, Spread, resizes_of
from penstock.assess.manifest import GraphPlan, graph_name
from penstock.engine import profiles
from penstock.simulator.scenario import Resize

HOUR = ServedHour(0.0, 100.0, *[None] * 8)
PLAN = GraphPlan("llama", SloConfig(), 1, is_disaggregated=False, replicas=2, max_gpus=8)


def fleet(kind, in_time, hours):
    """A fleet with that share in time for those GPU-hours."""
    plan = PLAN if kind is FleetKind.PENSTOCK else None
    spreads = Spread(in_time, in_time, in_time), Spread(hours, hours, hours)
    known = [Spread(each, each, each) for each in (0.0, 0.1, 0.5)]
    return Fleet(kind.value, kind, *spreads, *known, 4, plan)


def fleets(ran, own, fixed=(1.0, 90.0)):
    """The fleet that ran, a fixed one and Penstock's."""
    kinds = ((FleetKind.RAN, ran), (FleetKind.FIXED, fixed), (FleetKind.PENSTOCK, own))
    return [fleet(kind, *figures) for kind, figures in kinds]


def calibration(share=0.0, ttft=0.0, gap=0.0):
    """A model that is off by that much."""
    return Calibration(HOUR, (), share, ttft, gap)


def test_a_cheaper_fleet_that_serves_as_well_is_recommended_with_what_a_fixed_one_would_do():
    """The sentence has both fleets, the saving, the fixed fleet and the money."""
    found = recommend(
        fleets((0.99, 100.0), (0.992, 60.0)), calibration(), AssessOptions(SloConfig(), gpu_price=2.0)
    )
    assert found.plan is PLAN
    assert found.sentence.startswith("Penstock would have saved 40% of the GPU-hours. ")
    assert "99.2% in time with 60.0 GPU-hours" in found.sentence
    assert "99.0% in time with 100.0 GPU-hours" in found.sentence
    assert "fixed: 100.0% in time with 90.0 GPU-hours" in found.sentence
    assert "saved by Penstock: 80.00" in found.sentence


@pytest.mark.parametrize(
    ("in_time", "hours", "is_named"), [(0.99, 50.0, True), (0.99, 61.0, False), (0.97, 50.0, False)]
)
def test_an_autoscaler_of_others_that_does_it_for_less_is_named(in_time, hours, is_named):
    """A reader decides between all of them; one that misses the target is no alternative."""
    others = [*fleets((0.99, 100.0), (0.992, 60.0)), fleet(FleetKind.HPA_TUNED, in_time, hours)]
    found = recommend(others, calibration(), AssessOptions(SloConfig()))
    assert found.plan is PLAN
    assert (f"hpa tuned: 99.0% in time with {hours} GPU-hours" in found.sentence) is is_named


def test_the_graph_with_bounds_is_recommended_where_it_serves_as_well():
    """Its figures are those of the sentence; where it serves worse, the graph without bounds is."""
    given = fleets((0.99, 100.0), (0.992, 60.0))
    for in_time, hours in ((0.991, 63.0), (0.97, 55.0)):
        bounded = fleet(FleetKind.PENSTOCK, in_time, hours)
        found = recommend([*given, bounded], calibration(), AssessOptions(SloConfig()), bounded=bounded)
        assert (found.fleet is bounded) is (in_time > 0.99)


@pytest.mark.parametrize(
    ("ran", "own", "said"),
    [
        ((0.99, 100.0), (0.97, 60.0), "Penstock would not have helped: at best 97.0%"),
        ((0.99, 100.0), (0.99, 101.0), "Penstock would not have saved anything"),
        ((0.90, 100.0), (0.99, 110.0), "Penstock would have served more in time, for 10% more GPU-hours"),
    ],
)
def test_a_fleet_that_serves_worse_or_saves_nothing_is_not_recommended(ran, own, said):
    """One that serves much better for more is."""
    found = recommend(fleets(ran, own), calibration(), AssessOptions(SloConfig()))
    assert said in found.sentence
    assert (found.plan is None) is ("not" in said)


@pytest.mark.parametrize(
    ("off", "count"),
    [
        ({}, 0),
        ({"share": -0.06}, 1),
        ({"ttft": 0.51, "gap": -0.21}, 2),
        ({"share": 0.05, "ttft": -0.5, "gap": 0.2}, 0),
    ],
)
def test_a_model_that_is_too_far_off_recommends_nothing(off, count):
    """Each figure beyond its bound is a reason of its own; what was not observed is none."""
    found = recommend(fleets((0.9, 100.0), (0.99, 60.0)), calibration(**off), AssessOptions(SloConfig()))
    assert len(found.reasons) == count
    assert (found.plan is None) is (count > 0)
    assert Calibration(HOUR, (), None, None, None).refusals == ()


@pytest.mark.parametrize("is_disaggregated", [False, True])
def test_the_manifest_is_valid(is_disaggregated):
    """As `penstock validate` checks it, for a model whose name is no name of Kubernetes."""
    plan = GraphPlan("meta-llama/Llama-3.1-8B", SloConfig(itl="50ms"), 2, is_disaggregated, 3, 12)
    _, problems = parse_manifests(yaml.safe_dump(plan.manifest()))
    assert problems == []
    assert graph_name("Qwen/Qwen2.5-7B") == "qwen2-5-7b"
    assert graph_name("7B!") == "model-7b"


def test_changes_of_the_fleet_that_ran_are_resizes():
    """A number that is unknown for a while changes nothing."""
    replicas = np.array([2, 2, 3, math.nan, 3, 1], dtype=float)
    found = resizes_of(observed([10] * 3, replicas=replicas, replica_step_s=30.0))
    assert found == (Resize(75.0, Role.AGGREGATED, 3), Resize(165.0, Role.AGGREGATED, 1))


@pytest.mark.parametrize("name", ["h100-llama-8b-bf16-tp1", "h100-llama-3.3-70b-tp2-table"])
def test_a_scaled_profile_is_slower_by_its_factors_everywhere(name):
    """Within its tables and beyond them, with the observed KV capacity."""
    base = profiles.load(name)
    made = scaled(base, EngineFit(name, 2.0, 3.0, kv_tokens=50_000))
    assert made.kv_capacity_tokens == 50_000
    for tokens in (10, 3000, 200_000):
        assert made.latency().prefill.ttft_s(tokens) == pytest.approx(
            2 * base.latency().prefill.ttft_s(tokens)
        )
    for batch, held in ((1, 1000), (30, 60_000), (300, 3_000_000)):
        assert made.latency().decode.step_s(batch, held) == pytest.approx(
            3 * base.latency().decode.step_s(batch, held)
        )


def test_the_nearest_engine_is_the_one_whose_latencies_grow_alike():
    """A factor that is the same at every load is scaled away; one that differs is not."""
    seen = [Speeds(0.1, 0.02), Speeds(0.3, 0.04)]
    known = {
        "alike": [Speeds(0.12, 0.024), Speeds(0.36, 0.048)],
        "flat": [Speeds(0.17, 0.028), Speeds(0.17, 0.028)],
    }
    fits = [EngineFit("flat"), EngineFit("alike")]
    assert nearest(fits, seen, lambda fit: known[fit.base]).base == "alike"

    def simulated(fit):
        return [
            Speeds(0.12 * fit.prefill, 0.024 * fit.decode),
            Speeds(0.36 * fit.prefill, 0.048 * fit.decode),
        ]

    found = refined(EngineFit("alike"), seen, simulated)
    assert (found.prefill, found.decode) == pytest.approx((1 / 1.2, 1 / 1.2), rel=0.001)
