"""What a graph behind a Gateway becomes: an InferencePool, and the router's second port."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.kube.kinds import INFERENCE_POOL

GATEWAY = {"gateway": {"enabled": True}}


@pytest.fixture
def known(context):
    """A cluster that knows InferencePools."""
    return dataclasses.replace(context, kinds=frozenset({INFERENCE_POOL}))


def test_the_pool_names_the_workers_that_answer_and_the_router(objects, known):
    """Of a disaggregated graph those are the decode workers; draining ones are none of them."""
    pool = objects(context=known, router=GATEWAY)["InferencePool", "llama-pool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    labels = {
        "penstock.dev/graph": "llama",
        "penstock.dev/role": "decode",
        "penstock.dev/serving": "true",
    }
    assert pool["spec"] == {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": "llama-frontend",
            "port": {"number": 9002},
            "failureMode": "FailClose",
        },
    }


def test_the_router_answers_on_the_ports_that_the_pool_names(objects, known, container):
    """Service, container and command agree; the pool's failure mode is the graph's."""
    router = {"gateway": {"enabled": True, "port": 9100, "failureMode": "FailOpen"}}
    made = objects(context=known, router=router)
    reference = made["InferencePool", "llama-pool"]["spec"]["endpointPickerRef"]
    assert (reference["port"], reference["failureMode"]) == ({"number": 9100}, "FailOpen")
    ext_proc = {
        "name": "ext-proc",
        "port": 9100,
        "targetPort": "ext-proc",
        "protocol": "TCP",
        "appProtocol": "kubernetes.io/h2c",
    }
    assert ext_proc in made["Service", "llama-frontend"]["spec"]["ports"]
    assert len(made["Service", "llama-decode"]["spec"]["ports"]) == 1
    pod = container("frontend", router=router)
    assert {"name": "ext-proc", "containerPort": 9100, "protocol": "TCP"} in pod["ports"]
    assert pod["args"][2:6] == ["router", "pick", "--ext-proc", "9100"]


def test_without_a_gateway_or_its_kind_there_is_no_pool(objects, known, context):
    """Nor a second port, where the graph asks for none."""
    made = objects(context=known)
    assert ("InferencePool", "llama-pool") not in made
    assert len(made["Service", "llama-frontend"]["spec"]["ports"]) == 1
    assert ("InferencePool", "llama-pool") not in objects(context=context, router=GATEWAY)
