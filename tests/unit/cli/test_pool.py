"""`penstock pool` of a cluster: which objects it asks for, and what it says of them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from penstock.cli.cluster import Connection
from penstock.cli.pool import pool
from penstock.core.errors import ConfigError, NotFoundError
from penstock.kube.kinds import CLUSTER_GPU_POOL, GPU_POOL

ROW = {"name": "a/chat", "granted": 2, "serial": 1, "guaranteed": 2, "held": 2, "wanted": 4, "target": 4}
OTHER = {"name": "b/chat", "granted": 4, "serial": 1, "guaranteed": 2, "held": 4, "wanted": 2, "target": 2}
SHARED = {
    "metadata": {"name": "shared"},
    "spec": {"gpus": 6},
    "status": {"gpus": {"total": 6}, "graphs": [ROW, OTHER]},
}


@pytest.fixture(name="cluster")
def made_cluster(monkeypatch):
    """What the API server holds, and which kinds and namespaces it was asked for."""
    found = SimpleNamespace(pools=[SHARED], asked=[])

    async def listed(kind, *, namespace):
        found.asked.append((kind, namespace))
        return SimpleNamespace(items=found.pools)

    async def got(kind, name, *, namespace):
        found.asked.append((kind, namespace))
        return next(each for each in found.pools if each["metadata"]["name"] == name)

    @asynccontextmanager
    async def opened(_self):
        yield SimpleNamespace(list=listed, get=got)

    monkeypatch.setattr(Connection, "open", opened)
    return found


def shown(*arguments):
    """Run the command; return its output, or raise what it raised."""
    result = CliRunner().invoke(pool, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("-A",), (CLUSTER_GPU_POOL, None)),
        (("--all-namespaces", "shared"), (CLUSTER_GPU_POOL, None)),
        (("-n", "a"), (GPU_POOL, "a")),
        (("-n", "a", "shared"), (GPU_POOL, "a")),
    ],
)
def test_a_pool_of_the_kind_that_was_asked_for_is_shown(cluster, arguments, asked):
    """With graphs of several namespaces, and whom each waits for."""
    lines = [line.split() for line in shown(*arguments).splitlines()]
    assert cluster.asked == [asked]
    assert lines[1] == ["a/chat", "2", "2", "2", "4", "4", "b/chat"]
    assert lines[2] == ["b/chat", "2", "4", "4", "2", "2"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("-A",), "the chart's clusterWide"), (("-n", "a"), "one for its namespace")],
)
def test_a_pool_that_no_operator_shares_out_says_what_it_needs(cluster, arguments, text):
    """An installation of one namespace never sees a ClusterGpuPool, so nothing would."""
    cluster.pools = [{"metadata": {"name": "shared"}, "spec": {"gpus": 6}}]
    said = " ".join(shown(*arguments).split())
    assert "is not managed by any operator" in said
    assert text in said


@pytest.mark.parametrize(
    ("arguments", "text"), [(("-A",), "--namespace for a GpuPool"), (("-n", "a"), "pool --all-namespaces")]
)
def test_without_a_pool_the_other_kind_is_named(cluster, arguments, text):
    """Who looks in the wrong place finds the right one."""
    cluster.pools = []
    with pytest.raises(NotFoundError, match=text):
        shown(*arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("-A", "-n", "a"), "give only one"), (("--context", "c"), "add --namespace or --all-namespaces")],
)
def test_options_that_do_not_go_together_are_refused(arguments, text):
    """Before anything is read."""
    with pytest.raises(ConfigError, match=text):
        shown(*arguments)
