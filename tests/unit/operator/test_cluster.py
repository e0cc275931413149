"""The view: grouped by graph, marked by what matters, and not misled by answers and watches crossing."""

from __future__ import annotations

import asyncio

import pytest
from fake_api import FakeApi
from graph_harness import graph, told

from penstock.core.errors import ForbiddenError, UnavailableError
from penstock.kube.kinds import LEADER_WORKER_SET
from penstock_operator.cluster import Cluster

KEY = ("ns", "g")


def deployment(version, *, owner="g", name="g-decode", status=None, **spec):
    """Return a Deployment as the API server gives it."""
    labels = {"penstock.dev/graph": owner, "app.kubernetes.io/managed-by": "penstock"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": "u",
            "labels": labels,
            "resourceVersion": str(version),
        },
        "spec": {"replicas": 1, **spec},
        "status": status or {},
    }


def adapter(version, *, generation=1, replicas=1):
    """Return a ScalingAdapter."""
    found = deployment(version, name="g-decode")
    found |= {"apiVersion": "penstock.dev/v1alpha1", "kind": "ScalingAdapter", "spec": {"replicas": replicas}}
    found["metadata"]["generation"] = generation
    return found


@pytest.fixture
async def world():
    """A cluster's view whose watches run, its marks, and a function that sends an event."""
    marks, api = [], FakeApi()
    view = Cluster(api, namespace="ns", enqueue=lambda key, urgent: marks.append((key, urgent)))
    watching = asyncio.create_task(view.run())
    await view.synced()
    await told(api)

    async def watch(change, obj):
        api.tell(obj, change)
        await told(api)

    yield view, marks, watch
    watching.cancel()
    await asyncio.wait({watching})


async def test_a_change_marks_its_graph_and_a_heartbeat_does_not(world):
    """Only what the plans read counts."""
    view, marks, watch = world
    await watch("ADDED", deployment(1))
    beat = {"conditions": [{"type": "Available", "lastUpdateTime": "now"}]}
    await watch("MODIFIED", deployment(2, status=beat))
    beat["conditions"][0]["lastUpdateTime"] = "later"
    await watch("MODIFIED", deployment(3, status=beat))
    assert marks == [(KEY, False)] * 2
    assert view.known() == [KEY]
    await watch("DELETED", deployment(4))
    assert (len(marks), view.known()) == (3, [])


async def test_a_childs_new_graph_label_moves_it(world):
    """Both graphs are looked at."""
    view, marks, watch = world
    await watch("ADDED", deployment(1))
    await watch("MODIFIED", deployment(2, owner="other"))
    assert marks[1:] == [(KEY, False), (("ns", "other"), False)]
    assert view.known() == [("ns", "other")]


async def test_an_answered_write_is_seen_at_once_and_its_event_marks_nothing(world):
    """Else every write would cost another look."""
    view, marks, watch = world
    await watch("ADDED", deployment(1))
    view.record_write(deployment(5, replicas=2))
    assert view.snapshot(KEY).children["Deployment", "g-decode"]["spec"]["replicas"] == 2
    await watch("MODIFIED", deployment(3, replicas=7))
    assert view.snapshot(KEY).children["Deployment", "g-decode"]["spec"]["replicas"] == 2
    await watch("MODIFIED", deployment(5, replicas=2))
    assert len(marks) == 1


async def test_a_snapshot_keeps_what_it_showed(world):
    """The stages of one reconcile read the same graph, whatever is written or watched meanwhile."""
    view, _, watch = world
    await watch("ADDED", deployment(1))
    snapshot = view.snapshot(KEY)
    before = snapshot.fingerprint()
    view.record_write(deployment(5, replicas=2))
    await watch("DELETED", deployment(6))
    assert snapshot.fingerprint() == before
    assert list(snapshot.children) == [("Deployment", "g-decode")]


async def test_an_answer_that_shows_anothers_change_marks_the_graph(world):
    """A user's number that arrives first in the answer to a status write."""
    view, marks, watch = world
    await watch("ADDED", adapter(1))
    marks.clear()
    view.record_write(adapter(6, generation=2, replicas=3))
    await watch("MODIFIED", adapter(5, generation=2, replicas=3))
    await watch("MODIFIED", adapter(6, generation=2, replicas=3))
    assert marks == [(KEY, True)]


async def test_a_late_answer_does_not_revive_a_deleted_object(world):
    """A ghost pod would hold GPUs for ever."""
    view, _, watch = world
    await watch("ADDED", deployment(1))
    await watch("DELETED", deployment(9))
    view.record_write(deployment(8))
    assert view.known() == []


async def test_an_answer_that_no_watch_confirms_is_dropped():
    """Created and deleted while the watch was away."""
    marks = []
    enqueue = lambda key, urgent: marks.append((key, urgent))  # noqa: E731 - as in `world`
    view = Cluster(FakeApi(), namespace="ns", enqueue=enqueue, confirm_s=0.0)
    view.record_write(deployment(3))
    assert view.known() == [KEY]
    await told(None)
    assert (view.known(), marks) == ([], [(KEY, False)])


async def test_an_object_of_an_older_graph_does_not_take_its_successor_away(world):
    """Kopf handles two graphs of one name side by side; only the identity tells which one is gone."""
    view, _, _ = world
    graphs = [graph(), graph()]
    for number, each in enumerate(graphs, start=1):
        each["metadata"] |= {"uid": f"u{number}", "resourceVersion": str(number)}
        view.report(each)
    view.remove(graphs[0])
    assert view.snapshot(KEY).graph["metadata"]["uid"] == "u2"
    view.report(graphs[0])
    assert view.snapshot(KEY).graph["metadata"]["uid"] == "u2"
    view.remove(graphs[1])
    assert view.known() == []


async def test_pods_keep_their_view_and_address(world):
    """And nothing of their specification."""
    view, _, watch = world
    pod = deployment(1, name="p")
    pod |= {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"schedulingGates": [{"name": "a"}]},
        "status": {"podIP": "1.2.3.4"},
    }
    await watch("ADDED", pod)
    kept = view.snapshot(KEY).pods["Pod", "p"]
    assert (kept["view"].ip, kept["view"].gates, kept["view"].name) == ("1.2.3.4", ("a",), "p")
    assert set(kept) == {"metadata", "view", "version"}


class UnlistableSets(FakeApi):
    """Knows LeaderWorkerSet and lets nobody list them."""

    async def raw_get(self, path):
        """Name the kind."""
        return {"resources": [{"name": LEADER_WORKER_SET.plural}]}

    async def read_pages(self, kind, **kwargs):
        """Refuse one kind."""
        if kind is LEADER_WORKER_SET:
            raise ForbiddenError("403: leaderworkersets is forbidden")
        return await super().read_pages(kind, **kwargs)


async def test_sets_that_cannot_be_listed_hold_no_other_graph_up():
    """The graph that needs them fails with the server's words and is tried again; no worker waits for ever."""
    view = Cluster(UnlistableSets(), namespace="ns", enqueue=lambda _key, _urgent: None, list_s=0.2)
    watching = asyncio.create_task(view.run())
    await view.synced()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="403: leaderworkersets is forbidden"):
            await view.serves(LEADER_WORKER_SET)
    assert "403" in view.problem()
    watching.cancel()
    await asyncio.wait({watching})
