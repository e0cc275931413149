"""Services that a graph no longer has leave once those in their place serve."""

from __future__ import annotations

import yaml
from graph_harness import KEY, Loads, conditions, edit, operator, pod, router, serving, to_rest, told

from penstock.kube.objects.names import DRAINING
from penstock_operator.plan.drain import PodLoad

ROOM = {"maxGpuBudget": 8}


async def look(api, made, number=4):
    """Reconcile a few times; return what the last said of the next."""
    for _ in range(number):
        await told(api)
        after_s = await made.reconciler.reconcile(KEY)
    await told(api)
    return after_s


def roll_out(api, *names, done=True):
    """Let Deployments run one pod of their newest template, or of the one before."""
    for name in names:
        live = api.at("Deployment", name)
        replicas = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1 if done else 0}
        live["status"] = {"observedGeneration": live["metadata"]["generation"], **replicas}
        api.stored(live, "MODIFIED")


async def serve(api, service, role):
    """Let a service serve."""
    made = pod(f"{service}-1", service, gated=False, ready=True, phase="Running")
    made["metadata"]["labels"]["penstock.dev/role"] = role
    await api.create(made, field_manager="kubelet")
    roll_out(api, f"g-{service}")


def leaves(api, name):
    """Return whether a pod drains."""
    return api.at("Pod", name)["metadata"]["labels"]["penstock.dev/serving"] == DRAINING


async def test_a_renamed_service_serves_until_the_new_one_does(api):
    """The graph stays ready, the status counts GPUs of both, and the drain is looked at each second."""
    loads = Loads({f"{each}-1": PodLoad(1, 0, 0.4) for each in ("prefill", "decode")})
    async with operator(api, loads) as made:
        await to_rest(api, made)
        for each in ("prefill", "decode"):
            await serving(api, f"{each}-1", each)
        await api.create(router(), field_manager="kubelet")
        roll_out(api, "g-frontend", "g-prefill", "g-decode")
        await to_rest(api, made)
        services = dict(api.at("GraphDeployment", "g")["spec"]["services"])
        services["decoder"] = services.pop("decode")
        edit(api, "GraphDeployment", "g", services=services, planner=ROOM)
        await look(api, made)
        roll_out(api, "g-frontend")
        await look(api, made)
        assert not leaves(api, "decode-1")
        said = conditions(api)
        assert said["Ready"]["status"] == "True"
        assert said["BudgetRespected"]["message"] == "2 GPUs are in use of 8"
        assert "decode: scaling to 0 replicas" in said["Progressing"]["message"]
        await serve(api, "decoder", "decode")
        assert await look(api, made) == 1.0
        assert leaves(api, "decode-1")


async def test_other_roles_serve_before_routers_know_them_and_the_old_one_leaves_after_that(api):
    """An aggregated service becomes prefill and decode: neither old nor new routers are without workers."""
    split = api.at("GraphDeployment", "g")["spec"]["services"]
    together = {"frontend": {"role": "router"}, "worker": {"role": "aggregated"}}
    edit(api, "GraphDeployment", "g", services=together, planner=ROOM)

    def known():
        [text] = api.at("ConfigMap", "g-router")["data"].values()
        return set(yaml.safe_load(text)["spec"]["services"])

    async with operator(api, Loads({"worker-1": PodLoad(1, 0, 0.4)})) as made:
        await to_rest(api, made)
        await serve(api, "worker", "aggregated")
        roll_out(api, "g-frontend")
        await to_rest(api, made)
        edit(api, "GraphDeployment", "g", services=split, planner=ROOM)
        await look(api, made)
        await serve(api, "prefill", "prefill")
        await look(api, made)
        assert known() == {"frontend", "worker"}
        assert "frontend: waiting for decode to become ready" in conditions(api)["Progressing"]["message"]
        await serve(api, "decode", "decode")
        await look(api, made)
        assert known() == {"frontend", "prefill", "decode"}
        roll_out(api, "g-frontend", done=False)
        await look(api, made)
        assert not leaves(api, "worker-1")
        roll_out(api, "g-frontend")
        await look(api, made)
        assert leaves(api, "worker-1")
