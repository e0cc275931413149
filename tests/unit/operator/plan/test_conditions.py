"""Conditions: what a graph is said to be, and why."""

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.operator.plan.budget import Waiting
from penstock.operator.plan.conditions import (
    BUDGET_RESPECTED,
    DEGRADED,
    MESSAGE_LIMIT,
    PROGRESSING,
    READY,
    SCHEDULABLE,
    ConditionFacts,
    ConditionResult,
    Replicas,
    ServiceFacts,
    condition_results,
    conditions,
)
from penstock.operator.plan.diagnose import Category, Diagnosis


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
    assert condition_results(REST) == (
        ConditionResult(
            BUDGET_RESPECTED, status=True, reason="WithinBudget", message="3 GPUs are in use of 8"
        ),
        ConditionResult(DEGRADED, status=False, reason="Healthy", message="no pod is in trouble"),
        ConditionResult(PROGRESSING, status=False, reason="Stable", message="everything is as wanted"),
        ConditionResult(
            READY, status=True, reason="Serving", message="ready replicas: router 2, prefill 1, decode 2"
        ),
        ConditionResult(SCHEDULABLE, status=True, reason="Scheduled", message="every pod has a node"),
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
    assert judged(facts)[READY] == (
        True,
        "Serving",
        "ready replicas: aggregated 1; the graph declares no router, so requests have to come through one of your own",
    )
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
    assert judged(asleep)[READY] == (
        True,
        "ScaledToZero",
        "no replica of prefill, decode is wanted: the next request brings them back",
    )
    assert judged(asleep)[PROGRESSING][:2] == (False, "Stable")
    assert judged(asleep)[DEGRADED][0] is False
    waking = {**services, "decode": replace(DECODE, **{**gone, "target": 1})}
    assert judged(replace(asleep, services=waking))[READY][:2] == (False, "NoReadyWorker")
    alone = {**services, "frontend": replace(ROUTER, replicas=none)}
    assert judged(replace(asleep, services=alone))[READY][:2] == (False, "NoReadyRouter")
    assert judged(replace(asleep, is_woken=False))[READY][:2] == (False, "NoReadyWorker")


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"rolling": True}, "RollingOut", "decode: rolls out"),
        ({"held": "waits for prefill"}, "Scaling", "decode: waits for prefill"),
        (
            {"replicas": Replicas(2, 2, 1, 1, 2), "target": 1},
            "Draining",
            "decode: 1 of its replicas is leaving",
        ),
        (
            {"replicas": Replicas(3, 3, 1, 2, 3), "target": 1},
            "Draining",
            "decode: 2 of its replicas are leaving",
        ),
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
    assert judged(replace(REST, diagnoses=[slow, crash, waits]))[DEGRADED] == (
        True,
        "CrashLoop",
        "p: m; r (and 1 more)",
    )
    assert judged(replace(REST, diagnoses=[crash]))[DEGRADED] == (True, "CrashLoop", "p: m; r")
    assert not judged(replace(REST, diagnoses=[waits]))[DEGRADED][0]


def test_the_budget_is_judged_by_what_exists():
    """Over, within, or none at all."""
    assert judged(replace(REST, budget=2))[BUDGET_RESPECTED] == (
        False,
        "OverBudget",
        "3 GPUs are in use, the budget is 2; no worker starts until enough have ended",
    )
    assert judged(replace(REST, budget=None))[BUDGET_RESPECTED] == (
        True,
        "NoBudget",
        "3 GPUs are in use; there is no ceiling",
    )


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
    assert a == {
        "type": "A",
        "status": "True",
        "reason": "R",
        "message": "new",
        "lastTransitionTime": "then",
        "observedGeneration": 7,
    }
    assert (b["status"], b["lastTransitionTime"], len(b["message"])) == ("False", "now", MESSAGE_LIMIT)
    assert b["message"].endswith("...")
