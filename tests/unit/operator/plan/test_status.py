"""The status as a whole: phase, columns, and when it is written."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.api.status import AdapterStatus, GraphStatus
from penstock.operator.plan.diagnose import Category, Diagnosis
from penstock.operator.plan.drain import Bounded
from penstock.operator.plan.facts import ConditionFacts, Failure, Replicas, ServiceFacts
from penstock.operator.plan.status import adapter_status, graph_status, is_current


def service(role, number, target=None, **counts):
    """Return a service with ``number`` replicas of one GPU."""
    gpus = number if role.is_worker else 0
    replicas = replace(Replicas(number, number, number, 0, gpus), **counts)
    return ServiceFacts(role, replicas, number, number if target is None else target, number, f"s={role}")


SERVICES = {
    "frontend": service(Role.ROUTER, 1),
    "prefill": service(Role.PREFILL, 1),
    "decode": service(Role.DECODE, 2),
}
REST = ConditionFacts(3, SERVICES, budget=8)
NOTHING = ConditionFacts(
    1, {name: service(each.role, 0, target=1) for name, each in SERVICES.items()}, budget=None
)
FAULT = Diagnosis(Category.CRASH_LOOP, "p", "decode", "m", "r")


def test_the_status_of_a_graph_at_rest():
    """Generation, phase, services and columns; the planner's part is not in it."""
    found = graph_status(REST, old=None, now="now")
    assert found["observedGeneration"] == 3
    assert found["phase"] == "Ready"
    numbers = dict.fromkeys(("replicas", "ready", "updated", "desired", "target", "gpus"), 2)
    assert found["services"]["decode"] == {**numbers, "draining": 0, "selector": "s=decode"}
    assert found["summary"] == {"prefill": "1/1", "decode": "2/2", "gpus": "3/8"}
    types = [each["type"] for each in found["conditions"]]
    assert types == ["BudgetRespected", "Degraded", "Progressing", "Ready", "Schedulable"]
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


def with_decode(number, **more):
    """Return REST with another service decode."""
    return replace(REST, services={**SERVICES, "decode": service(Role.DECODE, number, **more)})


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        (REST, "Ready"),
        (NOTHING, "Pending"),
        (with_decode(2, target=3), "Progressing"),
        (with_decode(0), "Pending"),
        (with_decode(1, ready=0, serving=0), "Progressing"),
        (replace(REST, diagnoses=[FAULT]), "Degraded"),
        (replace(REST, failure=Failure("ApplyFailed", "m")), "Degraded"),
        (replace(NOTHING, failure=Failure("InvalidSpec", "m")), "Failed"),
        (replace(NOTHING, deleting="waits"), "Progressing"),
    ],
)
def test_the_phase_is_one_word_for_it(facts, phase):
    """Failed only if nothing is served; Degraded wherever something is broken; Pending before anything runs."""
    assert graph_status(facts, old=None, now="now")["phase"] == phase


COUNTS = st.builds(Replicas, *[st.integers(0, 3)] * 5)
FACTS = st.builds(
    ConditionFacts,
    generation=st.integers(1, 3),
    services=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(
            ServiceFacts,
            role=st.sampled_from(Role),
            replicas=COUNTS,
            desired=st.integers(0, 3),
            target=st.integers(0, 3),
            updated=st.integers(0, 3),
            selector=st.just("s"),
            rolling=st.booleans(),
            held=st.sampled_from(["", "held"]),
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


DECODE = SERVICES["decode"]


def test_an_adapters_status():
    """Numbers for /scale, and whether the desired number was cut."""
    found = adapter_status(replace(DECODE, bounds=(1, 8)), Bounded(2), generation=4, old=None, now="now")
    numbers = {"replicas": 2, "ready": 2, "minReplicas": 1, "maxReplicas": 8, "selector": "s=decode"}
    same = {"status": "False", "lastTransitionTime": "now", "observedGeneration": 4}
    within = {"reason": "WithinBounds", "message": "the number asked for is within the bounds"}
    limited = {"type": "ScalingLimited", **within, **same}
    refused = {"type": "ReplicaFailure", "reason": "PodsCreated", "message": "no pod is refused", **same}
    assert found == {**numbers, "conditions": [limited, refused]}
    AdapterStatus.model_validate(found)
    limited = adapter_status(DECODE, Bounded(2, "TooManyReplicas", "m"), generation=5, old=found, now="later")
    assert [(each["status"], each["reason"], each["message"]) for each in limited["conditions"]] == [
        ("True", "TooManyReplicas", "m"),
        ("False", "PodsCreated", "no pod is refused"),
    ]
