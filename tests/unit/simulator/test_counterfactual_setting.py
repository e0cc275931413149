"""What a counterfactual keeps of a run: budget, start-up times, planner and beginning; ledgers here are made up."""

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.api.manifests import load_graph
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.observation import PoolCounts
from penstock.report.analysis import GpuUse, violations
from penstock.report.findings import RunReport
from penstock.report.ledger_view import LedgerSample, PlannerRun
from penstock.simulator.counterfactual_setting import MOST_SPLITS, setting_of
from penstock.workload.results import LoadRun
from penstock.workload.traces import TraceRequest

P, D = Role.PREFILL, Role.DECODE
MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: g}
spec:
  model: {name: m, contextTokens: 131072}
  runtime: RUNTIME
  services:
    frontend: {role: router}
    prefill: {role: prefill, gpusPerReplica: PREFILL_GPUS, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, scaling: {minReplicas: 1, maxReplicas: 4}}
  engine: {profile: a100-llama-8b-bf16-tp1}
  router: {ttftSloSeconds: 3}
  planner: {maxGpuBudget: 6}
"""


@pytest.fixture
def make_graph(tmp_path):
    """Read the manifest with another runtime, or GPUs of a prefill replica."""

    def make(*, runtime="simulated", prefill_gpus=1):
        path = tmp_path / "graph.yaml"
        text = MANIFEST.replace("RUNTIME", runtime).replace("PREFILL_GPUS", str(prefill_gpus))
        path.write_text(text)
        return load_graph(path)

    return make


def _sample(at_s, prefill, *, starting=0):
    pools = {P: PoolCounts(prefill, starting, 0, 1), D: PoolCounts(1, 0, 0, 1)}
    return LedgerSample(at_s, pools, prefill + starting + 1, None, None, None)


def _run(*samples, config=None, start_ups=()):
    return PlannerRun(config or DecideConfig(max_gpu_budget=6), samples, (), (), 100.0, (), start_ups)


def _report(planner=None, use=None):
    nothing = violations([], ttft_target_s=None, itl_target_s=None)
    return RunReport(LoadRun({}, ()), planner, use, nothing)


def _use(gpu_hours):
    return GpuUse(0.0, 3600.0, gpu_hours, 6.0, 2.0, 5, 6)


def _requests(rps, *, tokens=8000, count=100):
    return [TraceRequest(place / rps, tokens, 10, None, place + 1) for place in range(count)]


def test_the_simulation_begins_as_the_run_did(make_graph):
    """What was ready or starting when the first request was sent, not what the graph asks for."""
    run = _run(_sample(-20, 1), _sample(-1, 2, starting=1), _sample(5, 4))

    base = setting_of(_report(run), make_graph()).base

    assert [(pool.role, pool.replicas) for pool in base.pools] == [(P, 3), (D, 1)]


def test_replicas_start_as_fast_as_they_were_seen_to(make_graph):
    """The ledger's mean, and where it saw none, an assumption that is said to be one."""
    seen = setting_of(_report(_run(_sample(0, 1), start_ups=(10.0, 14.0))), make_graph())
    assumed = setting_of(_report(_run(_sample(0, 1))), make_graph())

    assert seen.base.cold_start_s == 12.0
    assert seen.notes == ("replicas start in 12.0 s, the mean of 2 in the ledger",)
    assert assumed.base.cold_start_s == 30.0
    assert assumed.notes == ("replicas are assumed to start in 30 s; the ledger saw none start",)


def test_the_ledgers_planner_is_simulated_and_may_act(make_graph):
    """Its own settings, the graph's SLO; one that only observed is let loose."""
    config = DecideConfig(mode=Mode.LOAD, queue_up=0.7, no_operation=True, max_gpu_budget=6)

    setting = setting_of(_report(_run(_sample(0, 1), config=config)), make_graph())

    assert (setting.planner.mode, setting.planner.queue_up) == (Mode.LOAD, 0.7)
    assert not setting.planner.no_operation
    assert (setting.planner.ttft_slo_s, setting.base.slo_s) == (3, 3)
    assert setting.has_ledger


def test_without_a_ledger_the_graphs_planner_is_not_passed_off_as_what_served(make_graph):
    """Its budget bounds the fleets; nothing says that it was at work."""
    setting = setting_of(_report(), make_graph())

    assert not setting.has_ledger
    assert setting.base.max_gpus == 6


def test_without_a_budget_fleets_hold_what_the_run_held(make_graph):
    """A comparison needs an end."""
    config = DecideConfig(max_gpu_budget=None)

    setting = setting_of(_report(_run(_sample(0, 1), config=config), _use(3.0)), make_graph())

    assert (setting.base.max_gpus, setting.planner.max_gpu_budget) == (5, 5)


def test_fleets_come_by_what_they_hold_within_the_budget(make_graph):
    """Prefill replicas of two GPUs: every fleet inside six, the cheapest first, the best split of a size first."""
    setting = setting_of(_report(), make_graph(prefill_gpus=2))

    sizes = setting.fleets(_requests(0.5))

    assert list(sizes) == [3, 4, 5, 6]
    assert sizes[5] == [(2, 1), (1, 3)]
    assert all(setting.gpus_of(fleet) == gpus for gpus, fleets in sizes.items() for fleet in fleets)
    assert setting.name_of((2, 1)) == "2P+1D"


def test_hopeless_fleets_and_odd_splits_are_not_tried(make_graph):
    """Nothing below half of what the load needs; of a large size the splits next to that need."""
    setting = setting_of(_report(), make_graph())
    large = replace(setting, base=replace(setting.base, max_gpus=40))

    sizes = large.fleets(_requests(20))

    assert min(sizes) >= 5
    assert max(sizes) == 40
    assert all(len(fleets) <= MOST_SPLITS for fleets in sizes.values())
