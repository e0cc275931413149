from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import (
    GraphDeployment,
    Role,
    ScalingConfig,
    ServiceSpec,
)
from penstock.api.fields import walk


def test_router_holds_no_gpus():
    """A router's gpusPerReplica does not count."""
    assert ServiceSpec(role=Role.ROUTER, gpus_per_replica=4).gpus == 0
    assert ServiceSpec(role=Role.DECODE, gpus_per_replica=4).gpus == 4


@pytest.mark.parametrize(
    ("scaling", "expected"), [(None, (3, 3)), (ScalingConfig(min_replicas=2, max_replicas=5), (2, 5))]
)
def test_replica_bounds_are_fixed_without_scaling(scaling, expected):
    """Without a scaling section the number of replicas is both bounds."""
    assert ServiceSpec(role=Role.DECODE, replicas=3, scaling=scaling).replica_bounds == expected


def test_services_are_found_by_role(build):
    """The graph names its service of a role, and tells disaggregated from aggregated."""
    spec = build().spec
    assert spec.service(Role.DECODE)[0] == "decode"
    assert spec.service(Role.AGGREGATED) is None
    assert list(spec.workers) == ["prefill", "decode"]
    assert spec.is_disaggregated


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


def test_every_field_is_optional_but_for_what_has_no_default():
    """Only what cannot have a default is required."""
    required = {entry.path for entry in walk(GraphDeployment) if entry.info.is_required()}
    assert {path for path in required if path.startswith("spec") and "env" not in path} == {
        "spec",
        "spec.model",
        "spec.model.name",
        "spec.services",
        "spec.services.NAME.role",
    }


def test_null_is_kept_where_it_is_not_the_default(build):
    """No ceiling survives a round trip; leaving it out would mean the default of 8."""
    graph = build(planner={"maxGpuBudget": None})
    assert graph.to_manifest()["spec"]["planner"] == {"maxGpuBudget": None}
    assert GraphDeployment.model_validate(graph.to_manifest()) == graph


_BUDGETS = st.one_of(st.none(), st.integers(min_value=2, max_value=64))


@given(
    budget=_BUDGETS,
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
