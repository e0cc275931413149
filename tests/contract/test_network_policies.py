"""Who reaches whom under the rendered NetworkPolicies, by an evaluator of Kubernetes' rules: chart and graphs together.

Source: kubernetes.io/docs/concepts/services-networking/network-policies. A pod that no policy of a direction selects is
open in it; policies add up; a connection needs the egress of its source and the ingress of its target. A port is a number
or a name of the target's. Peers of one entry are a conjunction, entries a disjunction; none means everybody.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.api import GraphDeployment
from penstock_operator.resources import BuildContext, children

sys.path.append(str(Path(__file__).parent))
from manifest_table import manifest_of
from test_chart import rendered

PORTS = {
    "http": 8000,
    "side": 5600,
    "kv": 5557,
    "replay": 5558,
    "ext": 9100,
    "metrics": 8080,
    "board": 6006,
    "dns": 53,
    "api": 6443,
}


@dataclass(frozen=True)
class Pod:
    """A pod, as far as policies see it."""

    name: str
    namespace: str
    labels: dict = field(hash=False, default_factory=dict)
    ports: dict = field(hash=False, default_factory=dict)


def matches(selector, labels):
    """Whether a label selector takes these labels."""
    expressions = [
        {"key": k, "operator": "In", "values": [v]} for k, v in selector.get("matchLabels", {}).items()
    ]
    for each in [*expressions, *selector.get("matchExpressions", [])]:
        value = labels.get(each["key"])
        holds = {"In": value in each.get("values", ()), "Exists": value is not None}[each["operator"]]
        if not holds:
            return False
    return True


class Network:
    """Pods, the labels of their namespaces, and policies."""

    def __init__(self, objects, namespaces, others):
        self.namespaces = namespaces
        self.policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
        self.pods = {each.name: each for each in [*map(_pod_of, filter(_makes_pods, objects)), *others]}

    def reached_from(self, name):
        """What a pod reaches, as ``target:port``."""
        source = self.pods[name]
        return {
            f"{target.name}:{port}"
            for target in self.pods.values()
            for port, number in PORTS.items()
            if target != source
            and self._lets("Egress", source, target, target, number)
            and self._lets("Ingress", target, source, target, number)
        }

    def _lets(self, direction, pod, other, target, number):
        own = [
            each
            for each in self.policies
            if each["metadata"]["namespace"] == pod.namespace
            and direction in each["spec"]["policyTypes"]
            and matches(each["spec"]["podSelector"], pod.labels)
        ]
        rules = [rule for each in own for rule in each["spec"].get(direction.lower(), [])]
        peers = {"Egress": "to", "Ingress": "from"}[direction]
        return not own or any(
            self._takes(rule.get(peers), pod, other) and _has_port(rule.get("ports"), target, number)
            for rule in rules
        )

    def _takes(self, peers, pod, other):
        def takes(peer):
            spaces = peer.get("namespaceSelector")
            known = {
                "kubernetes.io/metadata.name": other.namespace,
                **self.namespaces.get(other.namespace, {}),
            }
            is_there = pod.namespace == other.namespace if spaces is None else matches(spaces, known)
            return is_there and matches(peer.get("podSelector", {}), other.labels)

        return not peers or any(map(takes, peers))


def _has_port(ports, target, number):
    numbers = [
        each["port"] if isinstance(each["port"], int) else target.ports.get(each["port"])
        for each in ports or ()
    ]
    return not ports or number in numbers


def _makes_pods(obj):
    return obj["kind"] in {"Deployment", "Pod"}


def _pod_of(obj):
    template = obj["spec"]["template"] if obj["kind"] == "Deployment" else obj
    containers = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for one in containers for each in one.get("ports", ())}
    return Pod(obj["metadata"]["name"], obj["metadata"]["namespace"], template["metadata"]["labels"], ports)


STRANGERS = {
    "neighbour": "serving",
    "client": "apps",
    "prometheus": "watching",
    "envoy": "gateways",
    "system": "kube-system",
}


def network(operator_namespace="serving", **spec):
    """A release with TensorBoard in namespace serving, two graphs alongside it, and strangers."""
    context = BuildContext(owner_uid="u", namespace="serving", operator_namespace=operator_namespace)
    objects = [*rendered("an own claim")]
    for name in ("a", "b"):
        graph = GraphDeployment.model_validate(manifest_of({"metadata": {"name": name}, "spec": spec}))
        objects += children(graph, context, replicas={}, unavailable={})
    labels = {
        "watching": {"penstock.dev/metrics-access": "true"},
        "gateways": {"penstock.dev/gateway-access": "true"},
    }
    return Network(objects, labels, [Pod(name, namespace) for name, namespace in STRANGERS.items()])


GRAPHS = {f"{name}-{role}" for name in "ab" for role in ("frontend", "prefill", "decode")}
RELEASE = {"penstock-operator", "penstock-planner"}
OTHERS = {"penstock-test", *STRANGERS}
READERS = {"prometheus", *RELEASE}


def table(found, name="a"):
    """Who reaches each port of a graph's and the release's pods; ports that only the other pool reaches are one row."""
    reached: dict[str, set[str]] = {}
    for source in found.pods:
        for each in found.reached_from(source):
            reached.setdefault(each, set()).add(source)
    return {
        key: by
        for key, by in reached.items()
        if key.startswith((f"{name}-", "penstock-o", "penstock-p", "penstock-te"))
    }


def test_workers_are_reached_by_their_graph_and_who_reads_metrics_and_routers_by_everybody():
    """TensorBoard reaches nothing, and nobody reaches a worker of another graph."""
    found = table(network())
    clients = GRAPHS | RELEASE | OTHERS
    expected = {"a-frontend:http": clients - {"a-frontend"}}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        expected[f"a-{role}:http"] = {"a-frontend", f"a-{other}"} | READERS
        expected |= {f"a-{role}:{port}": {f"a-{other}"} for port in PORTS.keys() - {"http"}}
    # Who may send metrics is the chart's networkPolicy.metricsFrom and tensorboardFrom: by default everybody.
    expected |= {f"{each}:metrics": (GRAPHS | OTHERS) for each in RELEASE}
    expected["penstock-tensorboard:board"] = GRAPHS | OTHERS
    assert {key: by for key, by in found.items() if not key.startswith("penstock-test:")} == expected


def test_an_operator_of_no_known_namespace_is_in_the_graphs():
    """A namespaced operator lives alongside its graphs."""
    assert table(network(operator_namespace=None)) == table(network())


def test_operator_and_planner_reach_names_the_api_server_and_graphs_alone():
    """Port 8000 of what carries a graph's label, wherever; ports 53 and 6443 of anything."""
    reached = network().reached_from("penstock-operator")
    assert reached == network().reached_from("penstock-planner")
    assert {each for each in reached if not each.endswith((":dns", ":api"))} == {
        f"{each}:http" for each in GRAPHS
    }
    assert {"system:dns", "system:api"} <= reached


WORKERS = ("prefill", "decode")


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (
            {"router": {"kvEventsPort": 5557}},
            {f"a-{role}:{port}": {"a-frontend"} for role in WORKERS for port in ("kv", "replay")},
        ),
        (
            {"router": {"gateway": {"enabled": True, "port": 9100}}},
            {
                "a-frontend:ext": (GRAPHS | OTHERS) - {"a-frontend"},
                **{f"a-{role}:http": {"envoy"} for role in WORKERS},
            },
        ),
        (
            {"runtime": "dynamo", "router": {"policy": "kv-cost"}},
            {
                **{f"a-frontend:{port}": {"a-prefill", "a-decode"} for port in PORTS if port != "http"},
                **{
                    f"a-{role}:{port}": {"a-frontend"} for role in WORKERS for port in PORTS if port != "http"
                },
            },
        ),
    ],
    ids=["KV events", "gateway", "dynamo, whose ports are chosen at run time"],
)
def test_a_graph_opens_what_its_settings_need_and_no_more(spec, more):
    """Against the graph without them."""
    before, after = table(network()), table(network(**spec))
    gained = {key: by - before.get(key, set()) for key, by in after.items() if by - before.get(key, set())}
    assert gained == more
    assert [key for key, by in before.items() if by - after.get(key, set())] == []
