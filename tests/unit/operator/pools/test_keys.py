"""Names of pools and of their graphs."""

from __future__ import annotations

import pytest

from penstock.kube.kinds import CLUSTER_GPU_POOL, GPU_POOL
from penstock_operator.pools.keys import graph_of, is_of_cluster, kind_of_pool, member_of, title_of


@pytest.mark.parametrize(
    ("pool", "member", "kind"),
    [(("ns", "p"), "chat", GPU_POOL), (("", "p"), "ns/chat", CLUSTER_GPU_POOL)],
)
def test_a_member_is_its_graph_and_back(pool, member, kind):
    """A ClusterGpuPool names the namespace, too."""
    assert member_of(pool, ("ns", "chat")) == member
    assert graph_of(pool, member) == ("ns", "chat")
    assert kind_of_pool(pool) is kind
    assert is_of_cluster(pool) == (kind is CLUSTER_GPU_POOL)


def test_sentences_name_kind_and_pool():
    """Of the one that lives in no namespace likewise."""
    assert title_of({"metadata": {"name": "p", "namespace": "ns"}}) == "GpuPool p"
    assert title_of({"metadata": {"name": "p"}}) == "ClusterGpuPool p"
