"""A graph's objects: which there are, what they share, who may reach them, and what a change rolls."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

import pytest

from penstock.api import Role
from penstock.api.manifests import parse_manifests
from penstock_operator.resources import adapter, children
from penstock_operator.resources.metadata import inherit
from penstock_operator.resources.router_config import router_manifest

GRAPH_LABELS = {
    "penstock.dev/graph": "llama",
    "app.kubernetes.io/managed-by": "penstock",
    "app.kubernetes.io/name": "penstock-graph",
    "app.kubernetes.io/instance": "llama",
    "app.kubernetes.io/part-of": "penstock",
}
RELEASE = {"app.kubernetes.io/version": version("penstock").replace("+", "_")}
DECODE = {"penstock.dev/graph": "llama", "penstock.dev/service": "decode"}
OWNER = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GraphDeployment",
    "name": "llama",
    "uid": "uid-1",
    "controller": True,
    "blockOwnerDeletion": True,
}


def service_labels(service, role):
    """Labels of a service's pods; its children carry the release as well."""
    own = {"penstock.dev/service": service, "penstock.dev/role": role, "app.kubernetes.io/component": role}
    return {**GRAPH_LABELS, **own}


def test_children_come_in_the_order_of_their_use(objects):
    """What pods need comes before them, workers before the routers that look for them."""
    assert list(objects()) == [
        ("ServiceAccount", "llama-router"),
        ("ServiceAccount", "llama-worker"),
        ("Role", "llama-router"),
        ("RoleBinding", "llama-router"),
        ("ConfigMap", "llama-router"),
        ("NetworkPolicy", "llama-worker"),
        ("NetworkPolicy", "llama-router"),
        ("Service", "llama-decode"),
        ("PodDisruptionBudget", "llama-decode"),
        ("Service", "llama-prefill"),
        ("PodDisruptionBudget", "llama-prefill"),
        ("Service", "llama-frontend"),
        ("PodDisruptionBudget", "llama-frontend"),
        ("Deployment", "llama-decode"),
        ("Deployment", "llama-prefill"),
        ("Deployment", "llama-frontend"),
    ]


@pytest.mark.parametrize(("connector", "ports"), [("nixl", ["http"]), ("mooncake", ["http", 5600])])
def test_routers_reach_where_mooncakes_engines_introduce_themselves(objects, connector, ports):
    """The policy of workers lets them in there; nothing else is opened."""
    found = objects(runtime="vllm", engine={"kvConnector": connector})[("NetworkPolicy", "llama-worker")]
    assert [each["port"] for each in found["spec"]["ingress"][0]["ports"]] == ports


def test_every_child_has_its_place_labels_and_owner(objects):
    """Namespace, the graph's labels and a controlling owner are on each child."""
    for each in objects().values():
        metadata = each["metadata"]
        assert metadata["namespace"] == "serving"
        assert metadata["ownerReferences"] == [OWNER]
        assert metadata["labels"].items() >= {**GRAPH_LABELS, **RELEASE}.items()
        assert metadata["labels"]["app.kubernetes.io/component"] in {"router", "worker", "prefill", "decode"}


def test_the_graphs_labels_and_chosen_annotations_reach_its_children_and_roll_no_pod(build, context):
    """But those by which other tools find the graph stay there, for they would prune or adopt the children."""
    metadata = {
        "labels": {
            "team": "search",
            "kueue.x-k8s.io/queue-name": "gpus",
            "app.kubernetes.io/instance": "argo-app",
            "kustomize.toolkit.fluxcd.io/name": "apps",
            "penstock.dev/graph": "other",
        },
        "annotations": {
            "example.com/cost": "7",
            "example.com/note": "x",
            "argocd.argoproj.io/tracking-id": "a",
        },
    }
    chosen = ("example.com/cost", "argocd.argoproj.io/tracking-id", "example.com/absent")
    passed = inherit(context, metadata, chosen)
    plain = children(build(), context, replicas={}, unavailable={})
    for was, each in zip(plain, children(build(), passed, replicas={}, unavailable={}), strict=True):
        added = {"team": "search", "kueue.x-k8s.io/queue-name": "gpus"}
        assert each["metadata"]["labels"] == {**was["metadata"]["labels"], **added}
        assert each["metadata"]["annotations"] == {"example.com/cost": "7"}
        assert each.get("spec") == was.get("spec")


def test_without_a_uid_there_is_no_owner(build, context):
    """A rendering of a graph that is in no cluster names no owner: the collector would delete its children."""
    free = dataclasses.replace(context, owner_uid="")
    found = children(build(), free, replicas={}, unavailable={})
    assert all("ownerReferences" not in each["metadata"] for each in found)


def test_deployment_selects_by_graph_and_service_alone(objects):
    """A selector is immutable, so nothing in it may change during a pod's life."""
    spec = objects()["Deployment", "llama-decode"]["spec"]
    assert spec["selector"] == {"matchLabels": DECODE}
    assert spec["template"]["metadata"]["labels"] == {
        **service_labels("decode", "decode"),
        "penstock.dev/serving": "true",
    }


@pytest.mark.parametrize(
    ("replicas", "unavailable", "expected"),
    [
        ({}, {}, (3, {"maxSurge": 1, "maxUnavailable": 0})),
        ({"decode": 5}, {"decode": 0}, (5, {"maxSurge": 1, "maxUnavailable": 0})),
        ({"decode": 0}, {"decode": 1}, (0, {"maxSurge": 0, "maxUnavailable": 1})),
        ({"decode": 5}, {"decode": 2}, (5, {"maxSurge": 0, "maxUnavailable": 2})),
        ({"prefill": 5}, {"prefill": 1}, (3, {"maxSurge": 1, "maxUnavailable": 0})),
    ],
)
def test_replicas_and_rollout_are_the_callers(objects, replicas, unavailable, expected):
    """The number and how many may be away come from the caller, the graph's own number where it has none."""
    found = objects(replicas=replicas, unavailable=unavailable, services={"decode": {"replicas": 3}})
    spec = found["Deployment", "llama-decode"]["spec"]
    strategy = {"type": "RollingUpdate", "rollingUpdate": expected[1]}
    assert (spec["replicas"], spec["strategy"]) == (expected[0], strategy)


def test_worker_service_is_headless_and_leaves_out_draining_pods(objects):
    """Routers find workers in its EndpointSlices; a pod whose serving label changed is in none."""
    spec = objects()["Service", "llama-decode"]["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["selector"] == {**DECODE, "penstock.dev/serving": "true"}


def test_an_eviction_takes_one_replica_at_a_time(objects):
    """Workers and routers alike; a pod that never got ready holds up no node's drain."""
    for service in ("frontend", "decode"):
        assert objects()["PodDisruptionBudget", f"llama-{service}"]["spec"] == {
            "maxUnavailable": 1,
            "selector": {"matchLabels": {"penstock.dev/graph": "llama", "penstock.dev/service": service}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }


def test_routers_may_watch_slices_read_their_graph_and_nothing_else(objects):
    """The Role reads EndpointSlices and the one graph, and is bound to the routers' account alone."""
    found = objects()
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    graphs = {"apiGroups": ["penstock.dev"], "resources": ["graphdeployments"], "resourceNames": ["llama"]}
    assert found["Role", "llama-router"]["rules"] == [
        {**slices, "verbs": ["get", "list", "watch"]},
        {**graphs, "verbs": ["get"]},
    ]
    binding = found["RoleBinding", "llama-router"]
    assert binding["roleRef"]["name"] == "llama-router"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "llama-router", "namespace": "serving"}]


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ("vllm", {"frontend": True, "prefill": False, "decode": False}),
        ("simulated", {"frontend": True, "prefill": False, "decode": False}),
        ("dynamo", {"frontend": True, "prefill": True, "decode": True}),
    ],
)
def test_only_who_asks_the_api_server_gets_a_token(objects, runtime, expected):
    """Accounts mount no token by themselves; a pod that needs one says so."""
    found = objects(runtime=runtime)
    for suffix in ("router", "worker"):
        assert found["ServiceAccount", f"llama-{suffix}"]["automountServiceAccountToken"] is False
    for service, has_token in expected.items():
        spec = found["Deployment", f"llama-{service}"]["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is has_token
        suffix = "router" if service == "frontend" else "worker"
        assert spec["serviceAccountName"] == f"llama-{suffix}"


def test_routers_read_a_valid_graph_of_their_own(objects, build):
    """The ConfigMap's graph loads, and has the model, the roles, the router's settings and the lease."""
    changes = {
        "slo": {"ttft": "2s"},
        "router": {"policy": "dualmap"},
        "lease": {"durationSeconds": 12},
        "services": {"decode": {"replicas": 4, "gpusPerReplica": 2, "scaling": {}}},
        "planner": {"maxGpuBudget": 64},
    }
    text = objects(**changes)["ConfigMap", "llama-router"]["data"]["graph.yaml"]
    manifests, problems = parse_manifests(text, "graph.yaml")
    assert problems == []
    (graph,) = manifests.graphs
    original = build(**changes)
    assert graph.name == "llama"
    assert (graph.spec.model, graph.spec.router, graph.spec.lease.duration_seconds) == (
        original.spec.model,
        original.spec.router,
        original.spec.lease.duration_seconds,
    )
    assert {name: each.role for name, each in graph.spec.services.items()} == {
        "frontend": Role.ROUTER,
        "prefill": Role.PREFILL,
        "decode": Role.DECODE,
    }


def test_adapter_names_graph_and_service(build, context):
    """With a number for its creation, without one afterwards."""
    graph = build(services={"decode": {"scaling": {}}})
    made = adapter(graph, "decode", context, replicas=2)
    assert made == {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ScalingAdapter",
        "metadata": {
            "name": "llama-decode",
            "namespace": "serving",
            "labels": {**service_labels("decode", "decode"), **RELEASE},
            "ownerReferences": [OWNER],
        },
        "spec": {"graph": "llama", "service": "decode", "replicas": 2},
    }
    assert adapter(graph, "decode", context, replicas=None)["spec"] == {"graph": "llama", "service": "decode"}


@pytest.mark.parametrize(("is_on", "limit"), [(True, 8), (False, None)])
def test_a_router_with_tiers_reads_the_request_limit_of_its_workers(build, is_on, limit):
    """It sends them no more, so that the rest waits by tier; without tiers it need not know, and a change rolls nothing."""
    text = router_manifest(
        build(runtime="simulated", engine={"requestLimit": 8}, router={"tiers": {"enabled": is_on}})
    )
    manifests, problems = parse_manifests(text)
    assert problems == []
    (graph,) = manifests.graphs
    assert graph.spec.engine.request_limit == limit


LEASE = {"durationSeconds": 40, "decoderBlocksTtlSeconds": 300}


def templates(objects, **changes):
    """Return the pod templates of a graph by Deployment."""
    return {
        name: each["spec"]["template"]
        for (kind, name), each in objects(**changes).items()
        if kind == "Deployment"
    }


@pytest.mark.parametrize(
    ("changes", "rolled"),
    [
        ({"lease": {**LEASE, "durationSeconds": 50}}, {"llama-prefill", "llama-decode", "llama-frontend"}),
        ({"lease": {**LEASE, "decoderBlocksTtlSeconds": 301}}, {"llama-decode"}),
        ({"services": {"prefill": {"lease": {"durationSeconds": 60}}}}, {"llama-prefill", "llama-frontend"}),
        ({"services": {"decode": {"lease": {"durationSeconds": 60}}}}, {"llama-decode"}),
        ({"lease": {**LEASE, "acknowledgeShortLease": True}}, set()),
    ],
)
def test_a_change_rolls_only_what_reads_it(objects, changes, rolled):
    """Routers judge KV transfers by prefill's lease; the life of decoder blocks is decode's alone."""
    before, after = templates(objects, lease=LEASE), templates(objects, **{"lease": LEASE, **changes})
    assert {name for name in before if before[name] != after[name]} == rolled


WIDE = {"gpusPerReplica": 8, "nodesPerReplica": 2, "args": ["--enforce-eager"]}
JOIN = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank"]
LEADER = ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", "29501"]


@pytest.fixture
def wide(objects):
    """Return a function that makes the LeaderWorkerSet of a two-node decode service."""

    def make(runtime="vllm", **arguments):
        found = objects(runtime=runtime, services={"decode": WIDE}, planner={"maxGpuBudget": 64}, **arguments)
        return found["LeaderWorkerSet", "llama-decode"]

    return make


def args(template):
    """Arguments of the main container."""
    return template["spec"]["containers"][0]["args"]


def test_a_service_over_nodes_is_a_leader_worker_set(wide, objects):
    """Its size is the number of nodes; the one-node services stay Deployments."""
    spec = wide(replicas={"decode": 3}, unavailable={"decode": 1})["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert (spec["startupPolicy"], spec["leaderWorkerTemplate"]["restartPolicy"]) == (
        "LeaderCreated",
        "RecreateGroupOnPodRestart",
    )
    kinds = list(objects(services={"decode": WIDE}, planner={"maxGpuBudget": 64}))
    assert ("Deployment", "llama-decode") not in kinds
    assert ("Deployment", "llama-prefill") in kinds


@pytest.mark.parametrize("runtime", ["vllm", "dynamo"])
def test_nodes_join_at_the_leader(wide, runtime):
    """Rank 0 serves, the others run headless; the user's own arguments stay last."""
    template = wide(runtime)["spec"]["leaderWorkerTemplate"]
    assert args(template["leaderTemplate"])[-11:] == [*JOIN, "0", *LEADER, "--enforce-eager"]
    follower = [*JOIN, "$(LWS_WORKER_INDEX)", *LEADER, "--headless", "--enforce-eager"]
    assert args(template["workerTemplate"])[-12:] == follower


def test_followers_answer_nobody(wide):
    """No probes, no hooks and no place in a Service."""
    template = wide()["spec"]["leaderWorkerTemplate"]
    leader, follower = template["leaderTemplate"], template["workerTemplate"]
    hooks = {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert hooks <= set(leader["spec"]["containers"][0])
    assert not hooks & set(follower["spec"]["containers"][0])
    assert leader["metadata"]["labels"]["penstock.dev/serving"] == "true"
    assert "penstock.dev/serving" not in follower["metadata"]["labels"]


def test_without_the_kind_there_is_no_workload(build, context):
    """The other children stand ready; a status tells what is missing."""
    poor = dataclasses.replace(context, kinds=frozenset())
    graph = build(services={"decode": WIDE}, planner={"maxGpuBudget": 64})
    kinds = {
        (each["kind"], each["metadata"]["name"])
        for each in children(graph, poor, replicas={}, unavailable={})
    }
    assert ("Service", "llama-decode") in kinds
    assert not {("LeaderWorkerSet", "llama-decode"), ("Deployment", "llama-decode")} & kinds
