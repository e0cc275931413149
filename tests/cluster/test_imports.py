"""What `penstock import` makes of Dynamo's deployments is what a cluster takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock.api import GraphDeployment
from penstock.cli.graph import as_yaml, context_of, objects_of
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_dynamo.importer import import_dgd

pytestmark = pytest.mark.cluster

IMPORTS = sorted((Path(__file__).parents[2] / "manifests/import").glob("*.yaml"))


@pytest.mark.parametrize("path", IMPORTS, ids=lambda path: path.stem)
async def test_imported_graphs_and_their_pods_are_accepted(client, api_server, namespace, crds, path):
    """The graph means the same to the server as to the models, and the objects built of it pass its checks."""
    printed = as_yaml([import_dgd(path.read_text(encoding="utf-8")).graph.to_manifest()])
    document = yaml.safe_load(printed)
    document["metadata"]["namespace"] = namespace

    live = await client.create(document, field_manager="test", dry_run=True)

    graph = GraphDeployment.model_validate(document)
    assert GraphDeployment.model_validate(live).spec == graph.spec
    assert live["apiVersion"] == GRAPH_DEPLOYMENT.api_version
    strictly = ("create", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-")
    assert "created" in api_server.kubectl(*strictly, stdin=printed)
    text = as_yaml(objects_of(graph, context_of("", namespace=namespace), service=None))
    out = api_server.kubectl(*strictly, stdin=text)
    assert len(out.splitlines()) == len(list(yaml.safe_load_all(text)))
