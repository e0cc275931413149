"""Objects and contexts that the builders' tests share."""

from __future__ import annotations

import pytest

from penstock.kube.kinds import LEADER_WORKER_SET
from penstock_operator.resources import BuildContext, children


@pytest.fixture
def base_runtime():
    """The runtime that real clusters run."""
    return "vllm"


@pytest.fixture
def context() -> BuildContext:
    """A cluster that knows LeaderWorkerSets, operator in a namespace of its own."""
    return BuildContext(
        owner_uid="uid-1",
        namespace="serving",
        operator_namespace="penstock",
        kinds=frozenset({LEADER_WORKER_SET}),
    )


@pytest.fixture
def objects(build, context):
    """Return a function that makes the children of the changed base graph by kind and name."""

    def make(replicas=None, unavailable=None, context=context, **spec_changes):
        found = children(
            build(**spec_changes), context, replicas=replicas or {}, unavailable=unavailable or {}
        )
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    return make


@pytest.fixture
def template(objects):
    """Return a function that makes the pod template of one service."""

    def make(service, **changes):
        return objects(**changes)["Deployment", f"llama-{service}"]["spec"]["template"]

    return make


@pytest.fixture
def container(template):
    """Return a function that makes the main container of one service."""

    def make(service, **changes):
        (found,) = template(service, **changes)["spec"]["containers"]
        return found

    return make
