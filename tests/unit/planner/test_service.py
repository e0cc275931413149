"""The planner as a process: options from every layer, and real sources, ledger and dashboard around the loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from served import served

from penstock.api import Role
from penstock.cli.planner import planner
from penstock.core.errors import ConfigError, InvalidSpecError
from penstock_planner import files
from penstock_planner.dashboard import Dashboard
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.ledger import read_ledger
from penstock_planner.options import join
from penstock_planner.replay import replay
from penstock_planner.service import PlannerService, run_until_stopped
from penstock_planner.stats import PlannerStats
from penstock_planner.targets.base import Endpoint, TargetState

D, P = Role.DECODE, Role.PREFILL
SPEED = 200.0
CLUSTER = ("--environment", "kubernetes")
SAMPLE = Path(__file__).parents[3] / "manifests/samples/disaggregated.yaml"

PAGE = """\
penstock_router_prefill_queue_requests{model_name="llama"} 0.3
penstock_router_worker_kv_usage_fraction{worker="llama_decode",role="decode"} 0.95
penstock_router_worker_metrics_age_seconds{worker="llama_decode",role="decode"} 0.5
"""


def _dry_run(*arguments, **keys):
    answer = CliRunner().invoke(planner, ["run", "--dry-run", *arguments], catch_exceptions=False, **keys)
    return orjson.loads(answer.stdout)


def test_a_flag_beats_the_environment_and_that_beats_the_file(tmp_path):
    """Flag > env > file > default."""
    file = tmp_path / "planner.yaml"
    file.write_text(
        "Planner: {adjustment-interval: 60, min-gpu-budget: 2, no-operation: true, max-gpu-budget: 20}\n"
    )
    env = {"PENSTOCK_PLANNER_ADJUSTMENT_INTERVAL": "70", "PENSTOCK_PLANNER_MIN_GPU_BUDGET": "3"}
    options = _dry_run("--config", str(file), "--adjustment-interval", "80", env=env)
    chosen = [options[k] for k in ("adjustment-interval", "min-gpu-budget", "no-operation", "namespace")]
    assert chosen == [80.0, 3, True, "dynamo"]
    assert _dry_run("--config", str(file), "--operate", env=env)["no-operation"] is False


def test_options_that_do_nothing_in_the_mode_are_named(tmp_path):
    """As `validate` and `up` do, of the graph's keys and of options, wherever the process plans."""
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        SAMPLE.read_text().replace("  planner:", "  planner:\n    decodeKvScaleUpThreshold: 0.8", 1)
    )
    options = [
        "--mode",
        "adaptive",
        "--itl-slo",
        "100ms",
        "--adjustment-interval",
        "60",
        "--min-gpu-budget",
        "1",
    ]
    told = [
        "warning: planner: --adjustment-interval: mode adaptive decides every 2 s regardless; leave it out, or choose mode load",
    ]
    for more, keys in ((["--graph", str(graph)], ["spec.planner.decodeKvScaleUpThreshold"]), (CLUSTER, [])):
        lines = CliRunner().invoke(planner, ["run", "--dry-run", *options, *more]).stderr.splitlines()
        assert sorted(line for line in lines if "--" in line) == sorted(told)
        assert [key for key in keys if any(key in line for line in lines)] == keys
        assert len(lines) == len(told) + len(keys)
    assert (
        not CliRunner()
        .invoke(planner, ["run", "--dry-run", "--mode=adaptive", "--adjustment-interval=1"])
        .stderr
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *((["--no-operation"], True), (["--no-operation=true"], True), (["--no-operation=false"], False)),
        *((["--no-operation", "--max-gpu-budget", "4"], True), (["--operate"], False), ([], True)),
    ],
)
def test_no_operation_is_written_as_in_the_document(tmp_path, arguments, expected):
    """Alone or with a value; either beats the file."""
    file = tmp_path / "planner.yaml"
    file.write_text("Planner: {no-operation: true}\n")
    assert _dry_run("--config", str(file), *arguments)["no-operation"] is expected


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_prometheus_without_its_client_is_refused_at_the_start(monkeypatch, more):
    """Before anything is looked for or begun, with the command that mends it."""
    monkeypatch.setitem(sys.modules, "prometheus_api_client", None)
    answer = CliRunner().invoke(planner, ["run", "--prometheus-url", "http://p:9090", *more])
    assert isinstance(answer.exception, ConfigError)
    assert "pip install 'penstock[prometheus]'" in str(answer.exception)


def test_on_kubernetes_only_what_was_said_overrides_the_graphs(tmp_path):
    """Flags, environment and file; nothing by default."""
    file = tmp_path / "planner.yaml"
    file.write_text("Planner: {environment: kubernetes, min-gpu-budget: 2}\n")
    env = {"PENSTOCK_PLANNER_ADJUSTMENT_INTERVAL": "70"}
    options = _dry_run("--config", str(file), "-A", "--max-gpu-budget", "none", env=env)
    assert options == {
        "environment": "kubernetes",
        "min-gpu-budget": 2,
        "adjustment-interval": 70.0,
        "max-gpu-budget": None,
        "all-namespaces": True,
        "graph-name": None,
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ["--graph-name", "llama"],
            ConfigError,
            "--graph-name: has an effect only with --environment kubernetes",
        ),
        (["--max-gpu-budget", "1"], InvalidSpecError, "below the floor"),
        ([*CLUSTER, "--graph", "g.yaml"], ConfigError, "--graph: graphs are read from the cluster"),
        ([*CLUSTER, "-A", "--namespace", "serving"], ConfigError, "are mutually exclusive; use one"),
        ([*CLUSTER, "--speed", "2"], ConfigError, "--speed: 2; pods run in real time"),
        (
            [*CLUSTER, "--router-url", "http://r:1"],
            ConfigError,
            "--router-url: on Kubernetes routers are discovered from their pods",
        ),
        ([*CLUSTER, "--max-gpu-budget", "many"], InvalidSpecError, "--max-gpu-budget"),
        ([*CLUSTER, "--kubeconfig", "/nowhere"], ConfigError, "/nowhere"),
        (["--namespace", "Not A Label"], ConfigError, "--namespace"),
        (["--speed", "0"], ConfigError, "--speed"),
        (
            ["--profile", "p"],
            ConfigError,
            "--profile: p, but mode adaptive does not use a profile; remove it",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path, monkeypatch, arguments, error, message
):
    """A configuration error, nothing written."""
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(tmp_path))
    answer = CliRunner().invoke(planner, ["run", *arguments])
    assert isinstance(answer.exception, error)
    assert message in str(answer.exception)
    assert not list(tmp_path.rglob("*.jsonl"))


class _Backend:
    """One worker of each role that never changes; it ends the planner when a condition holds, or at the first request."""

    def __init__(self, is_over=lambda: False):
        self.is_over = is_over
        self.stop = asyncio.Event()
        self.requests = []

    async def observe(self):
        if self.is_over():
            self.stop.set()
        pools = {role: PoolCounts(1, gpus=1) for role in (P, D)}
        endpoints = (
            Endpoint("llama_decode", D, "http://127.0.0.1:9"),
            Endpoint("llama_prefill", P, "http://127.0.0.1:9"),
        )
        return TargetState(pools, is_adjusting=False, endpoints=endpoints)

    async def scale(self, role, replicas, *, decision_id):
        self.requests.append((role, replicas, decision_id))
        self.stop.set()


def _service(speed=SPEED, **given):
    options = join(given={key.replace("_", "-"): value for key, value in given.items()})
    return PlannerService(options, None, speed=speed, host="127.0.0.1", metrics_port=0)


async def _run(backend, router_url="http://127.0.0.1:9", **given):
    await run_until_stopped(_service(**given), backend, router_url, backend.stop)


async def test_a_planner_pulls_decides_records_and_draws_in_real_time(tmp_path):
    """Against a served router page at speed 200: one decision, asked of the target, replayable."""
    backend = _Backend()
    async with served(PAGE) as url:
        await _run(backend, url, log_dir=str(tmp_path), mode="load")
    assert backend.requests[0] == (D, 2, "d000001")
    ledger = read_ledger(tmp_path)
    kinds = [r["type"] for r in ledger.records]
    assert kinds[0] == "header"
    assert kinds.count("pull") > 2
    assert replay(ledger).differences == ()
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "state.json").exists()


async def test_a_disk_that_hangs_delays_no_decision(tmp_path, monkeypatch):
    """A pipe without a reader holds whoever opens state.json; the planner decides, counts what it drops, and ends."""
    others = set(threading.enumerate())
    os.mkfifo(tmp_path / "state.json.tmp")
    monkeypatch.setattr(files, "CLOSE_S", 0.1)
    monkeypatch.setattr(files, "QUEUED", 3)
    stats, boards = [], []
    begin, make = PlannerStats.begin, Dashboard.__init__
    monkeypatch.setattr(
        Dashboard,
        "__init__",
        lambda self, *given, **more: (boards.append(self), make(self, *given, **more))[1],
    )
    monkeypatch.setattr(
        PlannerStats, "begin", lambda self, config: (stats.append(self), begin(self, config))[1]
    )
    backend = _Backend(lambda: stats[0].ticks > 20)
    await _run(backend, log_dir=str(tmp_path), mode="adaptive")
    assert any(record["type"] == "decision" for record in read_ledger(tmp_path).records)
    assert stats[0].dropped_updates >= 15
    with (tmp_path / "state.json.tmp").open("rb") as pipe:  # lets the thread end
        pipe.read()
    for thread in set(threading.enumerate()) - others:
        if thread.name == "planner files":
            thread.join()
    # The planner has left the dashboard's files open, as the disk did not answer.
    for board in boards:
        board.close()


async def test_what_keeps_a_planner_from_starting_is_named(tmp_path):
    """Source router without a URL, and a file in place of the log folder."""
    with pytest.raises(ConfigError, match="--router-url: not given and not in the statefile"):
        await _run(_Backend(), None, log_dir=str(tmp_path))
    (tmp_path / "log").write_text("in the way")
    with pytest.raises(ConfigError, match=r"--log-dir .*: cannot be written to: Not a directory"):
        await _run(_Backend(), log_dir=str(tmp_path / "log" / "planner"))
