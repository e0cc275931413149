"""The demo's graph on the demo's traffic, in virtual time: what `make demo` promises without a machine's lag."""

from dataclasses import replace
from importlib import resources

import pytest

from penstock.api.manifests import load_graph
from penstock.cli.demo import demo
from penstock.planner.options import join
from penstock.simulator.baselines import configured
from penstock.simulator.graph_scenario import graph_pools
from penstock.simulator.scenario import Scenario
from penstock.simulator.scoreboard import score
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload.arrivals import Spread

START_UP_S = 12.0
"""A simulated worker's process takes a bit less than two real seconds to start, at speed 7."""


@pytest.fixture(scope="module")
def base():
    """The graph, with nothing that scales."""
    with resources.as_file(resources.files("penstock.cli") / "data" / "demo.yaml") as path:
        graph = load_graph(path)
    pools = tuple(replace(pool, model=replace(pool.model, block_size=128)) for pool in graph_pools(graph))
    config = join(given={}, graph=graph).decide_config(graph)
    scenario = Scenario(pools, graph.spec.router, cold_start_s=START_UP_S, max_gpus=config.max_gpu_budget)
    return scenario, configured(config, config.mode, pools)


def _figures(scenario):
    rate_rps = next(option.default for option in demo.params if option.name == "rate_rps")
    workload = prepare(WorkloadSpec("mooncake", Spread.EVEN), seed=0, qps=rate_rps)
    return score(Simulation(scenario, workload.requests).run(), workload, scenario)


def test_the_planner_keeps_the_p99_below_ten_seconds_for_less_than_a_fixed_fleet(base):
    """2P+2D is the smallest fixed fleet that serves as well: every one of three GPUs keeps less in time."""
    scenario, config = base
    fleets = {counts: _figures(_fixed(scenario, counts)) for counts in ((2, 1), (1, 2), (2, 2))}
    planned = _figures(replace(scenario, planner=config))

    assert planned["ttft_s"]["p99"] < 10
    assert planned["failed"] + planned["rejected"] == 0
    assert fleets[2, 2]["capacity"] >= planned["capacity"]
    assert max(fleets[2, 1]["capacity"], fleets[1, 2]["capacity"]) < planned["capacity"]
    assert planned["gpu_hours"] <= fleets[2, 2]["gpu_hours"]


def _fixed(scenario, counts):
    pools = tuple(replace(pool, replicas=count) for pool, count in zip(scenario.pools, counts, strict=True))
    return replace(scenario, pools=pools)
