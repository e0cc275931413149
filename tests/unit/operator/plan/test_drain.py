"""Scaling one service: within its bounds, who is marked, who may go, and that nothing with requests is deleted."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import ServiceSpec
from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock_operator.plan.drain import (
    DRAINING_COST,
    REMOVABLE_COST,
    LimitedReplicas,
    PodLoad,
    ScalePlan,
    ServicePool,
    limited_replicas,
    plan_scale,
)
from penstock_operator.plan.pods import ContainerView, PodView

SCALED = ServiceSpec.model_validate(
    {"role": "decode", "replicas": 2, "gpusPerReplica": 2, "scaling": {"minReplicas": 1, "maxReplicas": 6}}
)
TOO_MANY = LimitedReplicas(6, "TooManyReplicas", "9 replicas were requested; scaling.maxReplicas is 6")
FIXED = ServiceSpec.model_validate({"role": "router", "replicas": 2, "gpusPerReplica": 1})


@pytest.mark.parametrize(
    ("desired", "budget", "expected"),
    [
        (None, None, LimitedReplicas(2)),
        (1, 8, LimitedReplicas(1)),
        (4, 8, LimitedReplicas(4)),
        (6, None, LimitedReplicas(6)),
        (0, 8, LimitedReplicas(1, "TooFewReplicas", "0 replicas were requested; scaling.minReplicas is 1")),
        (9, None, TOO_MANY),
        (9, 12, TOO_MANY),
        (
            5,
            8,
            LimitedReplicas(
                4,
                "OverBudget",
                "5 replicas of 2 GPUs exceed the 8 of planner.maxGpuBudget or its pool; the service gets 4",
            ),
        ),
        (
            9,
            1,
            LimitedReplicas(
                1,
                "OverBudget",
                "9 replicas of 2 GPUs exceed the 1 of planner.maxGpuBudget or its pool; the service gets 1",
            ),
        ),
    ],
)
def test_a_desired_number_is_kept_within_the_bounds(desired, budget, expected):
    """minReplicas, maxReplicas and what the complete budget can hold; each says so."""
    assert limited_replicas(desired, SCALED, max_gpu_budget=budget) == expected


def test_a_service_without_scaling_keeps_its_number():
    """A desired number from outside is refused in words."""
    assert limited_replicas(None, FIXED, max_gpu_budget=1) == LimitedReplicas(2)
    assert limited_replicas(2, FIXED, max_gpu_budget=1) == LimitedReplicas(2)
    assert limited_replicas(5, FIXED, max_gpu_budget=1) == LimitedReplicas(
        2, "NotScalable", "5 replicas were requested; the service has no scaling, so it keeps 2"
    )


IDLE = PodLoad(0, 0, 0.0, idle_s=2.0)
NOW = 1000.0


def pod(name, **more):
    """Return a serving decode pod."""
    defaults = {
        "uid": name,
        "role": "decode",
        "node": "n",
        "phase": "Running",
        "ready": True,
        "serving": SERVING,
        "containers": (ContainerView("worker", ready=True, started=True),),
    }
    return PodView(name, **{**defaults, **more})


def marked(name, since_s=NOW - 10, cost=DRAINING_COST, **more):
    """Return a pod that drains."""
    return pod(name, serving=DRAINING, drain_since_s=since_s, deletion_cost=cost, **more)


def pending(name, **more):
    """Return a pod without a node."""
    return pod(name, node="", phase="Pending", ready=False, containers=(), **more)


def plan(*pods, desired, spec=None, loads=None, now_s=NOW, **more):
    """Call `plan_scale` with defaults."""
    spec = len(pods) if spec is None else spec
    pool = ServicePool(pods, desired=desired, spec_replicas=spec, grace_s=60.0, **more)
    return plan_scale(pool, loads=loads or {}, now_s=now_s)


def test_up_is_at_once_and_restores():
    """More replicas are written directly; a marked pod serves again and loses its cost."""
    found = plan(pod("a"), marked("b"), desired=4)
    assert found == ScalePlan(4, restore=("b",), deletion_costs={"b": 0})


@pytest.mark.parametrize(
    ("since_s", "load", "may_go"),
    [
        (NOW - 2, IDLE, False),  # routers are learning that it leaves
        (NOW - 10, None, False),
        (NOW - 10, PodLoad(1, 0, 0.0), False),
        (NOW - 10, PodLoad(0, 1, 0.0), False),
        (NOW - 10, PodLoad(0, 0, 0.01), False),  # another worker may read its KV blocks
        (NOW - 10, PodLoad(0, 0, 0.0, idle_s=0.5), False),
        (NOW - 3, PodLoad(0, 0, 0.0, idle_s=1.0), True),
        (NOW - 60, PodLoad(9, 9, 1.0), True),
        (NOW - 60, None, True),
    ],
)
def test_a_marked_pod_goes_when_idle_or_overdue(since_s, load, may_go):
    """Its cost falls first; the spec follows when that is seen on the pod."""
    found = plan(pod("a"), marked("b", since_s), desired=1, loads={"b": load})
    assert (found.draining, found.removable) == (("b",), ("b",) if may_go else ())
    assert (found.spec_replicas, found.deletion_costs) == (2, {"b": REMOVABLE_COST} if may_go else {})
    seen = plan(pod("a"), marked("b", since_s, REMOVABLE_COST), desired=1, loads={"b": load})
    assert (seen.spec_replicas, seen.deletion_costs) == ((1, {}) if may_go else (2, {"b": DRAINING_COST}))


@pytest.mark.parametrize(
    "never_served",
    [
        {"node": "", "phase": "Pending", "ready": False, "containers": ()},
        {"ready": False, "containers": (ContainerView("worker"),)},
    ],
)
def test_who_never_served_goes_without_waiting(never_served):
    """A pod whose process never started, or ended, holds no request."""
    found = plan(pod("a"), marked("b", NOW, REMOVABLE_COST, **never_served), desired=1)
    assert found.spec_replicas == 1


def test_victims_are_the_cheapest():
    """Unassigned, then pending, then not ready, then fewest requests, least KV, youngest, by name."""
    pods = {
        "gated": pending("gated", gates=(BUDGET_GATE,)),
        "unassigned": pending("unassigned", created_s=9.0),
        "pending": pod("pending", phase="Pending", ready=False, containers=()),
        "unready": pod("unready", ready=False),
        "idle": pod("idle"),
        "twin": pod("twin", created_s=5.0),
        "young": pod("young", created_s=5.0),
        "low-kv": pod("low-kv"),
        "high-kv": pod("high-kv"),
        "unknown": pod("unknown"),
    }
    loads = {
        "idle": PodLoad(0, 0, 0.0),
        "young": PodLoad(1, 0, 0.1),
        "twin": PodLoad(1, 0, 0.1),
        "low-kv": PodLoad(0, 1, 0.1),
        "high-kv": PodLoad(1, 0, 0.5),
    }
    for count in range(len(pods) + 1):
        found = plan(*reversed(pods.values()), desired=len(pods) - count, loads=loads)
        assert found.start_drain == tuple(sorted(list(pods)[:count]))


def test_a_broken_pod_takes_the_place_of_a_draining_one():
    """The ReplicaSet deletes not ready pods first, whatever the costs; so the broken one is the victim."""
    found = plan(
        pod("broken", ready=False),
        pod("well"),
        marked("b", cost=REMOVABLE_COST),
        desired=2,
        loads={"b": IDLE},
    )
    assert found == ScalePlan(
        3,
        start_drain=("broken",),
        restore=("b",),
        deletion_costs={"b": 0, "broken": DRAINING_COST},
        draining=("broken",),
    )


def test_the_spec_falls_only_as_far_as_the_right_pods_go():
    """A pod whose low cost was not yet taken away would be deleted too: wait until that is seen."""
    pods = (pod("a"), pod("b", deletion_cost=REMOVABLE_COST), marked("c", cost=REMOVABLE_COST))
    found = plan(*pods, desired=2, loads={"c": IDLE})
    assert (found.spec_replicas, found.deletion_costs) == (3, {"b": 0})


def test_a_busy_pod_that_is_not_ready_holds_back_an_idle_ready_one():
    """The ReplicaSet would take the one that is not ready first, and it still has requests."""
    pods = (pod("a"), marked("b", cost=REMOVABLE_COST), marked("c", ready=False))
    found = plan(*pods, desired=1, loads={"b": IDLE, "c": PodLoad(1, 0, 0.5)})
    assert (found.spec_replicas, found.removable) == (3, ("b",))


def test_pods_that_are_not_seen_are_in_service():
    """Where the controller knows more replicas than the view, the number stays."""
    assert plan(pod("a"), desired=2, spec=5, known_replicas=5).spec_replicas == 5


def test_half_a_mark_is_completed_or_removed():
    """A label without its time, or a time without its label, or no label at all, is repaired."""
    label_only = pod("a", serving=DRAINING)
    time_only = pod("b", drain_since_s=NOW)
    stripped = pod("c", serving="")
    assert plan(label_only, time_only, stripped, desired=3).restore == ("a", "b", "c")
    assert plan(label_only, desired=0).start_drain == ("a",)


def test_a_rollout_is_not_shrunk():
    """A Deployment with two ReplicaSets chooses for itself; marked pods stay as they are."""
    found = plan(pod("a"), marked("b"), pod("surge"), desired=1, spec=2, rolling=True)
    assert found == ScalePlan(
        2, draining=("b",), hold_reason="a rollout is under way; replicas are reduced after it"
    )
    assert plan(pod("a"), pod("surge"), desired=1, spec=1, rolling=True) == ScalePlan(1)
    assert plan(pod("a"), marked("b"), desired=3, spec=2, rolling=True).restore == ("b",)


def test_an_ordered_deletion_is_not_taken_back_before_it_is_seen():
    """A workload whose new number its controller has not read yet looks like one that rolls."""
    pods = (pod("a"), pod("c"), marked("b", cost=REMOVABLE_COST))
    found = plan(*pods, desired=2, spec=2, loads={"b": IDLE}, rolling=True)
    assert (found.spec_replicas, found.restore, found.deletion_costs) == (2, (), {})


def leader(index, **more):
    """Return the leader of group ``index``."""
    return pod(f"g-{index}", group=f"k{index}", group_index=index, group_size=2, **more)


def follower(index):
    """Return the second pod of group ``index``, which serves nothing."""
    return pod(f"g-{index}-1", group=f"k{index}", group_index=index, worker_index=1, group_size=2, serving="")


def test_groups_go_from_the_highest_index():
    """A LeaderWorkerSet takes the last group, so that one drains; costs mean nothing to it."""
    pods = [leader(0), follower(0), leader(1), follower(1), leader(2), follower(2)]
    found = plan(*pods, desired=1, spec=3)
    assert (found.spec_replicas, found.start_drain, found.deletion_costs) == (3, ("g-1", "g-2"), {})


def test_a_busy_lower_group_keeps_only_itself():
    """Groups above it may go; one above a busy one waits for nobody."""
    busy_middle = [
        leader(0),
        leader(1, serving=DRAINING, drain_since_s=NOW - 10),
        leader(2, serving=DRAINING, drain_since_s=NOW - 10),
    ]
    loads = {"g-1": PodLoad(1, 0, 0.5), "g-2": IDLE}
    assert plan(*busy_middle, desired=1, loads=loads).spec_replicas == 2
    loads = {"g-1": IDLE, "g-2": PodLoad(1, 0, 0.5)}
    assert plan(*busy_middle, desired=1, loads=loads).spec_replicas == 3
    loads = {"g-1": IDLE, "g-2": IDLE}
    assert plan(*busy_middle, desired=1, loads=loads).spec_replicas == 1
    assert plan(*busy_middle, desired=1, spec=4, loads=loads, known_replicas=4).spec_replicas == 4
    assert plan(*busy_middle, desired=3, loads=loads).restore == ("g-1", "g-2")


STATES = st.sampled_from(["gated", "pending", "loading", "unready", "ready"])
PODS = st.lists(
    st.tuples(
        STATES, st.sampled_from(["serving", "draining", "leaving"]), st.integers(0, 99), st.integers(0, 3)
    ),
    max_size=7,
)
LOADS = st.none() | st.builds(
    PodLoad, st.integers(0, 2), st.integers(0, 1), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 2.0])
)


def make(name, state, mark, since, age):
    """Return a pod in one of the states that a cluster shows."""
    more = {"created_s": float(age)}
    if state in {"gated", "pending"}:
        more |= {
            "node": "",
            "phase": "Pending",
            "ready": False,
            "containers": (),
            "gates": (BUDGET_GATE,) if state == "gated" else (),
        }
    elif state == "loading":
        more |= {"ready": False, "containers": (ContainerView("worker"),)}
    elif state == "unready":
        more |= {"ready": False}
    if mark == "serving":
        return pod(name, **more)
    return marked(name, NOW - since, REMOVABLE_COST if mark == "leaving" else DRAINING_COST, **more)


@st.composite
def services(draw):
    """Draw pods and their loads."""
    pods = [make(f"p{i}", *row) for i, row in enumerate(draw(PODS))]
    return pods, {each.name: draw(LOADS) for each in pods}


@given(services(), st.integers(0, 8), st.integers(0, 8))
def test_never_marks_more_than_needed(service, desired, spec):
    """Victims are exactly the surplus; the spec lies between the desired number and what it was."""
    pods, loads = service
    found = plan(*pods, desired=desired, spec=spec, loads=loads)
    assert len(found.draining) == max(0, len(pods) - desired)
    assert min(desired, spec) <= found.spec_replicas <= max(desired, spec)
    assert not set(found.start_drain) & set(found.restore)
    assert set(found.removable) <= set(found.draining)


def carry_out(pods, found, now_s=NOW):
    """Return the pods after the plan's marks are written."""
    done = []
    for each in pods:
        view = each
        if each.name in found.start_drain:
            view = replace(view, serving=DRAINING, drain_since_s=now_s)
        if each.name in found.restore:
            view = replace(view, serving=SERVING, drain_since_s=None)
        if each.name in found.deletion_costs:
            view = replace(view, deletion_cost=found.deletion_costs[each.name])
        done.append(view)
    return done


@given(services(), st.integers(0, 8))
def test_carried_out_it_asks_for_nothing_twice(service, desired):
    """Marks that are written are not written again."""
    pods, loads = service
    first = plan(*pods, desired=desired, loads=loads)
    second = plan(*carry_out(pods, first), desired=desired, loads=loads)
    assert (second.start_drain, second.restore) == ((), ())
    third = plan(*carry_out(carry_out(pods, first), second), desired=desired, loads=loads)
    assert third.deletion_costs == {}


class Cluster:
    """A Deployment's pods with requests in them, and the ReplicaSet that deletes some."""

    def __init__(self, random, count):
        self.random = random
        self.now_s = NOW
        self.spec = count
        self.born = 0
        self.pods = {}
        self.requests = {}
        self.idle_since = {}
        self.behind = False
        self.sync()
        for name in list(self.pods):
            self.change(name, "ready")

    def sync(self):
        """Make or delete pods as the ReplicaSet controller would, ties broken at random."""
        while len(self.pods) < self.spec:
            self.born += 1
            name = f"p{self.born}"
            self.pods[name] = pending(name, created_s=self.now_s)
            self.requests[name] = 0
        ranked = sorted(
            self.pods.values(),
            key=lambda p: (p.bound, p.phase != "Pending", p.ready, p.deletion_cost, self.random.random()),
        )
        for victim in ranked[: max(0, len(self.pods) - self.spec)]:
            overdue = victim.drain_since_s is not None and self.now_s - victim.drain_since_s >= 60
            assert victim.serving == DRAINING, "deleted while in service"
            assert overdue or self.requests[victim.name] == 0, "deleted with requests"
            del self.pods[victim.name]

    def change(self, name, state):
        """Let a pod's containers take another state; a process that ends loses its requests by itself.

        Not between an order to shrink and the ReplicaSet's obeying it, which chooses by the states of then.
        """
        if self.behind:
            self.behind = False
            self.sync()
        if name not in self.pods:
            return
        fresh = make(name, state, "serving", 0, 0)
        kept = self.pods[name]
        self.pods[name] = replace(
            fresh,
            serving=kept.serving,
            drain_since_s=kept.drain_since_s,
            deletion_cost=kept.deletion_cost,
            created_s=kept.created_s,
        )
        if not self.pods[name].may_hold_requests:
            self.requests[name] = 0

    def work(self):
        """Let requests come to serving pods and end anywhere."""
        for name, each in self.pods.items():
            if each.ready and each.serving == SERVING and self.random.random() < 0.5:
                self.requests[name] += 1
            if self.requests[name] and self.random.random() < 0.4:
                self.requests[name] -= 1

    def loads(self):
        """Return what the pods' metrics say now."""
        found = {}
        for name, count in self.requests.items():
            if name in self.pods and self.pods[name].may_hold_requests:
                since = self.idle_since.setdefault(name, self.now_s) if not count else None
                if since is None:
                    self.idle_since.pop(name, None)
                    found[name] = PodLoad(count, 0, 0.5)
                else:
                    found[name] = PodLoad(0, 0, 0.0, self.now_s - since)
        return found

    def operate(self, desired, *, crash):
        """One look of the operator, which may die between any two of its writes."""
        found = plan(
            *self.pods.values(),
            desired=desired,
            spec=self.spec,
            loads=self.loads(),
            now_s=self.now_s,
            known_replicas=len(self.pods),
            rolling=self.behind,
        )
        one_by_one = [
            *(ScalePlan(0, start_drain=(name,)) for name in found.start_drain),
            *(ScalePlan(0, restore=(name,)) for name in found.restore),
            *(ScalePlan(0, deletion_costs={name: cost}) for name, cost in found.deletion_costs.items()),
        ]
        written = self.random.randint(0, len(one_by_one)) if crash else len(one_by_one)
        for write in one_by_one[:written]:
            self.pods = {p.name: p for p in carry_out(self.pods.values(), write, self.now_s)}
        if written == len(one_by_one) and not crash:
            self.behind = self.random.random() < 0.3
            self.spec = found.spec_replicas
        if not self.behind:
            self.sync()
        return found


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["desired", "crash", "look", "look", "look", "flap"]), st.integers(0, 6), STATES
    ),
    max_size=50,
)


@settings(max_examples=120)
@given(st.integers(0, 2**32), st.integers(0, 6), EVENTS)
def test_no_request_is_lost_whatever_happens(chance, count, events):
    """Changed minds, crashes of the operator, pods that break: only what may go is deleted.

    And left in peace, the service ends with as many replicas as wished, none of them marked.
    """
    cluster = Cluster(Random(chance), count)
    desired = count
    for kind, number, state in events:
        if kind == "desired":
            desired = number
        elif kind == "flap" and cluster.pods:
            cluster.change(sorted(cluster.pods)[number % len(cluster.pods)], state)
        cluster.operate(desired, crash=kind == "crash")
        cluster.work()
        cluster.now_s += 1.5
    for _ in range(60):
        found = cluster.operate(desired, crash=False)
        for name in list(cluster.pods):
            cluster.change(name, "ready")
        cluster.work()
        cluster.now_s += 1.5
    assert found == ScalePlan(desired)
    assert len(cluster.pods) == cluster.spec == desired
    assert all(p.serving == SERVING and p.deletion_cost == 0 for p in cluster.pods.values())
