"""What keeps pods from serving is said in the graph's conditions, and ends without a hand."""

from __future__ import annotations

import pytest
from operating import condition, graph, is_ready, running, set_status, until

from penstock.kube.kinds import GRAPH_DEPLOYMENT, POD

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WAIT_S = 90.0


def says(client, namespace, kind, reason, *words):
    """Return a check that a condition gives this reason, with these words."""

    async def check():
        found = await condition(client, namespace, kind)
        return found.get("reason") == reason and all(each in found["message"] for each in words)

    return check


async def pod_of(client, namespace, service):
    """Return the only pod of a service."""
    [pod] = (await client.list(POD, namespace=namespace, labels={"penstock.dev/service": service})).items
    return pod


async def kubelet_says(client, pod, *, ready, state):
    """Write a pod's status as its kubelet would."""
    container = {
        "name": pod["spec"]["containers"][0]["name"],
        "image": pod["spec"]["containers"][0]["image"],
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    }
    word = "True" if ready else "False"
    kept = [each for each in pod["status"]["conditions"] if each["type"] not in {"Ready", "ContainersReady"}]
    conditions = [*kept, *({"type": each, "status": word} for each in ("Ready", "ContainersReady"))]
    status = {"containerStatuses": [container], "conditions": conditions}
    await set_status(client, POD, pod["metadata"]["name"], pod["metadata"]["namespace"], status)


RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
PULL = 'rpc error: code = NotFound desc = failed to pull image "example.com/none:1": not found'
PULLING = {
    "waiting": {"reason": "ImagePullBackOff", "message": f"Back-off pulling image: ErrImagePull: {PULL}"}
}


async def test_a_container_that_cannot_run_is_told_until_it_does(crds, kwok, make_node, client, namespace):
    """Named in Degraded, and Ready is false while it is the only one of its role; both end with it."""
    make_node(gpus=8)
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace):
        await until(is_ready(client, namespace), "readiness", timeout_s=WAIT_S)
        pod = await pod_of(client, namespace, "decode")
        await kubelet_says(client, pod, ready=False, state=PULLING)
        words = (pod["metadata"]["name"], "not found", "correct the image")
        told = says(client, namespace, "Degraded", "ImagePull", *words)
        await until(told, "the condition", timeout_s=WAIT_S)
        assert (await condition(client, namespace, "Ready"))["status"] == "False"
        assert (await pod_of(client, namespace, "decode"))["metadata"]["uid"] == pod["metadata"]["uid"]
        await kubelet_says(client, pod, ready=True, state=RUNNING)
        await until(is_ready(client, namespace), "readiness again", timeout_s=WAIT_S)
        assert (await condition(client, namespace, "Degraded"))["status"] == "False"


async def test_a_node_pool_without_nodes_is_told_in_the_schedulers_words(
    crds, kwok, make_node, client, namespace
):
    """Schedulable is false with the scheduler's message and a remedy, until such a node comes."""
    make_node(gpus=8)
    wanted = graph(namespace, nodePools={"big": {"nodeSelector": {"example.com/pool": namespace}}})
    wanted["spec"]["services"]["decode"]["nodePool"] = "big"
    await client.create(wanted, field_manager="test")
    async with running(client, namespace):
        remedy = "label the nodes as the node pool's nodeSelector says"
        words = ("g-decode-", "nodes are available", remedy)
        told = says(client, namespace, "Schedulable", "Unschedulable", *words)
        await until(told, "the condition", timeout_s=WAIT_S)
        live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
        assert live["status"]["phase"] in {"Pending", "Degraded"}
        make_node(gpus=8, labels={"example.com/pool": namespace})
        await until(is_ready(client, namespace), "readiness", timeout_s=WAIT_S)
        assert (await condition(client, namespace, "Schedulable"))["status"] == "True"
