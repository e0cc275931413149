"""Graphs of several namespaces, some of one name, alongside a ClusterGpuPool and a GpuPool, whose operator dies at any step.

The model does what `penstock_operator.pools.driver` does: a graph draws from the oldest pool that matches it, acts under the grant
that its reconcile began with, and only a pool's status outlives the process.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.api import ClusterGpuPool, GpuPool, GraphDeployment
from penstock_operator.pools.keys import graph_of, member_of
from penstock_operator.pools.observe import PoolMember, PoolObservation, entry_of, shares_of
from penstock_operator.pools.share_out import share_out
from penstock_operator.pools.status import pool_status

GPUS = 6
OWN = ("x", "own")
SHARED = ("", "shared")
NAMESPACES = {
    "x": {"x"},
    "y": {"y"},
    "team-*": {"team-a", "team-b"},
    "*-b": {"team-b"},
    "*": {"x", "y", "team-a", "team-b", "stranger"},
}
"""By pattern, those of the model that it names."""
GRAPHS = (*((namespace, "chat") for namespace in sorted(NAMESPACES["*"])), ("x", "batch"))
TEAMS = ({}, {"team": "a"}, {"team": "b"})

keys = st.sampled_from(GRAPHS)
pools = st.sampled_from((OWN, SHARED))
names = st.sampled_from(({"name": "chat"}, {"name": "batch"}, {"labels": {"team": "a"}}))
bounds = st.fixed_dictionaries(
    {
        "guaranteedGpus": st.integers(0, 2),
        "maxGpus": st.none() | st.integers(2, GPUS),
        "priority": st.sampled_from(("high", "normal", "low")),
    }
)
own_entries = st.lists(st.tuples(names, bounds), min_size=1, max_size=3)
shared_entries = st.lists(
    st.tuples(st.sampled_from(sorted(NAMESPACES)), st.just({}) | names, bounds), min_size=1, max_size=3
)


def made_graph(name, labels):
    """A graph without a budget of its own."""
    services = {role: {"role": role} for role in ("prefill", "decode")}
    return GraphDeployment.model_validate(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "GraphDeployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "model": {"name": "m"},
                "runtime": "simulated",
                "services": {"frontend": {"role": "router"}, **services},
                "planner": {"maxGpuBudget": None},
            },
        }
    )


def made_pool(model, name, entries, hold_s):
    """A pool of six GPUs."""
    spec = {"gpus": GPUS, "holdSeconds": hold_s, "graphs": entries}
    data = {"apiVersion": "penstock.dev/v1alpha1", "kind": model.__name__, "metadata": {"name": name}}
    return model.model_validate({**data, "spec": spec})


@dataclass
class Graph:
    """A graph as it is, and what the operator's process knows of it: ``acting`` and ``bid``, which a restart forgets."""

    model: GraphDeployment
    labels: dict
    created: str
    wants: tuple = ()
    held: int = 0
    is_deleted: bool = False
    acting: tuple | None = None
    bid: tuple | None = None


class NamespacesMachine(RuleBasedStateMachine):
    """Two pools, six graphs of five namespaces, and an operator."""

    def __init__(self):
        super().__init__()
        self.now_s, self.pools, self.statuses, self.graphs, self.order, self.named = (
            0.0,
            {},
            {},
            {},
            (),
            set(),
        )

    @initialize(
        entries=st.tuples(own_entries, shared_entries),
        hold_s=st.sampled_from((0, 60)),
        order=st.permutations((OWN, SHARED)),
        labels=st.lists(st.sampled_from(TEAMS), min_size=len(GRAPHS), max_size=len(GRAPHS)),
        created=st.permutations(range(len(GRAPHS))),
    )
    def start(self, entries, hold_s, order, labels, created):
        """Any entries and labels; either pool is the older."""
        own, shared = entries
        mine = [{"match": match, **rest} for match, rest in own]
        theirs = [{"match": {"namespaces": [where], **match}, **rest} for where, match, rest in shared]
        self.named = set().union(*(NAMESPACES[where] for where, _, _ in shared))
        self.pools = {
            OWN: made_pool(GpuPool, "own", mine, hold_s),
            SHARED: made_pool(ClusterGpuPool, "shared", theirs, hold_s),
        }
        self.order = tuple(order)
        for key, team, at in zip(GRAPHS, labels, created, strict=True):
            created_at = f"2026-01-01T00:00:{at:02d}Z"
            self.graphs[key] = Graph(made_graph(key[1], team), team, created_at, wants=(1,) * (GPUS - at))

    def entry(self, pool, key):
        """Return a graph's entry in a pool."""
        if pool == OWN and key[0] != OWN[0]:
            return None
        return entry_of(self.pools[pool], key[1], self.graphs[key].labels, key[0])

    def pool_of(self, key):
        """Return the pool that counts for a graph."""
        return next((each for each in self.order if self.entry(each, key) is not None), None)

    def shares(self, pool):
        """Return the allocator's state by a pool's status."""
        return shares_of(self.statuses.get(pool))

    @rule(key=keys, wants=st.lists(st.sampled_from((1, 1, 2)), max_size=6).map(tuple))
    def want(self, key, wants):
        """A graph's planner bids, of which the operator hears at the next reconcile."""
        self.graphs[key].wants = wants

    @rule(key=keys)
    def reconcile(self, key):
        """A graph begins to act under the newest grant, drains what is above, and reports."""
        pool, graph = self.pool_of(key), self.graphs[key]
        if pool is None or graph.is_deleted:
            return
        share = self.shares(pool).get(member_of(pool, key))
        if share is not None:
            graph.acting = (share.serial, share.gpus)
        elif graph.acting is None or graph.acting[0]:
            graph.acting = (0, graph.held)
        graph.bid = graph.wants

    @rule(key=keys, gpus=st.integers(1, 4))
    def grow(self, key, gpus):
        """Workers start within the grant under which the graph acts."""
        graph = self.graphs[key]
        if graph.acting is not None and not graph.is_deleted:
            graph.held = max(graph.held, min(graph.held + gpus, graph.acting[1]))

    @rule(key=keys, gpus=st.integers(1, 4))
    def end(self, key, gpus):
        """Workers of a graph end, whatever it may hold."""
        self.graphs[key].held = max(0, self.graphs[key].held - gpus)

    @rule(key=keys)
    def delete(self, key):
        """A graph is deleted, or one of its name is made once its workers are gone."""
        graph = self.graphs[key]
        if not graph.is_deleted:
            graph.is_deleted, graph.acting, graph.bid = True, None, None
        elif not graph.held:
            graph.is_deleted = False

    @rule(pool=pools, passed_s=st.sampled_from((0.0, 5.0, 61.0)), is_lost=st.booleans())
    def share(self, pool, passed_s, is_lost):
        """The operator shares a pool out, and dies before the status is written or not."""
        self.now_s += passed_s
        before, model = self.shares(pool), self.pools[pool]
        members = {}
        for key, graph in self.graphs.items():
            name = member_of(pool, key)
            if pool[0] not in {"", key[0]}:
                continue
            if graph.is_deleted:
                if name in before and graph.held:
                    members[name] = PoolMember(None, bid=(), held=graph.held, draining=graph.held)
            elif self.pool_of(key) == pool:
                members[name] = self.member(key, self.entry(pool, key))
        observed = PoolObservation(model, members, self.now_s, status=self.statuses.get(pool), generation=1)
        found = share_out(observed)
        if is_lost:
            self.restart()
        if found is None or is_lost:
            return
        self.statuses[pool] = pool_status(observed, found)

    def member(self, key, entry):
        """Return a graph as the operator's process knows it."""
        graph = self.graphs[key]
        serial, gpus = graph.acting or (None, None)
        return PoolMember(
            entry,
            None if graph.bid is None else graph.model,
            graph.bid,
            held=graph.held,
            serial=serial,
            initial_gpus=gpus,
            created=graph.created,
        )

    @rule()
    def restart(self):
        """A new process knows no graph's reconcile."""
        for graph in self.graphs.values():
            graph.acting, graph.bid = None, None

    @rule(pool=pools, first=st.integers(0, 5), apart=st.integers(1, 5))
    def lend_and_want_back(self, pool, first, apart):
        """What a graph lent others is wanted back while the workers of one of them start again, which has not reconciled yet."""
        members = [key for key in GRAPHS if self.pool_of(key) == pool and not self.graphs[key].is_deleted]
        if len(members) < 2:
            return
        slow, eager = (members[each % len(members)] for each in (first, first + apart))
        self.graphs[slow].wants = (1,) * GPUS
        self.graphs[eager].wants = ()
        self.settle(pool, None)
        self.graphs[slow].held = 0
        self.graphs[eager].wants = (1,) * GPUS
        self.settle(pool, None if slow == eager else slow)

    @rule(pool=pools, slow=st.none() | keys)
    def settle(self, pool, slow):
        """All but a graph whose reconcile takes long act and fill their grants, three times; that one then fills its older grant."""
        for _ in range(3):
            for key in GRAPHS:
                if key != slow:
                    self.reconcile(key)
            self.share(pool, 0.0, is_lost=False)
            for key in GRAPHS:
                if key != slow:
                    self.grow(key, GPUS)
        if slow is not None:
            self.grow(slow, GPUS)

    @invariant()
    def no_pool_is_exceeded(self):
        """Nor does its status say that graphs may hold more."""
        for pool in self.pools:
            names = {member_of(pool, key): key for key in GRAPHS if self.pool_of(key) == pool}
            assert sum(self.graphs[key].held for key in names.values()) <= GPUS
            assert sum(row["granted"] for row in (self.statuses.get(pool) or {}).get("graphs", ())) <= GPUS

    @invariant()
    def every_graph_draws_from_one_pool_at_most_that_names_its_namespace(self):
        """By the rows of both: same-named graphs are told apart, and nobody draws by name or label alone."""
        drawing = [
            (pool, graph_of(pool, row["name"]))
            for pool, status in self.statuses.items()
            for row in status["graphs"]
        ]
        drawn = [key for _, key in drawing]
        assert len(drawn) == len(set(drawn))
        for pool, (namespace, _) in drawing:
            assert namespace in (self.named if pool == SHARED else {OWN[0]})


TestNamespaces = NamespacesMachine.TestCase
TestNamespaces.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
