"""Conditions and status of a graph and of its adapters: every row of them, and when they are written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.api.status import AdapterStatus, GraphStatus
from penstock_operator.plan.budget import WaitingPod
from penstock_operator.plan.diagnose import Category, Diagnosis
from penstock_operator.plan.drain import LimitedReplicas
from penstock_operator.plan.status import (
    BUDGET_RESPECTED,
    DEGRADED,
    MESSAGE_LIMIT,
    PROGRESSING,
    READY,
    RECONCILING,
    SCHEDULABLE,
    STALLED,
    ConditionResult,
    adapter_status,
    condition_results,
    conditions,
    graph_status,
    is_current,
)
from penstock_operator.plan.status_input import Failure, ServiceReplicas, ServiceStatusInput, StatusInput


def service(role, number, **more):
    """Return a service at rest with ``number`` replicas of one GPU."""
    gpus = number if role.is_worker else 0
    counts = ServiceReplicas(number, number, number, 0, gpus)
    values = {"replicas": counts, "desired": number, "target": number, "updated": number, "selector": "s"}
    return ServiceStatusInput(role, **{**values, **more})


ROUTER = service(Role.ROUTER, 2)
PREFILL = service(Role.PREFILL, 1)
DECODE = service(Role.DECODE, 2)
SERVICES = {"frontend": ROUTER, "prefill": PREFILL, "decode": DECODE}
REST = StatusInput(3, SERVICES, budget=8)


def results(facts):
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
        ConditionResult(DEGRADED, False, "Healthy", "all pods are healthy"),
        ConditionResult(PROGRESSING, False, "Stable", "all services match the spec"),
        ConditionResult(READY, True, "Serving", serving),
        ConditionResult(RECONCILING, False, "Stable", "the newest specification is applied"),
        ConditionResult(SCHEDULABLE, True, "Scheduled", "every pod has a node"),
        ConditionResult(STALLED, False, "NotStalled", "the specification can be applied"),
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
    assert results(replace(REST, services=services))[READY] == (False, reason, message)


def test_a_graph_without_router_is_ready_with_its_workers():
    """Requests come through a router of the user's own, which the message says."""
    facts = StatusInput(1, {"w": service(Role.AGGREGATED, 1)})
    words = "the graph declares no router, so requests need a router of your own"
    assert results(facts)[READY] == (True, "Serving", f"ready replicas: aggregated 1; {words}")
    facts = StatusInput(1, {"w": service(Role.AGGREGATED, 0)})
    assert results(facts)[READY] == (False, "NoReadyWorker", "no ready replica of aggregated")


def test_a_graph_that_went_to_zero_is_ready_for_the_request_that_wakes_it():
    """Not while a replica is wanted, not without a router, and not where nothing brings workers back."""
    none = ServiceReplicas(0, 0, 0, 0, 0)
    gone = {"replicas": none, "desired": 0, "target": 0, "updated": 0}
    services = {
        "frontend": ROUTER,
        "prefill": replace(PREFILL, **gone),
        "decode": replace(DECODE, **gone),
    }
    asleep = replace(REST, services=services, is_woken=True)
    words = "prefill, decode are scaled to zero; the next request starts them"
    assert results(asleep)[READY] == (True, "ScaledToZero", words)
    assert results(asleep)[PROGRESSING][:2] == (False, "Stable")
    assert results(asleep)[DEGRADED][0] is False
    waking = {**services, "decode": replace(DECODE, **{**gone, "target": 1})}
    assert results(replace(asleep, services=waking))[READY][:2] == (False, "NoReadyWorker")
    alone = {**services, "frontend": replace(ROUTER, replicas=none)}
    assert results(replace(asleep, services=alone))[READY][:2] == (False, "NoReadyRouter")
    assert results(replace(asleep, is_woken=False))[READY][:2] == (False, "NoReadyWorker")


def leaving(number):
    """Return what changes on a service of one replica while more of it drain."""
    return {"replicas": ServiceReplicas(number + 1, number + 1, 1, number, number + 1), "target": 1}


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"rolling": True}, "RollingOut", "decode: rolls out"),
        ({"hold_reason": "waits for prefill"}, "Scaling", "decode: waits for prefill"),
        (leaving(1), "Draining", "decode: 1 of its replicas is draining or terminating"),
        (leaving(2), "Draining", "decode: 2 of its replicas are draining or terminating"),
        ({"target": 3}, "Scaling", "decode: 2 of 3 replicas are ready"),
        ({"desired": 3}, "Scaling", "decode: scaling to 2 replicas"),
        ({"target": 1}, "Scaling", "decode: scaling to 1 replicas"),
    ],
)
def test_progress_says_what_is_under_way(changes, reason, message):
    """One clause per service and step."""
    assert results(with_service("decode", **changes))[PROGRESSING] == (True, reason, message)


def trouble(category, pod="p"):
    """Return a diagnosis."""
    return Diagnosis(category, pod, "decode", "m", "r")


def test_degraded_names_the_worst():
    """And how many more there are; waiting for the budget is none of them."""
    crash, slow = trouble(Category.CRASH_LOOP), trouble(Category.STARTING_SLOWLY, "q")
    waits = trouble(Category.WAITING_FOR_BUDGET, "w")
    several = results(replace(REST, diagnoses=[slow, crash, waits]))[DEGRADED]
    assert several == (True, "CrashLoop", "p: m; r (and 1 more)")
    assert results(replace(REST, diagnoses=[crash]))[DEGRADED] == (True, "CrashLoop", "p: m; r")
    assert not results(replace(REST, diagnoses=[waits]))[DEGRADED][0]


def test_the_budget_is_judged_by_what_exists():
    """Over, within, or none at all."""
    over = "3 GPUs are in use, the budget is 2; no new workers start until enough workers exit"
    assert results(replace(REST, budget=2))[BUDGET_RESPECTED] == (False, "OverBudget", over)
    none = "3 GPUs are in use; there is no limit"
    assert results(replace(REST, budget=None))[BUDGET_RESPECTED] == (True, "NoBudget", none)


def test_schedulable_tells_the_schedulers_or_the_budgets_reason():
    """A node that is missing comes before a budget that is used up."""
    waiting = [WaitingPod("u", "p", "decode", "needs 1"), WaitingPod("v", "q", "decode", "needs 1")]
    facts = replace(REST, waiting=waiting)
    assert results(facts)[SCHEDULABLE] == (False, "WaitingForBudget", "decode: needs 1")
    one = replace(facts, diagnoses=[trouble(Category.UNSCHEDULABLE)])
    assert results(one)[SCHEDULABLE] == (False, "Unschedulable", "p: m; r")
    two = replace(facts, diagnoses=[trouble(Category.UNSCHEDULABLE), trouble(Category.UNSCHEDULABLE, "q")])
    assert results(two)[SCHEDULABLE] == (False, "Unschedulable", "p: m; r (and 1 more)")


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


NOTHING = StatusInput(
    1, {name: service(each.role, 0, target=1) for name, each in SERVICES.items()}, budget=None
)
FAULT = trouble(Category.CRASH_LOOP)


def test_the_status_of_a_graph_at_rest():
    """Generation, phase, services and columns; the planner's part is not in it."""
    found = graph_status(REST, old=None, now="now")
    assert found["observedGeneration"] == 3
    assert found["phase"] == "Ready"
    numbers = dict.fromkeys(("replicas", "ready", "updated", "desired", "target", "gpus"), 2)
    assert found["services"]["decode"] == {**numbers, "draining": 0, "selector": "s"}
    assert found["summary"] == {"prefill": "1/1", "decode": "2/2", "gpus": "3/8"}
    types = [each["type"] for each in found["conditions"]]
    assert types == [
        "BudgetRespected",
        "Degraded",
        "Progressing",
        "Ready",
        "Reconciling",
        "Schedulable",
        "Stalled",
    ]
    assert "planner" not in found
    GraphStatus.model_validate(found)


def test_an_address_stays_while_an_invalid_specification_does_not_tell_it_and_goes_with_the_router():
    """A client that reads it is not sent away by a typing error of somebody else."""
    told = graph_status(replace(REST, url="http://r:8000", served_model="tiny"), old=None, now="now")
    assert (told["address"], told["servedModel"]) == ({"url": "http://r:8000"}, "tiny")
    invalid = graph_status(replace(REST, failure=Failure("InvalidSpec", "m")), old=told, now="now")
    assert (invalid["address"], invalid["servedModel"]) == (told["address"], "tiny")
    without = graph_status(replace(REST, url="", served_model="tiny"), old=told, now="now")
    assert "address" not in without
    assert not is_current(without, told)


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        (REST, "Ready"),
        (NOTHING, "Pending"),
        (with_service("decode", target=3), "Progressing"),
        (with_service("decode", replicas=ServiceReplicas(0, 0, 0, 0, 0), desired=0, target=0), "Pending"),
        (with_service("decode", replicas=ServiceReplicas(1, 0, 0, 0, 1), desired=1, target=1), "Progressing"),
        (replace(REST, diagnoses=[FAULT]), "Degraded"),
        (replace(REST, failure=Failure("ApplyFailed", "m")), "Degraded"),
        (replace(NOTHING, failure=Failure("InvalidSpec", "m")), "Failed"),
        (replace(NOTHING, deleting="waits"), "Progressing"),
    ],
)
def test_the_phase_is_one_word_for_it(facts, phase):
    """Failed only if nothing is served; Degraded wherever something is broken; Pending before anything runs."""
    assert graph_status(facts, old=None, now="now")["phase"] == phase


COUNTS = st.builds(ServiceReplicas, *[st.integers(0, 3)] * 5)
FACTS = st.builds(
    StatusInput,
    generation=st.integers(1, 3),
    services=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(
            ServiceStatusInput,
            role=st.sampled_from(Role),
            replicas=COUNTS,
            desired=st.integers(0, 3),
            target=st.integers(0, 3),
            updated=st.integers(0, 3),
            selector=st.just("s"),
            rolling=st.booleans(),
            hold_reason=st.sampled_from(["", "held"]),
        ),
    ),
    budget=st.none() | st.integers(0, 5),
    diagnoses=st.lists(
        st.builds(
            Diagnosis,
            st.sampled_from(Category),
            st.sampled_from("xyz"),
            st.just("a"),
            st.just("m"),
            st.just("r"),
        ),
        max_size=3,
    ),
    failure=st.none() | st.just(Failure("F", "m")),
)


@given(FACTS)
def test_the_same_facts_are_not_written_twice(facts):
    """A second look at an unchanged graph, later, finds its own status current; others' parts do not matter."""
    first = graph_status(facts, old=None, now="then")
    others = {
        **first,
        "conditions": [{"type": "PlannerActive"}, *reversed(first["conditions"])],
        "planner": {"gpus": 1},
    }
    assert is_current(graph_status(facts, old=others, now="now"), others)
    GraphStatus.model_validate(first)


@given(FACTS, FACTS)
def test_ready_means_that_a_request_would_be_served(facts, other):
    """Ready is True exactly if every declared role has a serving replica, whatever was before."""
    old = graph_status(other, old=None, now="then")
    found = graph_status(facts, old=old, now="now")
    ready = next(each["status"] for each in found["conditions"] if each["type"] == "Ready")
    roles = {each.role for each in facts.services.values()}
    served = bool(roles) and all(
        any(each.role is role and each.replicas.serving for each in facts.services.values()) for role in roles
    )
    assert ready == ("True" if served else "False")


@pytest.mark.parametrize(
    "change", [{"phase": "Pending"}, {"services": {}}, {"conditions": []}, {"observedGeneration": 2}]
)
def test_what_differs_is_written(change):
    """Also a service or condition that is there and no longer wanted."""
    wanted = graph_status(REST, old=None, now="now")
    assert is_current(wanted, wanted)
    assert not is_current(wanted, {**wanted, **change})
    assert not is_current(wanted, None)


def test_an_adapters_status():
    """Numbers for /scale, and whether the desired number was cut."""
    found = adapter_status(
        replace(DECODE, bounds=(1, 8)), LimitedReplicas(2), generation=4, old=None, now="now"
    )
    numbers = {"replicas": 2, "ready": 2, "minReplicas": 1, "maxReplicas": 8, "selector": "s"}
    same = {"status": "False", "lastTransitionTime": "now", "observedGeneration": 4}
    within = {"reason": "WithinBounds", "message": "the requested number is within the bounds"}
    limited = {"type": "ScalingLimited", **within, **same}
    refused = {"type": "ReplicaFailure", "reason": "PodsCreated", "message": "no pod was rejected", **same}
    assert found == {**numbers, "conditions": [limited, refused]}
    AdapterStatus.model_validate(found)
    limited = adapter_status(
        DECODE, LimitedReplicas(2, "TooManyReplicas", "m"), generation=5, old=found, now="later"
    )
    assert [(each["status"], each["reason"], each["message"]) for each in limited["conditions"]] == [
        ("True", "TooManyReplicas", "m"),
        ("False", "PodsCreated", "no pod was rejected"),
    ]
