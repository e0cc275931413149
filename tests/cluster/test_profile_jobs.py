"""ProfileRequests with the real Job controller and fake nodes: GPUs at every instant, ends, quotas, restarts."""

from __future__ import annotations

import asyncio

import pytest
from operating import BudgetWatch, graph, running, set_status, until

from penstock.core.errors import NotFoundError
from penstock.kube.kinds import JOB, POD, PROFILE_REQUEST

pytestmark = [pytest.mark.cluster]

POOL = {"gpu": {"gpuResourceName": "nvidia.com/gpu"}}


def request(namespace, **changes):
    """A request that asks for two GPUs, for a simulated graph on a GPU pool."""
    template = graph(namespace, nodePools=POOL)["spec"]
    template["services"]["decode"]["nodePool"] = "gpu"
    slo = {"ttft": "200ms", "itl": "50ms"}
    spec = {"template": template, "isl": 3000, "osl": 150, "slo": slo, "maxGpus": 2, **changes}
    return PROFILE_REQUEST.of({"name": "fast", "namespace": namespace}, spec=spec)


def says(client, namespace, phase, reason):
    """Return a check of a request's phase and reason; gives the condition's message."""

    async def check():
        status = (await client.get(PROFILE_REQUEST, "fast", namespace=namespace)).get("status", {})
        [condition] = status.get("conditions", [{}])
        return (status.get("phase"), condition.get("reason")) == (phase, reason) and condition["message"]

    return check


async def pods_of(client, namespace):
    """Return the Job's pods."""
    return (await client.list(POD, namespace=namespace, labels={"penstock.dev/profile": "fast"})).items


def pods_are(client, namespace, number):
    """Return a check of how many pods of the Job there are."""

    async def check():
        found = await pods_of(client, namespace)
        return found if len(found) == number else None

    return check


async def fail(client, namespace, name, code, message):
    """End a pod as its kubelet would."""
    ended = {"exitCode": code, "message": message, "startedAt": None, "finishedAt": "2026-01-01T00:01:00Z"}
    state = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [{**state, "state": {"terminated": ended}}]}
    await set_status(client, POD, name, namespace, status)


async def test_a_pod_without_a_node_is_told_in_the_schedulers_words(crds, controllers, client, namespace):
    """GPUs that no node has; and the second try waits until the first pod is gone, whatever becomes of it."""
    await client.create(request(namespace), field_manager="test")
    watch = BudgetWatch(client, namespace, "penstock.dev/profile")
    async with watch.on(), running(client, namespace):
        await until(says(client, namespace, "Profiling", "Unschedulable"), "the scheduler's word")
        [pod] = await until(pods_are(client, namespace, 1), "one pod")
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "2"}
        name = pod["metadata"]["name"]
        held = {"metadata": {"finalizers": [*pod["metadata"]["finalizers"], "test/held"]}}
        await client.patch(POD, name, held, namespace=namespace, field_manager="test")
        await client.delete(POD, name, namespace=namespace, grace_s=30)
        await asyncio.sleep(3)
        assert len(await pods_of(client, namespace)) == 1
        await client.patch(
            POD, name, {"metadata": {"finalizers": []}}, namespace=namespace, field_manager="test"
        )

        async def replaced():
            return [each for each in await pods_of(client, namespace) if each["metadata"]["name"] != name]

        await until(replaced, "the second try")
    assert watch.most == 2


async def test_wrong_options_are_not_tried_again(crds, controllers, client, namespace):
    """Exit code 2 ends the Job at once, though it might try twice; the words are the pod's."""
    await client.create(request(namespace, retries=2), field_manager="test")
    async with running(client, namespace):
        [pod] = await until(pods_are(client, namespace, 1), "the pod")
        await fail(client, namespace, pod["metadata"]["name"], 2, "Error: --isl: too long; lower it")
        check = says(client, namespace, "Failed", "PodFailurePolicy")
        message = await until(check, "the end")
    assert "Error: --isl: too long; lower it" in message
    assert len(await pods_of(client, namespace)) == 1


async def test_a_job_that_a_quota_refuses_waits_for_it(crds, controllers, client, namespace):
    """What it needs is there by then; an operator that starts again continues from that."""
    controllers.kubectl("create", "quota", "none", "--hard=count/jobs.batch=0", "--namespace", namespace)

    async def is_counted():
        found = controllers.kubectl("get", "quota", "none", "-n", namespace, "-o", "jsonpath={.status.hard}")
        return "count" in found

    await until(is_counted, "the quota")
    await client.create(request(namespace), field_manager="test")
    async with running(client, namespace):
        message = await until(says(client, namespace, "Pending", "QuotaExceeded"), "the refusal")
        assert "exceeded quota: none" in message
        with pytest.raises(NotFoundError):
            await client.get(JOB, "fast-profile", namespace=namespace)
    controllers.kubectl("delete", "quota", "none", "-n", namespace)
    async with running(client, namespace):
        await until(pods_are(client, namespace, 1), "the pod")


async def test_a_deleted_request_leaves_nothing(crds, controllers, client, namespace):
    """The Job's pod included; a new request of that name waits for that and is measured."""
    await client.create(request(namespace), field_manager="test")
    async with running(client, namespace):
        [pod] = await until(pods_are(client, namespace, 1), "the pod")
        await client.delete(PROFILE_REQUEST, "fast", namespace=namespace)
        await client.create(request(namespace, isl=1000), field_manager="test")

        async def renewed():
            found = await pods_of(client, namespace)
            uids = [each["metadata"]["uid"] for each in found]
            if len(uids) != 1 or uids == [pod["metadata"]["uid"]]:
                return None
            return " ".join(found[0]["spec"]["containers"][0]["args"])

        assert "--isl 1000" in await until(renewed, "the new request's pod")
        await client.delete(PROFILE_REQUEST, "fast", namespace=namespace)
        kinds = "jobs,pods,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"

        async def nothing():
            selector = "--selector=penstock.dev/profile=fast"
            return not controllers.kubectl("get", kinds, "-n", namespace, selector, "-o", "name").strip()

        await until(nothing, "nothing left")
