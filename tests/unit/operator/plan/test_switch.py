"""Who switches its role: the idle worker of the role that shrinks, into a place that waits in the role that grows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import GraphSpec, Role
from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock_operator.plan.drain import LimitedReplicas, PodLoad, ServicePool, plan_scale
from penstock_operator.plan.pods import ContainerView, PodView
from penstock_operator.plan.replicas import RoleSwitch, ServiceState
from penstock_operator.plan.rollout import RolloutView
from penstock_operator.plan.switch import keeping_switched_workers, plan_switches, pods_kept_for_switch

NOW_S = 1000.0
BUSY, IDLE = PodLoad(1, 0, 0.2), PodLoad(0, 0, 0.0, idle_s=60.0)


def spec(**engine):
    """Return a graph of prefill and decode workers."""
    services = {"front": {"role": "router"}, "p": {"role": "prefill"}, "d": {"role": "decode"}}
    return GraphSpec.model_validate(
        {"model": {"name": "m"}, "runtime": "simulated", "services": services, "engine": engine}
    )


def pod(name, **change):
    """Return a ready worker pod of the service that its name begins with."""
    main = ContainerView("main", ready=True, started=True)
    view = PodView(
        name, uid=f"uid-{name}", service=name[0], node="n", phase="Running", ready=True, serving=SERVING
    )
    return replace(view, **{"containers": (main,), **change})


def waiting(name, **change):
    """Return a pod that waits at the budget's gate."""
    return pod(name, **{"node": "", "phase": "Pending", "ready": False, "gates": (BUDGET_GATE,), **change})


def draining(name, since_s=NOW_S - 60, **change):
    """Return a pod that is marked to leave."""
    return pod(name, serving=DRAINING, drain_since_s=since_s, **change)


def states(graph, pods, *, loads, p=1, d=2, rolling=False):
    """Return the services' states, with their plans, where each workload has as many replicas as pods."""
    found = {}
    for name, desired in {"p": p, "d": d}.items():
        own = [each for each in pods if each.service == name]
        grace_s = graph.services[name].termination_grace_period_seconds
        plan = plan_scale(ServicePool(own, desired, len(own), grace_s), loads=loads, now_s=NOW_S)
        rollout = RolloutView(name, Role.PREFILL, rolling=rolling)
        found[name] = ServiceState(
            graph.services[name], LimitedReplicas(desired), running=len(own), rollout=rollout, plan=plan
        )
    return found


PODS = [pod("p0"), draining("p1"), pod("d0"), waiting("d1")]


def test_an_idle_worker_takes_the_place_that_waits_and_its_workload_shrinks_later():
    """A smaller number would have it deleted, and so would its deletion cost."""
    graph = spec(switchable=True)
    services = states(graph, PODS, loads={"p1": IDLE, "p0": IDLE})
    assert (services["p"].number, services["p"].plan.removable) == (2, ("p1",))
    assert "p1" in services["p"].plan.deletion_costs
    switches = plan_switches(graph, services, PODS, now_s=NOW_S)
    assert switches == (RoleSwitch(PODS[1], PODS[3]),)
    assert pods_kept_for_switch(graph, services, PODS) == {"uid-d1"}
    after = keeping_switched_workers(services, switches)
    plan = after["p"].plan
    assert (plan.spec_replicas, plan.removable, "p1" in plan.deletion_costs) == (2, (), False)
    assert after["d"] == services["d"]


def test_a_busy_worker_keeps_its_role_and_the_place_waits_for_it():
    """It finishes its requests first."""
    graph = spec(switchable=True)
    services = states(graph, PODS, loads={"p1": BUSY, "p0": BUSY})
    assert plan_switches(graph, services, PODS, now_s=NOW_S) == ()
    assert pods_kept_for_switch(graph, services, PODS) == {"uid-d1"}


@pytest.mark.parametrize(
    ("pods", "change"),
    [
        (PODS, {"engine": {}}),
        (PODS, {"rolling": True}),
        ([pod("p0"), draining("p1", since_s=NOW_S - 1e5), pod("d0"), waiting("d1")], {}),
        ([pod("p0"), draining("p1", ready=False), pod("d0"), waiting("d1")], {}),
        ([pod("p0"), draining("p1"), pod("d0"), pod("d1")], {}),
        ([pod("p0"), draining("p1"), pod("d0"), waiting("d1", gates=())], {}),
        ([pod("p0"), draining("p1"), pod("d0"), waiting("d1", terminating=True)], {}),
        ([pod("p0"), draining("p1"), pod("d0"), waiting("d1")], {"d": 1}),
        ([pod("p0"), pod("p1"), pod("d0"), waiting("d1")], {"p": 2}),
    ],
)
def test_nothing_switches_otherwise(pods, change):
    """Not switchable, amid a rollout, past its grace, not well, without a place, or with none that leaves."""
    graph = spec(**change.pop("engine", {"switchable": True}))
    services = states(graph, pods, loads={each.name: IDLE for each in pods}, **change)
    assert plan_switches(graph, services, pods, now_s=NOW_S) == ()


def test_a_graph_of_one_role_and_a_workload_that_is_yet_to_be_made_switch_nothing():
    """There is nobody to switch with."""
    graph = spec(switchable=True)
    services = states(graph, PODS, loads={"p1": IDLE, "p0": IDLE})
    no_workload = {**services, "d": replace(services["d"], rollout=None)}
    assert plan_switches(graph, no_workload, PODS, now_s=NOW_S) == ()
    alone = graph.model_copy(update={"services": {"p": graph.services["p"]}})
    assert pods_kept_for_switch(alone, services, PODS) == frozenset()
    no_plan = {name: replace(each, plan=None) for name, each in services.items()}
    assert plan_switches(graph, no_plan, PODS, now_s=NOW_S) == ()
    assert keeping_switched_workers(no_plan, (RoleSwitch(PODS[1], PODS[3]),)) == no_plan
