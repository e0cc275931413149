"""Graphs whose workers can be of either role."""

import pytest

from penstock.api import GraphDeployment
from penstock.runtimes import RuntimeContext, process_specs


def _graph(decode=None, **engine):
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "g"},
        "spec": {
            "model": {"name": "m", "contextTokens": 8192},
            "runtime": "simulated",
            "services": {
                "frontend": {"role": "router"},
                "prefill": {"role": "prefill", "env": [{"name": "A", "value": "1"}], "args": ["--seed", "1"]},
                "decode": {"role": "decode", "env": [{"name": "A", "value": "1"}], "args": ["--seed", "1"]}
                | (decode or {}),
            },
            "engine": {"switchable": True} | engine,
        },
    }


@pytest.mark.parametrize("key", ["args", "env", "envFrom", "podTemplate"])
def test_what_a_process_starts_with_is_the_same_in_both_roles(key):
    """A worker keeps its process, so that another list of arguments would never take effect."""
    given = {
        "args": [],
        "env": [],
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "podTemplate": {"spec": {"priorityClassName": "high"}},
    }
    with pytest.raises(ValueError, match="differs from that of prefill, whose workers are to take this role"):
        GraphDeployment.model_validate(_graph({key: given[key]}))


def test_sizes_bounds_and_times_may_differ():
    """They are the pools', not the process's."""
    decode = {"replicas": 2, "scaling": {"maxReplicas": 3}, "terminationGracePeriodSeconds": 5}
    assert GraphDeployment.model_validate(_graph(decode)).spec.engine.switchable


@pytest.mark.parametrize("runtime", ["simulated", "vllm"])
def test_workers_of_both_roles_have_one_command(runtime):
    """Ports are placeholders, so that the lines are equal; neither names a role that the worker may leave."""
    data = _graph()
    data["spec"] |= {"runtime": runtime, "router": {"kvEventsPort": 5557, "policy": "prefix-cost"}}
    graph = GraphDeployment.model_validate(data)
    context = RuntimeContext(namespace="n", discovery="/s/n.json", python="python", graph_file="g.yaml")
    lines = {spec.role: spec for spec in process_specs(graph, context) if spec.role in {"prefill", "decode"}}
    assert lines["prefill"].argv == lines["decode"].argv
    assert (lines["prefill"].env, lines["prefill"].ports) == (lines["decode"].env, lines["decode"].ports)
    assert '"kv_role":"kv_both"' in " ".join(lines["decode"].argv)
