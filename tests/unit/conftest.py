"""The graph that the tests of several packages build on."""

from __future__ import annotations

import copy

import pytest

from penstock.api import GraphDeployment


def _merge(target, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
    return target


@pytest.fixture
def base_runtime():
    """The runtime of the base graph; a folder of tests may name another."""
    return "simulated"


@pytest.fixture
def build(base_runtime):
    """Return a function that makes the base graph with changes to its spec."""
    base = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"name": "meta/llama", "servedName": "llama"},
            "runtime": base_runtime,
            "services": {
                "frontend": {"role": "router"},
                "prefill": {"role": "prefill"},
                "decode": {"role": "decode"},
            },
        },
    }

    def make(**spec_changes) -> GraphDeployment:
        return GraphDeployment.model_validate(_merge(copy.deepcopy(base), {"spec": spec_changes}))

    return make
