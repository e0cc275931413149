"""Builders that the graph's tests share."""

from __future__ import annotations

import copy

import pytest

from penstock_graph.models import GraphDeployment
from penstock_graph.runtimes import RuntimeContext

_BASE = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GraphDeployment",
    "metadata": {"name": "llama"},
    "spec": {
        "model": {"name": "meta/llama", "servedName": "llama"},
        "runtime": "simulated",
        "services": {
            "frontend": {"role": "router"},
            "prefill": {"role": "prefill"},
            "decode": {"role": "decode"},
        },
    },
}


def _merge(target, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
    return target


@pytest.fixture
def build():
    """Return a function that makes the base graph with changes to its spec."""

    def make(**spec_changes) -> GraphDeployment:
        return GraphDeployment.model_validate(_merge(copy.deepcopy(_BASE), {"spec": spec_changes}))

    return make


@pytest.fixture
def context() -> RuntimeContext:
    """A local context at speed 1."""
    return RuntimeContext(
        python="/py", graph_file="/g.yaml", discovery="/state/llama.json", namespace="llama"
    )
