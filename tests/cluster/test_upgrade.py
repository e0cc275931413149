"""Graphs that an older release's definitions stored, under today's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.api import GraphDeployment
from penstock.api.manifests.validation import validated
from penstock.kube.client import KubeClient
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_planner.cluster.fleet import parse

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
FIRST = "c0f456dc"
"""The commit whose definitions store next to no defaults; nothing was released before it."""
DEFINITION = "crds/penstock.dev_graphdeployments.yaml"
SAMPLES = ("aggregated", "disaggregated", "two-node-pools", "vllm-disaggregated")
"""Not Dynamo's: it stored settings of Penstock's router, which are refused alongside a frontend of its own."""


def at_first(path):
    """Documents of a file as it was then."""
    done = subprocess.run(
        ["git", "show", f"{FIRST}:{path}"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        pytest.skip(f"no commit {FIRST} here: {done.stderr.strip()}")
    return [each for each in yaml.safe_load_all(done.stdout) if each]


async def test_graphs_stored_under_the_first_definition_are_valid_and_can_be_edited(own_api_server, tmp_path):
    """Operator and planner read them, and their specification can be edited."""
    (old,) = at_first(DEFINITION)
    definition = tmp_path / "old.yaml"
    definition.write_text(yaml.safe_dump(old))
    own_api_server.install_crds(definition)
    client = await KubeClient.connect(kubeconfig=own_api_server.kubeconfig)
    try:
        for name in SAMPLES:
            for graph in at_first(f"manifests/samples/{name}.yaml"):
                if graph["kind"] == "GraphDeployment":
                    graph["metadata"] |= {"name": f"old-{name}"[:40], "namespace": "default"}
                    await client.create(graph, field_manager="test")
        own_api_server.install_crds()
        stored = (await client.list(GRAPH_DEPLOYMENT, namespace="default")).items
        assert len(stored) == len(SAMPLES)
        for each in stored:
            model, problems = validated(GraphDeployment, each)
            assert [f"{one.path}: {one.message}" for one in problems] == [], each["metadata"]["name"]
            assert model is not None
            assert parse(each).spec == model.spec
            where = {"namespace": "default", "field_manager": "test"}
            name = each["metadata"]["name"]
            label = {"metadata": {"labels": {"team": "a"}}}
            assert (await client.patch(GRAPH_DEPLOYMENT, name, label, **where))["spec"] == each["spec"]
            changed = await client.patch(GRAPH_DEPLOYMENT, name, {"spec": {"paused": True}}, **where)
            assert changed["spec"]["paused"] is True
    finally:
        await client.close()
