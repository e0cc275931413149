from __future__ import annotations

import asyncio
import copy
import dataclasses
from pathlib import Path

import pytest
import yaml

from penstock.api import GraphDeployment
from penstock.cli.graph import as_yaml, context_of, objects_of
from penstock.core.errors import ForbiddenError
from penstock.kube.kinds import KINDS, LEADER_WORKER_SET
from penstock.kube.objects.names import OPERATOR
from penstock_operator.plan.drift import differences, with_content_digest
from penstock_operator.resources import BuildContext, adapter, children

pytestmark = pytest.mark.cluster

SAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "manifests/samples").glob("*.yaml"))
    if "kind: GraphDeployment" in path.read_text(encoding="utf-8")
]
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
FULL = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GraphDeployment",
    "metadata": {"name": "full"},
    "spec": {
        "model": {"name": "meta/llama"},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "envFrom": [{"secretRef": {"name": "more", "optional": True}}],
        "services": {
            "frontend": {"role": "router", "replicas": 3},
            "prefill": {"role": "prefill", "gpusPerReplica": 2, "nodePool": "claim", "scaling": {}},
            "decode": {
                "role": "decode",
                "nodePool": "claim",
                "terminationGracePeriodSeconds": 1,
                "podTemplate": {
                    "metadata": {"labels": {"team": "a"}},
                    "spec": {
                        "priorityClassName": None,
                        "tolerations": [{"key": "spot", "operator": "Exists"}],
                        "containers": [
                            {
                                "name": "main",
                                "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "80Gi"}},
                                "env": [{"name": "HF_TOKEN", "value": "x"}],
                                "ports": [{"containerPort": 9000, "name": "debug"}],
                            },
                            {
                                "name": "side",
                                "image": "busybox",
                                "securityContext": {
                                    "allowPrivilegeEscalation": False,
                                    "capabilities": {"drop": ["ALL"]},
                                },
                            },
                        ],
                        "volumes": [{"name": "home", "emptyDir": {"sizeLimit": "1Gi"}}],
                    },
                },
            },
        },
        "nodePools": {
            "claim": {
                "nodeSelector": {"gpu": "a100"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "cacheMount": "/models",
                "cacheClaim": "weights",
            }
        },
        "router": {"auth": {"apiKeysSecret": "keys"}},
        "planner": {"maxGpuBudget": 64},
    },
}
"""Every part that the samples leave out."""


def wide(manifest):
    """The same graph with a decode service over two nodes."""
    changed = copy.deepcopy(manifest)
    changed["metadata"]["name"] = "wide"
    changed["spec"]["services"]["decode"] |= {"nodesPerReplica": 2, "gpusPerReplica": 16}
    return changed


MANIFESTS = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in SAMPLES] + [FULL]
NAMES = [path.stem for path in SAMPLES] + ["full"]


@pytest.fixture
def restricted(make_namespace, crds) -> str:
    """A namespace that refuses pods outside the restricted standard."""
    return make_namespace("restricted", RESTRICTED)


@pytest.fixture
def live(client, restricted):
    """Return a function that makes a graph in the cluster; it returns the graph and the builders' context."""

    async def make(manifest):
        placed = copy.deepcopy(manifest)
        placed["metadata"]["namespace"] = restricted
        stored = await client.create(placed, field_manager="test")
        context = BuildContext(
            owner_uid=stored["metadata"]["uid"], namespace=restricted, operator_namespace="penstock"
        )
        return GraphDeployment.model_validate(placed), context

    return make


def without_others(obj):
    """An object without what controllers write into it meanwhile, which counts its versions up."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
    own = [each for each in metadata["managedFields"] if each["manager"] == OPERATOR]
    kept = {key: value for key, value in obj.items() if key != "status"}
    return {**kept, "metadata": {**metadata, "managedFields": own, "annotations": None}}


def pod_of(template, namespace):
    """A pod as a workload's controller would make it."""
    metadata = {**template["metadata"], "name": "probe", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


async def admitted(client, pod):
    """The pod as the server would store it; a new ServiceAccount reaches its admission after a moment."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.create(pod, field_manager="test", dry_run=True)
            except ForbiddenError as exc:
                if "looking up service account" not in str(exc):
                    raise
            await asyncio.sleep(0.05)


def pod_templates(objects):
    """Pod templates of all workloads."""
    for each in objects:
        if each["kind"] == "Deployment":
            yield each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            yield each["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            yield each["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def is_restricted(template):
    """Whether a template uses no folder of the node; the one thing that a manifest may ask for."""
    return not any("hostPath" in each for each in template["spec"]["volumes"])


@pytest.mark.parametrize("manifest", MANIFESTS, ids=NAMES)
async def test_children_are_accepted_and_settle(client, live, manifest):
    """Each object is taken as it is, applying it again changes nothing, and read or listed it has not drifted."""
    graph, context = await live(manifest)
    objects = children(graph, context, replicas={}, unavailable={})
    objects += [
        adapter(graph, name, context, replicas=each.replicas)
        for name, each in graph.spec.services.items()
        if each.scaling is not None
    ]
    for each in map(with_content_digest, objects):
        first = await client.apply(each, field_manager=OPERATOR)
        second = await client.apply(each, field_manager=OPERATOR)
        assert without_others(first) == without_others(second)
        kind, name = KINDS[each["kind"]], each["metadata"]["name"]
        listed = (await client.list(kind, namespace=context.namespace)).items
        read = await client.get(kind, name, namespace=context.namespace)
        found = [first, read, *(one for one in listed if one["metadata"]["name"] == name)]
        assert [list(differences(each, one)) for one in found] == [[]] * 3


@pytest.mark.parametrize("manifest", [*MANIFESTS, wide(FULL)], ids=[*NAMES, "wide"])
async def test_pods_pass_the_restricted_standard(client, live, manifest):
    """A pod of each template is admitted, with its gate, alongside the account that it names."""
    graph, context = await live(manifest)
    several = dataclasses.replace(context, kinds=frozenset({LEADER_WORKER_SET}))
    objects = children(graph, several, replicas={}, unavailable={})
    for each in objects:
        if each["kind"] == "ServiceAccount":
            await client.apply(each, field_manager=OPERATOR)
    found = list(pod_templates(objects))
    assert len(found) >= len(graph.spec.services)
    for template in found:
        made = await admitted(client, pod_of(template, context.namespace))
        assert made["spec"].get("schedulingGates") == template["spec"].get("schedulingGates")


async def test_a_nodes_folder_needs_a_privileged_namespace(client, live, make_namespace):
    """A cacheMount without a claim is refused by the restricted standard, and taken where none is enforced."""
    manifest = copy.deepcopy(FULL)
    del manifest["spec"]["nodePools"]["claim"]["cacheClaim"]
    graph, context = await live(manifest)
    free = dataclasses.replace(context, namespace=make_namespace("free"))
    for each in (context, free):
        objects = children(graph, each, replicas={}, unavailable={})
        for child in objects:
            if child["kind"] == "ServiceAccount":
                # Its owner lives in one of the namespaces only: the collector would take the other's.
                del child["metadata"]["ownerReferences"]
                await client.apply(child, field_manager=OPERATOR)
    (template,) = (each for each in pod_templates(objects) if each["metadata"]["labels"].get("team") == "a")
    assert not is_restricted(template)
    await admitted(client, pod_of(template, free.namespace))
    with pytest.raises(ForbiddenError, match="hostPath"):
        await admitted(client, pod_of(template, context.namespace))


def test_a_rendering_is_what_kubectl_takes(api_server, restricted):
    """The command line's YAML passes the server's own check."""
    graph = GraphDeployment.model_validate(FULL)
    text = as_yaml(objects_of(graph, context_of("", namespace=restricted), service=None))
    out = api_server.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=text)
    assert len(out.splitlines()) == len(list(yaml.safe_load_all(text)))
