"""A graph becomes the first statefile."""

from pathlib import Path

import pytest

from penstock.api.manifests import load_graph
from penstock.core.errors import ConfigError
from penstock.core.local_state import EntryState
from penstock.local.build import UpOptions, initial_state
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
            "decode.replicas: 2: one replica needs 1 GPU, but 3",
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


def test_a_variable_from_a_secret_may_come_from_the_callers_environment(build):
    """Exporting it is enough."""
    secret = "gpusPerReplica: 2, env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}]"
    assert build(GRAPH.replace("gpusPerReplica: 2", secret), environment={"HF_TOKEN": "x"}).entries
