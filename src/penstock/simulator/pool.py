"""Simulates several graphs that share the GPUs of a pool: their planners bid, and the live allocator grants.

Every second the pool counts the GPUs that each graph holds, and takes the bid of its planner's last decision. A grant takes effect
immediately. After every event the GPUs of all workers are compared with the pool's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.gpu_pool.allocator import Allocator, Grant, GraphBid, PoolState, PoolTerms, allocate
from penstock.gpu_pool.reclaim import cut_drain_message, with_cut_drain
from penstock.gpu_pool.waiting import GraphHolding, shortage_message
from penstock.simulator.fleet import BudgetExceededError
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.observer import Recording
from penstock.simulator.scenario import BudgetChange, Scenario
from penstock.simulator.simulation import CutDrain, Simulation
from penstock.workload.traces import TraceRequest

POOL_TICK_S: Final = 1.0
"""Simulated seconds between two allocations of a pool's GPUs to its graphs; planners scrape metrics at the same interval."""


@dataclass(frozen=True, slots=True)
class PooledGraph:
    """One graph of a simulated pool of GPUs.

    Attributes:
        scenario: Scenario of the graph, with a planner and without a GPU budget.
        requests: Requests in order of arrival.
        guaranteed: Number of GPUs that the pool gives to the graph whenever its planner wants them.
        max_gpus: Maximum number of GPUs that the graph may hold.
        priority: Priority for GPUs above the guarantee; of the graphs that request more, those with the highest number get these
            GPUs first.
    """

    scenario: Scenario
    requests: Sequence[TraceRequest]
    guaranteed: int = 0
    max_gpus: int = 100_000
    priority: int = 0

    @property
    def starts_with(self) -> int:
        """Number of GPUs that the graph's workers hold at time 0."""
        return sum(pool.replicas * pool.gpus for pool in self.scenario.pools)


@dataclass(frozen=True, slots=True)
class PoolSample:
    """One allocation of a pool's GPUs to the graphs that share them.

    Attributes:
        at_s: Time of the allocation, simulated seconds.
        held: GPUs of each graph's existing workers just before the allocation, draining workers included, by graph.
        grants: Grant of each graph (the number of GPUs that it may hold) from ``at_s`` on, by graph.
    """

    at_s: float
    held: Mapping[str, int]
    grants: Mapping[str, Grant]


@dataclass(frozen=True, slots=True)
class PoolRun:
    """Result of a pool's run.

    Attributes:
        recordings: Recording of each graph, by its name.
        samples: All allocations in order of time.
        cuts: Workers that were removed before they had finished draining, to return GPUs to the pool, by graph.
    """

    recordings: Mapping[str, Recording]
    samples: Sequence[PoolSample]
    cuts: Mapping[str, Sequence[CutDrain]]


@dataclass(slots=True)
class _Member:
    """A graph during the run.

    Attributes:
        bid: GPU count of every replica that its planner wants, the most urgent first.
        acknowledged: Serial number and note of the grant that it received last.
        cuts: Drains that were cut short so far.
    """

    graph: PooledGraph
    simulation: Simulation
    bid: tuple[int, ...]
    acknowledged: tuple[int, str] = (0, "")
    cuts: list[CutDrain] = field(default_factory=list)

    def take_bid(self) -> GraphBid:
        """Return the graph's bid, from the newest decision of its planner that had observations."""
        assert self.simulation.control is not None  # noqa: S101 - checked where it was made
        self.bid = self.simulation.control.taken.bid or self.bid
        held = self.simulation.fleet.gpus
        return GraphBid(
            self.graph.guaranteed,
            self.graph.priority,
            self.graph.max_gpus,
            self.bid,
            held,
            self.acknowledged[0],
        )

    def acknowledge(self, grant: Grant, note: str) -> None:
        """Deliver a grant to the graph if it has changed; ``note`` names the graphs that hold GPUs which this one lacks."""
        if (grant.serial, note) != self.acknowledged:
            self.acknowledged = (grant.serial, note)
            self.simulation.set_grant(grant.gpus, note)


class PoolSimulation:
    """Simulates several graphs that share the GPUs of a pool, in one simulated time.

    Every graph has its own workers, routers and planner. The pool repeatedly divides its GPUs between the graphs, by what their
    planners request and by the graphs' guarantees and priorities.
    """

    def __init__(
        self,
        terms: PoolTerms,
        graphs: Mapping[str, PooledGraph],
        *,
        changes: Sequence[BudgetChange] = (),
        allocator: Allocator = allocate,
        reclaim_s: float | None = None,
    ) -> None:
        """Set up the graphs at time 0.

        Args:
            terms: Size of the pool and rules for sharing it.
            graphs: Graphs by name.
            changes: Changes of the pool's GPUs during the run.
            allocator: Function that divides the GPUs.
            reclaim_s: Seconds after which a drain is cut short if the graph of the draining worker holds more GPUs than its grant; None
                never cuts drains.
        """
        self._terms = terms
        self._reclaim_s = reclaim_s
        self._changes = changes
        self._allocate = allocator
        self._tolerated = 0
        self._kernel = Kernel()
        self._members = {name: self._member(graph) for name, graph in graphs.items()}
        self._fleets = [each.simulation.fleet for each in self._members.values()]
        self._state: PoolState = {}
        self._samples: list[PoolSample] = []

    def run(self) -> PoolRun:
        """Run until all requests of every graph have ended, and return the recordings of the graphs and the allocations of the pool.

        Raises:
            BudgetExceededError: the workers of all graphs held more GPUs than the pool has.
        """
        simulations = [each.simulation for each in self._members.values()]
        for member in self._members.values():
            member.simulation.schedule_start()
            member.simulation.set_grant(member.graph.starts_with, "")
        self._kernel.at(0.0, Order.POOL, self._tick)
        for change in self._changes:
            self._kernel.at(change.at_s, Order.FLEET, self._resize, change.gpus)
        while any(each.is_open for each in simulations) and self._kernel.step():
            self._check()
        return PoolRun(
            {name: each.simulation.finish() for name, each in self._members.items()},
            tuple(self._samples),
            {name: tuple(each.cuts) for name, each in self._members.items()},
        )

    def _member(self, graph: PooledGraph) -> _Member:
        sizes = tuple(pool.gpus for pool in graph.scenario.pools for _ in range(pool.replicas))
        planner = graph.scenario.planner
        assert planner is not None  # noqa: S101 - as `PooledGraph` says
        scenario = replace(graph.scenario, planner=replace(planner, grant=graph.starts_with))
        return _Member(graph, Simulation(scenario, graph.requests, kernel=self._kernel), sizes)

    def _tick(self) -> None:
        now_s = self._kernel.now_s
        self._samples.append(self._share_out())
        self._kernel.at(now_s + POOL_TICK_S, Order.POOL, self._tick)

    def _share_out(self) -> PoolSample:
        """Collect every graph's bid, divide the pool's GPUs, and deliver the grants."""
        now_s = self._kernel.now_s
        bids = self._observe()
        grants, self._state = self._allocate(self._terms, bids, self._state, now_s)
        self._deliver(bids, grants)
        return PoolSample(now_s, {name: bid.held for name, bid in bids.items()}, grants)

    def _observe(self) -> dict[str, GraphBid]:
        return {name: member.take_bid() for name, member in self._members.items()}

    def _deliver(self, bids: Mapping[str, GraphBid], grants: Mapping[str, Grant]) -> None:
        holdings = {name: GraphHolding(bid.guaranteed, bid.held, grants[name]) for name, bid in bids.items()}
        for name, member in self._members.items():
            lacks = shortage_message(name, holdings, "at {:.0f} s".format)
            member.acknowledge(grants[name], self._status(name, lacks))
            member.cuts += member.simulation.cut_drains(self._reclaim_s)

    def _status(self, name: str, lacks: str) -> str:
        """Return the pool's message to a graph: the graphs holding GPUs that it lacks, and whether its last drain was cut short."""
        cuts = self._members[name].cuts
        if not cuts or self._reclaim_s is None:
            return lacks
        sentence = cut_drain_message(cuts[-1].worker, self._reclaim_s)
        return with_cut_drain(lacks, sentence, self._kernel.now_s - cuts[-1].at_s).removeprefix("; ")

    @property
    def _held(self) -> int:
        return sum(fleet.gpus for fleet in self._fleets)

    def _resize(self, gpus: int) -> None:
        """Change the pool's GPUs: workers above the new number drain, and no worker joins before."""
        self._terms, self._tolerated = replace(self._terms, gpus=gpus), self._held
        self._share_out()

    def _check(self) -> None:
        held = self._held
        # GPUs held above a reduced pool must not increase.
        self._tolerated = min(self._tolerated, held)
        if held > max(self._terms.gpus, self._tolerated):
            raise BudgetExceededError(f"{held} GPUs are held, the pool has {self._terms.gpus}")
