"""Replicas counted from pods."""

from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock.operator.plan.conditions import Replicas, count
from penstock.operator.plan.pods import PodView


def pod(name, **more):
    """Return a ready, serving decode pod with one GPU."""
    return PodView(name, **{"role": "decode", "ready": True, "serving": SERVING, "gpus": 1, **more})


def test_each_pod_is_counted_once_for_what_it_is():
    """Ready, starting, gated, draining, stripped of its label, terminating, finished."""
    pods = [
        pod("ready"),
        pod("starting", ready=False),
        pod("gated", ready=False, gates=(BUDGET_GATE,)),
        pod("draining", serving=DRAINING),
        pod("stripped", serving=""),
        pod("terminating", terminating=True),
        pod("finished", finished=True),
    ]
    assert count(pods) == Replicas(existing=5, ready=3, serving=1, draining=2, gpus=5)


def test_a_group_is_one_replica():
    """Ready only as a whole; a leader's end is the group's."""

    def member(group, index, **more):
        more = {"serving": SERVING if index == 0 else "", **more}
        return pod(f"{group}-{index}", group=group, worker_index=index, group_size=2, **more)

    assert count([member("a", 0), member("a", 1)]) == Replicas(1, 1, 1, 0, 2)
    assert count([member("a", 0), member("a", 1, ready=False)]) == Replicas(1, 0, 0, 0, 2)
    assert count([member("a", 0)]) == Replicas(1, 0, 0, 0, 1)
    leaving = [member("a", 0, terminating=True), member("a", 1, terminating=True)]
    assert count(leaving) == Replicas(0, 0, 0, 1, 2)
