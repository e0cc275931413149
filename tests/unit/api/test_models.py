from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Environment, GraphDeployment, Role, ScalingConfig, ServiceSpec
from penstock.api.manifests import load_graph
from penstock.api.manifests.reference import markdown
from penstock.runtimes import RuntimeContext, process_specs


@pytest.mark.parametrize(
    ("scaling", "expected"), [(None, (3, 3)), (ScalingConfig(min_replicas=2, max_replicas=5), (2, 5))]
)
def test_replica_bounds_are_fixed_without_scaling(scaling, expected):
    """Without a scaling section the number of replicas is both bounds."""
    assert ServiceSpec(role=Role.DECODE, replicas=3, scaling=scaling).replica_bounds == expected


@pytest.mark.parametrize(
    ("changes", "on_kubernetes", "locally"),
    [
        ({"role": "router"}, 2, 1),
        ({"role": "router", "replicas": 1}, 1, 1),
        ({"role": "router", "scaling": {"minReplicas": 3, "maxReplicas": 4}}, 3, 3),
        ({"role": "router", "scaling": {"minReplicas": 1, "maxReplicas": 1}}, 1, 1),
        ({"role": "decode"}, 1, 1),
        ({"role": "decode", "scaling": {"minReplicas": 2, "maxReplicas": 4}}, 2, 2),
        ({"role": "decode", "scaling": {"minReplicas": 0, "maxReplicas": 4}}, 1, 1),
    ],
)
def test_replicas_that_nobody_gave(changes, on_kubernetes, locally):
    """Two routers on Kubernetes, else one; scaling's bounds hold the default."""
    service = ServiceSpec.model_validate(changes)
    assert service.replicas_in(Environment.KUBERNETES) == service.first_replicas == on_kubernetes
    assert service.replicas_in(Environment.LOCAL) == locally


@pytest.mark.parametrize(
    ("changes", "service", "image"),
    [
        ({}, "decode", "ghcr.io/penstock/penstock:0.1.0"),
        ({"image": "own:1"}, "frontend", "own:1"),
        ({"runtime": "vllm"}, "decode", "vllm/vllm-openai:v0.32.0"),
        ({"runtime": "vllm", "image": "vllm:x"}, "frontend", "ghcr.io/penstock/penstock:0.1.0"),
        ({"runtime": "vllm", "services": {"frontend": {"image": "r:1"}}}, "frontend", "r:1"),
        ({"runtime": "dynamo", "image": "d:1", "services": {"decode": {"image": "d:2"}}}, "decode", "d:2"),
    ],
)
def test_image_of_a_service(build, changes, service, image):
    """Service, then graph, then runtime; a router never runs in vLLM's image."""
    assert build(**changes).spec.image_of(service) == image


@given(
    budget=st.none() | st.integers(min_value=2, max_value=64),
    low=st.floats(min_value=0.01, max_value=0.49),
    high=st.floats(min_value=0.5, max_value=1),
    interval=st.integers(min_value=1, max_value=600),
    args=st.lists(st.text(max_size=8), max_size=3),
)
def test_dump_and_load_give_the_same_graph(budget, low, high, interval, args):
    """What a graph says survives being written as a manifest and read again."""
    graph = GraphDeployment.model_validate(
        {
            "metadata": {"name": "g"},
            "spec": {
                "model": {"name": "m"},
                "services": {"p": {"role": "prefill", "args": args}, "d": {"role": "decode"}},
                "planner": {
                    "maxGpuBudget": budget,
                    "decodeKvScaleDownThreshold": low,
                    "decodeKvScaleUpThreshold": high,
                    "adjustmentIntervalSeconds": interval,
                },
            },
        }
    )
    assert GraphDeployment.model_validate(graph.to_manifest()) == graph
    assert GraphDeployment.model_validate(graph.model_dump(mode="json", by_alias=True)) == graph


ROOT = Path(__file__).parents[3]
SAMPLES = [
    path
    for path in sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
    if "kind: GraphDeployment" in path.read_text(encoding="utf-8")
]


def test_the_reference_is_current():
    """docs/manifest.md is what the models say; renew it with `python -m penstock.api.manifests.reference`."""
    assert (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_each_sample_is_valid_and_becomes_processes(path):
    """A sample can be loaded and rendered, with a router, workers and a planner unless it asks for none."""
    graph = load_graph(path)
    context = RuntimeContext(python="py", graph_file=str(path), discovery="/s.json", namespace=graph.name)
    roles = {spec.role for spec in process_specs(graph, context)}
    assert "router" in roles
    assert ("planner" in roles) is graph.spec.planner.enabled
    assert roles & {"prefill", "decode", "aggregated"}
