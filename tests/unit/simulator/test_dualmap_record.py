"""The record of DualMap's evaluation: what is compared with what, and what a live run may conclude."""

import importlib
import sys
from pathlib import Path

import pytest

from penstock.simulator.scenario import DUALMAP_7B, RouterGroup

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module")
def bench():
    """The bench's modules; they are folders of scripts."""
    folders = [str(BENCH / "dualmap"), str(BENCH)]
    sys.path[:0] = folders
    try:
        names = ("digest", "setups", "fleets", "depths", "live_routers")
        return {name: importlib.import_module(name) for name in names}
    finally:
        for folder in folders:
            sys.path.remove(folder)


def row(policy, qps, capacity, *, p50=1.0, p90=2.0):
    """One policy's figures at one rate."""
    return {
        "policy": policy,
        "qps": qps,
        "capacity": capacity,
        "ttft_s": {"p50": p50, "p90": p90},
        "hit_rate": 0.3,
        "hit_rate_per_request": 0.4,
        "hit_share_of_bound": 0.8,
    }


@pytest.fixture
def part():
    """Two rates: everybody serves the first; at the second DualMap is ahead of all but Preble."""
    calm = [
        row(name, 5.0, 1.0) for name in ("dualmap", "preble", "min-ttft", "cache-affinity", "least-pending")
    ]
    high = [
        row("dualmap", 6.0, 0.6, p50=2.0, p90=6.0),
        row("preble", 6.0, 0.8, p50=1.0, p90=5.0),
        row("min-ttft", 6.0, 0.4, p50=4.0, p90=12.0),
        row("cache-affinity", 6.0, 0.3, p50=8.0, p90=24.0),
        row("least-pending", 6.0, 0.0, p50=9.0, p90=30.0),
    ]
    held = {"dualmap": 5.5, "preble": 5.8, "min-ttft": 5.0, "cache-affinity": None, "least-pending": None}
    goodput = [{"policy": name, "goodput_rps": rps} for name, rps in held.items()]
    return {"summary": calm + high, "goodput": goodput}


def test_gains_are_over_the_best_baseline_and_over_the_best_but_preble(bench, part):
    """0.6 is a quarter less than Preble's 0.8, and half more than the 0.4 of the next."""
    found = bench["digest"].comparison_claims("server.conversation", part)

    assert found["server.conversation.capacity_gain"] == "+0.0% (QPS 5)"
    assert found["server.conversation.capacity_gain.but_preble"] == "+50.0% (QPS 6)"
    assert found["server.conversation.p50_change"] == "+100.0% (QPS 6)"
    assert found["server.conversation.p50_change.but_preble"] == "-50.0% (QPS 6)"
    assert found["server.conversation.goodput_gain"] == "-5.2%"
    assert found["server.conversation.goodput_gain.but_preble"] == "+10.0%"


def test_a_goodput_that_no_baseline_reaches_at_the_lowest_rate_is_a_bound(bench):
    """Nobody held 90% at 5 requests/s, so the gain of 6 is at least a fifth."""
    goodput_gain = bench["digest"].goodput_gain

    assert goodput_gain(6.0, [], 5.0) == "above +20.0%"
    assert goodput_gain(None, [5.0], 5.0) == "-"


def test_the_ablation_is_told_at_every_rate(bench):
    """What rebalancing gives depends on the side of the knee; no rate may stand for the others."""
    labels = ("dualmap", "- rebalancing", "- SLO-aware: pair min-TTFT")
    p90 = {12.0: (8.0, 10.0, 10.0), 13.0: (22.0, 20.0, 10.0)}
    rows = [
        row(label, qps, 0.9, p90=seconds)
        for qps, values in p90.items()
        for label, seconds in zip(labels, values, strict=True)
    ]

    found = bench["digest"].ablation_claims({"summary": rows})

    assert found["server.ablation.rebalance_p90"] == "-20.0% (QPS 12), +10.0% (QPS 13)"
    assert found["server.ablation.slo_p90"] == "+0.0% (QPS 12), +100.0% (QPS 13)"


def test_one_router_stands_at_the_beginning_of_every_way(bench):
    """Ways differ from two routers on."""
    rows = [row("p|1|alone", 6.0, 0.9), row("p|2|alone", 6.0, 0.5), row("p|2|shared", 6.0, 0.8)]

    found = bench["digest"].by_routers(rows)

    assert [(policy, way, {n: each["capacity"] for n, each in of.items()}) for policy, way, of in found] == [
        ("p", "alone", {1: 0.9, 2: 0.5}),
        ("p", "shared", {1: 0.9, 2: 0.8}),
    ]


def test_routers_work_together_as_the_label_says(bench):
    """One picks; in the other way it dies at even distances."""
    setups, fleets = bench["setups"], bench["fleets"]
    one = setups.world(DUALMAP_7B, setups.router("prefix-cost"))
    lives, dies = fleets.WAYS

    assert fleets.together(one, 1, dies, last_s=50.0) == one
    assert fleets.together(one, 4, lives, last_s=50.0).routers == RouterGroup(4, 0.0, fleets.PICK_DELAY_S)
    deaths = fleets.together(one, 4, dies, last_s=50.0).routers.picker_deaths_s
    assert deaths == (10.0, 20.0, 30.0, 40.0)


def test_rare_key_lengths_are_left_out_of_the_words(bench):
    """One in a thousand is no group of requests."""
    assert bench["depths"].in_words({1: 0.001, 2: 0.44, 13: 0.559}) == "2: 44.0%, 13: 55.9%"


def outcome(bench, policy, live_s, simulated_s, *, spread_s=0.0, late=()):
    """One way on both sides; its simulations lie within the spread."""
    live_routers = bench["live_routers"]
    names = (live_routers.TTFT, live_routers.HITS)
    live, simulated = (dict.fromkeys(names, value) for value in (live_s, simulated_s))
    variants = [dict.fromkeys(names, simulated_s + spread_s)]
    way = live_routers.Way(policy, 1)
    return live_routers.Outcome(way, live, simulated, variants, list(late), 0.01)


@pytest.mark.parametrize(
    ("live", "late", "expected"),
    [
        ((1.1, 1.9), (), "the same order: all 1 pairs"),
        ((1.9, 1.1), (), "1 of 1 pairs come in the other order: TTFT p50 of a, 1 and b, 1"),
        ((1.9, 1.1), ("router",), "no conclusion: no two ways on time are told apart"),
    ],
)
def test_a_live_run_concludes_only_from_processes_on_time(bench, live, late, expected):
    """The order agrees, or does not, or a late process leaves it open."""
    live_routers = bench["live_routers"]
    found = [outcome(bench, "a", live[0], 1.0), outcome(bench, "b", live[1], 2.0, late=late)]

    said = live_routers.conclusion(found, live_routers.pairs(found, live_routers.TTFT))

    assert said.startswith(expected)
    assert ("left out, since this machine was too late: b, 1 (router)" in said) is bool(late)


def test_ways_that_the_simulator_does_not_tell_apart_are_not_compared(bench):
    """Where moved arrivals make one as long as the other, either order would be right."""
    live_routers = bench["live_routers"]
    found = [outcome(bench, "a", 2.0, 1.0, spread_s=0.5), outcome(bench, "b", 1.0, 1.52)]

    assert live_routers.pairs(found, live_routers.TTFT) == []
    assert live_routers.conclusion(found, []).startswith("no conclusion: no two ways")
