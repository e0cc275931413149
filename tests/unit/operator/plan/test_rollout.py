"""Rollouts: surge within the budget, one worker service at a time."""

import pytest

from penstock.api import Role
from penstock_operator.plan.rollout import RolloutView, rollout_view, unavailable, waiting_rollouts


@pytest.mark.parametrize(
    ("role", "gpus", "wanted", "budget", "expected"),
    [
        (Role.ROUTER, 0, 8, 8, 0),
        (Role.DECODE, 1, 8, None, 0),
        (Role.DECODE, 1, 7, 8, 0),
        (Role.DECODE, 2, 7, 8, 1),
        (Role.PREFILL, 1, 9, 8, 1),
    ],
)
def test_a_rollout_surges_where_there_is_room(role, gpus, wanted, budget, expected):
    """Room for one replica more alongside all that are wanted; routers and graphs without a ceiling always."""
    values = {"gpus_per_replica": gpus, "wanted_gpus": wanted, "budget": budget}
    assert unavailable(role=role, blocked=0, **values) == expected


@pytest.mark.parametrize(
    ("gpus", "wanted", "blocked", "expected"),
    [(1, 9, 1, 2), (1, 9, 3, 2), (4, 13, 3, 3), (1, 8, 3, 1), (0, 9, 3, 1)],
)
def test_replicas_that_the_budget_keeps_away_are_not_the_one_that_a_rollout_replaces(
    gpus, wanted, blocked, expected
):
    """With a budget of 8: one alongside them, and of these no more than the wanted replicas exceed it by."""
    values = {"gpus_per_replica": gpus, "wanted_gpus": wanted, "budget": 8, "blocked": blocked}
    assert unavailable(role=Role.DECODE, **values) == expected


def workload(*, generation=2, observed=2, replicas=3, **status):
    """Return a Deployment."""
    found = {"metadata": {"generation": generation}, "spec": {"replicas": replicas}, "status": status}
    if observed is not None:
        status["observedGeneration"] = observed
    return found


DEADLINE = {"type": "Progressing", "reason": "ProgressDeadlineExceeded", "message": "too slow"}


@pytest.mark.parametrize(
    ("deployment", "rolling", "stuck"),
    [
        ({}, False, False),
        (workload(replicas=3, updatedReplicas=3, readyReplicas=3), False, False),
        (workload(updatedReplicas=1, replicas_=0), False, False),
        (workload(observed=1), True, False),
        (workload(observed=None), False, False),
        (workload(conditions=[{"type": "Available"}, DEADLINE]), False, True),
        (workload(observed=1, conditions=[DEADLINE]), True, False),
    ],
)
def test_a_workload_rolls_while_older_replicas_exist(deployment, rolling, stuck):
    """Or while its controller has not seen its newest specification; a deadline passed means stuck."""
    view = rollout_view("decode", Role.DECODE, deployment)
    assert (view.rolling, view.stuck) == (rolling, stuck)


DECODE = RolloutView("decode", Role.DECODE, ready=2, updated=2)
PREFILL = RolloutView("prefill", Role.PREFILL, ready=2, updated=2)
ROUTER = RolloutView("frontend", Role.ROUTER, ready=2, updated=2)
BEHIND_DECODE = "waits for the rollout of decode"
BEHIND_PREFILL = "waits for the rollout of prefill"


def view(base, **more):
    """Return ``base`` changed."""
    return RolloutView(base.service, base.role, **{"ready": base.ready, "updated": 1, **more})


STUCK = view(DECODE, rolling=True, stuck=True, message="too slow")


@pytest.mark.parametrize(
    ("changed", "views", "expected"),
    [
        ((), (DECODE, PREFILL), {}),
        (("prefill",), (DECODE, PREFILL), {}),
        (("prefill", "decode", "frontend"), (PREFILL, DECODE, ROUTER), {"prefill": BEHIND_DECODE}),
        (("prefill",), (PREFILL, view(DECODE, rolling=True)), {"prefill": BEHIND_DECODE}),
        (("prefill", "decode"), (DECODE, view(PREFILL, rolling=True)), {"decode": BEHIND_PREFILL}),
        (("prefill",), (PREFILL, STUCK), {"prefill": f"{BEHIND_DECODE}, which is stuck: too slow"}),
        (("prefill", "decode"), (PREFILL, view(DECODE, ready=0)), {}),
        (("unknown",), (DECODE,), {}),
    ],
)
def test_one_worker_service_rolls_at_a_time(changed, views, expected):
    """Decode first; a rolling one may be corrected; with nothing served there is no ratio to keep."""
    assert waiting_rollouts(changed, views) == expected


def test_a_number_that_the_controller_has_not_seen_is_no_rollout():
    """Only a pod template that it has not seen is one."""
    live = {
        "metadata": {"generation": 5},
        "spec": {},
        "status": {"observedGeneration": 4, "replicas": 2, "updatedReplicas": 2},
    }
    assert rollout_view("decode", Role.DECODE, live).rolling
    assert rollout_view("decode", Role.DECODE, live, template_generation=5).rolling
    assert not rollout_view("decode", Role.DECODE, live, template_generation=4).rolling
