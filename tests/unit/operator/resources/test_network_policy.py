from __future__ import annotations

import dataclasses
from pathlib import Path

from penstock.operator.resources import children

CHART = Path(__file__).parents[4] / "charts" / "penstock"
HTTP = [{"port": "http", "protocol": "TCP"}]


def pods(*roles):
    """Selector of the graph's pods of some roles."""
    return {
        "matchLabels": {"penstock.dev/graph": "llama"},
        "matchExpressions": [{"key": "penstock.dev/role", "operator": "In", "values": list(roles)}],
    }


WORKERS = pods("prefill", "decode", "aggregated")


def readers(namespace):
    """The rule of those who may read metrics: operator and planner, and namespaces that say so."""
    own = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchExpressions": [{"key": "penstock.dev/scope", "operator": "Exists"}]},
    }
    labelled = {"namespaceSelector": {"matchLabels": {"penstock.dev/metrics-access": "true"}}}
    return {"from": [own, labelled], "ports": HTTP}


def test_workers_are_reached_by_routers_each_other_and_readers(objects):
    """Routers on the port, workers on every port, operator, planner and Prometheus on the port."""
    assert objects()["NetworkPolicy", "llama-worker"]["spec"] == {
        "podSelector": WORKERS,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": pods("router")}], "ports": HTTP},
            {"from": [{"podSelector": WORKERS}]},
            readers("penstock"),
        ],
    }


def test_routers_that_follow_kv_events_reach_their_port(objects):
    """The graph's port beside HTTP, for routers alone."""
    ingress = objects(router={"kvEventsPort": 5557})["NetworkPolicy", "llama-worker"]["spec"]["ingress"]
    ports = [{"port": 5557, "protocol": "TCP"}, {"port": 5558, "protocol": "TCP"}]
    assert ingress[0] == {"from": [{"podSelector": pods("router")}], "ports": [*HTTP, *ports]}
    assert ingress[2] == readers("penstock")


def test_an_operator_of_no_known_namespace_is_in_the_graphs(build, context):
    """A namespaced operator lives beside its graphs."""
    unknown = dataclasses.replace(context, operator_namespace=None)
    (policy,) = (
        each
        for each in children(build(), unknown, replicas={}, unavailable={})
        if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "llama-worker")
    )
    assert policy["spec"]["ingress"][2] == readers("serving")


def test_the_charts_pods_are_let_in():
    """Operator and planner carry the label by which workers' policies know them."""
    for component in ("operator", "planner"):
        text = (CHART / "templates" / component / "deployment.yaml").read_text(encoding="utf-8")
        _, _, template = text.partition("template:")
        assert "penstock.dev/scope:" in template


def test_dynamo_streams_answers_back_on_ports_of_its_own(objects):
    """Its frontend and workers connect to each other on ports chosen at run time."""
    found = objects(runtime="dynamo")
    assert {"from": [{"podSelector": WORKERS}]} in found["NetworkPolicy", "llama-router"]["spec"]["ingress"]
    assert found["NetworkPolicy", "llama-worker"]["spec"]["ingress"][0] == {
        "from": [{"podSelector": pods("router")}]
    }
