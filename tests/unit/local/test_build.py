"""A graph becomes the first statefile."""

import json
import socket
from pathlib import Path

import pytest
from certificates import write_certificates

from penstock.api import GraphSpec
from penstock.api.manifests import load_graph
from penstock.core.errors import ConfigError, InvalidSpecError
from penstock.core.local_state import EntryState
from penstock.local.build import (
    UpOptions,
    argv_of,
    check_model,
    environment_of,
    initial_state,
    model_warnings,
    ports_for,
    visible_devices,
)
from penstock.local.ports import FIRST_PORT, LAST_PORT, choose_port, is_free, unused_port
from penstock.runtimes import RuntimeContext

GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
spec:
  model: {name: m, servedName: served}
  runtime: simulated
  services:
    frontend: {role: router, replicas: 2}
    prefill: {role: prefill, replicas: 1, gpusPerReplica: 2, terminationGracePeriodSeconds: 60}
    decode: {role: decode, replicas: 2}
  planner: {maxGpuBudget: 6}
"""


@pytest.fixture
def build():
    """Return a function: manifest text and options -> statefile."""

    def make(text=GRAPH, *, gpus=None, with_planner=True, environment=None):
        context = RuntimeContext(
            python="python",
            graph_file="g.yaml",
            discovery="/s/n.json",
            namespace="n",
            speed=20.0,
            log_dir="/l/planner",
        )
        options = UpOptions(port=8123, gpus=gpus, speed=20.0, with_planner=with_planner)
        return initial_state(
            load_graph(text), options, context, log_dir=Path("/l"), environment=environment or {}
        )

    return make


def test_every_replica_is_requested_with_gpus_of_its_own(build):
    """Names follow the document, ids are exclusive, one router serves the machine."""
    state = build()
    assert list(state.entries) == ["n_frontend", "n_prefill", "n_decode", "n_decode_1", "n_planner"]
    assert [entry.gpus for entry in state.entries.values()] == [(), (0, 1), (2,), (3,), ()]
    assert all(entry.state is EntryState.REQUESTED for entry in state.entries.values())
    assert state.entries["n_prefill"].grace_s == 60
    assert state.entries["n_frontend"].port == 8123
    assert state.entries["n_decode"].port is None


def test_the_arbiter_knows_budget_url_model_and_the_planners_folder(build):
    """The budget is the planner's maximum; --gpus bounds the host besides."""
    arbiter = build().arbiter
    assert (arbiter.gpus, arbiter.budget) == (6, 6)
    assert (arbiter.router_url, arbiter.model) == ("http://127.0.0.1:8123", "served")
    assert arbiter.planner_log_dir == "/l/planner"
    smaller = build(gpus=4).arbiter
    assert (smaller.gpus, smaller.budget) == (4, 4)
    larger = build(gpus=16).arbiter
    assert (larger.gpus, larger.budget) == (16, 6)


def test_a_service_with_no_replicas_waits_as_its_base_entry(build):
    """Its command is there for the planner's first scale-up."""
    state = build(GRAPH.replace("decode, replicas: 2", "decode, replicas: 0"))
    assert state.entries["n_decode"].state is EntryState.STOPPED
    assert state.entries["n_decode"].gpus == ()


@pytest.mark.parametrize(
    ("old", "new", "gpus", "words"),
    [
        (
            "replicas: 2}\n  planner",
            "replicas: 2}\n  planner",
            3,
            "--gpus: 3; the graph starts with 4 GPUs",
        ),
        ("gpusPerReplica: 2", "gpusPerReplica: 2, nodesPerReplica: 2", None, "prefill.nodesPerReplica: 2"),
        ("    frontend: {role: router, replicas: 2}\n", "", None, "role: router"),
        (
            "gpusPerReplica: 2",
            "gpusPerReplica: 2, env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}]",
            None,
            "export HF_TOKEN",
        ),
    ],
)
def test_what_one_machine_cannot_give_is_refused_with_the_remedy(build, old, new, gpus, words):
    """Each impossibility is one ConfigError before anything is started."""
    with pytest.raises(ConfigError, match=words):
        build(GRAPH.replace(old, new), gpus=gpus)


def test_workers_that_speak_https_need_a_folder_and_are_reached_so(build, tmp_path):
    """On one machine nothing mounts a Secret; the supervisor writes their URLs with the scheme of their entries."""
    write_certificates(tmp_path)
    tls = {"caBundle": (tmp_path / "ca.crt").read_text()}

    def graph(**more):
        return GRAPH.replace("spec:\n", f"spec:\n  engine: {json.dumps({'tls': {**tls, **more}})}\n", 1)

    with pytest.raises(ConfigError, match=r"engine\.tls\.folder: null"):
        build(graph())
    schemes = {each.role: each.scheme for each in build(graph(folder=str(tmp_path))).entries.values()}
    assert schemes["router"] == "http"
    assert schemes["prefill"] == "https"


def test_a_variable_from_a_secret_may_come_from_the_callers_environment(build):
    """Exporting it is enough."""
    secret = "gpusPerReplica: 2, env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}]"
    assert build(GRAPH.replace("gpusPerReplica: 2", secret), environment={"HF_TOKEN": "x"}).entries


def spec_of(name, runtime="vllm"):
    """Return a graph with the model."""
    services = {"frontend": {"role": "router"}, "worker": {"role": "aggregated"}}
    return GraphSpec.model_validate({"model": {"name": name}, "runtime": runtime, "services": services})


@pytest.mark.parametrize("name", ["./tiny-model", "../tiny-model", "/no/such/tiny-model"])
def test_a_path_without_a_folder_is_refused(name, tmp_path, monkeypatch):
    """Its workers would end at their start, several times, before anybody learnt why."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InvalidSpecError, match=r"spec\.model\.name.*is not a folder or file here.*make-model"
    ):
        check_model(spec_of(name))
    check_model(spec_of(name, "simulated"))


def test_a_name_that_may_be_a_folder_is_warned_of(tmp_path, monkeypatch):
    """`tiny-model` may be an old id on Hugging Face; `org/model` is one."""
    monkeypatch.chdir(tmp_path)
    (warning,) = model_warnings(spec_of("tiny-model"))
    assert warning.path == "spec.model.name"
    assert "Hugging Face" in warning.message
    assert not list(model_warnings(spec_of("org/tiny-model")))
    assert not list(model_warnings(spec_of("tiny-model", "simulated")))
    (tmp_path / "tiny-model").mkdir()
    assert not list(model_warnings(spec_of("tiny-model")))
    check_model(spec_of("./tiny-model"))


def test_a_model_may_be_a_file(tmp_path, monkeypatch):
    """As llama.cpp's GGUF is, and what vLLM loads of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    check_model(spec_of("./tiny.gguf"))
    assert not list(model_warnings(spec_of("tiny.gguf")))


@pytest.fixture
def listening():
    """Yield a port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        yield server.getsockname()[1]


def test_a_port_that_is_listened_on_is_not_free(listening):
    """`penstock up` notices it before anything is started."""
    assert not is_free(listening)
    assert is_free(unused_port())


def test_chosen_ports_lie_in_the_worker_range_and_are_not_promised_twice():
    """Promised ports count as taken although no process listens yet."""
    first = choose_port([])
    second = choose_port([first])
    assert FIRST_PORT <= first <= LAST_PORT
    assert first != second


def test_a_worker_keeps_its_port_unless_somebody_took_it(entry_of, listening):
    """A restart is at the same address where that is possible; the router's address never changes."""
    free = unused_port()
    kept = entry_of(placeholders=("port",), ports={"port": free})
    lost = entry_of(placeholders=("port",), ports={"port": listening})
    router = entry_of("frontend", "router", placeholders=("port",), ports={"port": listening})
    assert ports_for(kept, [kept]) == {"port": free}
    assert ports_for(lost, [lost])["port"] != listening
    assert ports_for(router, [router]) == {"port": listening}


def test_placeholders_are_filled_and_other_braces_stay(entry_of):
    """Arguments hold JSON."""
    entry = entry_of(cmd=("x", "--port", "{port}", '{"kv": {"port": 1}}'), ports={"port": 21000})
    assert argv_of(entry) == ["x", "--port", "21000", '{"kv": {"port": 1}}']


def test_a_worker_sees_its_gpus_only_and_carries_the_mark(entry_of):
    """CUDA_VISIBLE_DEVICES is set for every worker, empty for one without GPUs, and for no other process."""
    worker = entry_of(gpus=(2, 3), env={"SIDE": "{port}", "CACHE": "{cache_folder}/x"}, ports={"port": 5})
    assert environment_of(worker, "/s.json", Path("/c"), {}) == {
        "SIDE": "5",
        "CACHE": "/c/x",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "PENSTOCK_STATEFILE": "/s.json",
    }
    assert environment_of(entry_of(gpus=()), "/s.json", Path("/c"), {})["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(
        entry_of("frontend", "router"), "/s.json", Path("/c"), {}
    )


@pytest.mark.parametrize(
    ("gpus", "inherited", "expected"),
    [((0, 1), None, "0,1"), ((0, 1), "4, 6", "4,6"), ((1,), "GPU-a,GPU-b", "GPU-b"), ((2,), "4", "2")],
)
def test_ids_count_the_devices_that_the_arbiter_sees(gpus, inherited, expected):
    """An inherited list is indexed, so two graphs on one host can share it out."""
    assert visible_devices(gpus, inherited) == expected
