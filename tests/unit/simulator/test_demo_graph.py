"""The demo's graph on the demo's traffic, in virtual time: what `make demo` promises without a machine's lag."""

from dataclasses import replace
from importlib import resources

import pytest

from penstock.api.manifests import load_graph
from penstock.cli.demo import DAYS
from penstock.simulator.baselines import configured
from penstock.simulator.scenario import Scenario, graph_pools
from penstock.simulator.scoreboard import score
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock_planner.options import join

START_UP_S = 6.5
"""A simulated worker's process takes 0.7 real seconds to start on an idle machine, at speed 9."""


@pytest.fixture(scope="module")
def base():
    """The graph, with nothing that scales."""
    with resources.as_file(resources.files("penstock.cli") / "data" / "demo.yaml") as path:
        graph = load_graph(path)
    pools = tuple(replace(pool, model=replace(pool.model, block_size=128)) for pool in graph_pools(graph))
    config = join(given={}, graph=graph).decide_config(graph)
    scenario = Scenario(
        pools,
        graph.spec.router,
        cold_start_s=START_UP_S,
        max_gpus=config.max_gpu_budget,
        slo=graph.spec.slo,
    )
    return scenario, configured(config, config.mode, pools)


def _figures(scenario):
    workload = prepare(WorkloadSpec(DAYS), seed=0)
    return score(Simulation(scenario, workload.requests).run(), workload, scenario)


@pytest.mark.slow
def test_no_fixed_fleet_serves_as_well_for_as_little(base):
    """Twelve GPUs all day serve as well for more; ten keep too few in time, however split, and so does the HPA for more.

    Both roles grow at noon and shrink at night.
    """
    scenario, config = base
    planned = _figures(replace(scenario, planner=config))
    fixed = {fleet: _figures(_fixed(scenario, fleet)) for fleet in ((4, 2), (4, 1), (3, 2))}
    hpa = _figures(replace(scenario, planner=configured(config, "hpa", scenario.pools)))

    assert planned["ttft_s"]["p99"] < scenario.slo.ttft_seconds
    assert planned["failed"] + planned["rejected"] == 0
    assert planned["on_time"] >= 0.99
    assert planned["gpu_hours"] < 0.85 * fixed[4, 2]["gpu_hours"]
    assert planned["gpu_hours"] < hpa["gpu_hours"]
    assert max(each["on_time"] for each in (fixed[4, 1], fixed[3, 2], hpa)) < planned["on_time"] - 0.1


def _fixed(scenario, counts):
    pools = tuple(replace(pool, replicas=count) for pool, count in zip(scenario.pools, counts, strict=True))
    return replace(scenario, pools=pools)
