"""Which gated pods start within the budget, and what a service keeps of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kube.objects.names import BUDGET_GATE
from penstock_operator.plan.budget import (
    OVERDUE_S,
    RESERVATION_S,
    ServiceReservation,
    UngatePlan,
    blocked,
    blocked_on_budget,
    missing_replicas,
    plan_ungating,
    reservations,
    with_gates_removed,
)
from penstock_operator.plan.pods import PodView


def worker(name, *, gpus=1, role="decode", **more):
    """Return a gated worker pod whose uid is its name."""
    defaults = {"uid": name, "service": role, "role": role, "gates": (BUDGET_GATE,), "gpus": gpus}
    return PodView(name, **{**defaults, **more})


def running(name, **more):
    """Return a worker pod whose gate is ungated."""
    return worker(name, gates=(), **more)


def allowed(*pods, budget=8, priorities=None, held=None, lifted=(), now_s=0.0):
    """Call `plan_ungating` with defaults; gates of pods with the ``lifted`` uids are lifted."""
    return plan_ungating(
        with_gates_removed(pods, lifted),
        budget=budget,
        priorities=priorities or {},
        held=held or {},
        now_s=now_s,
    )


def test_without_a_ceiling_all_start():
    """No budget, no waiting; the used GPUs are counted all the same."""
    assert allowed(running("a", gpus=4), worker("b", gpus=99), budget=None) == UngatePlan(("b",), (), 4)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((running("a", gpus=8), worker("b")), {"decode"}),
        ((running("a", gpus=7), worker("b")), set()),
        ((running("a", gpus=8), running("c", gpus=1, terminating=True), worker("b")), set()),
        ((running("a", gpus=8, service="p"), worker("b", service="q")), {"q"}),
    ],
)
def test_starved_is_who_waits_for_gpus_that_nobody_is_about_to_free(pods, expected):
    """Room, or a worker on its way out, is worth waiting for."""
    assert blocked_on_budget(allowed(*pods), pods) == expected


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((running("a", gpus=8), worker("b"), worker("c")), {"decode": 2}),
        ((running("a", gpus=7), running("x", terminating=True), worker("b"), worker("c")), {"decode": 1}),
        ((running("a", gpus=7), running("x", terminating=True, role="prefill"), worker("b")), {"decode": 1}),
        ((running("a", gpus=7), running("x", terminating=True), worker("b")), {}),
        ((running("a", gpus=7), worker("b")), {}),
    ],
)
def test_blocked_is_who_waits_for_gpus_that_its_own_service_does_not_free(pods, expected):
    """A replacement whose predecessor leaves is on its way; so is one that fits."""
    assert blocked(allowed(*pods), pods) == expected


def test_a_service_gets_back_the_gpus_of_a_replica_that_it_lost():
    """Before older pods and higher priorities of others; not before an empty role, and not more than it lost."""
    pods = [
        running("d0", created_s=1),
        running("p0", role="prefill", created_s=1),
        worker("p1", role="prefill", created_s=2),
        worker("d1", created_s=3),
        worker("d2", created_s=4),
    ]
    assert allowed(*pods, budget=3).ungate == ("p1",)
    held = {"decode": ServiceReservation(2, 1), "prefill": ServiceReservation(1, 1)}
    assert allowed(*pods, budget=3, held=held, priorities={"prefill": 1}).ungate == ("d1",)
    assert allowed(*pods, budget=4, held=held).ungate == ("d1", "p1")
    assert allowed(pods[0], *pods[2:], budget=2, held={"decode": ServiceReservation(2, 1)}).ungate == ("p1",)
    leaving = running("d9", terminating=True)
    assert allowed(*pods, leaving, budget=4, held=held).ungate == ("p1",)


@pytest.mark.parametrize(
    ("pod", "counts"),
    [
        (running("a", gpus=8), True),
        (running("a", gpus=8, terminating=True), True),
        (running("a", gpus=8, phase="Failed"), False),
        (worker("a", gpus=8, terminating=True), False),
    ],
)
def test_a_pod_counts_from_release_to_its_end(pod, counts):
    """Terminating pods still hold their GPUs; finished ones and those never released hold none."""
    found = allowed(pod, worker("b"))
    assert found.ungate == (() if counts else ("b",))
    assert found.gpus == (8 if counts else 0)


def test_an_empty_role_goes_before_any_priority():
    """A graph with an empty role serves nothing, so one replica of it comes first; priority decides the rest."""
    pods = [
        worker("p1", role="prefill"),
        worker("p2", role="prefill"),
        worker("d1"),
        worker("d2"),
    ]
    assert allowed(*pods, budget=3, priorities={"prefill": 5}).ungate == ("p1", "d1", "p2")
    assert allowed(running("d0"), *pods, budget=3, priorities={"decode": 5}).ungate == ("p1", "d1")


def test_room_that_comes_free_is_kept_for_the_first_in_line():
    """Small replicas do not slip past a big one whose room is being freed."""
    pods = [
        running("x", gpus=2, role="prefill"),
        running("y", gpus=2),
        running("leaving", gpus=2, terminating=True, deleted_s=100.0),
        worker("big", gpus=4, created_s=1),
        worker("small", created_s=2),
    ]
    found = allowed(*pods, now_s=50.0)
    assert found.ungate == ()
    assert {each.uid: each.reason for each in found.waiting} == {
        "big": "needs 4 of 8 GPUs and 2 are free; 2 more are being freed",
        "small": "needs 1 of 8 GPUs and 2 are free; decode is next in line",
    }


@pytest.mark.parametrize("deleted_s", [100.0 - OVERDUE_S, 0.0])
def test_nobody_waits_for_a_stuck_pod(deleted_s):
    """A terminating pod past its deadline frees nothing soon: those behind the first in line pass."""
    pods = [
        running("x", gpus=4),
        running("stuck", gpus=2, terminating=True, deleted_s=deleted_s),
        worker("big", gpus=4, created_s=1),
        worker("small", created_s=2),
    ]
    assert allowed(*pods, now_s=100.0).ungate == ("small",)


def group(name, index, **more):
    """Return pod ``index`` of a group of two."""
    return worker(f"{name}-{index}", group=name, worker_index=index, group_size=2, gpus=4, **more)


def test_a_group_starts_as_a_whole():
    """Leader first, and only if the whole group fits, also the pods that do not exist yet."""
    assert allowed(group("g", 1), group("g", 0)).ungate == ("g-0", "g-1")
    assert allowed(group("g", 0), running("a")).ungate == ()
    assert allowed(group("g", 0)).ungate == ("g-0",)


def test_a_started_groups_rest_has_its_room():
    """Nobody takes the GPUs that a group's missing pods will need."""
    leader = group("g", 0, gates=())
    found = allowed(leader, worker("other"))
    assert (found.ungate, found.gpus) == ((), 8)
    assert allowed(leader, group("g", 1)).ungate == ("g-1",)
    assert allowed(leader, group("g", 1), lifted={"g-1"}).ungate == ()


def test_a_groups_replacement_waits_for_what_it_replaces():
    """A terminating pod of a running group counts alongside the group's whole."""
    pods = (
        group("g", 0, gates=()),
        replace(group("g", 1, gates=(), terminating=True), uid="old"),
        group("g", 1),
    )
    found = allowed(*pods)
    assert (found.ungate, found.gpus) == ((), 12)
    assert found.waiting[0].reason == "12 GPUs are in use and the budget is 8"


PODS = st.lists(
    st.builds(
        PodView,
        name=st.uuids().map(str),
        service=st.sampled_from(["prefill", "decode"]),
        role=st.sampled_from(["prefill", "decode"]),
        gpus=st.integers(0, 4),
        gates=st.sampled_from([(), (BUDGET_GATE,)]),
        terminating=st.booleans(),
        phase=st.sampled_from(["Running", "Failed"]),
        created_s=st.integers(0, 3).map(float),
        deleted_s=st.none() | st.integers(0, 3).map(float),
    ).map(lambda pod: replace(pod, uid=pod.name)),
    max_size=10,
)


@given(PODS, st.integers(0, 12), st.dictionaries(st.sampled_from(["prefill", "decode"]), st.integers(-2, 2)))
def test_releases_fit_and_leave_no_usable_room(pods, budget, priorities):
    """What starts fits; what waits either does not fit or gives way to one whose room is coming."""
    found = allowed(*pods, budget=budget, priorities=priorities)
    by_uid = {pod.uid: pod for pod in pods}
    started = sum(by_uid[uid].gpus for uid in found.ungate)
    if any(by_uid[uid].gpus for uid in found.ungate):
        assert found.gpus + started <= budget
    room = budget - found.gpus - started
    for each in found.waiting:
        assert by_uid[each.uid].gpus > room or "next in line" in each.reason
    alive_gated = {pod.uid for pod in pods if pod.gated and pod.alive}
    assert alive_gated == {*found.ungate, *(each.uid for each in found.waiting)}
    if any("next in line" in each.reason for each in found.waiting):
        assert any("being freed" in each.reason for each in found.waiting)


class World:
    """A cluster, an operator that sees it late, and the releases on their way."""

    def __init__(self, budget):
        self.budget = budget
        self.pods = {}
        self.history = [{}]
        self.seen = 0
        self.released = set()
        self.in_flight = []
        self.born = 0

    def record(self):
        """Take a picture of the cluster, which must be within its budget."""
        self.history.append(dict(self.pods))
        gpus = sum(pod.gpus for pod in self.pods.values() if not pod.gated and not pod.finished)
        assert gpus <= self.budget

    def create(self, gpus, role, size):
        """A workload makes a replica."""
        self.born += 1
        for index in range(size):
            name = f"p{self.born}-{index}"
            more = {"group": f"g{self.born}", "worker_index": index, "group_size": size} if size > 1 else {}
            self.pods[name] = worker(name, gpus=gpus, role=role, created_s=float(self.born), **more)
            self.record()

    def change(self, pick, **changes):
        """Something happens to a pod."""
        if self.pods:
            name = sorted(self.pods)[pick % len(self.pods)]
            self.pods[name] = replace(self.pods[name], **changes)
            self.record()

    def delete(self, pick):
        """A terminating or gated pod is gone."""
        gone = sorted(n for n, pod in self.pods.items() if pod.terminating or pod.gated)
        if gone:
            del self.pods[gone[pick % len(gone)]]
            self.record()

    def watch(self, steps):
        """The operator's view catches up a little."""
        self.seen = min(len(self.history) - 1, self.seen + steps)

    def operate(self):
        """The operator decides on what it sees and sends its patches."""
        view = self.history[self.seen]
        self.released = {uid for uid in self.released if uid in view and view[uid].gated}
        found = allowed(*view.values(), budget=self.budget, lifted=self.released)
        self.released |= set(found.ungate)
        self.in_flight += found.ungate
        return found

    def land(self, pick):
        """One patch arrives."""
        if self.in_flight:
            uid = self.in_flight.pop(pick % len(self.in_flight))
            if uid in self.pods:
                self.pods[uid] = replace(self.pods[uid], gates=())
                self.record()

    def restart(self):
        """Another operator takes over with a fresh list."""
        while self.in_flight:  # the lease outlives what the old leader sent
            self.land(0)
        self.released = set()
        self.seen = len(self.history) - 1


STEPS = st.one_of(
    st.tuples(
        st.just("create"),
        st.integers(0, 4),
        st.sampled_from(["prefill", "decode"]),
        st.sampled_from([1, 1, 2]),
    ),
    st.tuples(st.just("terminate"), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(st.just("watch"), st.integers(1, 4)),
    st.tuples(st.just("operate")),
    st.tuples(st.just("operate")),
    st.tuples(st.just("land"), st.integers(0, 9)),
    st.tuples(st.just("restart")),
)


@settings(max_examples=200)
@given(st.integers(1, 8), st.lists(STEPS, max_size=60))
def test_no_order_of_events_exceeds_the_budget(budget, steps):
    """Creates, kills, late watches, late and lost answers, restarts: at every instant the budget holds.

    And once everything has settled, no waiting replica would have fitted.
    """
    world = World(budget)
    for name, *arguments in steps:
        if name == "terminate":
            world.change(arguments[0], terminating=True)
        elif name == "finish":
            world.change(arguments[0], phase="Failed")
        else:
            getattr(world, name)(*arguments)
    for _ in range(len(world.pods) + 1):
        world.restart()
        for uid in [n for n, pod in world.pods.items() if pod.terminating]:
            del world.pods[uid]
            world.record()
        world.watch(len(world.history))
        found = world.operate()
        for _ in found.ungate:
            world.land(0)
    waiting = {each.uid for each in found.waiting}
    assert not any("next in line" in each.reason or "being freed" in each.reason for each in found.waiting)
    assert {uid for uid, pod in world.pods.items() if pod.gated and pod.alive} == waiting


def test_gpus_are_kept_for_a_replacement_that_does_not_exist_yet():
    """Of those behind it; an empty role goes first all the same."""
    held = {"decode": ServiceReservation(2, 1)}
    pods = [running("d0"), running("p0", role="prefill"), worker("p1", role="prefill")]
    found = allowed(*pods, budget=3, held=held)
    assert found.ungate == ()
    assert [each.reason for each in found.waiting] == [
        "needs 1 of 3 GPUs and 0 are free; 1 more are being freed"
    ]
    assert allowed(*pods, budget=4, held=held).ungate == ("p1",)
    assert allowed(pods[0], pods[2], budget=2, held=held).ungate == ("p1",)


def pod(name, *, gated=False, **more):
    """Return a decode pod of two GPUs."""
    gates = (BUDGET_GATE,) if gated else ()
    return PodView(name, uid=name, service="decode", role="decode", gpus=2, gates=gates, **more)


def held(*pods, before=None, wanted=2, now_s=100.0):
    """Call `reservations` with defaults."""
    return reservations(pods, before or {}, replicas={"decode": wanted}, now_s=now_s)


def test_what_runs_starts_or_leaves_is_held():
    """A lifted gate counts before it is seen; a gated or finished pod holds nothing."""
    pods = (pod("a"), pod("b", gated=True), pod("c", phase="Failed"), pod("d", terminating=True))
    assert held(*pods) == {"decode": ServiceReservation(2, 2)}
    assert held(*with_gates_removed(pods, {"b"}), wanted=3) == {"decode": ServiceReservation(3, 2)}


def test_a_lost_replica_is_kept_for_a_while():
    """From the moment that it was missed, until it is back or `RESERVATION_S` have passed."""
    both = held(pod("a"), pod("b"))
    missed = held(pod("a"), before=both)
    assert missed == {"decode": ServiceReservation(2, 2, 100.0)}
    assert missing_replicas(missed, [pod("a")]) == {"decode": 1}
    assert held(pod("a"), before=missed, now_s=100.0 + RESERVATION_S - 0.1) == missed
    assert held(pod("a"), before=missed, now_s=100.0 + RESERVATION_S) == {"decode": ServiceReservation(1, 2)}
    assert held(pod("a"), pod("b"), before=missed, now_s=101.0) == both
    assert held(before=both) == {"decode": ServiceReservation(2, 2, 100.0)}


def test_what_is_no_longer_wanted_is_given_up_at_once():
    """A scale-down, and a service that the graph no longer has."""
    both = held(pod("a"), pod("b"))
    assert held(pod("a"), before=both, wanted=1) == {"decode": ServiceReservation(1, 2)}
    assert missing_replicas(held(pod("a"), pod("b"), wanted=1), [pod("a")]) == {}
    assert reservations([], both, replicas={}, now_s=0.0) == {}
