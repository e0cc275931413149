"""A pool whose allocator is killed at any step, whose messages are lost, repeated and late, and whose reports are stale.

The model: graphs act on the newest grant that has reached them, grow within it and drain when they please. The allocator
works from any report ever made, keeps its state, then delivers. Nothing of that may bring the pool above its GPUs.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.api import ReclaimBy
from penstock.gpu_pool.allocator import GraphBid, PoolTerms, allocate, wanted_gpus

STARTUP_S = 30.0
NAMES = "abc"

replicas = st.lists(st.sampled_from([1, 1, 2, 3]), max_size=10).map(tuple)
names = st.sampled_from(NAMES)


@dataclass
class Graph:
    """A graph as it is."""

    guaranteed: int
    priority: int
    held: int
    limit: int
    serial: int = 0
    replicas: tuple[int, ...] = ()
    reports: list[GraphBid] = field(default_factory=list)

    def report(self) -> GraphBid:
        """Return what the graph says of itself now, and remember it among those that may arrive later."""
        bid = GraphBid(self.guaranteed, self.priority, 1000, self.replicas, self.held, self.serial)
        self.reports.append(bid)
        return bid

    def hear(self, gpus: int, serial: int) -> None:
        """Act under a grant from now on, unless a newer one is known."""
        if serial > self.serial:
            self.limit, self.serial = gpus, serial


class PoolMachine(RuleBasedStateMachine):
    """One pool, its graphs, and an allocator of which only the kept state survives."""

    def __init__(self):
        super().__init__()
        self.gpus, self.ceiling, self.now_s = 0, 0, 0.0
        self.order = tuple(ReclaimBy)
        self.graphs, self.kept, self.sent = {}, {}, []

    @initialize(
        gpus=st.integers(0, 16),
        drawn=st.lists(st.integers(0, 5), min_size=9, max_size=9),
        order=st.permutations(list(ReclaimBy)),
    )
    def start(self, gpus, drawn, order):
        """Graphs with any guarantees and priorities, and with workers that fit into the pool together."""
        self.gpus = self.ceiling = gpus
        self.order = tuple(order)
        free = gpus
        for index, name in enumerate(NAMES):
            guaranteed, priority, held = drawn[3 * index : 3 * index + 3]
            held = min(held, free)
            free -= held
            self.graphs[name] = Graph(guaranteed, priority, held, held)
            self.graphs[name].report()
        # A pool counts its graphs before any may grow.
        self.kept = self.allocated({name: graph.report() for name, graph in self.graphs.items()})[1]

    def allocated(self, bids):
        """Return what the allocator makes of these bids now."""
        return allocate(PoolTerms(self.gpus, STARTUP_S, self.order), bids, self.kept, self.now_s)

    # -- the graphs -----------------------------------------------------------------------------------

    @rule(name=names, wanted=replicas)
    def want(self, name, wanted):
        """A planner changes its mind."""
        self.graphs[name].replicas = wanted

    @rule(name=names, gpus=st.integers(1, 6))
    def grow(self, name, gpus):
        """Workers start, within the grant."""
        graph = self.graphs[name]
        graph.held = max(graph.held, min(graph.held + gpus, graph.limit))

    @rule(name=names, gpus=st.integers(1, 6))
    def shrink(self, name, gpus):
        """Workers end: drained, or failed."""
        graph = self.graphs[name]
        graph.held = max(0, graph.held - gpus)

    @rule(name=names)
    def report(self, name):
        """A graph tells of itself."""
        self.graphs[name].report()

    # -- the allocator --------------------------------------------------------------------------------

    @rule(
        ages=st.lists(st.integers(0, 6), min_size=3, max_size=3),
        is_killed=st.booleans(),
        unseen=st.sets(names),
    )
    def work(self, ages, is_killed, unseen):
        """Allocate from reports of any age, without those of some graphs; a kill comes before or after the state is kept."""
        bids = {
            name: graph.reports[-1 - min(age, len(graph.reports) - 1)]
            for (name, graph), age in zip(self.graphs.items(), ages, strict=True)
            if name not in unseen
        }
        grants, after = self.allocated(bids)
        if is_killed and ages[0] % 2:
            return
        self.kept = after
        if sum(share.max_held for share in after.values()) <= self.gpus:
            self.ceiling = self.gpus
        if not is_killed:
            self.sent.extend((name, grant.gpus, grant.serial) for name, grant in grants.items())

    @precondition(lambda self: self.sent)
    @rule(index=st.integers(0, 1000))
    def deliver(self, index):
        """Any message arrives, again and in any order; one that never does is lost."""
        name, gpus, serial = self.sent[index % len(self.sent)]
        self.graphs[name].hear(gpus, serial)

    @rule(seconds=st.floats(-40.0, 40.0))
    def wait(self, seconds):
        """Time passes, or the clock is set back."""
        self.now_s += seconds

    @rule(gpus=st.integers(0, 16))
    def resize(self, gpus):
        """Nodes join or leave; what was granted before stands until the graphs have given back."""
        self.gpus = gpus
        self.ceiling = max(self.ceiling, gpus)

    # -- what holds -----------------------------------------------------------------------------------

    @invariant()
    def is_within_the_pool(self):
        """The graphs hold no more than there is, or was before nodes left that they have not given back for yet."""
        assert sum(graph.held for graph in self.graphs.values()) <= self.ceiling

    def teardown(self):
        """Once messages arrive again, every graph gets its guarantee, no GPU is free that one may have, all fit."""
        if not self.graphs:
            return
        for _ in range(12):
            self.now_s += 2 * STARTUP_S
            bids = {name: graph.report() for name, graph in self.graphs.items()}
            grants, self.kept = self.allocated(bids)
            for name, graph in self.graphs.items():
                graph.hear(grants[name].gpus, grants[name].serial)
                graph.held = graph.limit
        held = sum(graph.held for graph in self.graphs.values())
        assert held <= self.gpus
        guaranteed = sum(graph.guaranteed for graph in self.graphs.values())
        for graph in self.graphs.values():
            if guaranteed <= self.gpus:
                assert graph.held >= within(graph.replicas, graph.guaranteed)
            assert graph.held == within(graph.replicas, graph.held + self.gpus - held)


def within(wanted: tuple[int, ...], gpus: int) -> int:
    """Return the GPUs of the first replicas that fit."""
    return wanted_gpus(GraphBid(0, 0, gpus, wanted, 0, 0))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
