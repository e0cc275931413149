from pathlib import Path

import pytest
import yaml

from penstock.api import ClusterGpuPool, GpuPool, GraphDeployment, PoolPriority, pool_entries
from penstock.api.manifests import load_graph, load_manifests, load_pool, parse_manifests
from penstock.api.pool_rules import pool_problems
from penstock.core.errors import InvalidSpecError

POOL = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GpuPool",
    "metadata": {"name": "shared"},
    "spec": {
        "gpus": 8,
        "graphs": [
            {"match": {"name": "chat"}, "guaranteedGpus": 4},
            {"match": {"labels": {"team": "batch"}}, "guaranteedGpus": 2, "priority": "low"},
        ],
    },
}


FLOOR_REMEDY = "raise it, or lower the graph's minReplicas, minGpuBudget or minTotalGpus"


OLDEST = "on a cluster the oldest graphs' guarantees count first"


def graph(name="chat", labels=None, planner=None, **scaling) -> dict:
    """A graph that never goes below two GPUs unless told otherwise."""
    workers = {
        role: {"role": role, "replicas": 4, "scaling": {"minReplicas": 1, "maxReplicas": 8, **scaling}}
        for role in ("prefill", "decode")
    }
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "model": {"name": "m"},
            "runtime": "simulated",
            "services": {"frontend": {"role": "router"}, **workers},
            "planner": planner or {},
        },
    }


def pool(*entries, **spec) -> dict:
    """The pool with other entries or keys."""
    return {**POOL, "spec": {**POOL["spec"], **spec, **({"graphs": list(entries)} if entries else {})}}


def said(*objects) -> list[str]:
    """What is wrong with the objects of one file."""
    _, problems = parse_manifests(yaml.safe_dump_all(objects, sort_keys=False))
    assert all(each.line is not None for each in problems)
    return [f"{each.path}: {each.message}" for each in problems]


def test_a_pool_beside_its_graphs_is_valid():
    """Each entry finds its graph, by name or by labels."""
    graphs = [graph(), graph("night", {"team": "batch", "more": "x"})]
    assert said(*graphs, POOL) == []
    models = [GraphDeployment.model_validate(each) for each in graphs]
    found = pool_entries(GpuPool.model_validate(POOL), models)
    assert {name: each.guaranteed_gpus for name, each in found.items()} == {"chat": 4, "night": 2}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        (
            [pool(gpus=5)],
            "spec.gpus: 5 GPUs are fewer than guaranteed: 4 + 2 = 6; raise it or lower guaranteedGpus",
        ),
        (
            [pool(gpus=None)],
            "spec.gpus: neither gpus nor nodeSelector; set gpus to the number of GPUs, or nodeSelector to the nodes to count",
        ),
        (
            [pool({"match": {"name": "a"}, "guaranteedGpus": 3, "maxGpus": 2})],
            "spec.graphs[0].guaranteedGpus: 3 exceeds maxGpus 2; lower it or raise maxGpus",
        ),
        (
            [pool(reclaim={"order": ["newest", "newest"]})],
            "spec.reclaim.order: one occurs twice; remove the second",
        ),
        (
            [pool({"match": {}})],
            "spec.graphs[0].match: neither name nor labels; give one, or every graph would match",
        ),
        (
            [graph(labels={"team": "batch"}), POOL],
            "spec.graphs[1].match: graph chat is matched by graphs[0] too; make one of them narrower",
        ),
        (
            [graph(minReplicas=3), POOL],
            f"spec.graphs[0].guaranteedGpus: 4 GPUs are fewer than the 6 that graph chat never goes below; {FLOOR_REMEDY}",
        ),
        (
            [graph(planner={"minTotalGpus": 5}), POOL],
            f"spec.graphs[0].guaranteedGpus: 4 GPUs are fewer than the 5 that graph chat never goes below; {FLOOR_REMEDY}",
        ),
        (
            [
                graph("one", {"team": "batch"}),
                graph("two", {"team": "batch"}),
                pool({"match": {"labels": {"team": "batch"}}, "guaranteedGpus": 5}),
            ],
            "spec.gpus: 8 GPUs are fewer than guaranteed to the graphs here: 5 + 5 = 10; raise it or lower guaranteedGpus; " + OLDEST,
        ),
        (
            [POOL, POOL],
            "metadata.name: a second GpuPool 'shared'; rename or remove one",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pool_is_said_at_its_line_with_the_remedy(objects, expected):
    """Also what only the graphs alongside it show."""
    assert said(*objects) == [expected]


def with_nodes(resource, *, on=("prefill", "decode"), **keys) -> dict:
    """The graph with workers on nodes of one resource."""
    made = graph(**keys)
    made["spec"]["nodePools"] = {"there": {"gpuResourceName": resource}}
    for each in on:
        made["spec"]["services"][each]["nodePool"] = "there"
    return made


MIG = "nvidia.com/mig-3g.40gb"

OTHER_RESOURCE = "correct it or the node pool's gpuResourceName, or let no entry match the graph"


@pytest.mark.parametrize(
    ("made", "counted", "expected"),
    [
        (with_nodes("amd.com/gpu"), "amd.com/gpu", []),
        (with_nodes(MIG), MIG, []),
        (graph(), "amd.com/gpu", []),
        (
            with_nodes("amd.com/gpu", on=("decode",)),
            "nvidia.com/gpu",
            [f"spec.resource: decode's amd.com/gpu of graph chat count against 8 nvidia.com/gpu; {OTHER_RESOURCE}"],
        ),
        (
            with_nodes(MIG),
            "nvidia.com/gpu",
            [
                f"spec.resource: prefill's {MIG}, decode's {MIG} of graph chat count against 8 nvidia.com/gpu; {OTHER_RESOURCE}"
            ],
        ),
    ],
)  # fmt: skip
def test_workers_that_ask_for_another_resource_than_the_pools_are_named(made, counted, expected):
    """A pool counts one resource; simulated workers without a node pool ask for none."""
    assert said(made, pool(resource=counted)) == expected


def test_a_real_workers_gpu_is_one_of_nvidia_unless_its_node_pool_names_another():
    """So a pool of AMD's GPUs names a graph that forgot to."""
    made = graph()
    made["spec"]["runtime"] = "vllm"
    (message,) = [each for each in said(made, pool(resource="amd.com/gpu")) if "spec.resource" in each]
    assert "prefill's nvidia.com/gpu, decode's nvidia.com/gpu of graph chat" in message


@pytest.mark.parametrize("resource", ["gpu.nvidia.com", "gpu"])
def test_a_pool_counts_no_device_class(resource):
    """It is refused in words: GPUs of claims count by gpusPerReplica, whatever the class."""
    (message,) = said(pool(resource=resource))
    assert message == (
        f"spec.resource: {resource} is not an extended resource, as its name has no slash; devices of a DRA class are not counted on "
        "nodes; name one, or leave resource and nodeSelector out and write gpus, against which claims count by gpusPerReplica"
    )


def test_a_pool_of_counted_nodes_is_for_clusters_alone():
    """What its guarantees have to fit is known only once the nodes are counted."""
    made = pool(gpus=None, nodeSelector={"gpu": "h100"})
    assert said(graph(), graph("night", {"team": "batch"}), made) == []
    model = GpuPool.model_validate(made)
    graphs = [GraphDeployment.model_validate(graph())]
    assert list(pool_problems(model, graphs, 4)) == []
    ((path, message),) = pool_problems(model, graphs, 3)
    assert (path, message.partition(";")[0]) == (
        ("spec", "gpus"),
        "3 GPUs are fewer than guaranteed to the graphs here: 4 = 4",
    )
    with pytest.raises(InvalidSpecError, match="only a cluster has nodes to count"):
        assert model.written_gpus


def test_a_graph_without_an_entry_cannot_draw():
    """The pool's name, the graph's and what to do."""
    model = GraphDeployment.model_validate(graph("other"))
    with pytest.raises(
        InvalidSpecError, match="GpuPool shared: no entry matches graph other; add one for it"
    ):
        pool_entries(GpuPool.model_validate(POOL), [model])


def test_a_graph_without_a_planner_keeps_what_it_starts_with():
    """Its guarantee has to cover that."""
    data = graph(planner={"enabled": False})
    (message,) = said(data, POOL)
    assert "fewer than the 8 that graph chat never goes below" in message


LARGE = "spec.planner.maxGpuBudget: 8 GPUs are fewer than the graph starts with: prefill 6 + decode 6 = 12; raise it or lower replicas"


def starting_with_twelve(**planner):
    """A graph that the default budget is too small for."""
    made = graph(planner=planner)
    for each in ("prefill", "decode"):
        made["spec"]["services"][each]["replicas"] = 6
    return made


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([starting_with_twelve()], [f"{LARGE} (not written, maxGpuBudget is 8 outside of GpuPools)"]),
        ([starting_with_twelve(maxGpuBudget=8), pool(gpus=16)], [LARGE]),
        ([starting_with_twelve(maxGpuBudget=None)], []),
        ([starting_with_twelve(), pool(gpus=16)], []),
        ([pool(gpus=16), starting_with_twelve()], []),
        (
            [starting_with_twelve(), pool({"match": {"name": "other"}}, gpus=16)],
            [f"{LARGE} (not written, maxGpuBudget is 8 outside of GpuPools)"],
        ),
    ],
)  # fmt: skip
def test_the_default_budget_is_for_graphs_outside_of_pools(objects, expected):
    """Inside one only what is written counts; the pool may stand before its graphs or behind them."""
    assert said(*objects) == expected


@pytest.mark.parametrize(
    ("planner", "most"), [({}, 64), ({"maxGpuBudget": None}, 64), ({"maxGpuBudget": 8}, 8), ({"maxGpuBudget": 90}, 64)]
)  # fmt: skip
def test_a_graph_may_hold_the_pool_unless_it_writes_a_budget(planner, most):
    """The entry's maxGpus is the least where it is lower; 0 is a bound, too."""
    model = load_graph(yaml.safe_dump(graph(planner=planner)), draws=True)
    entries = [
        GpuPool.model_validate(pool({"match": {"name": "chat"}, **more}, gpus=64)).spec.graphs[0]
        for more in ({}, {"maxGpus": 5}, {"maxGpus": 0})
    ]
    assert [each.max_gpus_of(64, model) for each in entries] == [most, 5, 0]
    written = planner.get("maxGpuBudget")
    assert model.spec.planner.max_gpu_budget == written


def test_a_file_holds_one_pool():
    """The sample does; a graph alone does not."""
    assert load_pool(yaml.safe_dump(POOL)).name == "shared"
    with pytest.raises(InvalidSpecError, match="0 GpuPools where one is needed"):
        load_pool(yaml.safe_dump(graph()))


def test_priorities_have_an_order():
    """High borrows before normal, normal before low."""
    assert sorted(PoolPriority, key=lambda each: each.rank) == ["low", "normal", "high"]


def cluster_pool(*entries, **spec) -> dict:
    """A pool of several namespaces."""
    return {**pool(*entries, **spec), "kind": "ClusterGpuPool"}


def within(made, namespace):
    """A graph in a namespace."""
    return {**made, "metadata": {**made["metadata"], "namespace": namespace}}


@pytest.mark.parametrize(
    ("match", "graphs", "fits"),
    [
        ({"namespaces": ["a"]}, [("a", "chat"), ("b", "chat"), (None, "chat")], [True, False, False]),
        ({"namespaces": ["team-*"]}, [("team-a", "x"), ("team", "x"), ("my-team-a", "x")], [True, False, False]),
        ({"namespaces": ["*"]}, [("a", "x"), (None, "x")], [True, True]),
        ({"namespaces": ["a", "b"], "name": "chat"}, [("b", "chat"), ("b", "x"), ("c", "chat")], [True, False, False]),
        ({"namespaces": ["a"], "labels": {"team": "batch"}}, [("a", "x")], [False]),
    ],
)  # fmt: skip
def test_an_entry_of_a_clusters_pool_is_for_the_namespaces_that_it_names(match, graphs, fits):
    """By name or pattern, and for no others; name and labels narrow it."""
    entry = ClusterGpuPool.model_validate(cluster_pool({"match": match})).spec.graphs[0]
    models = [GraphDeployment.model_validate(within(graph(name), namespace)) for namespace, name in graphs]
    assert [entry.match.fits(each) for each in models] == fits


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            cluster_pool({"match": {"name": "chat"}}),
            "spec.graphs[0].match.namespaces: neither namespaces nor namespaceLabels; give one",
        ),
        (pool({"match": {"name": "chat", "namespaceLabels": {"team": "a"}}}), "spec.graphs[0].match.namespaceLabels: "),
        (cluster_pool({"match": {"namespaces": []}}), "spec.graphs[0].match.namespaces: "),
        (cluster_pool({"match": {"namespaces": ["A b"]}}), "spec.graphs[0].match.namespaces[0]: "),
        (pool({"match": {"name": "chat", "namespaces": ["a"]}}), "spec.graphs[0].match.namespaces: "),
    ],
)  # fmt: skip
def test_nothing_lets_all_namespaces_draw_by_omission(made, text):
    """A ClusterGpuPool names namespaces, and a GpuPool, which has one, knows no such key."""
    assert any(each.startswith(text) for each in said(made))


LABELLED = {"a": {"team": "x"}, "b": {"team": "x", "tier": "gold"}, "c": {"team": "y"}, "d": {}}


@pytest.mark.parametrize(
    ("match", "names"),
    [
        ({"namespaceLabels": {"team": "x"}}, "ab"),
        ({"namespaceLabels": {"team": "x", "tier": "gold"}}, "b"),
        ({"namespaceLabels": {"team": "z"}}, ""),
        ({"namespaceLabels": {"team": "x"}, "namespaces": ["a", "c"]}, "a"),
        ({"namespaces": ["c", "e"]}, "ce"),
    ],
)  # fmt: skip
def test_an_entry_is_for_the_namespaces_whose_labels_it_selects(match, names):
    """All labels, and of the namespaces that it names where it names some; a file shows no labels, so there it may fit."""
    made = ClusterGpuPool.model_validate(cluster_pool({"match": match}))
    graphs = [GraphDeployment.model_validate(within(graph(), name)) for name in "abcde"]
    (entry,) = made.within(LABELLED).spec.graphs
    assert [each.metadata.namespace for each in graphs if entry.match.fits(each)] == list(names)
    (unresolved,) = made.spec.graphs
    if unresolved.match.namespace_labels:
        assert not any(map(unresolved.match.fits, graphs))
    may = [
        each.metadata.namespace
        for each in graphs
        if unresolved.match.may_cover("chat", {}, each.metadata.namespace)
    ]
    assert may == list(match.get("namespaces", "abcde"))


def test_graphs_of_one_name_in_two_namespaces_are_told_apart():
    """In what is said, and in what is guaranteed together."""
    made = cluster_pool({"match": {"namespaces": ["a", "b"]}, "guaranteedGpus": 5})
    messages = said(within(graph(), "a"), within(graph(), "b"), made)
    assert [each.split(";")[0] for each in messages] == [
        "spec.gpus: 8 GPUs are fewer than guaranteed to the graphs here: 5 + 5 = 10"
    ]
    (message,) = said(
        within(graph(minReplicas=3), "a"), cluster_pool({"match": {"namespaces": ["*"]}, "guaranteedGpus": 4})
    )
    assert "fewer than the 6 that graph a/chat never goes below" in message


def test_the_sample_of_a_clusters_pool_is_valid():
    """It is alongside the samples of graphs."""
    (found,) = load_manifests(Path("manifests/samples/cluster-gpu-pool.yaml")).gpu_pools
    assert isinstance(found, ClusterGpuPool)
    assert [each.match.namespaces for each in found.spec.graphs] == [("chat",), ("research-*",)]
