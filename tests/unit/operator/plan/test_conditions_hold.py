"""Whatever pods are seen: no condition says that all is well while something is missing for longer than a start."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.api import GraphDeployment
from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock_operator.plan.budget import WaitingPod
from penstock_operator.plan.drain import LimitedReplicas
from penstock_operator.plan.pods import ContainerView, PodCondition, PodView
from penstock_operator.plan.replicas import ServiceState
from penstock_operator.plan.status import condition_results, graph_status
from penstock_operator.plan.status_input import late_services, observed_status_input, status_input

NOW_S = 100_000.0
RAW = {"metadata": {"generation": 1}, "spec": {}}
ROLES = {"frontend": "router", "prefill": "prefill", "decode": "decode"}
GRAPH = GraphDeployment.model_validate(
    {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "g", "namespace": "ns"},
        "spec": {
            "model": {"name": "tiny"},
            "runtime": "simulated",
            "services": {name: {"role": role} for name, role in ROLES.items()},
            "planner": {"maxGpuBudget": 8},
        },
    }
)

STATES = {
    "gated": {"gates": (BUDGET_GATE,)},
    "held": {"gates": ("example.com/other",)},
    "new": {},
    "unplaced": {"conditions": (PodCondition("PodScheduled", "False", "Unschedulable", "0/3 nodes"),)},
    "starting": {"node": "n", "containers": (ContainerView("main"),)},
    "unready": {
        "node": "n",
        "phase": "Running",
        "containers": (ContainerView("main", started=True, running_since_s=0.0),),
    },
    "ready": {"node": "n", "phase": "Running", "ready": True},
    "leaving": {"node": "n", "phase": "Running", "ready": True, "serving": DRAINING, "drain_since_s": NOW_S},
    "ending": {"node": "n", "phase": "Running", "ready": True, "terminating": True, "deleted_s": NOW_S + 9},
    "failed": {"node": "n", "phase": "Failed"},
    "without its node": {"node": "n", "phase": "Running", "node_is_deleted": True},
}
SERVICE = st.lists(st.sampled_from(sorted(STATES)), max_size=4)
AT_REST = {name: ["ready"] for name in ROLES}
PODS = st.one_of(
    st.fixed_dictionaries(dict.fromkeys(ROLES, SERVICE)),
    st.builds(lambda name, found: {**AT_REST, name: found}, st.sampled_from(sorted(ROLES)), SERVICE),
)
"""Of all services, or of one alongside others at rest: what a sound service would hide is found by that."""

TARGETS = st.one_of(
    st.fixed_dictionaries(dict.fromkeys(ROLES, st.integers(0, 3))),
    st.builds(
        lambda name, number: {**dict.fromkeys(ROLES, 1), name: number},
        st.sampled_from(sorted(ROLES)),
        st.integers(0, 4),
    ),
)


def views(states, *, age_s=NOW_S):
    """Return the pods of all services in these states."""
    return [
        replace(
            PodView(f"{name}-{number}", uid=f"{name}-{number}", service=name, role=ROLES[name], gpus=1),
            **{"serving": SERVING, "created_s": NOW_S - age_s, **STATES[each]},
        )
        for name, found in states.items()
        for number, each in enumerate(found)
    ]


def facts_of(states, targets, *, late_for_s):
    """Return what is known of the graph whose services have been short of replicas for a time, if they are."""
    pods = views(states)
    services = {
        name: ServiceState(GRAPH.spec.services[name], LimitedReplicas(number), running=number)
        for name, number in targets.items()
    }
    waiting = [WaitingPod(each.uid, each.name, each.service, "needs 1") for each in pods if each.gated]
    facts = status_input(
        GRAPH, 1, pods, services, budget=GRAPH.spec.planner.max_gpu_budget, waiting=waiting, now_s=NOW_S
    )
    since = dict.fromkeys(facts.lacking_replicas, NOW_S - late_for_s)
    return replace(facts, late=late_services(GRAPH, since, now_s=NOW_S))


def results(facts):
    """Return conditions by type."""
    return {each.type: each for each in condition_results(facts)}


@example({**AT_REST, "decode": ["gated"]}, {**dict.fromkeys(ROLES, 1), "decode": 2})
@given(PODS, TARGETS)
def test_what_is_short_for_longer_than_a_start_is_never_well(states, targets):
    """Degraded says it, or Schedulable does where the budget alone keeps the missing replicas; the phase is not Ready."""
    facts = facts_of(states, targets, late_for_s=10_000.0)
    found = results(facts)
    for name in facts.lacking_replicas:
        replicas, target = facts.services[name].replicas, facts.services[name].target
        gated = states[name].count("gated")
        if replicas.serving + gated < target:
            assert found["Degraded"].status, (name, states, targets)
        else:
            assert not found["Schedulable"].status
    if facts.lacking_replicas:
        assert found["Progressing"].reason != "Stable"
        assert graph_status(facts, old=None, now="now")["phase"] != "Ready"


@given(PODS, TARGETS, st.booleans())
def test_a_replica_without_a_node_is_never_said_to_have_one(states, targets, is_deleted):
    """Whether a gate of the budget's or of another holds it, no node fits, or its pod does not exist yet; deleted or not."""
    if is_deleted:
        facts = observed_status_input(RAW, views(states), deleting="waits")
    else:
        facts = facts_of(states, targets, late_for_s=0.0)
    lacks = any(set(found) & {"gated", "held", "new", "unplaced"} for found in states.values())
    if lacks or (
        facts.lacking_replicas
        and any(each.replicas.existing < each.target for each in facts.services.values())
    ):
        assert not results(facts)["Schedulable"].status


@given(PODS, TARGETS)
def test_well_is_said_of_a_graph_at_rest_alone(states, targets):
    """Ready, Stable, Healthy and Scheduled together mean that the wanted replicas serve and no other exists."""
    facts = facts_of(states, targets, late_for_s=0.0)
    found = results(facts)
    if found["Ready"].status and found["Progressing"].reason == "Stable" and found["Schedulable"].status:
        for name, each in facts.services.items():
            assert states[name].count("ready") == each.target, (name, states, targets)
