"""`penstock up --Planner.OPTION=VALUE`: the planner's options beside the graph's, checked before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from penstock.cli import local as commands
from penstock.core.errors import ConfigError, InvalidSpecError
from penstock.local.build import UpOptions
from penstock.local.up import prepare

GRAPH = """\
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
spec:
  runtime: simulated
  model: {name: llama, servedName: llama}
  engine: {profile: h200-llama-3.1-8b-tp1}
  services:
    frontend: {role: router}
    prefill: {role: prefill, gpusPerReplica: 1, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, gpusPerReplica: 1, scaling: {minReplicas: 1, maxReplicas: 4}}
  planner: {maxGpuBudget: 8, logDir: /graphs/own}
"""


@pytest.fixture(name="up")
def _up(tmp_path, monkeypatch):
    """Return what `up` would start, with some options of its planner."""
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(tmp_path / "state"))
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH)

    def up(**planner):
        options = UpOptions(planner={name.replace("_", "-"): value for name, value in planner.items()})
        return prepare(file, options)[1]

    up.file = file
    return up


def _planner_of(state):
    (entry,) = [entry for name, entry in state.entries.items() if name.endswith("planner")]
    return " ".join(entry.cmd)


def test_budget_and_log_folder_reach_what_up_itself_keeps(up, tmp_path):
    """The GPU allocator's budget, and the folder that `status` shows."""
    state = up(max_gpu_budget="4", log_dir=str(tmp_path / "charts"), environment="local")
    assert (state.arbiter.budget, state.arbiter.gpus) == (4, 4)
    assert state.arbiter.planner_log_dir == str(tmp_path / "charts")
    assert "--max-gpu-budget=4" in _planner_of(state)
    assert _planner_of(state).count("--log-dir") == 1


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("namespace", "other", ConfigError, "give --namespace"),
        ("environment", "kubernetes", ConfigError, "starts a local planner"),
        ("max_gpu_budget", "1", InvalidSpecError, "below the floor"),
        ("max_step", "0", InvalidSpecError, "--max-step"),
        ("memory", "/gone.json", ConfigError, "/gone.json"),
    ],
)
def test_what_no_local_planner_can_do_is_refused_before_anything_starts(up, name, value, error, message):
    """With the option's name and a remedy."""
    with pytest.raises(error, match=message):
        up(**{name: value})


def test_the_command_takes_the_documents_form(up, monkeypatch):
    """--Planner.no-operation alone is true; an option that the planner does not have is a usage error."""
    observed = []

    async def start(_file, options, _progress):
        observed.append(dict(options.planner))
        raise ConfigError("far enough")

    monkeypatch.setattr(commands, "start_graph", start)
    arguments = [str(up.file), "--Planner.no-operation", "--Planner.max-gpu-budget=4"]
    CliRunner().invoke(commands.up, arguments)
    CliRunner().invoke(commands.up, [str(up.file), "--Planner.no-operation=false"])
    assert observed == [{"no-operation": "true", "max-gpu-budget": "4"}, {"no-operation": "false"}]
    assert CliRunner().invoke(commands.up, [str(up.file), "--Planner.colour=red"]).exit_code == 2
