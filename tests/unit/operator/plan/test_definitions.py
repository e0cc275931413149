"""Which kinds of others a graph needs, and what is said of a missing one."""

from __future__ import annotations

import pytest

from penstock.api import GraphSpec
from penstock.operator.plan.conditions import missing_definition
from penstock.operator.resources.metadata import BuildContext


def spec(runtime, nodes=1, **router):
    """Return a graph of one worker."""
    worker = {"role": "aggregated", "nodesPerReplica": nodes, "gpusPerReplica": nodes}
    services = {"frontend": {"role": "router"}, "worker": worker}
    manifest = {"model": {"name": "m"}, "runtime": runtime, "services": services, "router": router}
    return GraphSpec.model_validate(manifest)


@pytest.mark.parametrize(
    ("spec", "sets", "discovery", "named"),
    [
        (spec("vllm"), False, False, None),
        (spec("vllm", nodes=2), True, False, None),
        (spec("vllm", nodes=2), False, True, "worker: nodesPerReplica above 1"),
        (spec("dynamo"), False, True, None),
        (spec("dynamo"), True, False, "DynamoWorkerMetadata"),
        (spec("dynamo", nodes=2), False, True, "worker: nodesPerReplica above 1"),
        (spec("dynamo", nodes=2), True, True, None),
    ],
)
def test_only_what_a_graph_needs_is_missed(spec, sets, discovery, named):
    """One replica over several nodes, and runtime dynamo."""
    context = BuildContext("", "", has_leader_worker_set=sets)
    failure = missing_definition(spec, context, has_kind_of_runtime=discovery)
    assert (
        (failure is None) if named is None else (failure.reason == "MissingCRD" and named in failure.message)
    )


@pytest.mark.parametrize("known", [False, True])
def test_a_graph_behind_a_gateway_needs_the_kind_of_its_pool(known):
    """Its condition names the kind and where it comes from."""
    graph = spec("vllm", gateway={"enabled": True})
    context = BuildContext("", "", has_inference_pool=known)
    failure = missing_definition(graph, context, has_kind_of_runtime=False)
    assert (failure is None) if known else "InferencePool of inference.networking.k8s.io" in failure.message
