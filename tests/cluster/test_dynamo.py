"""Graphs of runtime dynamo against a real API server: the kind in which workers register, and who may write it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from operating import condition, graph, running, until

from penstock.core.errors import ForbiddenError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import CONFIG_MAP, KINDS
from penstock_dynamo.runtime import WORKER_METADATA

pytestmark = pytest.mark.cluster

DEFINITION = Path(__file__).parents[2] / "manifests" / "dynamo-discovery.yaml"
NAMESPACE = "default"
DYNAMO = {"runtime": "dynamo", "engine": {"mocker": True}, "router": {"policy": "kv-cost"}}


def registration(name):
    """Return an object as a worker of Dynamo 1.6 applies it, with keys that no schema names."""
    data = {"endpoints": {"ns/backend/generate/1": {"instance_id": 2**52}}, "model_cards": {}}
    return WORKER_METADATA.of({"name": name, "namespace": NAMESPACE}, spec={"data": data})


async def test_dynamos_kind_is_asked_for_and_written_by_the_graphs_accounts_alone(own, monkeypatch):
    """Missing, it is named with its remedy; created, the graph's workers and frontends register, and may do no more."""
    plane, client = own
    # The client stands for Dynamo's, too, which knows its own kind.
    monkeypatch.setattr("penstock.kube.kinds.KINDS", {**KINDS, WORKER_METADATA.kind: WORKER_METADATA})
    await client.create(graph(NAMESPACE, **DYNAMO), field_manager="test")

    async def degraded():
        return (await condition(client, NAMESPACE, "Degraded")).get("reason") == "MissingCRD"

    async def mended():
        return not await degraded()

    async with running(client, NAMESPACE, resync_s=0.5):
        await until(degraded, "the missing kind is named")
        plane.install_crds(DEFINITION)
        await until(mended, "the kind is found without a change of the graph")

    for account in ("g-worker", "g-router"):
        kubeconfig = plane.service_account_kubeconfig(NAMESPACE, account)
        theirs = await KubeClient.connect(kubeconfig=kubeconfig, rng=random.Random(3))
        try:
            written = await theirs.apply(registration(account), field_manager="dynamo-worker")
            assert written["spec"] == registration(account)["spec"]
            with pytest.raises(ForbiddenError):
                await theirs.list(CONFIG_MAP, namespace=NAMESPACE)
        finally:
            await theirs.close()
    registered = (await client.list(WORKER_METADATA, namespace=NAMESPACE)).items
    assert {each["metadata"]["name"] for each in registered} == {"g-worker", "g-router"}
