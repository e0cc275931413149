"""Another team's ValidatingAdmissionPolicy denies the operator one kind of write after the other: all else happens."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from accounts import account, operators_rules
from operating import IDLE, Loads, condition, edit, events, graph, running, scale, set_status, until

from penstock.core.errors import ClusterError, NotFoundError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import DEPLOYMENT, GRAPH_DEPLOYMENT, KINDS, POD, SCALING_ADAPTER
from penstock.kube.objects.names import BUDGET_GATE
from penstock_operator.plan.pods import pod_view

pytestmark = [pytest.mark.cluster]

LABEL = "deny"
POLICY = "hands-off"

CREATED = {
    "ConfigMap": ["g-router"],
    "Deployment": ["g-decode", "g-frontend", "g-prefill"],
    "NetworkPolicy": ["g-router", "g-worker"],
    "PodDisruptionBudget": ["g-decode", "g-frontend", "g-prefill"],
    "Role": ["g-router"],
    "RoleBinding": ["g-router"],
    "ScalingAdapter": ["g-decode"],
    "Service": ["g-decode", "g-frontend", "g-prefill"],
    "ServiceAccount": ["g-router", "g-worker"],
}
"""What is wanted in the end, when service ``more`` and prefill's scaling are gone."""

PRUNED = {
    "Deployment": ["g-more"],
    "PodDisruptionBudget": ["g-more"],
    "ScalingAdapter": ["g-prefill"],
    "Service": ["g-more"],
}

DENIED = [
    *(f"CREATE.{KINDS[kind].plural}" for kind in CREATED),
    "CREATE.secrets",
    *(f"UPDATE.{KINDS[kind].plural}" for kind in CREATED),
    *(f"DELETE.{KINDS[kind].plural}" for kind in PRUNED),
    "UPDATE.pods",
    "UPDATE.graphdeployments",
    "UPDATE.graphdeployments.status",
    "UPDATE.scalingadapters.status",
]

DEPENDENT = {
    # Without its object nothing else of the object can be; a RoleBinding needs its Role.
    "CREATE.scalingadapters": {"number", "drain mark", "adapter's status"},
    "CREATE.roles": {"there RoleBinding", "repaired RoleBinding"},
    "CREATE.deployments": {"number"},
    "UPDATE.deployments": {"number"},
    # What belongs to a service stays until its Deployment is gone.
    "DELETE.deployments": {"pruned"},
    "UPDATE.pods": {"gate", "drain mark", "number"},
    "UPDATE.graphdeployments.status": {"status"},
    "UPDATE.scalingadapters.status": {"adapter's status"},
}
"""What else cannot happen: prefixes of the facts below."""


def policy():
    """Return the policy: a namespace's label says which write of service accounts is denied there."""
    what = (
        "request.operation + '.' + request.resource.resource + "
        "(has(request.subResource) ? '.' + request.subResource : '')"
    )
    group = "admissionregistration.k8s.io/v1"
    rules = [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*/*"]}]
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": rules},
        "matchConditions": [
            {
                "name": "account",
                "expression": "request.userInfo.username.startsWith('system:serviceaccount:')",
            }
        ],
        "validations": [
            {
                "expression": f"namespaceObject.metadata.labels['{LABEL}'] != {what}",
                "message": "not in this team's namespace",
            }
        ],
    }
    binding = {
        "policyName": POLICY,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}},
    }
    return (
        {
            "apiVersion": group,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": POLICY},
            "spec": spec,
        },
        {
            "apiVersion": group,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": POLICY},
            "spec": binding,
        },
    )


async def make_pod(client, namespace, name, service, *, gated=False):
    """Make a worker pod in the place of the controllers; unless it is gated it serves."""
    labels = {
        "app.kubernetes.io/managed-by": "penstock",
        "penstock.dev/graph": "g",
        "penstock.dev/service": service,
        "penstock.dev/role": "prefill" if service == "prefill" else "decode",
        "penstock.dev/serving": "true",
    }
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": labels,
        "annotations": {"penstock.dev/gpus": "1"},
    }
    spec = {"containers": [{"name": "main", "image": "i"}], "terminationGracePeriodSeconds": 0}
    spec |= {"schedulingGates": [{"name": BUDGET_GATE}]} if gated else {"nodeName": "n"}
    await client.create(POD.of(metadata, spec=spec), field_manager="kubelet")
    if not gated:
        main = {
            "name": "main",
            "image": "i",
            "imageID": "i",
            "restartCount": 0,
            "ready": True,
            "started": True,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }
        status = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [main],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await set_status(client, POD, name, namespace, status)


async def facts(client, namespace):
    """Return what has happened, fact by fact."""
    found = {}
    for kind, names in CREATED.items():
        live = {
            each["metadata"]["name"]: each
            for each in (await client.list(KINDS[kind], namespace=namespace)).items
        }
        for name in names:
            found[f"there {kind} {name}"] = name in live
            label = live.get(name, {"metadata": {}})["metadata"].get("labels", {})
            found[f"repaired {kind} {name}"] = label.get("app.kubernetes.io/name") == "penstock-graph"
        for name in PRUNED.get(kind, ()):
            found[f"pruned {kind} {name}"] = name not in live
    pods = [pod_view(each) for each in (await client.list(POD, namespace=namespace)).items]
    found["gate"] = not any(each.gated for each in pods)
    found["drain mark"] = [each.draining for each in pods if each.service == "decode"].count(True) == 1
    with suppress(NotFoundError):
        live = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        found["number"] = live["spec"]["replicas"] == 1
    with suppress(NotFoundError):
        live = await client.get(SCALING_ADAPTER, "g-decode", namespace=namespace)
        found["adapter's status"] = live.get("status", {}).get("maxReplicas") == 3
    live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
    found["status"] = live.get("status", {}).get("servedGeneration") == live["metadata"]["generation"]
    return found


def happened(client, namespace, *, but=()):
    """Return a check that all facts hold, except for some prefixes."""

    async def check():
        wrong = [name for name, each in (await facts(client, namespace)).items() if not each]
        return not [each for each in wrong if not each.startswith(tuple(but))]

    return check


def excused(denied):
    """Return the prefixes of the facts that a denied write keeps from happening."""
    verb, plural, *_ = denied.split(".")
    own = {"CREATE": ("there", "repaired"), "UPDATE": ("repaired",), "DELETE": ("pruned",)}[verb]
    kinds = [kind for kind in CREATED if KINDS[kind].plural == plural]
    return {f"{word} {kind}" for kind in kinds for word in own} | DEPENDENT.get(denied, set())


def told(client, namespace):
    """Return a check that an Event names the policy."""

    async def check():
        found = await events(client, namespace, "AdmissionDenied")
        return [each for each in found if POLICY in each["message"]]

    return check


async def live_through(client, operator_client, namespace, denied):
    """Run an operator through a life of a graph in which one kind of write is denied."""
    made = graph(namespace, planner={"maxGpuBudget": 6})
    made["spec"]["services"]["more"] = {"role": "router"}
    await client.create(made, field_manager="test")
    async with running(operator_client, namespace, loads=Loads(IDLE)):
        await make_pod(client, namespace, "prefill-1", "prefill", gated=True)
        for number in (1, 2):
            await make_pod(client, namespace, f"decode-{number}", "decode")

        if denied == "UPDATE.graphdeployments":  # without its finalizer nothing of a graph is made
            await until(told(client, namespace), f"{denied}: an Event")
            return

        async def begun():
            live = (await client.list(DEPLOYMENT, namespace=namespace)).items
            return denied == "CREATE.deployments" or len(live) == 4

        await until(begun, f"{denied}: the Deployments")
        with suppress(NotFoundError):  # the adapter may be what is denied
            await scale(client, namespace, "decode", 2)
        for kind, own in CREATED.items():  # a hand changes a label
            for each in (await client.list(KINDS[kind], namespace=namespace)).items:
                name = each["metadata"]["name"]
                if name in own:
                    label = {"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}}
                    with suppress(ClusterError):
                        await client.patch(
                            KINDS[kind], name, label, namespace=namespace, field_manager="hand"
                        )
        with suppress(NotFoundError):
            await scale(client, namespace, "decode", 1)
        services = {"more": None, "prefill": {"scaling": None}}
        await edit(client, namespace, {"services": services})
        but = excused(denied)
        try:
            await until(happened(client, namespace, but=but), f"{denied}: all else")
        except pytest.fail.Exception:
            wrong = [name for name, each in (await facts(client, namespace)).items() if not each]
            pytest.fail(f"{denied}: {wrong}, of which {sorted(but)} may be wrong")

        await until(told(client, namespace), f"{denied}: an Event")
        if denied != "UPDATE.graphdeployments.status":
            degraded = await condition(client, namespace, "Degraded")
            assert degraded["reason"] == "AdmissionDenied", (denied, degraded)
            assert POLICY in degraded["message"]


async def test_each_kind_of_write_denied_in_turn_stops_no_other(crds, client, make_namespace):
    """Gates, drains, numbers, repairs, removals and words: the condition and an Event name the policy."""
    crds.apply(*policy())
    namespaces = {denied: make_namespace("denied", {LABEL: denied}) for denied in DENIED}
    home = make_namespace("home")
    path = account(crds, home, "operator", operators_rules(), cluster_wide=True)
    own = await KubeClient.connect(kubeconfig=path, rng=random.Random(3))
    slots = asyncio.Semaphore(4)

    async def one(denied):
        async with slots:
            await live_through(client, own, namespaces[denied], denied)

    try:
        async with asyncio.TaskGroup() as group:
            for denied in DENIED:
                group.create_task(one(denied))
    finally:
        await own.close()
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            crds.kubectl("delete", kind, POLICY)
