"""What a leader may work on, as Leases of other installations come, are renewed, fall and come again."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from types import SimpleNamespace

import orjson
import pytest

from penstock.core.errors import UnavailableError
from penstock.kube.lease_scopes import Keys
from penstock.kube.ownership import ElectionScope, GraphOwnership

KEYS = Keys("component", "scope", "graph")
TERM_S = 15.0
SERVER_S = 1_800_000_000.0


def lease(name, namespace="system", *, scope="cluster", created=0, changed=0.0, **labels):
    """A Lease made and changed so many seconds before the server's now."""

    def stamp(age_s):
        return datetime.fromtimestamp(SERVER_S - age_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"component": "operator", "scope": scope, **labels},
            "creationTimestamp": stamp(created),
            "managedFields": [{"manager": "penstock-lease", "time": stamp(changed)}],
        },
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 15, "renewTime": "r"},
    }


class Api:
    """Leases, a clock, and a watch that tells what is put."""

    def __init__(self):
        self.rng = random.Random(1)
        self.leases = []
        self.may_look_around = False
        self.time_error = None
        self.events = asyncio.Queue()

    async def server_time_s(self):
        """Return the server's clock."""
        if self.time_error is not None:
            raise self.time_error
        return SERVER_S

    async def create(self, obj, *, field_manager, dry_run=False):
        """Answer whether this process may list all Leases."""
        assert obj["kind"] == "SelfSubjectAccessReview"
        return {"status": {"allowed": self.may_look_around}}

    async def list(self, kind, *, namespace, labels=None):
        """List all namespaces, if that is allowed."""
        assert self.may_look_around
        return SimpleNamespace(items=list(self.leases))

    async def read_pages(self, kind, *, namespace, selector, take, restart):
        """List what is there."""
        assert selector == "component=operator,scope"
        for each in self.leases:
            if namespace in {None, each["metadata"]["namespace"]}:
                take(orjson.loads(orjson.dumps(each)))
        return "1"

    @asynccontextmanager
    async def watch(self, kind, *, namespace, params):
        """Tell what is put."""

        async def lines():
            while True:
                yield await self.events.get()

        yield lines()

    async def put(self, obj, what="MODIFIED"):
        """Have the watch tell."""
        obj["metadata"]["resourceVersion"] = "2"
        self.events.put_nowait(orjson.dumps({"type": what, "object": obj}) + b"\n")
        for _ in range(10):
            await asyncio.sleep(0)


class Won:
    """An election won at a given time of the test's clock."""

    def __init__(self, *, found=None, term_s=TERM_S):
        self.duration_s = term_s
        self.found = found
        self.sent = {"r": 0.0}

    def sent_s(self, renew_time):
        """Return when a renewal was sent."""
        return self.sent.get(renew_time)


class World:
    """One ownership with its own clock."""

    def __init__(self, api, won, *, cluster_wide=True, graph=None):
        self.api = api
        self.now_s = 0.0
        self.changes = 0
        home = "system" if cluster_wide else "n"
        post = ElectionScope("operator", KEYS, (home, "mine"), cluster_wide=cluster_wide, graph=graph)
        self.won = won
        self.ownership = GraphOwnership(api, won, post, on_change=self._changed, now_s=lambda: self.now_s)

    def _changed(self):
        self.changes += 1

    def pass_s(self, seconds):
        """Let time pass with renewals that are seen."""
        self.now_s += seconds
        self.ownership._fresh_s = self.now_s
        self.ownership._refresh()


@asynccontextmanager
async def world(api, *, won=None, settles=True, **post):
    """Run a ownership until it has listed."""
    made = World(api, won or Won(), **post)
    task = asyncio.create_task(made.ownership.run())
    for _ in range(60):
        await asyncio.sleep(0)
    assert made.ownership._is_settled.is_set() is settles
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def api():
    """An API server with this process's own Lease."""
    made = Api()
    made.leases = [lease("mine", created=100)]
    return made


async def test_alone_everything_is_its_own_at_once(api):
    """A cluster-wide one that sees no other does not wait."""
    async with world(api) as made:
        assert made.ownership.owns("n", "g")
        assert made.ownership.may_write_in("n")
        assert made.ownership.problem() is None
        assert not made.ownership.is_idle


async def test_a_namespaces_own_installation_takes_it_and_its_claim_falls_after_three_terms(api):
    """Only that namespace; renewals keep it, silence ends it, and giving the Lease back is no shorter."""
    async with world(api) as made:
        own = lease("own", "n", scope="namespace")
        await api.put(own)
        assert [made.ownership.owns(each, "g") for each in ("n", "m")] == [False, True]
        assert not made.ownership.may_write_in("n")
        assert [each.namespace for each in made.ownership.preceding] == ["n"]
        made.pass_s(44)
        own["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        await api.put(own)
        made.pass_s(45)
        assert not made.ownership.owns("n", "g")
        changes = made.changes
        made.pass_s(0.1)
        assert made.ownership.owns("n", "g")
        assert made.changes == changes + 1
        assert made.ownership.preceding == ()


async def test_a_deleted_lease_stands_like_one_that_is_not_renewed(api):
    """Its holder may be alive and write it again."""
    async with world(api) as made:
        own = lease("own", "n", scope="namespace")
        await api.put(own)
        await api.put(own, "DELETED")
        made.pass_s(45)
        assert not made.ownership.owns("n", "g")
        made.pass_s(0.1)
        assert made.ownership.owns("n", "g")


@pytest.mark.parametrize(("created", "idle"), [(101, True), (99, False)])
async def test_of_two_cluster_wide_ones_the_older_lease_works(api, created, idle):
    """The younger of the two is idle."""
    async with world(api) as made:
        await api.put(lease("other", "elsewhere", created=created))
        assert made.ownership.is_idle is idle
        assert made.ownership.owns("n", "g") is not idle


async def test_a_lease_that_was_made_anew_loses_its_place_only_after_a_term(api):
    """The other one has to see it, too; meanwhile nobody works."""
    async with world(api) as made:
        await api.put(lease("other", "elsewhere", created=200))
        assert made.ownership.is_idle
        await api.put(lease("other", "elsewhere", created=1))
        assert not made.ownership.is_idle
        assert not made.ownership.owns("n", "g")
        made.pass_s(15)
        assert made.ownership.owns("n", "g")


async def test_without_its_own_renewals_in_the_watch_nothing_is_written(api):
    """The view is as old as the newest of them: 10 s of a term of 15, as leadership itself."""
    async with world(api) as made:
        made.now_s = 9.9
        assert made.ownership.may_write_in("n")
        made.now_s = 10.0
        assert not made.ownership.may_write_in("n")
        assert "own renewals" in made.ownership.problem()
        made.won.sent["s"] = 9.0
        mine = lease("mine", created=100)
        mine["spec"]["renewTime"] = "s"
        await api.put(mine)
        assert made.ownership.may_write_in("n")
        assert made.ownership.lease["spec"]["renewTime"] == "s"


async def test_leases_that_nobody_renews_are_no_obstacle_at_the_start(api):
    """Of an installation that was removed last week: its claim fell long ago, by the server's own clock."""
    api.leases += [
        lease("old", "elsewhere", created=10**6, changed=61),
        lease("young", "n", scope="namespace", changed=59),
    ]
    async with world(api) as made:
        assert [each.lease for each in made.ownership.preceding] == [("n", "young")]
        made.pass_s(1.1)
        assert made.ownership.preceding == ()


async def test_without_the_servers_clock_every_lease_counts_as_new(api):
    """So nothing is taken too early."""
    api.time_error = UnavailableError("503")
    api.leases.append(lease("old", "n", scope="namespace", changed=10**6))
    async with world(api) as made:
        made.pass_s(45)
        assert not made.ownership.owns("n", "g")


@pytest.mark.parametrize(
    ("others", "found", "waits"),
    [
        ([], None, True),
        ([], lease("mine", "n", changed=29), False),
        ([], lease("mine", "n", changed=31), True),
    ],
    ids=["a new Lease", "renewed 29 s ago", "renewed 31 s ago"],
)
async def test_who_sees_one_namespace_waits_unless_it_succeeds_itself(api, others, found, waits):
    """Somebody cluster-wide may work here; within two terms of a renewal nobody else can have begun."""
    api.leases = [lease("mine", "n", scope="namespace"), *others]
    async with world(
        api,
        won=Won(found=found and found["metadata"]),
        settles=not waits,
        cluster_wide=False,
    ) as made:
        assert made.ownership.owns("n", "g") is not waits
        assert made.ownership.problem() is None
        made.pass_s(15)
        assert made.ownership.owns("n", "g")


@pytest.mark.parametrize(
    ("other", "waits"),
    [(None, False), (lease("wide", "elsewhere"), True), (lease("wide", "elsewhere", changed=61), False)],
    ids=["nobody", "a cluster-wide one", "one that fell"],
)
async def test_who_may_look_around_waits_only_if_somebody_is_there(api, other, waits):
    """An operator that a person starts with their own rights begins at once."""
    api.may_look_around = True
    api.leases = [lease("mine", "n", scope="namespace"), *([other] if other else [])]
    async with world(api, settles=not waits, cluster_wide=False) as made:
        assert made.ownership.owns("n", "g") is not waits


async def test_a_cluster_wide_one_waits_for_a_younger_one_to_stop(api):
    """It was away, and the other one took over."""
    api.leases.append(lease("younger", "elsewhere", created=1))
    async with world(api, settles=False) as made:
        assert not made.ownership.owns("n", "g")
        made.pass_s(15)
        assert made.ownership.owns("n", "g")


async def test_a_planner_of_one_graph_takes_only_that(api):
    """Others of the namespace stay with the planner of all graphs."""
    api.may_look_around = True
    api.leases = [lease("mine", "n", scope="namespace")]
    async with world(api, cluster_wide=False) as made:
        await api.put(lease("g", "n", scope="namespace", graph="g"))
        assert [made.ownership.owns("n", each) for each in ("g", "h")] == [False, True]
        assert made.ownership.may_write_in("n")
        assert not made.ownership.is_idle


def test_labels_and_selector():
    """What the Lease says is what other installations select."""
    post = ElectionScope("planner", KEYS, ("n", "x"), cluster_wide=False, graph="g")
    assert post.labels == {"component": "planner", "scope": "namespace", "graph": "g"}
    assert post.selector == "component=planner,scope"
    assert ElectionScope("operator", KEYS, ("n", "x"), cluster_wide=True).labels == {
        "component": "operator",
        "scope": "cluster",
    }
