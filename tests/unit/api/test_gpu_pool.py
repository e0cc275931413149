import pytest
import yaml

from penstock.api import GpuPool, GraphDeployment, PoolPriority, entries_of
from penstock.api.manifests import load_pool, parse_manifests
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
    found = entries_of(GpuPool.model_validate(POOL), models)
    assert {name: each.guaranteed_gpus for name, each in found.items()} == {"chat": 4, "night": 2}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        (
            [pool(gpus=5)],
            "spec.gpus: 5 GPUs are fewer than guaranteed: 4 + 2 = 6; raise it or lower guaranteedGpus",
        ),
        (
            [pool({"match": {"name": "a"}, "guaranteedGpus": 3, "maxGpus": 2})],
            "spec.graphs[0].guaranteedGpus: 3 exceeds maxGpus 2; lower it or raise maxGpus",
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
            "spec.gpus: 8 GPUs are fewer than guaranteed to the graphs here: 5 + 5 = 10; raise it or lower guaranteedGpus",
        ),
        (
            [POOL, POOL],
            "metadata.name: a second GpuPool 'shared'; rename or remove one",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pool_is_said_at_its_line_with_the_remedy(objects, expected):
    """Also what only the graphs beside it show."""
    assert said(*objects) == [expected]


def test_a_graph_without_an_entry_cannot_draw():
    """The pool's name, the graph's and what to do."""
    model = GraphDeployment.model_validate(graph("other"))
    with pytest.raises(
        InvalidSpecError, match="GpuPool shared: no entry matches graph other; add one for it"
    ):
        entries_of(GpuPool.model_validate(POOL), [model])


def test_a_graph_without_a_planner_keeps_what_it_starts_with():
    """Its guarantee has to cover that."""
    data = graph(planner={"enabled": False})
    (message,) = said(data, POOL)
    assert "fewer than the 8 that graph chat never goes below" in message


def test_a_file_holds_one_pool():
    """The sample does; a graph alone does not."""
    assert load_pool(yaml.safe_dump(POOL)).name == "shared"
    with pytest.raises(InvalidSpecError, match="0 GpuPools where one is needed"):
        load_pool(yaml.safe_dump(graph()))


def test_priorities_have_an_order():
    """High borrows before normal, normal before low."""
    assert sorted(PoolPriority, key=lambda each: each.rank) == ["low", "normal", "high"]
