"""Policies by entry point: the guide's own distribution in a manifest, the simulator, the scoreboard and the live loop."""

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.api import Role
from penstock.api.manifests import parse_manifests
from penstock.cli.graph import validate
from penstock.cli.main import cli
from penstock.core.errors import ConfigError
from penstock.core.plugins import registered
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.config import config_from
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.policy import policy_of
from penstock_planner.ledger import read_ledger
from penstock_planner.options import join
from penstock_planner.replay import replay

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "add-a-planner-policy.md"
GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: tiny}}
spec:
  model: {{name: m}}
  runtime: simulated
  services: {{frontend: {{role: router}}, worker: {{role: aggregated}}}}
  planner: {{mode: {mode}}}
"""


def _forget():
    registered.cache_clear()
    policy_of.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The guide's distribution on the path, as an installer leaves it; returns a function that adds entry points."""
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")

    def register(groups):
        lines = [
            line
            for group, points in groups.items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        _forget()

    register(project["entry-points"])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield register
    sys.modules.pop("queue_policy", None)
    _forget()


def test_a_policys_own_parameters_are_read_by_its_own_model(installed, tmp_path):
    """One worker for each six requests that wait, in place of two; live, from the ledger, and compared in a simulation."""
    text = GRAPH.format(mode="queue, policyParameters: {waiting_per_worker: 6}")
    graph = parse_manifests(text, "tiny.yaml")[0].graphs[0]
    config = join(given={}, graph=graph).decide_config(graph)
    assert config.parameters.waiting_per_worker == 6.0
    assert config_from(to_plain(config)) == config
    assert config.in_mode("queue") == config
    assert config.in_mode("adaptive").parameters is None
    other = join(given={"mode": "adaptive"}, graph=graph).decide_config(graph)
    assert other.parameters is None


@pytest.mark.parametrize(
    ("mode", "parameters", "told"),
    [
        ("queue", "{waiting: 6}", "waiting: policy queue has waiting_per_worker"),
        ("queue", "{waiting_per_worker: many}", "waiting_per_worker 'many'"),
        ("adaptive", "{waiting: 6}", "mode adaptive has no parameters of its own"),
    ],
)
def test_parameters_that_the_policy_does_not_take_are_refused_by_name(
    installed, tmp_path, mode, parameters, told
):
    """`validate` says which there are; a mode of Penstock's own has none."""
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH.format(mode=f"{mode}, policyParameters: {parameters}"))
    answer = CliRunner().invoke(validate, [str(file)])
    assert answer.exit_code == 2
    assert told in answer.stderr
    assert "policyParameters" in answer.stderr


def _problems(mode):
    return [problem.message for problem in parse_manifests(GRAPH.format(mode=mode), "tiny.yaml")[1]]


def test_a_manifest_names_it_once_it_is_installed(installed):
    """And the planner's options take it from there."""
    manifests, problems = parse_manifests(GRAPH.format(mode="queue"), "tiny.yaml")
    assert not problems
    assert join(given={}, graph=manifests.graphs[0]).decide_config().mode == "queue"


@pytest.mark.parametrize("mode", ["queue", "hpa"])
def test_what_is_not_installed_or_only_compared_is_no_mode_of_a_graph(mode):
    """The message has those that there are."""
    assert _problems(mode) == [f'"{mode}" is not one of adaptive, load, sla; choose one of them']


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            "absent_module:POLICY",
            "queue is registered as absent_module:POLICY, which cannot be imported: No module named",
        ),
        (
            "queue_policy:ABSENT",
            "queue is registered as queue_policy:ABSENT, which cannot be imported: .* no attribute",
        ),
        ("queue_policy:propose", "mode queue: the registered object must be a PlannerPolicy, not function"),
        (None, "mode queue: not registered as penstock.planner_policies; choose from adaptive, load, sla"),
    ],
)
def test_what_cannot_be_loaded_is_named(installed, value, told):
    """With where it is registered."""
    installed({} if value is None else {"penstock.planner_policies": {"queue": value}})
    with pytest.raises(ConfigError, match=told):
        policy_of("queue")


async def test_the_live_loop_runs_it_and_replay_repeats_it(installed, world):
    """Five requests wait: three workers more, one a decision; once none waits, back to the floor."""
    world.config = replace(world.config, mode="queue", max_gpu_budget=8)
    world.load.demand = lambda now: Demand(1.0, arrivals=1.0)
    world.load.queue = lambda now, _workers: 5.0 if now < 1060 else 0.0
    await world.run_until(60)
    grown = max(replicas for role, replicas, _ in world.backend.calls if role is Role.PREFILL)
    assert grown > 2
    await world.run_until(300)
    assert world.backend.replicas[Role.PREFILL] == 1
    found = replay(read_ledger(world.folder / "ledger.jsonl"))
    assert (found.decisions > 10, found.differences) == (True, ())


def test_the_simulator_compares_it(installed):
    """Alongside the planner's own."""
    trace = "poisson:rate=2,duration_s=60,input_tokens=4000,output_tokens=20"
    result = CliRunner().invoke(cli, ["simulate", "--trace", trace, "--planner", "queue,load"])
    assert result.exit_code == 0, result.output
    assert {"queue", "load"} <= set(result.output.split())
