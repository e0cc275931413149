"""How many replicas of a service that is no longer wanted stay, and until when."""

from __future__ import annotations

import pytest

from penstock.api import Role, ServiceSpec
from penstock.kube.objects.names import BUDGET_GATE, SERVING
from penstock_operator.plan.drain import LimitedReplicas
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import ServiceState
from penstock_operator.plan.retirement import replicas_to_keep
from penstock_operator.plan.rollout import RolloutView


def state(role, wanted, ready=None):
    """Return a service of one role; ``ready`` is None while it has no workload."""
    view = None if ready is None else RolloutView("new", role, ready=ready)
    return ServiceState(ServiceSpec(role=role), LimitedReplicas(wanted), running=wanted, rollout=view)


def pods(service, number, **more):
    """Return pods of a service, by default ready ones."""
    made = {"node": "n", "ready": True, "serving": SERVING, **more}
    return [PodView(f"{service}-{each}-{sorted(more)}", service=service, **made) for each in range(number)]


DECODE, PREFILL, ROUTER, AGGREGATED = Role.DECODE, Role.PREFILL, Role.ROUTER, Role.AGGREGATED
GATED = {"node": "", "ready": False, "gates": (BUDGET_GATE,)}
STARTING = {"ready": False}

CASES = {
    "nothing of the new service is there yet": (DECODE, pods("old", 2), {"new": state(DECODE, 2)}, [], False, 2),
    "one of two serves": (DECODE, pods("old", 2), {"new": state(DECODE, 2, 1)}, pods("new", 1), False, 1),
    "all serve": (DECODE, pods("old", 2), {"new": state(DECODE, 2, 2)}, pods("new", 2), False, 0),
    "fewer are wanted than were": (DECODE, pods("old", 4), {"new": state(DECODE, 1, 0)}, [], False, 1),
    "none is wanted": (DECODE, pods("old", 2), {"new": state(DECODE, 0, 0)}, [], False, 0),
    "an old one that serves nothing is not kept": (
        DECODE, pods("old", 1) + pods("old", 1, **STARTING), {"new": state(DECODE, 2)}, [], False, 1,
    ),
    "the budget has no room: one leaves": (
        DECODE, pods("old", 2), {"new": state(DECODE, 2, 0)}, pods("new", 2, **GATED), False, 1,
    ),
    "and no second one while it does": (
        DECODE, pods("old", 1) + pods("old", 1, terminating=True), {"new": state(DECODE, 2, 0)},
        pods("new", 2, **GATED), False, 1,
    ),
    "nor while the new one starts": (
        DECODE, pods("old", 1), {"new": state(DECODE, 2, 0)},
        pods("new", 1, **STARTING) + pods("new", 1, **GATED), False, 1,
    ),
    "the next one leaves when that serves": (
        DECODE, pods("old", 1), {"new": state(DECODE, 2, 1)}, pods("new", 1) + pods("new", 1, **GATED), False, 0,
    ),
    "an only one leaves, too": (
        DECODE, pods("old", 1), {"new": state(DECODE, 2, 0)}, pods("new", 2, **GATED), False, 0,
    ),
    "routers may still know the old service alone": (
        DECODE, pods("old", 2), {"new": state(DECODE, 2, 2)}, pods("new", 2), True, 2,
    ),
    "two roles in place of one: both are waited for": (
        AGGREGATED, pods("old", 3),
        {"p": state(PREFILL, 1, 1), "d": state(DECODE, 1, 0), "r": state(ROUTER, 1, 1)}, pods("p", 1), False, 1,
    ),
    "a router leaves when the new one is ready": (
        ROUTER, pods("old", 1), {"r": state(ROUTER, 1, 0), "d": state(DECODE, 1, 1)}, [], True, 1,
    ),
    "a graph without a router of its own": (ROUTER, pods("old", 1), {"d": state(DECODE, 1, 0)}, [], True, 0),
    "without workers nothing replaces one": (DECODE, pods("old", 1), {"r": state(ROUTER, 1, 0)}, [], True, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_old_replicas_stay_until_new_ones_serve(case):
    """By role, readiness and room."""
    role, old, services, new, routers_behind, kept = CASES[case]
    assert replicas_to_keep(role, old, services, [*old, *new], routers_behind=routers_behind) == kept
