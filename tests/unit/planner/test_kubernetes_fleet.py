"""Many graphs in one process: each has its loop, and one's trouble is nobody else's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.core.backoff import Backoff
from penstock.core.errors import ConfigError, InvalidSpecError, LedgerError, NotFoundError, UnavailableError
from penstock.engine.profiles.performance import graph_performance
from penstock.kube.kinds import CONFIG_MAP
from penstock_planner.cluster.fleet import Fleet, may_switch, parse, plan_of
from penstock_planner.cluster.profiles import ConfigMapProfiles
from penstock_planner.cluster.service import ClusterService
from penstock_planner.cluster.status import PlannerReason
from penstock_planner.cluster.watch import Watch

A, B = ("serving", "a"), ("serving", "b")


def _graph(name="a", generation=1, uid="u1", router=None, is_fixed=False, **planner):
    scaling = None if is_fixed else {"minReplicas": 1, "maxReplicas": 4}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": name, "namespace": "serving", "uid": uid, "generation": generation},
        "spec": {
            "model": {"name": "m"},
            "runtime": "simulated",
            "services": {
                "frontend": {"role": "router"},
                "prefill": {"role": "prefill", "scaling": scaling},
                "decode": {"role": "decode", "scaling": scaling},
            },
            "router": router or {},
            "planner": planner,
        },
        "status": {"planner": {}, "conditions": []},
    }


class _World:
    """Graphs as the watch shows them, and what the fleet does with each."""

    def __init__(self):
        self.graphs = {}
        self.running = {}
        self.begun = []
        self.said = []
        self.forgotten = []
        self.failures = {}
        self.fleet = Fleet(
            self,
            overrides={},
            profiles=ConfigMapProfiles(self, overrides={}, engine_profile=graph_performance),
            work=self._work,
            say=self._say,
            forget=self.forgotten.append,
        )
        self.config_maps = {}
        self.read_failure = None
        self.reads = 0
        self._task = None

    def graph(self, key):
        return self.graphs.get(key)

    async def get(self, kind, name, *, namespace):
        """Return a ConfigMap as the API server would."""
        self.reads += 1
        if self.read_failure is not None:
            raise self.read_failure
        if (kind, namespace, name) not in self.config_maps:
            raise NotFoundError(f"configmaps {name} not found")
        return self.config_maps[kind, namespace, name]

    def profile(self, text, version="1", name="fast"):
        """Store a profile."""
        data = {} if text is None else {"profile.json": text}
        self.config_maps[CONFIG_MAP, "serving", name] = {
            "metadata": {"resourceVersion": version},
            "data": data,
        }

    async def _work(self, job, stop):
        self.begun.append((job.key[1], job.plan.options.adjustment_interval))
        if self.failures.get(job.key):
            raise self.failures[job.key].pop()
        self.running[job.key] = job
        try:
            await stop.wait()
        finally:
            del self.running[job.key]

    def _say(self, key, report):
        self.said.append((key[1], report.reason, report.message))

    async def put(self, obj):
        key = obj["metadata"]["namespace"], obj["metadata"]["name"]
        self.graphs[key] = obj
        self.fleet.enqueue(key)
        await self.settle()

    async def drop(self, key):
        del self.graphs[key]
        self.fleet.enqueue(key)
        await self.settle()

    async def read_twice(self):
        """Wait until profiles have been read twice from now on: what the first read found is done by the second."""
        before = self.reads
        await _until(lambda: self.reads >= before + 2)

    async def settle(self):
        for _ in range(30):
            await asyncio.sleep(0)

    async def __aenter__(self):
        self._task = asyncio.create_task(self.fleet.run())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.wait({self._task})


@pytest.fixture(name="world")
async def _world():
    async with _World() as made:
        yield made


async def test_every_graph_gets_a_loop_and_loses_it_when_it_is_gone(world):
    """Two come, one goes."""
    await world.put(_graph("a"))
    await world.put(_graph("b"))
    assert set(world.running) == {A, B}
    await world.drop(A)
    assert set(world.running) == {B}
    assert world.forgotten == [A]


async def test_a_loop_is_restarted_only_by_what_it_depends_on(world):
    """A status, a router's setting: no. The planner's section, another graph of the same name: yes."""
    await world.put(_graph("a"))
    await world.put(_graph("a"))
    await world.put(_graph("a", generation=2, router={"policy": "round-robin"}))
    assert world.begun == [("a", 30)]
    await world.put(_graph("a", generation=3, adjustmentIntervalSeconds=60))
    assert world.begun == [("a", 30), ("a", 60)]
    await world.put(_graph("a", generation=3, uid="u2", adjustmentIntervalSeconds=60))
    assert len(world.begun) == 3
    assert set(world.running) == {A}


@pytest.mark.parametrize(
    ("planner", "reason", "words"),
    [
        ({"enabled": False}, PlannerReason.DISABLED, "spec.planner.enabled is false"),
        ({"environment": "local"}, PlannerReason.MISCONFIGURED, "spec.planner.environment"),
        ({"bogus": 1}, PlannerReason.MISCONFIGURED, "spec.planner.bogus"),
        ({"is_fixed": True}, PlannerReason.DISABLED, "no worker service has spec.services.*.scaling"),
    ],
)
async def test_why_a_graph_is_not_planned_is_said_and_a_change_starts_it(world, planner, reason, words):
    """Then it is planned without waiting."""
    await world.put(_graph("a", **planner))
    assert world.running == {}
    ((_, said, message),) = world.said
    assert said is reason
    assert words in message
    await world.put(_graph("a", generation=2))
    assert set(world.running) == {A}


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ConfigError("--log-dir: held by another planner"), PlannerReason.MISCONFIGURED),
        (LedgerError("disk full"), PlannerReason.FAILED),
        (RuntimeError("a bug"), PlannerReason.FAILED),
    ],
)
async def test_one_graphs_failure_is_told_retried_and_touches_no_other(world, failure, reason):
    """The other one continues; the failed one comes back after a pause, or at once when somebody has repaired it."""
    world.fleet.pauses = Backoff(0.3, 60.0)
    world.failures[A] = [failure]
    await world.put(_graph("b"))
    await world.put(_graph("a"))
    assert set(world.running) == {B}
    assert [said[:2] for said in world.said] == [("a", reason)]
    await _until(lambda: A in world.running)
    assert world.begun == [("b", 30), ("a", 30), ("a", 30)]
    world.fleet.pauses = Backoff(600.0, 600.0)
    world.failures[B] = [failure]
    await world.put(_graph("b", uid="u2"))
    assert set(world.running) == {A}
    await world.put(_graph("b", generation=2, uid="u2"))
    assert set(world.running) == {A, B}


def _profile(**changes):
    """A true profile of the graph's engines, as its file has it."""
    return json.dumps({**asdict(graph_performance(parse(_graph()).spec)), **changes})


_SLA = {"mode": "sla", "sla": {"profile": "fast"}}


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (
            "absent",
            PlannerReason.PROFILE_MISSING,
            "ConfigMap fast does not exist; apply a ProfileRequest with graph: a",
        ),
        (None, PlannerReason.PROFILE_MISSING, "ConfigMap fast does not hold profile.json yet"),
        ("{", PlannerReason.PROFILE_INVALID, "ConfigMap fast: profile.json: not a performance profile"),
        ("{}", PlannerReason.PROFILE_INVALID, "prefill: Field required"),
        (
            _profile(model="org/other-70b"),
            PlannerReason.PROFILE_INVALID,
            "ConfigMap fast: profile.json: model: measured of org/other-70b, but the graph serves m",
        ),
        (
            _profile(decode_gpus=2),
            PlannerReason.PROFILE_INVALID,
            "decode_gpus: measured with 2, but a replica has 1; set gpusPerReplica 2, or profile with --tp 1",
        ),
    ],
)
async def test_without_a_usable_profile_a_graph_waits_and_says_what_to_run(world, text, reason, words):
    """No loop, so that nothing is scaled; the other graph has its own."""
    if text != "absent":
        world.profile(text)
    await world.put(_graph("b"))
    await world.put(_graph("a", **_SLA))
    assert set(world.running) == {B}
    ((_, said, message),) = world.said
    assert said is reason
    assert words in message
    assert message.startswith("spec.planner.sla.profile: ")


async def test_a_profile_that_comes_starts_the_graph(world):
    """Within a look's time, without a change of the graph."""
    world.fleet.poll_s = 0.02
    await world.put(_graph("a", **_SLA))
    assert world.running == {}
    world.profile(_profile())
    await _until(lambda: A in world.running)
    assert world.running[A].plan.config.performance is not None


async def test_a_changed_profile_restarts_the_loop_and_a_rewritten_one_does_not(world):
    """The same content under a new version is the same plan."""
    world.fleet.poll_s = 0.02
    world.profile(_profile())
    await world.put(_graph("a", **_SLA))
    assert len(world.begun) == 1
    world.profile(_profile(), version="2")
    await world.read_twice()
    assert len(world.begun) == 1
    world.profile(_profile(model="org/M"), version="3")
    await _until(lambda: len(world.begun) == 2 and A in world.running)
    assert world.running[A].plan.config.performance.model == "org/M"


async def test_a_profile_that_goes_ends_the_loop_and_one_that_cannot_be_read_does_not(world):
    """What was read last holds while the API server is away; a deleted profile holds nothing."""
    world.fleet.poll_s = 0.02
    world.profile(_profile())
    await world.put(_graph("a", **_SLA))
    world.read_failure = UnavailableError("no answer")
    await world.read_twice()
    assert set(world.running) == {A}
    world.read_failure = None
    world.config_maps.clear()
    await _until(lambda: A not in world.running and world.said)
    assert world.said[-1][1] is PlannerReason.PROFILE_MISSING


async def test_a_simulated_graph_without_a_named_profile_plans_by_its_engines(world):
    """Read off engine.profile."""
    await world.put(_graph("a", mode="sla"))
    assert world.running[A].plan.config.performance == graph_performance(parse(_graph()).spec)


async def _until(check):
    while not check():  # noqa: ASYNC110 - a few looks of 0.02 s
        await asyncio.sleep(0.01)


def test_options_given_to_the_process_override_the_graphs_own():
    """And leave the rest alone."""
    graph = parse(_graph("a", adjustmentIntervalSeconds=60, maxGpuBudget=16))
    plan = plan_of(graph, {"max-gpu-budget": 4, "no-operation": True})
    assert (plan.config.adjustment_interval_s, plan.config.max_gpu_budget) == (60, 4)
    assert plan.config.no_operation


def drawn(made):
    """Return a graph that a GPU pool lets hold 20 GPUs."""
    return {**made, "status": {"pool": {"kind": "GpuPool", "name": "shared", "grantedGpus": 20}}}


def test_the_default_budget_is_none_of_a_graph_that_draws_from_a_pool():
    """Its floors may exceed 8, and it switches roles at the pool's gates; outside the default counts and is told."""
    made = _graph("a", minGpuBudget=6)
    plan = plan_of(parse(drawn(made)), {}, is_drawing=True)
    assert plan.config.max_gpu_budget is None
    written = parse(drawn(_graph("a", maxGpuBudget=12)))
    assert plan_of(written, {}, is_drawing=True).config.max_gpu_budget == 12
    with pytest.raises(InvalidSpecError, match="maxGpuBudget is 8 outside of GpuPools"):
        parse(made)


def test_on_a_cluster_workers_switch_where_the_budget_holds_their_places():
    """Without a budget no pod waits, and the plan says that none switches."""
    graph = parse(_graph("a"))
    spec = graph.spec.model_copy(update={"engine": graph.spec.engine.model_copy(update={"switchable": True})})
    switchable = graph.model_copy(update={"spec": spec})
    plan = plan_of(switchable, {"max-gpu-budget": 4})
    assert (plan.config.switches_roles, plan.unused) == (True, "")
    assert not may_switch(switchable, has_gates=False)
    services = {
        name: each.model_copy(update={"nodes_per_replica": 2}) for name, each in spec.services.items()
    }
    groups = switchable.model_copy(update={"spec": spec.model_copy(update={"services": services})})
    plan = plan_of(groups, {"max-gpu-budget": 4})
    assert not plan.config.switches_roles
    assert plan.unused == (
        "engine.switchable has no effect here: it needs planner.maxGpuBudget or a GpuPool, and replicas of one pod"
    )


def test_every_graph_has_a_folder_of_its_own(monkeypatch, tmp_path):
    """LOG-DIR/NAMESPACE/GRAPH; without one, below the state folder."""
    assert ClusterService({}, graph_performance, log_dir=Path("/logs")).folder(A) == Path("/logs/serving/a")
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(tmp_path))
    assert ClusterService({}, graph_performance).folder(A) == tmp_path / "planner" / "serving" / "a"


# ---------------------------------------------------------------- the watch


class _Client:
    """Enough for informers that are fed by hand."""

    rng = None


def _pod(name, graph="a", role="decode", ready="True", **labels):
    return {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": name,
            "labels": {"penstock.dev/graph": graph, "penstock.dev/role": role, **labels},
        },
        "spec": {"containers": []},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": ready}]},
    }


def _watch(only=None):
    watch = Watch(_Client(), namespace="serving", graph=only)
    marked = []
    watch.subscribe(marked.append)
    return watch, marked


def _feed(watch, informer, what, obj):
    watch._informers[informer]._take(what, obj)


def test_pods_are_grouped_by_graph_and_leave_when_deleted():
    """Each graph sees its own; routers that are ready and stay are sources."""
    watch, _ = _watch()
    for pod in (
        _pod("d0"),
        _pod("r1", role="router"),
        _pod("r0", role="router"),
        _pod("r2", role="router", ready="False"),
        _pod("other", graph="b"),
    ):
        _feed(watch, "pods", "ADDED", pod)
    assert set(watch.of(A).pods()) == {"d0", "r0", "r1", "r2"}
    assert watch.of(A).routers() == ["http://10.0.0.1:8000", "http://10.0.0.1:8000"]
    _feed(watch, "pods", "DELETED", _pod("other", graph="b"))
    assert watch.of(B).pods() == {}


def test_only_the_named_graph_is_marked():
    """--graph-name."""
    watch, marked = _watch(only="b")
    _feed(watch, "graphs", "ADDED", _graph("a"))
    _feed(watch, "graphs", "ADDED", _graph("b"))
    assert marked == [B]


def test_a_graph_that_is_being_deleted_is_none_to_plan():
    """Its status may still be written; of the object only what is read is kept."""
    watch, _ = _watch()
    graph = _graph("a")
    graph["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{}]}
    graph["status"]["conditions"] = [{"type": "Ready"}, {"type": "PlannerActive"}]
    _feed(watch, "graphs", "ADDED", graph)
    assert watch.graph(A) is None
    assert "managedFields" not in watch.live(A)["metadata"]
    assert watch.live(A)["status"]["conditions"] == [{"type": "PlannerActive"}]


def _edited(served_generation, text=None, **newest):
    """Return a graph of generation 3 with what its operator says that it carries out."""
    graph = _graph("a", generation=3)
    kept = json.dumps(graph["spec"] | {"model": {"name": "kept"}}) if text is None else text
    graph["spec"] |= newest
    graph["status"] |= {"servedGeneration": served_generation, "servedSpec": kept}
    return graph


@pytest.mark.parametrize(
    ("served", "text", "model", "generation"),
    [(2, None, "kept", 2), (3, None, "m", 3), (2, "", "m", 3), (2, "{", "m", 3)],
)
def test_the_edit_that_the_operator_carries_out_is_planned(served, text, model, generation):
    """An edit that it refuses, or has not seen, plans nothing; where it keeps no earlier one the newest counts."""
    watch, _ = _watch()
    _feed(watch, "graphs", "ADDED", _edited(served, text))
    found = watch.graph(A)
    assert (parse(found).spec.model.name, found["metadata"]["generation"]) == (model, generation)


@pytest.mark.parametrize(("given", "is_ours"), [({"operatorClass": "research"}, False), ({}, True)])
def test_which_installation_plans_a_graph_is_for_its_newest_edit_to_say(given, is_ours):
    """The installation that it leaves carries out no edit any more, so that nothing else would end its planner."""
    watch, _ = _watch()
    _feed(watch, "graphs", "ADDED", _edited(2, **given))
    assert (watch.graph(A) is not None) is is_ours


def test_a_watch_that_has_not_listed_yet_is_a_problem():
    """Nothing seen is not nothing there."""
    assert _watch()[0].problem() == "graphs: not listed yet"


def test_the_owner_of_a_number_is_whoever_set_it_last():
    """As the server's field managers say; one that set something else is not counted."""
    watch, _ = _watch()
    fields = [
        {"manager": manager, "time": f"2026-01-0{day}T00:00:00Z", "fieldsV1": {"f:spec": {f"f:{what}": {}}}}
        for day, manager, what in ((1, "init", "replicas"), (2, "hpa", "replicas"), (3, "operator", "graph"))
    ]
    metadata = {"name": "a-decode", "namespace": "serving", "managedFields": fields}
    _feed(watch, "adapters", "ADDED", {"metadata": metadata, "spec": {"replicas": 2}})
    assert watch.of(A).adapter("decode")["owner"] == "hpa"


@pytest.mark.parametrize(
    ("status", "gpus", "note"),
    [
        ({}, (None, None), ""),
        ({"pool": {"name": "h", "grantedGpus": 0}}, (0, None), "GpuPool h"),
        (
            {"pool": {"name": "h", "grantedGpus": 2, "guaranteedGpus": 4, "message": "b returns 1"}},
            (2, 4),
            "GpuPool h: b returns 1",
        ),
    ],
)
def test_what_a_gpu_pool_grants_is_in_the_graph_s_status(status, gpus, note):
    """Where the operator has said nothing, and where there is no graph, nothing is known of a pool."""
    watch, _ = _watch()
    assert (watch.of(A).grant(), watch.of(A).grant_note()) == (None, "")
    graph = _graph("a")
    graph["status"] |= status
    _feed(watch, "graphs", "ADDED", graph)
    found = watch.of(A)
    assert ((found.grant(), found.guaranteed()), found.grant_note()) == (gpus, note)
