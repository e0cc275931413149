"""A namespace is deleted, and what serves in it finishes its requests as a deleted graph does."""

from __future__ import annotations

import time
import uuid

import pytest
from kube import Graph, say, wait_for
from traffic import Load

CLIENTS = 16
PODS_GONE_S = 90
"""A stream takes some 20 s; 20 and 26 s were measured from the deletion to the last pod's end."""

NAMESPACE_GONE_S = 480
"""Its controller looks again after half the pods' terminationGracePeriodSeconds (900), or at its
resync of five minutes; 131 and 319 s were measured."""


class Neighbour(Graph):
    """A graph whose clients run in another namespace, so that they outlive its own."""

    def __init__(self, graph, namespace):
        super().__init__(graph.kube, namespace, graph.name)
        self._graph = graph

    def object(self):
        """Return the graph."""
        return self._graph.object()


def serving(graph):
    """Return the serving labels of the graph's decode workers."""
    return [pod["metadata"]["labels"].get("penstock.dev/serving") for pod in graph.pods("decode")]


@pytest.fixture
def outside(kube):
    """A namespace for clients."""
    name = f"e2e-clients-{uuid.uuid4().hex[:6]}"
    kube.kubectl("create", "namespace", name)
    yield name
    kube.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.nightly
def test_a_namespace_deleted_amid_a_drain_cuts_no_stream(kube, deploy, outside):
    """Its pods end as soon as their streams have, long before their grace; then the namespace goes, finalizer and all."""
    graph = deploy(
        model={"contextTokens": 4096},
        engine={"streamIntervalTokens": 8},
        services={"decode": {"replicas": 2, "scaling": {"minReplicas": 1, "maxReplicas": 3}}},
    )
    host = f"{graph.name}-frontend.{graph.namespace}"
    load = Load(Neighbour(graph, outside), "load", concurrency=CLIENTS, max_tokens=1500, host=host)
    load.finish()
    fewer = '{"spec":{"replicas":1}}'
    kube.kubectl("patch", "gsa", f"{graph.name}-decode", *graph.scope, "--type=merge", f"--patch={fewer}")
    wait_for("a worker drains", lambda: "draining" in serving(graph), 30)
    began_s = time.monotonic()
    kube.kubectl("delete", "namespace", graph.namespace, "--wait=false")

    wait_for("no pod is left", lambda: not kube.get("pods", *graph.scope), PODS_GONE_S)
    say(f"pods were gone {time.monotonic() - began_s:.0f} s after the deletion")
    outcome = load.stop()
    assert (outcome.answered, outcome.lost) == (CLIENTS, [])
    shown = ("get", "namespace", graph.namespace, "--ignore-not-found", "--output=name")
    wait_for("the namespace is gone", lambda: not kube.kubectl(*shown), NAMESPACE_GONE_S, every_s=2)
