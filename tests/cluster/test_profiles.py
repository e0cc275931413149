"""ProfileRequests against a real API server: objects, rights, status, failures, deletion."""

from __future__ import annotations

import pytest
import yaml
from accounts import account, operators_rules
from operating import edit, graph, running, set_status, until

from penstock.core.errors import InvalidObjectError, NotFoundError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import (
    CONFIG_MAP,
    EVENT,
    GRAPH_DEPLOYMENT,
    JOB,
    KINDS,
    PROFILE_REQUEST,
    ROLE,
)

pytestmark = pytest.mark.cluster

OBJECTS = {
    "ConfigMap": {"fast", "fast-profile"},
    "Job": {"fast-profile"},
    "NetworkPolicy": {"fast-profile"},
    "Role": {"fast-profile"},
    "RoleBinding": {"fast-profile"},
    "ServiceAccount": {"fast-profile"},
}

LINES = (
    "Suggested prefill TP:1 (TTFT 48.37 ms, throughput 15505.23 tokens/s/GPU)\n"
    "Suggested planner upper/lower bound for prefill queue size: 0.24/0.10\n"
    "Suggested decode TP:2 (ITL 4.83 ms, throughput 51.22 tokens/s/GPU)\n"
    "Suggested planner upper/lower bound for decode kv cache utilization: 0.20/0.10\n"
)


def request(namespace, name="fast", **changes):
    """Return a request for a small simulated graph that is not deployed."""
    slo = {"ttft": "200ms", "itl": "50ms"}
    spec = {
        "template": graph(namespace)["spec"],
        "isl": 3000,
        "osl": 150,
        "slo": slo,
        "maxGpus": 2,
        **changes,
    }
    given = {key: value for key, value in spec.items() if value is not None}
    return PROFILE_REQUEST.of({"name": name, "namespace": namespace}, spec=given)


def status_is(client, namespace, phase, reason=None, name="fast"):
    """Return a check of a request's phase and of its condition's reason."""

    async def check():
        status = (await client.get(PROFILE_REQUEST, name, namespace=namespace)).get("status", {})
        reasons = [each["reason"] for each in status.get("conditions", [])]
        return status if status.get("phase") == phase and reason in {None, *reasons} else None

    return check


async def end(client, namespace, kind, *, reason="", message=""):
    """End the Job as its controller would."""
    condition = {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:01:00Z",
    }
    before = {**condition, "type": "FailureTarget" if kind == "Failed" else "SuccessCriteriaMet"}
    status = {"startTime": "2026-01-01T00:00:00Z", "conditions": [before, condition]}
    if kind == "Complete":
        status |= {"completionTime": "2026-01-01T00:01:00Z", "succeeded": 1}
    else:
        status |= {"failed": 1}
    await set_status(client, JOB, "fast-profile", namespace, status)


async def fill(client, namespace, name="fast", **data):
    """Write the result as the Job does."""
    obj = CONFIG_MAP.of({"name": name, "namespace": namespace}, data=data)
    await client.apply(obj, field_manager="penstock-profiler")


async def owned(client, namespace, uid):
    """Return the names of the objects that a request controls, by kind."""
    found = {}
    for kind in OBJECTS:
        for each in (await client.list(KINDS[kind], namespace=namespace)).items:
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", [])):
                found.setdefault(kind, set()).add(each["metadata"]["name"])
    return found


async def test_a_request_becomes_one_job_and_its_result_is_told(crds, client, namespace):
    """Everything it needs, owned by it; phases, columns, the four lines, and an Event each."""
    made = await client.create(request(namespace), field_manager="test")
    async with running(client, namespace):
        await until(status_is(client, namespace, "Profiling"), "the Job")
        assert await owned(client, namespace, made["metadata"]["uid"]) == OBJECTS
        await fill(
            client, namespace, **{"profile.json": "{}", "graph.yaml": "{}", "recommendation.txt": LINES}
        )
        await end(client, namespace, "Complete", reason="CompletionsReached")
        status = await until(status_is(client, namespace, "Succeeded", "Profiled"), "success")

        async def told():
            events = (await client.list(EVENT, namespace=namespace)).items
            reasons = {
                each["reason"] for each in events if each["involvedObject"]["kind"] == "ProfileRequest"
            }
            return reasons >= {"ProfileProfiling", "ProfileSucceeded"}

        await until(told, "events")
    assert status["configMap"] == "fast"
    assert status["job"] == "fast-profile"
    assert status["completionTime"] == "2026-01-01T00:01:00Z"
    assert status["recommendation"] == {
        "prefillTensorParallel": 1,
        "decodeTensorParallel": 2,
        "summary": LINES.splitlines(),
    }
    printed = crds.kubectl("get", "gpr", "--namespace", namespace)
    assert printed.split("\n")[0].split() == ["NAME", "PHASE", "PREFILL-TP", "DECODE-TP", "CONFIGMAP", "AGE"]
    assert printed.split("\n")[1].split()[:5] == ["fast", "Succeeded", "1", "2", "fast"]


async def test_the_job_measures_the_deployed_graph(crds, client, namespace):
    """`graph` names one; until it is there the request waits and says for what."""
    await client.create(
        request(namespace, template=None, graph="g", slo={"ttft": "200ms", "itl": "50ms"}),
        field_manager="test",
    )
    async with running(client, namespace):
        await until(status_is(client, namespace, "Pending", "GraphMissing"), "the word that it is missing")
        await client.create(graph(namespace), field_manager="test")
        await until(status_is(client, namespace, "Profiling"), "the Job")
    config = await client.get(CONFIG_MAP, "fast-profile", namespace=namespace)
    measured = yaml.safe_load(config["data"]["graph.yaml"])
    assert (measured["kind"], measured["metadata"]["name"]) == ("GraphDeployment", "g")
    job = await client.get(JOB, "fast-profile", namespace=namespace)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert " ".join(container["args"]) == (
        "profile --config /etc/penstock-profile/graph.yaml --output-dir /tmp/profile --isl 3000 --osl 150 "
        "--ttft-slo 200ms --itl-slo 50ms --gpus 2 --config-map fast"
    )


async def test_an_object_of_another_is_not_overwritten(crds, client, namespace):
    """A ConfigMap that somebody made keeps its content; the request waits and names it."""
    await fill(client, namespace, keep="me")
    await client.create(request(namespace), field_manager="test")
    async with running(client, namespace):
        status = await until(status_is(client, namespace, "Pending", "NameConflict"), "the conflict")
        assert (
            "ConfigMap fast exists and is not owned by a ProfileRequest" in status["conditions"][0]["message"]
        )
        with pytest.raises(NotFoundError):
            await client.get(JOB, "fast-profile", namespace=namespace)
        await client.delete(CONFIG_MAP, "fast", namespace=namespace)
        await until(status_is(client, namespace, "Profiling"), "the Job")


async def test_an_unusable_request_is_refused_in_its_status(crds, client, namespace):
    """What the schema cannot say; nothing of it is made."""
    await client.create(request(namespace, nodePool="h100"), field_manager="test")
    async with running(client, namespace):
        status = await until(status_is(client, namespace, "Failed", "InvalidSpec"), "the refusal")
    message = status["conditions"][0]["message"]
    assert "spec.nodePool: h100 is not a node pool of graph fast" in message
    assert {each["metadata"]["name"] for each in (await client.list(JOB, namespace=namespace)).items} == set()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"graph": "g"}, "both or neither of graph and template"),
        ({"template": None}, "both or neither of graph and template"),
        ({"tensorParallel": [1, 4]}, "4 exceeds maxGpus 2; leave the size out or raise maxGpus"),
        ({"isl": 0}, "greater than or equal to 1"),
    ],
)
async def test_the_api_server_refuses_broken_rules(crds, client, namespace, changes, part):
    """With the rules' own words."""
    with pytest.raises(InvalidObjectError, match=part):
        await client.create(request(namespace, **changes), field_manager="test")


async def test_a_request_is_immutable_and_its_name_bounded(crds, client, namespace):
    """Measured once; another measurement is a new request."""
    await client.create(request(namespace), field_manager="test")
    with pytest.raises(InvalidObjectError, match="a request is measured once"):
        await edit(client, namespace, {"isl": 1}, name="fast", kind=PROFILE_REQUEST)
    with pytest.raises(InvalidObjectError, match="has 53 characters"):
        await client.create(request(namespace, "x" * 53), field_manager="test")


async def test_an_ended_request_is_left_alone(crds, client, namespace):
    """No write after its end, though its objects change and the operator starts again."""
    await client.create(request(namespace), field_manager="test")
    async with running(client, namespace):
        await until(status_is(client, namespace, "Profiling"), "the Job")
        await fill(client, namespace, **{"profile.json": "{}"})
        await end(client, namespace, "Complete")
        await until(status_is(client, namespace, "Succeeded"), "success")
    before = await client.get(PROFILE_REQUEST, "fast", namespace=namespace)
    await client.delete(ROLE, "fast-profile", namespace=namespace)
    async with running(client, namespace) as operator:
        await client.create(graph(namespace), field_manager="test")

        async def handled():
            live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
            return live.get("status", {}).get("observedGeneration")

        await until(handled, "the operator at work")
        await until(lambda: _quiet(operator), "an empty queue")
    after = await client.get(PROFILE_REQUEST, "fast", namespace=namespace)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    with pytest.raises(NotFoundError):
        await client.get(ROLE, "fast-profile", namespace=namespace)


async def _quiet(operator):
    return not operator.profiles.queue.depth and not operator.profiles.queue.running


async def test_the_operators_own_rights_suffice(crds, client, namespace, tmp_path):
    """With the chart's Role and not one right more."""
    path = account(crds, namespace, "op", operators_rules())
    bound = await KubeClient.connect(kubeconfig=path)
    try:
        await client.create(request(namespace), field_manager="test")
        async with running(bound, namespace):
            await until(status_is(client, namespace, "Profiling"), "the Job")
            await fill(client, namespace, **{"profile.json": "{}"})
            await end(client, namespace, "Complete")
            await until(status_is(client, namespace, "Succeeded"), "success")
    finally:
        await bound.close()
