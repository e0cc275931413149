"""Before an uninstallation the drains of deleted graphs are waited for within a limit, and no finalizer is left behind."""

from __future__ import annotations

import asyncio

import pytest
from fake_api import FakeApi
from patience import until

from penstock.core.errors import ConflictError, ForbiddenError, NotFoundError
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_operator import departure
from penstock_operator.departure import finish_drains

DRAIN = "penstock.dev/drain"


@pytest.fixture
def api():
    """An API server without a graph."""
    return FakeApi()


@pytest.fixture
def graph(api):
    """Stores graphs, in the namespace ``ns`` unless another is named."""

    async def make(name, *, namespace="ns", is_deleted=False, finalizers=(DRAIN,), **spec):
        obj = GRAPH_DEPLOYMENT.of(
            {"name": name, "namespace": namespace, "finalizers": list(finalizers)}, spec=spec
        )
        await api.create(obj, field_manager="test")
        if is_deleted:
            await api.delete(GRAPH_DEPLOYMENT, name, namespace=namespace)

    return make


@pytest.fixture
def lines(monkeypatch):
    """Lines that the user sees; the pause between two looks is short."""
    monkeypatch.setattr(departure, "POLL_S", 0.01)
    return []


def finish(api, lines, *, limit_s=0.0):
    """Run it over the namespace; return what it returns."""
    return finish_drains(api, ("ns",), operator_class="penstock", limit_s=limit_s, print_line=lines.append)


def exists(api, name):
    """Return whether a graph is stored."""
    return ("GraphDeployment", "ns", name) in api.objects


async def test_a_drain_that_ends_in_time_is_waited_for(api, graph, lines):
    """The operator removes the finalizer, and nothing is given up."""
    await graph("doomed", is_deleted=True)
    waiting = asyncio.create_task(finish(api, lines, limit_s=60.0))
    await until(lambda: lines, "the wait to be reported")
    assert lines == ["waiting up to 60 s for the drain of GraphDeployment ns/doomed"]
    await api.patch(
        GRAPH_DEPLOYMENT, "doomed", {"metadata": {"finalizers": []}}, namespace="ns", field_manager="operator"
    )
    assert await waiting
    assert lines[1:] == ["all graphs are deleted"]


async def test_a_drain_that_takes_longer_is_given_up_and_only_its_own_finalizer_goes(api, graph, lines):
    """Another owner's finalizer stays, and so does another class's graph."""
    await graph("doomed", is_deleted=True)
    await graph("kept", is_deleted=True, finalizers=(DRAIN, "example.com/audit"))
    await graph("other", is_deleted=True, finalizers=(f"{DRAIN}-blue",), operatorClass="blue")
    assert await finish(api, lines)
    assert not exists(api, "doomed")
    assert api.at("GraphDeployment", "kept")["metadata"]["finalizers"] == ["example.com/audit"]
    assert exists(api, "other")
    [line] = [each for each in lines if "abandoned" in each]
    assert line.startswith("GraphDeployments ns/doomed, ns/kept: not drained after 0 s")


async def test_graphs_of_another_installation_of_the_same_class_in_another_namespace_are_left_alone(
    api, graph, lines
):
    """Each installation watches its own namespaces; neither a deleted nor a serving graph of the other one is waited for."""
    await graph("doomed", is_deleted=True)
    await graph("doomed", namespace="other", is_deleted=True)
    await graph("serving", namespace="other")
    assert await finish(api, lines)
    assert not exists(api, "doomed")
    kept = api.objects["GraphDeployment", "other", "doomed"]
    assert kept["metadata"]["finalizers"] == [DRAIN]
    assert not any("other/" in each for each in lines)
    assert lines[-1] == "all graphs are deleted"


async def test_a_graph_that_is_not_deleted_keeps_its_finalizer_and_is_named(api, graph, lines):
    """A new installation takes it up."""
    await graph("serving")
    assert await finish(api, lines)
    assert api.at("GraphDeployment", "serving")["metadata"]["finalizers"] == [DRAIN]
    [line] = lines
    assert line.startswith("GraphDeployment ns/serving: not deleted; they continue to serve")


async def test_a_finalizer_that_cannot_be_removed_is_reported(api, graph, lines, monkeypatch):
    """The command fails then, and so does `helm uninstall`, before it deletes the operator."""
    await graph("doomed", is_deleted=True)

    async def patch(*_arguments, **_more):
        raise ForbiddenError("403")

    monkeypatch.setattr(api, "patch", patch)
    assert not await finish(api, lines)
    assert "all graphs are deleted" not in lines


async def test_where_the_definitions_are_deleted_there_is_nothing_to_wait_for(api, lines, monkeypatch):
    """Their deletion removed the graphs."""

    async def absent(*_arguments, **_more):
        raise NotFoundError("404")

    monkeypatch.setattr(api, "list", absent)
    assert await finish(api, lines, limit_s=60.0)
    assert lines == ["all graphs are deleted"]


async def test_a_write_by_the_operator_in_between_is_no_obstacle(api, graph, lines, monkeypatch):
    """The finalizer is removed from the graph as it is then."""
    await graph("doomed", is_deleted=True)
    patch, conflicts = api.patch, iter([True])

    async def busy(*arguments, **more):
        if next(conflicts, False):
            raise ConflictError("409: the object has been modified")
        return await patch(*arguments, **more)

    monkeypatch.setattr(api, "patch", busy)
    assert await finish(api, lines)
    assert not exists(api, "doomed")
