"""`penstock simulate --pool` end to end, and what it refuses."""

import io
import json

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from penstock.cli.main import cli
from penstock.core.errors import ConfigError
from penstock.simulator.pool_plan import pool_table

POOL = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GpuPool",
    "metadata": {"name": "shared"},
    "spec": {
        "gpus": 12,
        "holdSeconds": 30.0,
        "graphs": [
            {"match": {"name": "chat"}, "guaranteedGpus": 2, "priority": "high"},
            {"match": {"name": "batch"}, "guaranteedGpus": 4, "maxGpus": 6},
        ],
    },
}
TRACE = "poisson:rate=20,count=800,input_tokens=4096"


def manifest(folder, name, *, replicas=1, **planner):
    """Write a graph's manifest and return its path."""
    workers = {
        role: {"role": role, "replicas": replicas, "scaling": {"minReplicas": 1, "maxReplicas": 16}}
        for role in ("prefill", "decode")
    }
    graph = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "m"},
            "runtime": "simulated",
            "services": {"frontend": {"role": "router"}, **workers},
            "planner": planner,
        },
    }
    return written(folder / f"{name}.yaml", graph)


def written(path, data):
    """Write YAML and return its path."""
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Two graphs and their pool, as the command takes them."""
    chat, batch = manifest(tmp_path, "chat"), manifest(tmp_path, "batch")
    pool = written(tmp_path / "pool.yaml", POOL)
    return ["--manifest", chat, "--trace", TRACE, "--manifest", batch, "--trace", TRACE, "--pool", pool]


def run(*arguments):
    """Run the command."""
    return CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)


def test_it_reports_each_graph_and_the_pool(files):
    """Beyond the default budget of eight GPUs, which is for no pool, and never beyond twelve; maxGpus binds."""
    result = json.loads(run(*files, "--json").output)
    chat, batch = result["graphs"]
    assert (chat["graph"], batch["graph"], result["pool"]["gpus"]) == ("chat", "batch", 12)
    assert batch["held_most"] <= 6
    assert chat["held_most"] + batch["held_most"] >= result["pool"]["held_most"] > 8
    assert result["pool"]["held_most"] <= 12
    assert result["pool"]["lost"] == 0
    assert batch["lacked_s"] <= 10.0, "a decision and an allocation after it are waited for"
    total = sum(each["gpu_hours"] for each in result["graphs"])
    assert result["pool"]["gpu_hours"] == pytest.approx(total, abs=1e-5)


def test_rejected_requests_are_none_that_were_lost(files):
    """Routers whose queues take one request reject many; none that was taken fails."""
    result = json.loads(run(*files, "--max-waiting", "1", "--json").output)
    assert (result["pool"]["rejected"] > 0, result["pool"]["lost"]) == (True, 0)
    assert result["pool"]["rejected"] == sum(each["rejected"] for each in result["graphs"])


def test_the_pool_itself_can_change(files):
    """From second 20 on eight of its twelve GPUs are left."""
    result = json.loads(run(*files, "--budget-change", "20=8", "--json").output)
    assert (result["pool"]["held_most"] > 8, result["pool"]["lost"]) == (True, 0)


def test_a_budget_that_is_written_binds_in_a_pool_too(files, tmp_path):
    """Three GPUs of the manifest's own, though the pool has twelve."""
    manifest(tmp_path, "chat", maxGpuBudget=3)
    chat = json.loads(run(*files, "--json").output)["graphs"][0]
    assert chat["held_most"] == 3


def test_the_terminal_shows_a_row_a_graph_and_the_line_of_the_pool(files):
    """Whose GPUs they were is seen without a file."""
    lines = run(*files).output.splitlines()
    graphs = [line.split()[0] for line in lines if line.startswith(("chat ", "batch "))]
    assert graphs == ["chat", "batch"]
    assert any(line.startswith("pool shared: 12 GPUs, held") for line in lines)


def test_drains_that_were_cut_are_said_with_what_was_lost(files, tmp_path):
    """Where the pool bounds them; else nothing is."""
    result = json.loads(run(*files, "--json").output)
    assert [row["cut"] for row in result["graphs"]] == [{"drains": 0, "requests": 0, "lost": 0}] * 2
    assert "cut by" not in shown(result)
    result["graphs"][1]["cut"] = {"drains": 1, "requests": 3, "lost": 2}
    assert "batch: 1 drain cut by reclaim.graceSeconds, which had 3 requests, 2 of them lost" in shown(result)


def shown(result):
    """Return a pool's result as a terminal has it."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(pool_table(result))
    return console.export_text()


@pytest.mark.slow
def test_it_writes_figures_allocations_and_a_picture(files, tmp_path):
    """One row an allocation."""
    run(*files, "--output-dir", str(tmp_path / "out"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "pool_samples.jsonl").read_text().splitlines()]
    assert max(sum(row["held"].values()) for row in rows) <= 12
    assert json.loads((tmp_path / "out" / "pool.json").read_text())["schema"] == "penstock-pool/1"
    assert (tmp_path / "out" / "pool.png").read_bytes().startswith(b"\x89PNG")


def test_several_graphs_need_a_pool(files):
    """The last one would have been taken in silence."""
    with pytest.raises(
        ConfigError, match="--manifest: given 2 times; add --pool for several graphs, or give one"
    ):
        run(*files[:-2])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--trace", TRACE], "2 --manifest and 3 --trace; give each graph's manifest and its trace"),
        (["--max-gpus", "4"], "the pool is the budget; leave it out with --pool"),
        (["--seeds", "2"], "one run; give one --rate, --seeds, --routers, --planner and --policy at most"),
        (["--rate", "1,2"], "one run; give one --rate"),
    ],
)
def test_what_contradicts_a_pool_is_refused(files, more, expected):
    """With the remedy."""
    with pytest.raises(ConfigError, match=expected):
        run(*files, *more)


def test_a_pool_that_the_graphs_overfill_at_the_start_is_refused(files, tmp_path):
    """Sixteen GPUs at time 0 do not fit into twelve."""
    manifest(tmp_path, "chat", replicas=6, maxGpuBudget=16)
    with pytest.raises(
        ConfigError, match="the graphs start with 14 GPUs, shared has 12; lower their replicas"
    ):
        run(*files)


def test_two_graphs_of_one_name_are_refused(files):
    """Their figures could not be told apart."""
    files[4] = files[0]
    files[5] = files[1]
    with pytest.raises(ConfigError, match="two graphs are called chat; rename one"):
        run(*files)
