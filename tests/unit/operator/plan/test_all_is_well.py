"""No condition says that all is well while fewer replicas serve than are wanted for longer than a start takes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.api.enums import GraphPhase
from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock_operator.plan.pods import ContainerView, PodView
from penstock_operator.plan.status import condition_results, phase
from penstock_operator.plan.status_input import ServiceStatusInput, StatusInput, count_replicas

WELL = {"Stable", "Healthy", "Scheduled"}


@st.composite
def pods(draw):
    """Return a pod of a decode service in any state."""
    number = draw(st.integers(0, 10**6))
    is_ready = draw(st.booleans())
    return PodView(
        name=f"d-{number}",
        uid=str(number),
        service="decode",
        role="decode",
        gpus=1,
        gates=draw(st.sampled_from([(), (BUDGET_GATE,), ("other",)])),
        node="n" if is_ready else draw(st.sampled_from(["", "n"])),
        phase=draw(st.sampled_from(["Pending", "Running", "Failed"])),
        ready=is_ready,
        terminating=draw(st.booleans()),
        serving=draw(st.sampled_from([SERVING, DRAINING])),
        containers=(ContainerView("main", ready=is_ready, started=is_ready),),
    )


def facts(found, target, *, late):
    """Return facts of a graph whose one service has these pods and wants that many."""
    service = ServiceStatusInput(Role.DECODE, count_replicas(found), target, target, 0, "")
    made = StatusInput(1, {"decode": service})
    return replace(made, late=made.lacking_replicas if late else ())


@given(st.lists(pods(), max_size=6, unique_by=lambda each: each.name), st.integers(0, 6))
def test_a_service_that_is_short_for_long_is_never_well(found, target):
    """Whatever its pods look like: not Stable, not Healthy, not Ready in one word."""
    made = facts(found, target, late=True)
    results = {each.type: each for each in condition_results(made)}
    is_short = count_replicas(found).serving < target
    said = {results[each].reason for each in ("Progressing", "Degraded")}
    assert not (is_short and said & WELL)
    word = phase(made, {each.type: each.status for each in results.values()})
    assert not (is_short and word is GraphPhase.READY)


@given(st.lists(pods(), max_size=6, unique_by=lambda each: each.name), st.integers(0, 6))
def test_every_pod_has_a_node_is_said_only_where_every_replica_has(found, target):
    """A gated pod has none, and a replica without a pod has none either."""
    made = facts(found, target, late=False)
    [said] = [each for each in condition_results(made) if each.type == "Schedulable"]
    alive = [each for each in found if each.alive]
    is_placed = len(alive) >= target and all(each.bound or each.ready for each in alive)
    assert said.status is is_placed
