"""Graphs behind a Gateway against a real API server: the InferencePool, its definition, and its end."""

from __future__ import annotations

import json
import os

import pytest
from operating import condition, edit, graph, names, running, until

from penstock.kube.kinds import INFERENCE_POOL

pytestmark = pytest.mark.cluster

NAMESPACE = "default"
REAL = os.environ.get("INFERENCE_POOL_CRD")
"""The definition of the Gateway API Inference Extension (config/crd/bases/, v1.0.0); without it, one that checks less."""
OURS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "inferencepools.inference.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
    },
    "spec": {
        "group": "inference.networking.k8s.io",
        "names": {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}


async def test_a_pool_comes_with_its_kind_and_goes_with_the_gateway(own):
    """Missing, the kind is named; once it is there the pool is made, mended, and deleted when no longer wanted."""
    plane, client = own
    await client.create(graph(NAMESPACE, router={"gateway": {"enabled": True}}), field_manager="test")

    async def degraded():
        return (await condition(client, NAMESPACE, "Degraded")).get("reason") == "MissingCRD"

    async def pools():
        return await names(client, INFERENCE_POOL.kind, NAMESPACE)

    async def made():
        return not await degraded() and await pools() == {"g-pool"}

    async def mended():
        pool = await client.get(INFERENCE_POOL, "g-pool", namespace=NAMESPACE)
        return pool["spec"]["endpointPickerRef"]["name"] == "g-frontend"

    async def gone():
        return await pools() == set()

    async with running(client, NAMESPACE, resync_s=0.5):
        await until(degraded, "the missing kind is named")
        plane.kubectl("create", "-f", REAL or "-", stdin=json.dumps(OURS))
        await until(made, "the pool is made without a change of the graph")
        pool = await client.get(INFERENCE_POOL, "g-pool", namespace=NAMESPACE)
        assert pool["spec"]["endpointPickerRef"]["port"] == {"number": 9002}
        other = {"endpointPickerRef": {"name": "other"}}
        await edit(client, NAMESPACE, other, name="g-pool", kind=INFERENCE_POOL)
        await until(mended, "the pool is as the graph says again")
        await edit(client, NAMESPACE, {"router": {"gateway": {"enabled": False}}})
        await until(gone, "the pool is deleted")
