"""Which pools are for a graph while the namespaces, which a pool selects by labels, are not known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock_operator.pools.watch import PoolWatch


def pool(match):
    """Return a ClusterGpuPool that has given GPUs to a graph of namespace a."""
    row = {"name": "a/chat", "granted": 4, "serial": 2, "maxHeld": 4}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ClusterGpuPool",
        "metadata": {"name": "shared", "uid": "u", "generation": 1, "creationTimestamp": ""},
        "spec": {"gpus": 8, "graphs": [{"match": match, "guaranteedGpus": 2}]},
        "status": {"graphs": [row]},
    }


@pytest.mark.parametrize(
    ("match", "known", "covered"),
    [
        ({"namespaceLabels": {"team": "x"}}, False, [True, False]),
        ({"namespaces": ["b"], "namespaceLabels": {"team": "x"}}, False, [True, False]),
        ({"namespaces": ["b"]}, True, [False, True]),
    ],
)
def test_unknown_namespaces_take_nothing_and_let_none_in(match, known, covered):
    """Who draws already keeps that; it is said, and a pool that selects none needs no namespaces."""
    watch = PoolWatch(
        SimpleNamespace(),
        SimpleNamespace(),
        namespace=None,
        operator_class="penstock",
        on_change=lambda: None,
        on_edit=lambda *_: None,
    )
    graphs = [{"metadata": {"name": "chat", "namespace": each}} for each in "ab"]
    assert [watch.covers(pool(match), each) for each in graphs] == covered
    model, wrong = watch.model(pool(match))
    assert (model is not None) == known
    assert ("the namespaces are not known yet, so graphs keep their grants" in wrong) != known
