"""The target on Kubernetes: what it sees in the informers' copies, and the few writes that it makes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from penstock.api import GraphDeployment, ManagedBy, Role
from penstock.core.errors import ClusterError, ConflictError, NotFoundError
from penstock_planner.cluster.status import EventListener
from penstock_planner.decide.config import DecideConfig
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay
from penstock_planner.targets.kubernetes import GATED_S, STUCK_S, KubernetesTarget
from penstock_planner.targets.pods import PodFacts

D, P = Role.DECODE, Role.PREFILL

GRAPH = GraphDeployment.model_validate(
    {
        "metadata": {"name": "llama", "namespace": "serving"},
        "spec": {
            "model": {"name": "m"},
            "runtime": "simulated",
            "services": {
                "frontend": {"role": "router"},
                "prefill": {"role": "prefill", "scaling": {"minReplicas": 1, "maxReplicas": 4}},
                "decode": {"role": "decode", "scaling": {"minReplicas": 1, "maxReplicas": 4}},
            },
        },
    }
)


def _pod(name, role=D, **change):
    facts = PodFacts(
        name, f"uid-{name}", role, name, True, f"http://{name}:8000", True, False, False, False, True
    )
    return replace(facts, **change)


class _Cluster:
    """Adapters as an API server keeps them, and the informers' copy of them, which may lag behind."""

    def __init__(self):
        self.version = 100
        self.objects = {}
        self.copies = {}
        self.pod_list = {}
        self.trouble = None
        self.calls = []
        self.failures = []
        self.is_lagging = False
        self.refused = {}
        self.granted = None
        for service in ("prefill", "decode"):
            self._put(f"llama-{service}", {"replicas": 1}, {}, 1)

    def _put(self, name, spec, annotations, generation, owner="penstock-operator-init"):
        self.version += 1
        metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        metadata |= {"generation": generation, "annotations": annotations}
        self.objects[name] = {"metadata": metadata, "spec": spec, "owner": owner}
        if not self.is_lagging:
            self.catch_up()
        return self.objects[name]

    def catch_up(self):
        self.copies = dict(self.objects)

    def edit(self, service, replicas, owner="kubectl"):
        old = self.objects[f"llama-{service}"]["metadata"]
        self._put(old["name"], {"replicas": replicas}, old["annotations"], old["generation"] + 1, owner)

    def touch(self, service):
        """Write the adapter's status."""
        old = self.objects[f"llama-{service}"]
        self._put(
            old["metadata"]["name"],
            old["spec"],
            old["metadata"]["annotations"],
            old["metadata"]["generation"],
            old["owner"],
        )

    # what the target sees
    def problem(self):
        return self.trouble

    def adapter(self, service):
        found = self.copies.get(f"llama-{service}")
        return found and {**found, "refused": self.refused.get(service, "")}

    def pods(self):
        return self.pod_list

    def grant(self):
        return self.granted

    def guaranteed(self):
        return None if self.granted is None else 2

    def grant_note(self):
        return "" if self.granted is None else f"GpuPool shared grants {self.granted}"

    # what the target calls
    async def get(self, kind, name, *, namespace=None):
        self.calls.append(("get", name))
        return self.objects[name]

    async def patch(self, kind, name, patch, *, namespace, subresource=None, field_manager):
        assert (namespace, field_manager) == ("serving", "penstock-planner")
        self.calls.append((subresource or "patch", name, patch.get("spec", {}).get("replicas")))
        if self.failures:
            raise self.failures.pop(0)
        old = self.objects[name]
        metadata = old["metadata"]
        if patch["metadata"].get("resourceVersion") not in (None, metadata["resourceVersion"]):
            raise ConflictError("the object has been modified")
        if subresource == "scale":
            wanted = patch["spec"]["replicas"]
            generation = metadata["generation"] + (wanted != old["spec"]["replicas"])
            self._put(name, {"replicas": wanted}, metadata["annotations"], generation, field_manager)
            return {"metadata": {"resourceVersion": str(self.version)}, "spec": {"replicas": wanted}}
        notes = {**metadata["annotations"], **patch["metadata"]["annotations"]}
        return self._put(name, old["spec"], notes, metadata["generation"], old["owner"])


class _Time:
    at_s = 50.0

    def now_s(self):
        return self.at_s


@pytest.fixture(name="cluster")
def _cluster():
    made = _Cluster()
    made.pod_list = {p.name: p for p in (_pod("d0"), _pod("p0", P), _pod("r0", Role.ROUTER))}
    return made


@pytest.fixture(name="clock")
def _clock():
    return _Time()


@pytest.fixture(name="notes")
def _notes():
    return []


@pytest.fixture(name="target")
def _target(cluster, clock, notes):
    return KubernetesTarget(cluster, GRAPH, cluster, emit=notes.append, now_s=clock.now_s)


async def test_a_pool_s_grant_is_seen_as_the_operator_writes_it(target, cluster):
    """Also one of no GPU; without a pool there is none."""
    seen = []
    for granted in (None, 4, 0):
        cluster.granted = granted
        state = await target.observe()
        seen.append((state.grant, state.guaranteed, state.grant_note))
    assert seen == [(None, None, ""), (4, 2, "GpuPool shared grants 4"), (0, 2, "GpuPool shared grants 0")]


async def test_pools_come_from_watched_pods_without_a_call(target, cluster):
    """One of each role, routers left out."""
    state = await target.observe()
    assert {r: (p.ready, p.starting, p.draining) for r, p in state.pools.items()} == {
        P: (1, 0, 0),
        D: (1, 0, 0),
    }
    assert sorted(e.name for e in state.endpoints) == ["d0", "p0"]
    assert (state.is_adjusting, state.edited, cluster.calls) == (False, frozenset(), [])
    cluster.trouble = "pods: connection refused"  # the copies may be old: blind is better than wrong
    with pytest.raises(ClusterError, match="cannot be watched: pods: connection refused"):
        await target.observe()


async def test_scaling_writes_the_number_and_the_decision(target, cluster, notes):
    """Two patches; from then on the desired number counts although no pod is there yet."""
    await target.observe()
    await target.scale(D, 2, decision_id="d000007")
    assert cluster.calls == [("scale", "llama-decode", 2), ("patch", "llama-decode", None)]
    adapter = cluster.objects["llama-decode"]
    assert adapter["metadata"]["annotations"] == {"penstock.dev/decision-id": "d000007"}
    state = await target.observe()
    assert (state.pools[D].ready, state.pools[D].starting, state.is_adjusting) == (1, 1, True)
    assert (state.edited, notes) == (frozenset(), [])


async def test_asking_twice_writes_once(target, cluster):
    """Idempotent, also for a planner that died between the two patches."""
    await target.observe()
    await target.scale(D, 2, decision_id="d000007")
    cluster.calls.clear()
    await target.scale(D, 2, decision_id="d000007")
    assert cluster.calls == []
    del cluster.objects["llama-decode"]["metadata"]["annotations"]["penstock.dev/decision-id"]
    fresh = KubernetesTarget(cluster, GRAPH, cluster)
    await fresh.scale(D, 2, decision_id="d000007")
    assert cluster.calls == [("patch", "llama-decode", None)]


async def test_the_targets_own_write_counts_while_the_informer_lags(target, cluster):
    """Else the replica just asked for would look dropped, and be withdrawn."""
    await target.observe()
    cluster.is_lagging = True
    await target.scale(D, 2, decision_id="d000007")
    state = await target.observe()
    assert (state.pools[D].starting, state.edited) == (1, frozenset())
    cluster.catch_up()
    state = await target.observe()
    assert (state.pools[D].starting, state.edited) == (1, frozenset())


async def test_a_change_of_anything_else_is_no_conflict(target, cluster):
    """The operator writes the adapter's status all the time."""
    await target.observe()
    cluster.is_lagging = True
    cluster.touch("decode")
    await target.scale(D, 2, decision_id="d000007")
    assert cluster.calls[:3] == [
        ("scale", "llama-decode", 2),
        ("get", "llama-decode"),
        ("scale", "llama-decode", 2),
    ]
    assert cluster.objects["llama-decode"]["spec"]["replicas"] == 2


@pytest.mark.parametrize(("theirs", "is_conflict"), [(4, True), (2, False)])
async def test_somebody_elses_number_stays_and_is_a_conflict_unless_it_is_ours_too(
    target, cluster, notes, theirs, is_conflict
):
    """Observe and decide again; the Event says so."""
    await target.observe()
    cluster.is_lagging = True
    cluster.edit("decode", theirs)
    told = (
        pytest.raises(ConflictError, match="replicas are 4, not 1 as expected")
        if is_conflict
        else nullcontext()
    )
    with told:
        await target.scale(D, 2, decision_id="d000007")
    assert cluster.objects["llama-decode"]["spec"]["replicas"] == theirs
    assert [(n.reason, n.is_warning) for n in notes] == [("ScalingFailed", True)] * is_conflict


async def test_an_endless_storm_of_changes_gives_up(target, cluster):
    """The next interval tries again."""
    await target.observe()
    cluster.failures = [ConflictError("modified")] * 9
    with pytest.raises(ConflictError):
        await target.scale(D, 2, decision_id="d000007")
    assert [call[0] for call in cluster.calls].count("scale") == 4


async def test_an_edit_is_told_once_and_marks_its_role(target, cluster, notes):
    """With who did it; then it is what there is."""
    await target.observe()
    cluster.edit("decode", 3)
    first, second = await target.observe(), await target.observe()
    assert (first.edited, second.edited) == (frozenset({D}), frozenset())
    assert [(n.reason, n.detail) for n in notes] == [("ReplicasEdited", "1 -> 3")]
    assert notes[0].text.startswith(
        "decode was set by kubectl: the planner keeps this value for one adjustment interval"
    )
    assert first.writers == {D: "kubectl", P: "penstock-operator-init"}
    assert first.pools[D].starting == 2


async def test_a_number_of_somebody_elses_found_at_the_start_counts_as_an_edit(target, cluster, notes):
    """It may have been made while no planner ran; there is nothing to compare with, so no Event."""
    cluster.edit("decode", 3)
    assert (await target.observe()).edited == frozenset({D})
    assert notes == []


async def test_a_number_written_by_another_planner_is_a_second_installation(target, cluster, notes):
    """Two planners of one class on one namespace write under one name; a person reads it in the Event."""
    await target.observe()
    cluster.edit("decode", 3, owner="penstock-planner")
    assert (await target.observe()).edited == frozenset({D})
    assert [(n.reason, n.is_warning) for n in notes] == [("SecondPlanner", True)]


async def test_a_role_that_is_managed_by_others_is_never_edited(cluster, notes):
    """Its owner writes as it likes: no Event, no interval begun again, and no decision waits for its pods."""
    spec = GRAPH.spec
    scaling = spec.services["decode"].scaling.model_copy(update={"managed_by": ManagedBy.EXTERNAL})
    service = spec.services["decode"].model_copy(update={"scaling": scaling})
    spec = spec.model_copy(update={"services": {**spec.services, "decode": service}})
    target = KubernetesTarget(cluster, GRAPH.model_copy(update={"spec": spec}), cluster, emit=notes.append)
    await target.observe()
    cluster.edit("decode", 3, owner="hpa")
    state = await target.observe()
    assert (state.edited, state.is_adjusting, notes) == (frozenset(), False, [])
    assert (state.pools[D].starting, state.writers[D]) == (2, "hpa")


async def test_a_switch_is_both_numbers_and_counts_as_one_worker_until_it_serves(cluster):
    """Written, drained, relabelled: the worker starts in the role that takes it, and no GPU counts twice."""
    spec = GRAPH.spec.model_copy(update={"engine": GRAPH.spec.engine.model_copy(update={"switchable": True})})
    target = KubernetesTarget(cluster, GRAPH.model_copy(update={"spec": spec}), cluster)
    cluster.edit("prefill", 2, owner="penstock-planner")
    cluster.pod_list["p1"] = _pod("p1", P)
    await target.observe()

    async def counted():
        pools = (await target.observe()).pools
        return {r: (p.ready, p.starting, p.switching, p.draining) for r, p in pools.items()}

    assert await counted() == {P: (2, 0, 0, 0), D: (1, 0, 0, 0)}
    await target.switch(P, D, replicas={P: 1, D: 2}, decision_id="d000009")
    names = [call[1] for call in cluster.calls if call[0] == "scale"]
    assert names == ["llama-decode", "llama-prefill"]
    moving = {P: (1, 0, 0, 0), D: (1, 1, 1, 0)}
    assert await counted() == moving
    cluster.pod_list["p1"] = _pod("p1", P, leaving=True)
    cluster.pod_list["d1"] = _pod("d1", D, ready=False, is_scheduled=False, trouble="gated")
    assert await counted() == moving
    del cluster.pod_list["d1"]
    cluster.pod_list["p1"] = _pod("p1", D)
    assert await counted() == {P: (1, 0, 0, 0), D: (2, 0, 0, 0)}


async def test_a_start_beside_a_drain_is_no_switch_where_its_pod_has_a_node(cluster):
    """It holds GPUs alongside the one that drains."""
    spec = GRAPH.spec.model_copy(update={"engine": GRAPH.spec.engine.model_copy(update={"switchable": True})})
    target = KubernetesTarget(cluster, GRAPH.model_copy(update={"spec": spec}), cluster)
    cluster.edit("decode", 2, owner="penstock-planner")
    cluster.pod_list["p1"] = _pod("p1", P, leaving=True)
    for change in ({"is_scheduled": True}, {"is_scheduled": False, "trouble": "unschedulable"}):
        cluster.pod_list["d1"] = _pod("d1", D, ready=False, **change)
        pools = (await target.observe()).pools
        assert (pools[D].starting, pools[D].switching, pools[P].draining) == (1, 0, 1)


async def test_wishes_are_kept_within_the_services_bounds(target, cluster):
    """MinReplicas 1, maxReplicas 4: as the operator takes them."""
    await target.observe()
    await target.scale(D, 0, decision_id="d000001")
    assert cluster.calls == [("patch", "llama-decode", None)]
    await target.scale(D, 9, decision_id="d000002")
    assert cluster.objects["llama-decode"]["spec"]["replicas"] == 4
    cluster.edit("decode", 50)
    assert (await target.observe()).pools[D].starting == 3


async def test_what_cannot_be_scaled_is_said(target, cluster):
    """No such role, or no adapter yet."""
    with pytest.raises(ClusterError, match="has no aggregated service"):
        await target.scale(Role.AGGREGATED, 1, decision_id="d000001")
    cluster.copies.clear()
    with pytest.raises(NotFoundError, match=r"llama-decode: no such ScalingAdapter; .*decode.scaling"):
        await target.scale(D, 2, decision_id="d000001")


@pytest.mark.parametrize(("trouble", "patience_s"), [("unschedulable", 15.0), ("stuck", STUCK_S)])
async def test_a_pod_in_trouble_is_given_up_after_a_while(target, cluster, clock, trouble, patience_s):
    """Starting at first; then failed in its own words, and nothing is blocked by it."""
    cluster.edit("decode", 2, owner="penstock-planner")
    await target.observe()
    cluster.pod_list["d1"] = _pod("d1", ready=False, is_scheduled=False, trouble=trouble, message="0/3 nodes")
    state = await target.observe()
    assert (state.pools[D].starting, state.failures, state.is_adjusting) == (1, {}, True)
    clock.at_s += patience_s + 0.1
    state = await target.observe()
    assert (state.pools[D].starting, state.failures) == (0, {D: "pod d1: 0/3 nodes"})
    assert not state.is_adjusting


async def test_a_gated_pod_waits_as_long_as_something_leaves(target, cluster, clock):
    """A drain may take a quarter of an hour; its GPUs are what the pod waits for."""
    cluster.edit("decode", 2, owner="penstock-planner")
    cluster.pod_list["d1"] = _pod("d1", ready=False, is_scheduled=False, trouble="gated", message="waits")
    cluster.pod_list["p1"] = _pod("p1", P, leaving=True)
    for _ in range(20):
        assert (await target.observe()).failures == {}
        clock.at_s += GATED_S
    del cluster.pod_list["p1"]
    clock.at_s -= GATED_S
    assert (await target.observe()).pools[D].starting == 1
    clock.at_s += GATED_S + 0.1
    assert (await target.observe()).failures == {D: "pod d1: waits"}


async def test_a_worker_that_served_is_never_given_up(target, cluster, clock):
    """It restarts after a crash: that is the kubelet's business, not a failed scale-up."""
    await target.observe()
    cluster.pod_list["d0"] = _pod("d0", ready=False, trouble="stuck", message="CrashLoopBackOff")
    await target.observe()
    clock.at_s += 1000
    state = await target.observe()
    assert (state.pools[D].starting, state.failures, state.is_adjusting) == (1, {}, False)


async def test_pods_that_the_api_server_refuses_are_given_up_after_a_while(target, cluster, clock):
    """No pod exists that could be in trouble; a refusal that ends and comes back is waited for again."""
    cluster.edit("decode", 2, owner="penstock-planner")
    cluster.refused["decode"] = "exceeded quota: q"
    state = await target.observe()
    assert (state.pools[D].starting, state.failures, state.is_adjusting) == (1, {}, True)
    clock.at_s += 15.1
    state = await target.observe()
    assert (state.pools[D].starting, state.failures) == (0, {D: "exceeded quota: q"})
    assert not state.is_adjusting
    cluster.refused["decode"] = ""
    assert (await target.observe()).pools[D].starting == 1
    cluster.refused["decode"] = "exceeded quota: q"
    assert (await target.observe()).failures == {}


class _Refusing:
    """A planner on a cluster that creates no pod of either role: what it writes and says."""

    def __init__(self, world, cluster, mode, **changes):
        self.world, self.cluster, self.events = world, cluster, []
        cluster.pod_list.clear()
        cluster.refused |= dict.fromkeys(("prefill", "decode"), "violates PodSecurity")
        world.config = replace(DecideConfig().in_mode(mode), **changes)
        world.watch(EventListener(self.events.append))

    async def run_until(self, at_s):
        """Let a new planner process work until then."""
        self.world.backend = KubernetesTarget(
            self.cluster, GRAPH, self.cluster, emit=self.events.append, now_s=self.world.time.now_s
        )
        await self.world.run_until(at_s)


@pytest.mark.parametrize("mode", ["load", "adaptive"])
async def test_pods_refused_at_the_floor_are_asked_for_seldom_and_never_given_up(world, cluster, mode):
    """Three minutes: a try after one minute, then after two more; the planner's death in between hastens none."""
    refusing = _Refusing(world, cluster, mode)
    await refusing.run_until(100)
    await refusing.run_until(180)
    assert {each["spec"]["replicas"] for each in cluster.objects.values()} == {1}
    assert [call for call in cluster.calls if call[0] == "scale"] == []
    decided = [r["decision"] for r in world.records("decision")]
    tries = [d["at_s"] for d in decided if any(role["action"] != "hold" for role in d["roles"])]
    assert 1 <= len(tries) <= 3
    assert len(refusing.events) <= 12
    assert {event.reason for event in refusing.events} == {"ScaledUp", "ScaleUpFailed"}
    assert replay(read_ledger(world.folder)).differences == ()


async def test_a_refusal_that_ends_is_forgotten_as_soon_as_the_replicas_serve(world, cluster):
    """The Deployment made the pods by itself; a scale-up that demand asks for then does not wait."""
    refusing = _Refusing(world, cluster, "load")
    await refusing.run_until(100)
    cluster.refused.clear()
    cluster.pod_list |= {p.name: p for p in (_pod("d0"), _pod("p0", P))}
    world.load.kv = lambda _now, _workers: 0.95
    await refusing.run_until(170)
    assert cluster.objects["llama-decode"]["spec"]["replicas"] == 2
