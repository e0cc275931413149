"""What a GpuPool is shared out by, what its graphs may hold, and its status: tables of literals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import ClusterGpuPool, GpuPool, GraphDeployment
from penstock.core.stamps import stamp
from penstock.gpu_pool.allocator import Share
from penstock.gpu_pool.bid import RoleBid, sizes
from penstock.gpu_pool.waiting import DrainTimes
from penstock_operator.plan.drain import LimitedReplicas
from penstock_operator.plan.pods import PodView
from penstock_operator.pools.capacity import PoolNodes
from penstock_operator.pools.grant import (
    EffectiveBudget,
    PoolGrant,
    bids_of,
    effective_budget,
    is_bid_expired,
    with_wants,
    within_grant,
)
from penstock_operator.pools.observe import (
    PoolMember,
    PoolObservation,
    draining_gpus,
    entry_of,
    gpus_of,
    shares_of,
    updated_drain_times,
)
from penstock_operator.pools.share_out import grant_changes, guarantees, share_out
from penstock_operator.pools.status import (
    MAX_SHOWN,
    listed_graphs,
    own_budget_message,
    pool_status,
    problems_of,
    refused_status,
    shortage_in,
)

POOL = GpuPool.model_validate(
    {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GpuPool",
        "metadata": {"name": "shared"},
        "spec": {
            "gpus": 6,
            "holdSeconds": 0,
            "graphs": [
                {"match": {"name": "a"}, "guaranteedGpus": 2, "priority": "high"},
                {"match": {"labels": {"team": "b"}}, "guaranteedGpus": 2},
            ],
        },
    }
)


def made(name, labels=None):
    """Return a graph of one prefill and one decode service."""
    worker = {"gpusPerReplica": 1, "scaling": {"minReplicas": 1, "maxReplicas": 9}}
    services = {"p": {"role": "prefill", **worker}, "d": {"role": "decode", **worker}}
    return GraphDeployment.model_validate(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "GraphDeployment",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {
                "model": {"name": "tiny"},
                "runtime": "simulated",
                "services": {"r": {"role": "router"}, **services},
            },
        }
    )


def member(name, wants, held, *, serial=0, arrived=None, draining=0):
    """Return a graph that wants this many replicas of one GPU."""
    labels = {"team": "b"} if name == "b" else {}
    return PoolMember(
        entry_of(POOL, name, labels, "ns"), made(name, labels), (1,) * wants, held, draining, serial, arrived
    )


def observe(members, shares=None, now_s=0.0, *, pool=POOL, counted=None, **more):
    """Return a pool's observation whose status holds these shares."""
    rows = [
        {
            "name": name,
            "granted": share.gpus,
            "serial": share.serial,
            "maxHeld": share.max_held,
            "gainedTime": None if share.gained_s is None else stamp(share.gained_s),
            "lostTime": None if share.lost_s is None else stamp(share.lost_s),
        }
        for name, share in (shares or {}).items()
    ]
    gpus = {} if counted is None else {"gpus": {"counted": counted}}
    return PoolObservation(pool, members, now_s, status={"graphs": rows, **gpus}, generation=7, **more)


def test_the_first_entry_that_matches_is_a_graphs_own():
    """By name, or by labels; another graph has none."""
    assert entry_of(POOL, "a", {}, "ns") is POOL.spec.graphs[0]
    assert entry_of(POOL, "x", {"team": "b"}, "ns") is POOL.spec.graphs[1]
    assert entry_of(POOL, "x", {}, "ns") is None


def test_nothing_is_shared_out_before_a_new_graph_acts_under_the_pool():
    """Its gates could still open under its own budget."""
    assert share_out(observe({"a": member("a", 4, 2)})) is None


def test_a_new_graph_counts_with_what_it_may_hold_on_arrival():
    """Four of six are its own, so the other gets two."""
    members = {"a": member("a", 4, 3, arrived=4), "b": member("b", 4, 0, arrived=0)}
    found = share_out(observe(members))
    assert {name: each.gpus for name, each in found.shares.items()} == {"a": 4, "b": 2}


def test_a_graph_of_unknown_wants_keeps_its_share_and_one_that_is_gone_gives_back():
    """Its workers count as long as they exist."""
    shares = {"a": Share(2, 1, 2), "b": Share(4, 1, 4), "c": Share(1, 1, 1)}
    members = {
        "a": PoolMember(POOL.spec.graphs[0], held=2),
        "b": PoolMember(None, bid=(), held=1, draining=1),
    }
    found = share_out(observe(members, shares))
    assert found.shares["a"] == Share(2, 1, 2)
    assert (found.shares["b"].gpus, found.shares["b"].max_held) == (0, 4)
    assert "c" not in found.shares
    deleted = {"a": PoolMember(POOL.spec.graphs[0], bid=(), held=2, serial=1)}
    assert share_out(observe(deleted, {"a": Share(2, 1, 2)})).shares["a"].gpus == 0


def test_a_graphs_status_lists_its_pools_graphs():
    """Itself first, then those that hold the most, a bounded number; a graph that is not in the pool lists none."""
    rows = [
        {"name": "a", "guaranteed": 2, "held": 1, "granted": 1, "target": 2, "wanted": 2, "serial": 1},
        {"name": "b", "guaranteed": 2, "held": 2, "granted": 2, "target": 2, "wanted": 2, "serial": 1},
        {"name": "c", "guaranteed": 0, "held": 3, "granted": 2, "target": 2, "wanted": 3, "serial": 1},
    ]
    grant = PoolGrant(
        "GpuPool", "p", 1, 6, pool_gpus=6, pool_held_gpus=6, graphs=listed_graphs({"graphs": rows}, "a")
    )
    assert (grant.status["poolGpus"], grant.status["poolHeldGpus"]) == (6, 6)
    assert grant.status["graphs"] == [
        {"name": "a", "guaranteed": 2, "held": 1, "granted": 1, "wanted": 2, "waitsFor": ["c"]},
        {"name": "c", "guaranteed": 0, "held": 3, "granted": 2, "wanted": 3, "waitsFor": []},
        {"name": "b", "guaranteed": 2, "held": 2, "granted": 2, "wanted": 2, "waitsFor": []},
    ]
    assert listed_graphs({"graphs": rows}, "x") == listed_graphs(None, "a") == ()
    many = [{**rows[0], "name": f"g{number}", "held": number} for number in range(30)]
    shown = [each.graph for each in listed_graphs({"graphs": many}, "g0")]
    assert (shown[:2], len(shown)) == (["g0", "g29"], MAX_SHOWN)
    assert "poolGpus" not in PoolGrant("GpuPool", "p", 1, 6).status


def test_the_status_holds_the_allocators_state():
    """What is read back from it is what was written; times are whole seconds."""
    shares = {"a": Share(4, 3, 4, 100.0, None), "b": Share(2, 1, 2, None, 50.0)}
    members = {"a": member("a", 4, 4, serial=3), "b": member("b", 2, 2, serial=1)}
    observed = observe(members, shares, 500.0)
    found = share_out(observed)
    status = pool_status(observed, found)
    assert shares_of(status) == dict(found.shares)
    assert status["gpus"] == {
        "total": 6,
        "held": 6,
        "draining": 0,
        "free": 0,
        "unavailable": 0,
        "borrowed": 2,
    }
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "CeilingRespected": "True",
        "GuaranteesMet": "True",
        "Valid": "True",
    }
    assert shares_of(None) == {}


def test_a_guarantee_that_waits_names_who_gives_back():
    """The lender sees what it lacks; both graphs are told of the GPUs that move."""
    shares = {"a": Share(0, 1, 0), "b": Share(6, 1, 6)}
    members = {"a": member("a", 2, 0, serial=1), "b": member("b", 6, 7, serial=1)}
    observed = observe(members, shares, 500.0, in_other_pool={"x": "GpuPool old"})
    found = share_out(observed)
    status = pool_status(observed, found)
    said = {each["type"]: each["message"] for each in status["conditions"]}
    assert said["GuaranteesMet"] == "a lacks 2 of 2 GPUs; b returns 3"
    assert (
        said["CeilingRespected"] == "7 of 6 GPUs are in use; no new workers start until enough workers exit"
    )
    assert (
        said["Valid"]
        == "graph x belongs to GpuPool old, which is older; change one of them so that only one matches it"
    )
    lowered, text = grant_changes(observed, found)["b"]
    assert (lowered, text) == (True, "GpuPool shared grants 4 GPUs (before: 6); requested by a")
    after = {"a": member("a", 2, 0, serial=1), "b": member("b", 6, 4, serial=2)}
    later = replace(observed, members=after, status=status, now_s=600.0)
    assert grant_changes(later, share_out(later))["a"] == (
        False,
        "GpuPool shared grants 2 GPUs (before: 0); returned by b",
    )


def test_a_graph_hears_who_holds_what_it_lacks_and_when_it_comes():
    """By the pool's status alone: the graph's own status and its planner say the same."""
    shares = {"a": Share(0, 1, 0), "b": Share(6, 1, 6)}
    drains = DrainTimes({"u1": 480.0, "u2": 490.0}, 30.0)
    giving = replace(member("b", 6, 6, serial=1, draining=2), drains=drains)
    members = {"a": member("a", 3, 0, serial=1), "b": giving}
    observed = observe(members, shares, 500.0)
    found = share_out(observed)
    status = pool_status(observed, found)
    assert shortage_in(status, "a") == (
        "3 more GPUs will follow: b returns 3, expected at 1970-01-01T00:08:40Z"
    )
    assert (
        shortage_in(status, "b")
        == "3 more are not available until another graph needs fewer: a holds 0 and will hold 3 (guaranteed 2)"
    )
    assert status["graphs"][1]["drainSeconds"] == 30
    assert shortage_in(status, "x") == shortage_in(None, "a") == ""


def test_drain_times_go_on_from_the_status_after_a_restart():
    """A drain counts from its mark, for a pod that exists and was released."""
    pods = [
        PodView("p", uid="1", gpus=1, drain_since_s=100.0),
        PodView("q", uid="2", gpus=1, terminating=True),
        PodView("r", uid="3", gpus=1, drain_since_s=100.0, gates=("penstock.dev/gpu-budget",)),
    ]
    first = updated_drain_times(None, {"drainSeconds": 30.0}, pods, 110.0)
    assert first == DrainTimes({"1": 100.0}, 30.0)
    assert updated_drain_times(first, {}, [], 150.0) == DrainTimes({}, 40.0)


def test_a_wrong_pool_keeps_what_its_graphs_may_hold():
    """Only its condition changes."""
    old = {"graphs": [{"name": "a"}], "gpus": {"total": 6}, "conditions": []}
    said = refused_status("spec.gpus: is wrong", old=old, generation=2, now_s=0.0)
    assert (said["graphs"], said["gpus"]) == (old["graphs"], old["gpus"])
    assert said["conditions"][0]["message"] == "spec.gpus: is wrong"


def test_a_pool_has_no_more_than_its_nodes_offer():
    """What they lack is unavailable; where nothing is known of them, what is written counts."""
    members = {"a": member("a", 6, 2, serial=1), "b": member("b", 2, 2, serial=1)}
    shares = {"a": Share(2, 1, 2), "b": Share(2, 1, 2)}
    for nodes, total in ((PoolNodes(5, "x"), 5), (PoolNodes(None, "x"), 6), (PoolNodes(9, "x"), 6)):
        observed = observe(members, shares, 500.0, nodes=nodes)
        found = share_out(observed)
        assert found.shares["a"].gpus == total - 2
        status = pool_status(observed, found)
        assert (status["gpus"]["total"], status["gpus"]["unavailable"]) == (total, 6 - total)
        said = {each["type"]: each for each in status["conditions"]}["NodesCounted"]
        assert said["status"] == ("False" if nodes.gpus is None else "True")


COUNTED = GpuPool.model_validate(
    {
        **POOL.to_manifest(),
        "spec": {**POOL.to_manifest()["spec"], "gpus": None, "nodeSelector": {"gpu": "h100"}},
    }
)
KEPT = {"a": Share(3, 1, 3), "b": Share(2, 1, 2)}


@pytest.mark.parametrize(
    ("nodes", "counted", "total", "unavailable", "said"),
    [
        (PoolNodes(8, "2 nodes offer 8 GPUs", 4), 6, 8, 4, "2 nodes offer 8 GPUs"),
        (PoolNodes(0, "no GPUs", 8), 6, 0, 8, "no GPUs"),
        (PoolNodes(None, "away"), 6, 6, 0, "away; using the last known count of 6 GPUs"),
        (
            PoolNodes(None, "away"),
            None,
            5,
            0,
            "away; the GPUs were never counted, so the graphs keep what they hold and gain nothing; correct the cause, or set spec.gpus",
        ),
    ],
)  # fmt: skip
def test_a_pool_that_writes_no_gpus_has_those_of_its_nodes(nodes, counted, total, unavailable, said):
    """Nodes that are not known shrink nothing, and add nothing that was never there."""
    members = {"a": member("a", 9, 3, serial=1), "b": member("b", 9, 2, serial=1)}
    observed = observe(members, KEPT, pool=COUNTED, counted=counted, nodes=nodes)
    found = share_out(observed)
    assert sum(each.gpus for each in found.shares.values()) == total
    assert found.gpus == total + unavailable
    status = pool_status(observed, found)
    assert gpus_of(status) == found.gpus
    assert {key: status["gpus"].get(key) for key in ("total", "unavailable", "counted")} == {
        "total": total,
        "unavailable": unavailable,
        "counted": counted if nodes.gpus is None else nodes.gpus,
    }
    assert {each["type"]: each["message"] for each in status["conditions"]}["NodesCounted"] == said


@pytest.mark.parametrize(
    ("nodes", "total"), [(PoolNodes(9, ""), 6), (PoolNodes(4, ""), 4), (PoolNodes(None, ""), 6)]
)
def test_of_written_and_counted_gpus_the_fewer_count(nodes, total):
    """What is written counts alone while the nodes are not known, whatever was counted last."""
    members = {"a": member("a", 9, 3, serial=1)}
    found = share_out(observe(members, {"a": Share(3, 1, 3)}, counted=2, nodes=nodes))
    assert (found.total, found.gpus) == (total, 6)


@pytest.mark.parametrize(
    ("order", "kept"), [(["priority"], {"a": 4, "b": 2}), (["newest"], {"a": 2, "b": 4})]
)
def test_who_gives_back_first_is_as_the_pool_says(order, kept):
    """The high priority unless the one that was granted first is to keep what it has."""
    manifest = POOL.to_manifest()
    manifest["spec"]["reclaim"] = {"order": order}
    pool = GpuPool.model_validate(manifest)
    shares = {"a": Share(2, 1, 2, 50.0), "b": Share(4, 1, 4, 10.0)}
    members = {"a": member("a", 4, 2, serial=1), "b": member("b", 4, 4, serial=1)}
    grants = share_out(observe(members, shares, 1000.0, pool=pool)).grants
    assert {name: each.target for name, each in grants.items()} == kept


def test_what_is_wrong_beside_the_graphs_is_said():
    """Two pools, and a graph without a planner."""
    observed = observe(
        {"a": member("a", 1, 1, arrived=1)}, in_other_pool={"b": "GpuPool old"}, without_planner=["c"]
    )
    assert list(problems_of(observed, share_out(observed))) == [
        "graph b belongs to GpuPool old, which is older; change one of them so that only one matches it",
        "graph c has planner.enabled: false and therefore no GPU budget; enable it, or change the entries so that none matches it",
    ]


def test_pods_that_kueue_admits_are_told():
    """A pool and Kueue over the same nodes would each decide when they start."""
    manifest = made("a").to_manifest()
    labels = {"kueue.x-k8s.io/queue-name": "gpus"}
    manifest["spec"]["services"]["d"]["podTemplate"] = {"metadata": {"labels": labels}}
    graph = GraphDeployment.model_validate(manifest)
    observed = observe({"a": replace(member("a", 1, 1, arrived=1), graph=graph)})
    (said,) = problems_of(observed, share_out(observed))
    assert said.startswith("graph a: pods of d carry kueue.x-k8s.io/queue-name, so Kueue also decides")


def test_only_released_workers_that_leave_are_leaving():
    """A gated pod holds nothing."""
    pods = [
        PodView("a", gpus=1, terminating=True),
        PodView("b", gpus=2, drain_since_s=1.0),
        PodView("c", gpus=4),
        PodView("d", gpus=8, terminating=True, gates=("penstock.dev/gpu-budget",)),
    ]
    assert draining_gpus(pods) == 3


@pytest.mark.parametrize(
    ("gpus", "expected"), [(6, {"p": 2, "d": 4}), (4, {"p": 1, "d": 3}), (0, {"p": 1, "d": 1})]
)
def test_a_grant_is_for_the_replicas_needed_most_and_floors_stay(gpus, expected):
    """In the ratio that is wanted."""
    graph = made("a")
    wanted = {"r": LimitedReplicas(1), "p": LimitedReplicas(2), "d": LimitedReplicas(4)}
    bids = bids_of(graph, wanted)
    assert bids["p"] == RoleBid(2, 1, 1, is_prefill=True)
    assert sizes(bids) == (1,) * 6
    found = within_grant(wanted, bids, gpus=gpus, pool="GpuPool shared")
    assert {name: found[name].replicas for name in expected} == expected
    assert found["r"] == LimitedReplicas(1)


@pytest.mark.parametrize(
    ("planner", "expected"),
    [
        ({}, False),
        ({"wantsTime": "1970-01-01T00:01:00Z"}, True),
        ({"wantsTime": "1970-01-01T00:02:00Z"}, False),
        ({"wantsTime": "1970-01-01T00:09:00Z"}, False),
    ],
)
def test_a_planner_that_has_not_spoken_for_three_minutes_is_silent(planner, expected):
    """One that says no time, and one whose clock is ahead, is not."""
    assert is_bid_expired(planner, 300.0) is expected


@pytest.mark.parametrize(
    ("wants", "ceiling", "expected"),
    [
        ({}, None, {"p": 2, "d": 4}),
        ({"prefill": 3, "decode": 1}, None, {"p": 3, "d": 4}),
        ({"prefill": 30}, None, {"p": 9, "d": 4}),
        ({"decode": 8}, 6, {"p": 2, "d": 6}),
    ],
)
def test_a_bid_is_for_what_adapters_ask_for_or_the_planner_wants_if_that_is_more(wants, ceiling, expected):
    """A planner may be dead for long: its word shrinks nothing, and counts within today's bounds."""
    wanted = {"r": LimitedReplicas(1), "p": LimitedReplicas(2), "d": LimitedReplicas(4)}
    found = with_wants(made("a"), wanted, wants, max_gpu_budget=ceiling)
    assert {name: found[name].replicas for name in expected} == expected
    assert found["r"] == LimitedReplicas(1)


@pytest.mark.parametrize(
    ("planner", "wanted", "told"),
    [
        ({"maxGpuBudget": 8}, 8, True),
        ({"maxGpuBudget": 8}, 7, False),
        ({"maxGpuBudget": 64}, 64, False),
        ({"maxGpuBudget": None}, 64, False),
        ({}, 64, False),
        (None, 64, False),
    ],
)
def test_a_graph_hears_that_its_own_budget_bounds_it(planner, wanted, told):
    """As one of the former default does that the API server had written; with the remedy."""
    said = own_budget_message({"spec": {"planner": planner}}, wanted=wanted, pool_gpus=64)
    text = "limited by planner.maxGpuBudget (8), below the pool's 64; remove the key to use the pool's limit"
    assert said == (text if told else "")


def test_a_graph_is_granted_no_more_than_its_own_budget():
    """Its gates would hold the rest back."""
    budget = made("a")
    planner = budget.spec.planner.model_copy(update={"max_gpu_budget": 3})
    budget = budget.model_copy(update={"spec": budget.spec.model_copy(update={"planner": planner})})
    asks = PoolMember(POOL.spec.graphs[0], budget, (1,) * 5, held=2, serial=1)
    assert share_out(observe({"a": asks}, {"a": Share(2, 1, 2)})).shares["a"].gpus == 3


CLUSTER_POOL = ClusterGpuPool.model_validate(
    {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ClusterGpuPool",
        "metadata": {"name": "shared"},
        "spec": {
            "gpus": 6,
            "holdSeconds": 0,
            "graphs": [
                {"match": {"namespaces": ["x"]}, "guaranteedGpus": 2},
                {"match": {"namespaces": ["y"]}, "guaranteedGpus": 4},
            ],
        },
    }
)


def of_namespace(namespace, wants, held, **more):
    """A graph called chat of a namespace, in the cluster's pool."""
    entry = entry_of(CLUSTER_POOL, "chat", {}, namespace)
    return PoolMember(entry, made("chat"), (1,) * wants, held, **{"serial": 0, "initial_gpus": held, **more})


def test_graphs_of_one_name_in_two_namespaces_share_a_clusters_pool():
    """Each has its own entry and row; what is said of one names the other with its namespace."""
    members = {"x/chat": of_namespace("x", 6, 2), "y/chat": of_namespace("y", 4, 0)}
    observed = observe(members, pool=CLUSTER_POOL)
    found = share_out(observed)
    assert {name: each.gpus for name, each in found.shares.items()} == {"x/chat": 2, "y/chat": 4}
    status = pool_status(observed, found)
    assert [(row["name"], row["guaranteed"]) for row in status["graphs"]] == [("x/chat", 2), ("y/chat", 4)]
    assert shortage_in(status, "x/chat").startswith(
        "4 more are not available until another graph needs fewer: y/chat holds 0"
    )
    assert entry_of(CLUSTER_POOL, "chat", {}, "z") is None


@pytest.mark.parametrize(
    ("created", "expected"),
    [
        ({"y/a": "2026-01-01T00:00:00Z", "y/b": "2026-01-02T00:00:00Z"}, {"y/a": 4, "y/b": 2}),
        ({"y/a": "2026-01-02T00:00:00Z", "y/b": "2026-01-01T00:00:00Z"}, {"y/a": 2, "y/b": 4}),
        ({"y/a": "", "y/b": ""}, {"y/a": 4, "y/b": 2}),
    ],
)
def test_of_guarantees_above_the_pool_the_oldest_graphs_count(created, expected):
    """Who makes another graph that an entry matches takes nothing that an older one is promised; grants and status agree."""
    members = {name: of_namespace("y", 4, 0, created=at) for name, at in created.items()}
    assert guarantees(6, members) == expected
    observed = observe(members, pool=CLUSTER_POOL)
    found = share_out(observed)
    assert {name: each.gpus for name, each in found.shares.items()} == expected
    status = pool_status(observed, found)
    assert {row["name"]: row["guaranteed"] for row in status["graphs"]} == expected
    assert status["gpus"]["borrowed"] == 0


def test_the_workers_of_a_graph_that_is_gone_are_guaranteed_nothing():
    """They leave, and what they held is shared out."""
    members = {"y/gone": PoolMember(None, bid=(), held=2, draining=2), "y/chat": of_namespace("y", 4, 0)}
    assert guarantees(6, members) == {"y/gone": 0, "y/chat": 4}


def test_quotas_below_a_pool_are_among_its_problems():
    """Of a GpuPool by its GPUs; of a ClusterGpuPool by what it guarantees in each namespace."""
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"requests.nvidia.com/gpu": "3"}}}
    observed = observe({"a": member("a", 1, 1, arrived=1)}, quotas={"": [quota]})
    (said,) = problems_of(observed, share_out(observed))
    assert said.startswith("ResourceQuota team allows 3 nvidia.com/gpu, fewer than the pool's 6")
    members = {"x/chat": of_namespace("x", 6, 2), "y/chat": of_namespace("y", 4, 0)}
    observed = observe(members, pool=CLUSTER_POOL, quotas={"x": [quota], "y": [quota]})
    (said,) = problems_of(observed, share_out(observed))
    assert said.startswith("ResourceQuota y/team allows 3 nvidia.com/gpu, fewer than the 4 guaranteed")


GRANT = PoolGrant("GpuPool", "shared", gpus=3, max_gpus=6)


@pytest.mark.parametrize(
    ("planner", "grant", "expected"),
    [
        ({}, None, EffectiveBudget(8, 8)),
        ({"maxGpuBudget": 2}, None, EffectiveBudget(2, 2)),
        ({"maxGpuBudget": None}, None, EffectiveBudget(None, None)),
        ({"enabled": False}, None, EffectiveBudget(None, None)),
        ({}, GRANT, EffectiveBudget(6, 3)),
        ({"maxGpuBudget": 2}, GRANT, EffectiveBudget(2, 2)),
        ({"maxGpuBudget": 4}, GRANT, EffectiveBudget(4, 3)),
        ({"enabled": False}, GRANT, EffectiveBudget(None, 3)),
    ],
)
def test_a_graph_is_bounded_by_its_manifest_and_by_its_pools_grant(planner, grant, expected):
    """In a pool the pool's GPUs take the place of the default; the manifest stays as the user wrote it."""
    manifest = made("a").to_manifest()
    manifest["spec"]["planner"] = planner
    assert effective_budget(GraphDeployment.model_validate(manifest), grant) == expected
