"""Conditions of a graph, and what they are made of: replicas, observed services, kinds that are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import GraphSpec, Role
from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock.operator.plan.budget import Waiting
from penstock.operator.plan.diagnose import Category, Diagnosis
from penstock.operator.plan.facts import (
    ConditionFacts,
    Replicas,
    ServiceFacts,
    count,
    missing_definition,
    observed_facts,
)
from penstock.operator.plan.pods import PodView
from penstock.operator.plan.status import (
    BUDGET_RESPECTED,
    DEGRADED,
    MESSAGE_LIMIT,
    PROGRESSING,
    READY,
    SCHEDULABLE,
    ConditionResult,
    condition_results,
    conditions,
)
from penstock.operator.resources.metadata import BuildContext


def service(role, number, **more):
    """Return a service at rest with ``number`` replicas of one GPU."""
    gpus = number if role.is_worker else 0
    counts = Replicas(number, number, number, 0, gpus)
    values = {"replicas": counts, "desired": number, "target": number, "updated": number, "selector": "s"}
    return ServiceFacts(role, **{**values, **more})


ROUTER = service(Role.ROUTER, 2)
PREFILL = service(Role.PREFILL, 1)
DECODE = service(Role.DECODE, 2)
SERVICES = {"frontend": ROUTER, "prefill": PREFILL, "decode": DECODE}
REST = ConditionFacts(3, SERVICES, budget=8)


def judged(facts):
    """Return (status, reason, message) by type."""
    return {each.type: (each.status, each.reason, each.message) for each in condition_results(facts)}


def with_service(name, **changes):
    """Return REST with one service changed."""
    return replace(REST, services={**SERVICES, name: replace(SERVICES[name], **changes)})


def test_a_graph_at_rest():
    """Ready, stable, healthy, within its budget, scheduled; sorted by type."""
    serving = "ready replicas: router 2, prefill 1, decode 2"
    assert condition_results(REST) == (
        ConditionResult(BUDGET_RESPECTED, True, "WithinBudget", "3 GPUs are in use of 8"),
        ConditionResult(DEGRADED, False, "Healthy", "no pod is in trouble"),
        ConditionResult(PROGRESSING, False, "Stable", "everything is as wanted"),
        ConditionResult(READY, True, "Serving", serving),
        ConditionResult(SCHEDULABLE, True, "Scheduled", "every pod has a node"),
    )


@pytest.mark.parametrize(
    ("names", "reason", "message"),
    [
        (("frontend",), "NoReadyRouter", "no ready replica of router"),
        (("decode",), "NoReadyWorker", "no ready replica of decode"),
        (("frontend", "prefill"), "NoReadyWorker", "no ready replica of router, prefill"),
    ],
)
def test_ready_needs_every_role(names, reason, message):
    """A replica that exists, or is ready but drains, serves nothing."""
    services = {
        name: replace(each, replicas=replace(each.replicas, serving=0)) if name in names else each
        for name, each in SERVICES.items()
    }
    assert judged(replace(REST, services=services))[READY] == (False, reason, message)


def test_a_graph_without_router_is_ready_with_its_workers():
    """Requests come through a router of the user's own, which the message says."""
    facts = ConditionFacts(1, {"w": service(Role.AGGREGATED, 1)})
    words = "the graph declares no router, so requests have to come through one of your own"
    assert judged(facts)[READY] == (True, "Serving", f"ready replicas: aggregated 1; {words}")
    facts = ConditionFacts(1, {"w": service(Role.AGGREGATED, 0)})
    assert judged(facts)[READY] == (False, "NoReadyWorker", "no ready replica of aggregated")


def test_a_graph_that_went_to_zero_is_ready_for_the_request_that_wakes_it():
    """Not while a replica is wanted, not without a router, and not where nothing brings workers back."""
    none = Replicas(0, 0, 0, 0, 0)
    gone = {"replicas": none, "desired": 0, "target": 0, "updated": 0}
    services = {
        "frontend": ROUTER,
        "prefill": replace(PREFILL, **gone),
        "decode": replace(DECODE, **gone),
    }
    asleep = replace(REST, services=services, is_woken=True)
    words = "no replica of prefill, decode is wanted: the next request brings them back"
    assert judged(asleep)[READY] == (True, "ScaledToZero", words)
    assert judged(asleep)[PROGRESSING][:2] == (False, "Stable")
    assert judged(asleep)[DEGRADED][0] is False
    waking = {**services, "decode": replace(DECODE, **{**gone, "target": 1})}
    assert judged(replace(asleep, services=waking))[READY][:2] == (False, "NoReadyWorker")
    alone = {**services, "frontend": replace(ROUTER, replicas=none)}
    assert judged(replace(asleep, services=alone))[READY][:2] == (False, "NoReadyRouter")
    assert judged(replace(asleep, is_woken=False))[READY][:2] == (False, "NoReadyWorker")


def leaving(number):
    """Return what changes on a service of one replica while more of it drain."""
    return {"replicas": Replicas(number + 1, number + 1, 1, number, number + 1), "target": 1}


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"rolling": True}, "RollingOut", "decode: rolls out"),
        ({"held": "waits for prefill"}, "Scaling", "decode: waits for prefill"),
        (leaving(1), "Draining", "decode: 1 of its replicas is leaving"),
        (leaving(2), "Draining", "decode: 2 of its replicas are leaving"),
        ({"target": 3}, "Scaling", "decode: 2 of 3 replicas are ready"),
        ({"desired": 3}, "Scaling", "decode: goes to 2 replicas"),
        ({"target": 1}, "Scaling", "decode: goes to 1 replicas"),
    ],
)
def test_progress_says_what_is_under_way(changes, reason, message):
    """One clause per service and step."""
    assert judged(with_service("decode", **changes))[PROGRESSING] == (True, reason, message)


def trouble(category, pod="p"):
    """Return a diagnosis."""
    return Diagnosis(category, pod, "decode", "m", "r")


def test_degraded_names_the_worst():
    """And how many more there are; waiting for the budget is none of them."""
    crash, slow = trouble(Category.CRASH_LOOP), trouble(Category.STARTING_SLOWLY, "q")
    waits = trouble(Category.WAITING_FOR_BUDGET, "w")
    several = judged(replace(REST, diagnoses=[slow, crash, waits]))[DEGRADED]
    assert several == (True, "CrashLoop", "p: m; r (and 1 more)")
    assert judged(replace(REST, diagnoses=[crash]))[DEGRADED] == (True, "CrashLoop", "p: m; r")
    assert not judged(replace(REST, diagnoses=[waits]))[DEGRADED][0]


def test_the_budget_is_judged_by_what_exists():
    """Over, within, or none at all."""
    over = "3 GPUs are in use, the budget is 2; no worker starts until enough have ended"
    assert judged(replace(REST, budget=2))[BUDGET_RESPECTED] == (False, "OverBudget", over)
    none = "3 GPUs are in use; there is no ceiling"
    assert judged(replace(REST, budget=None))[BUDGET_RESPECTED] == (True, "NoBudget", none)


def test_schedulable_tells_the_schedulers_or_the_budgets_reason():
    """A node that is missing comes before a budget that is used up."""
    waiting = [Waiting("u", "p", "decode", "needs 1"), Waiting("v", "q", "decode", "needs 1")]
    facts = replace(REST, waiting=waiting)
    assert judged(facts)[SCHEDULABLE] == (False, "WaitingForBudget", "decode: needs 1")
    one = replace(facts, diagnoses=[trouble(Category.UNSCHEDULABLE)])
    assert judged(one)[SCHEDULABLE] == (False, "Unschedulable", "p: m; r")
    two = replace(facts, diagnoses=[trouble(Category.UNSCHEDULABLE), trouble(Category.UNSCHEDULABLE, "q")])
    assert judged(two)[SCHEDULABLE] == (False, "Unschedulable", "p: m; r (and 1 more)")


def test_a_transition_time_changes_only_with_the_status():
    """A new message alone keeps it; long messages are cut."""
    found = [
        ConditionResult("A", status=True, reason="R", message="new"),
        ConditionResult("B", status=False, reason="R", message="x" * 2000),
    ]
    old = [
        {"type": "A", "status": "True", "message": "old", "lastTransitionTime": "then"},
        {"type": "B", "status": "True", "lastTransitionTime": "then"},
        {"type": "PlannerActive", "status": "True"},
    ]
    a, b = conditions(found, old=old, generation=7, now="now")
    told = {"type": "A", "status": "True", "reason": "R", "message": "new"}
    assert a == {**told, "lastTransitionTime": "then", "observedGeneration": 7}
    assert (b["status"], b["lastTransitionTime"], len(b["message"])) == ("False", "now", MESSAGE_LIMIT)
    assert b["message"].endswith("...")


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
        pod("finished", phase="Failed"),
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


def member(name, role, service, **more):
    """Return a ready pod that serves."""
    return PodView(name, graph="g", role=role, service=service, ready=True, serving=SERVING, gpus=1, **more)


def test_services_are_found_by_their_pods():
    """Role and number from the pods; what carries no name or role is left out."""
    pods = [
        member("b", "decode", "decode"),
        member("a", "decode", "decode", terminating=True),
        member("r", "router", "frontend"),
        member("x", "", "frontend"),
        member("y", "decode", ""),
        member("z", "juggler", "circus"),
    ]
    raw = {"metadata": {"generation": 2}, "spec": {"planner": {"maxGpuBudget": 3}}}
    found = observed_facts(raw, pods, deleting="waits")
    assert (found.generation, found.budget, found.deleting) == (2, 3, "waits")
    selects = "penstock.dev/graph=g,penstock.dev/service="
    assert found.services == {
        "decode": ServiceFacts(Role.DECODE, Replicas(1, 1, 1, 1, 2), 1, 1, 0, f"{selects}decode"),
        "frontend": ServiceFacts(Role.ROUTER, Replicas(1, 1, 1, 0, 1), 1, 1, 0, f"{selects}frontend"),
    }
    assert observed_facts(raw, []).services == {}


def spec(runtime, nodes=1, **router):
    """Return a graph of one worker."""
    worker = {"role": "aggregated", "nodesPerReplica": nodes, "gpusPerReplica": nodes}
    services = {"frontend": {"role": "router"}, "worker": worker}
    return GraphSpec.model_validate(
        {"model": {"name": "m"}, "runtime": runtime, "services": services, "router": router}
    )


SEVERAL_NODES = "worker: nodesPerReplica above 1"
POOL = "InferencePool of inference.networking.k8s.io"
BEHIND_A_GATEWAY = spec("vllm", gateway={"enabled": True})


@pytest.mark.parametrize(
    ("spec", "known", "discovery", "named"),
    [
        (spec("vllm"), {}, False, None),
        (spec("vllm", nodes=2), {"has_leader_worker_set": True}, False, None),
        (spec("vllm", nodes=2), {}, True, SEVERAL_NODES),
        (spec("dynamo"), {}, True, None),
        (spec("dynamo"), {"has_leader_worker_set": True}, False, "DynamoWorkerMetadata"),
        (spec("dynamo", nodes=2), {}, True, SEVERAL_NODES),
        (spec("dynamo", nodes=2), {"has_leader_worker_set": True}, True, None),
        (BEHIND_A_GATEWAY, {}, False, POOL),
        (BEHIND_A_GATEWAY, {"has_inference_pool": True}, False, None),
    ],
)
def test_only_what_a_graph_needs_is_missed(spec, known, discovery, named):
    """One replica over several nodes, runtime dynamo, and a Gateway's pool; the kind is named."""
    failure = missing_definition(spec, BuildContext("", "", **known), has_kind_of_runtime=discovery)
    if named is None:
        assert failure is None
    else:
        assert failure.reason == "MissingCRD"
        assert named in failure.message
