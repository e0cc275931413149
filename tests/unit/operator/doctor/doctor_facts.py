"""Facts of a healthy cluster, for tests to spoil one at a time."""

from __future__ import annotations

import copy
from dataclasses import replace

from penstock.api.crd import definitions
from penstock_operator.doctor.facts import Facts, GraphFacts, LeaseFact, Page, RightsFact

NOW_S = 1_800_000_000.0
NOW = "2027-01-15T08:00:00.000000Z"
EARLIER = "2027-01-15T07:59:55.000000Z"


def component(name, **spec):
    """An operator's or planner's Deployment as the chart makes it, ready."""
    labels = {
        "app.kubernetes.io/component": name,
        "app.kubernetes.io/part-of": "penstock",
        "app.kubernetes.io/version": "0.1.0",
    }
    template = {
        "metadata": {"labels": {**labels, "penstock.dev/scope": "cluster"}},
        "spec": {"serviceAccountName": f"penstock-{name}"},
    }
    return {
        "metadata": {"name": f"penstock-{name}", "namespace": "penstock-system", "labels": labels},
        "spec": {"replicas": 1, "template": template, **spec},
        "status": {"readyReplicas": 1},
    }


def lease(renewed, holder="penstock-operator-abc", seconds=15):
    """A Lease renewed at a time."""
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": seconds}
    return {"metadata": {"name": "penstock-operator"}, "spec": spec}


def pod(name, service, role, **status):
    """A ready pod of graph serving/llama."""
    labels = {
        "penstock.dev/graph": "llama",
        "penstock.dev/service": service,
        "penstock.dev/role": role,
        "penstock.dev/serving": "true",
    }
    conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "Ready")]
    container = {
        "name": "main",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "image": "i",
        "state": {"running": {"startedAt": EARLIER}},
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": name,
            "labels": labels,
            "creationTimestamp": EARLIER,
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "main"}]},
        "status": {"phase": "Running", "conditions": conditions, "containerStatuses": [container], **status},
    }


def router_page(ages, ready=1):
    """A router's page with the ages of its workers' metrics."""
    lines = []
    for name, age in ages.items():
        labels = f'{{worker="{name}",role="decode"}}'
        lines.append(f"penstock_router_worker_ready{labels} {ready}")
        lines.append(f"penstock_router_worker_metrics_age_seconds{labels} {age}")
    return "\n".join(lines) + "\n"


def worker_page(running=0, tokens=10):
    """A worker's page."""
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'
        f'vllm:prompt_tokens_total{{engine="0"}} 5\n'
    )


def graph_object():
    """A graph that is Ready, with two workers and a router, on a pool with GPUs."""
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "llama", "namespace": "serving", "generation": 2},
        "spec": {
            "model": {"name": "m"},
            "runtime": "vllm",
            "services": {
                "frontend": {"role": "router"},
                "prefill": {
                    "role": "prefill",
                    "nodePool": "a100",
                    "scaling": {"minReplicas": 1, "maxReplicas": 4},
                },
                "decode": {
                    "role": "decode",
                    "nodePool": "a100",
                    "scaling": {"minReplicas": 1, "maxReplicas": 4},
                },
            },
            "nodePools": {"a100": {"nodeSelector": {"gpu": "a100"}}},
        },
        "status": {
            "observedGeneration": 2,
            "phase": "Ready",
            "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "serves"}],
        },
    }


def node(name="node-1", gpus=8, **spec):
    """A ready node of the pool."""
    return {
        "metadata": {"name": name, "labels": {"gpu": "a100"}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "64", "nvidia.com/gpu": str(gpus)},
        },
    }


def graph_facts(**changes):
    """What a healthy graph's processes say."""
    healthy = GraphFacts(
        graph=graph_object(),
        pods=(
            pod("llama-frontend-1", "frontend", "router"),
            pod("llama-prefill-1", "prefill", "prefill"),
            pod("llama-decode-1", "decode", "decode"),
        ),
        ready={"llama-frontend-1": '{"status":"ready","reasons":[]}'},
        pages={
            "llama-frontend-1": Page(
                router_page({"llama-prefill-1": 0.4, "llama-decode-1": 0.9}),
                router_page({"llama-prefill-1": 0.7, "llama-decode-1": 0.2}),
            ),
            "llama-prefill-1": Page(worker_page(), worker_page()),
            "llama-decode-1": Page(worker_page(1, 10), worker_page(1, 30)),
        },
    )
    return replace(healthy, **changes)


def facts(**changes):
    """What a healthy cluster shows."""
    live = {}
    for name, definition in definitions().items():
        live[name] = copy.deepcopy(definition)
        live[name]["spec"]["conversion"] = {"strategy": "None"}
        live[name]["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    healthy = Facts(
        url="https://cluster",
        version="v1.34.4",
        skew_s=0.2,
        crds=live,
        deployments=(component("operator"), component("planner")),
        leases=(LeaseFact("operator", "penstock-system", "penstock-operator", lease(EARLIER), lease(NOW)),),
        rights=(RightsFact("you", "", "serving", 10),),
        graphs=(graph_facts(),),
        profiles=(),
        nodes=(node(),),
        requested={"node-1": {"nvidia.com/gpu": 2}},
        now_s=NOW_S,
        interval_s=6.0,
        release="0.1.0",
    )
    return replace(healthy, **changes)
