"""When a service gets a replacement because its replicas are on cordoned nodes, and when the budget has no room for it."""

from __future__ import annotations

import pytest

from penstock.kube.objects.names import DRAINING, SERVING
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replacement import Replacement, cordoned_nodes, replacements


def worker(node, *, is_cordoned, **changes):
    """Return a serving worker on a node."""
    values = {"ready": True, "serving": SERVING, "phase": "Running", "role": "decode", **changes}
    return PodView(f"p-{node}", node=node, node_is_cordoned=is_cordoned, **values)


OLD = worker("a", is_cordoned=True)
OTHER = worker("b", is_cordoned=True)
NEW = worker("c", is_cordoned=False)
STARTING = worker("c", is_cordoned=False, ready=False)
LEAVING = worker("a", is_cordoned=True, serving=DRAINING)


@pytest.mark.parametrize(
    ("pods", "wanted", "of_worker", "of_router"),
    [
        ([OLD], 1, ("a",), ("a",)),
        ([OLD, STARTING], 1, ("a",), ("a",)),
        ([OLD, NEW], 1, (), ("a",)),  # the worker is drained now; the router stays until it is evicted
        ([LEAVING, NEW], 1, (), ()),
        ([OLD, OTHER], 2, ("a", "b"), ("a", "b")),
        ([OTHER, NEW], 2, (), ()),
        ([NEW], 1, (), ()),
        ([OLD], 0, (), ()),
        ([], 1, (), ()),
    ],
)
def test_a_service_whose_serving_replicas_are_all_on_cordoned_nodes_needs_one(
    pods, wanted, of_worker, of_router
):
    """Replicas that start elsewhere do not serve yet; those that leave do not count any more."""
    assert cordoned_nodes(pods, wanted=wanted, is_drained=True) == of_worker
    assert cordoned_nodes(pods, wanted=wanted, is_drained=False) == of_router


@pytest.mark.parametrize(
    ("budget", "fitting"),
    [
        (None, {"decode", "prefill", "router"}),
        (9, {"decode", "prefill", "router"}),
        (8, {"prefill", "router"}),
        (7, {"prefill", "router"}),
        (6, {"router"}),
    ],
)
def test_replacements_stay_together_within_the_budget(budget, fitting):
    """6 GPUs are wanted; the smallest replacements come first, and routers need no GPU."""
    nodes = {"decode": ("a",), "prefill": ("a",), "router": ("b",), "other": ()}
    gpus = {"decode": 2, "prefill": 1, "router": 0, "other": 1}
    found = replacements(nodes, gpus, wanted_gpus=6, budget=budget)
    assert {name for name, each in found.items() if each.fits} == fitting
    assert set(found) == {"decode", "prefill", "router"}
    for name, each in found.items():
        assert each == Replacement(nodes[name], name in fitting, gpus[name])
