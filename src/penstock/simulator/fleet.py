"""The simulated workers, their states (starting, ready, draining, switching, dead), and the GPUs that they hold.

A worker holds its GPUs from the time at which it is requested until it is removed. `SimulatedFleet.check_budget` is called after every
event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from penstock.api import Role
from penstock.core.errors import PenstockError
from penstock.engine.core.request_slots import RequestSlots
from penstock.simulator.jobs import Job
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.servers import Server
from penstock_planner.decide.demand.observation import PoolCounts


class BudgetExceededError(PenstockError):
    """The existing workers hold more GPUs than the budget allows, which is a bug in the calling code."""


class State(StrEnum):
    """Lifecycle state of a worker.

    STARTING: requested, but not ready yet. READY: serves requests. DRAINING: finishes its requests, then is removed.
    SWITCHING: finishes its requests, then changes to the other role. DOWN: dead, and will restart. GONE: removed.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SWITCHING = "switching"
    DOWN = "down"
    GONE = "gone"


class SimulatedWorker:
    """One simulated worker. Times are simulated seconds. A job is a request of the simulation.

    Attributes:
        spec: Pool that the worker belongs to.
        joined_s: Time at which it was requested.
        is_placed: Whether it is scheduled on a node, so that it occupies GPUs there.
        number: Serial number within its role.
        name: ``role-number``; names are never reused.
        state: Its lifecycle state.
        incarnation: Number of times that it has died.
        version: Number of the newest scheduled call of its server's ``run`` (its next step); scheduled calls with an older number are
            ignored.
        server: Its simulated engine, or the simple server, which only computes prompts.
        jobs: Jobs assigned to it, by `Job.index`.
        pending_tokens: Number of prompt tokens that it still has to compute.
        prompt_tokens: Sum of the prompt tokens of the jobs assigned to it.
        ended_output_tokens: Number of tokens generated for jobs that have ended, since its process started.
        computed_tokens: Cumulative number of prompt tokens computed.
        kv_usage_fraction: KV cache usage, 0-1, of a decode worker at the last metrics scrape; None before the first one, and for other
            roles.
        scraped_tokens, scraped_uncomputed_tokens: Tokens of its jobs at the last metrics scrape: the prompt and generated tokens, and the
            prompt tokens that were not computed yet; 0 before the first scrape, and for roles other than decode.
        slots: Which of its jobs, by their index, run in the engine, and which wait because the engine accepts no more.
        drains_since_s: Time at which its drain began; None if it does not drain.
        switching_to: Role that it is switching to, from the decision until it serves in that role; None if it is not switching.
    """

    def __init__(self, spec: PoolSpec, number: int, server: Server, joined_s: float) -> None:
        """Create a starting worker that is not on a node.

        Args:
            spec: Pool of its role.
            number: Serial number within the role.
            server: Empty server of the worker.
            joined_s: Time at which it is requested, in simulated seconds.
        """
        self.spec = spec
        self.joined_s = joined_s
        self.is_placed = False
        self.number = number
        self.name = f"{spec.role.value}-{number}"
        self.state = State.STARTING
        self.incarnation = 0
        self.version = 0
        self.computed_tokens = 0
        self.switching_to: Role | None = None
        self.drains_since_s: float | None = None
        self.renew(server)

    def renew(self, server: Server) -> None:
        """Reset the worker to a new process without requests or cache, after its process died; ``server`` is its new engine."""
        self.server = server
        self.jobs: dict[int, Job] = {}
        self.pending_tokens = 0
        self.prompt_tokens = 0
        self.ended_output_tokens = 0
        self.kv_usage_fraction: float | None = None
        self.scraped_tokens = 0
        self.scraped_uncomputed_tokens = 0
        model = self.spec.model
        self.slots: RequestSlots[int] = (
            RequestSlots(model.request_limit, model.request_queue)
            if isinstance(model, ProfiledModel)
            else RequestSlots(None, 1)
        )

    @property
    def role(self) -> Role:
        """Role of the worker: prefill, decode or aggregated."""
        return self.spec.role


class SimulatedFleet:
    """All existing workers by name, and their GPU budget.

    Attributes:
        gpus: GPUs held by existing workers.
        placed_gpus: The part of ``gpus`` that is on nodes.
        refused: Number of workers that the budget refused so far.
    """

    def __init__(self, scenario: Scenario, make_server: Callable[[Role], Server]) -> None:
        """Create a fleet without workers.

        Args:
            scenario: Scenario with the pools, the GPU budget and the nodes.
            make_server: Function that creates an empty server for a worker of a role.
        """
        self._scenario = scenario
        self._make_server = make_server
        self._workers: dict[str, SimulatedWorker] = {}
        self._numbers = dict.fromkeys((pool.role for pool in scenario.pools), 0)
        self._limit = scenario.max_gpus
        self._tolerated = 0
        self.gpus = 0
        self.placed_gpus = 0
        self.refused = 0

    def __iter__(self) -> Iterator[SimulatedWorker]:
        return iter(self._workers.values())

    def __getitem__(self, name: str) -> SimulatedWorker:
        return self._workers[name]

    def get(self, name: str) -> SimulatedWorker | None:
        """Return the existing worker of this name; None if there is none or it was removed."""
        return self._workers.get(name)

    def of(self, role: Role, *states: State) -> list[SimulatedWorker]:
        """Return the workers of a role whose lifecycle state is one of ``states``, in the order in which they were requested."""
        return [each for each in self._workers.values() if each.spec.role is role and each.state in states]

    def counts(self, role: Role) -> PoolCounts:
        """Return the numbers of ready, starting, draining and switching replicas of a role, as the planner observes them.

        A dead worker that will restart counts as starting. A worker that is switching to the role counts as starting and as switching.
        """
        spec = self._scenario.pool(role)
        switching = len(self._switching_to(role))
        return PoolCounts(
            ready=len(self.of(role, State.READY)),
            starting=len(self.of(role, State.STARTING, State.DOWN)) + switching,
            draining=len(self.of(role, State.DRAINING)),
            gpus=spec.gpus,
            switching=switching,
        )

    def join(self, role: Role, now_s: float) -> SimulatedWorker | None:
        """Add a worker of ``role`` in state STARTING to the fleet at the simulated time ``now_s``, and return it.

        Returns None, and adds no worker, if the GPU budget does not allow it.

        The worker is placed on a node if the nodes have GPUs that no worker holds; else it waits for a node.
        """
        spec = self._scenario.pool(role)
        if self._limit is not None and self.gpus + spec.gpus > self._limit:
            self.refused += 1
            return None
        worker = self._named(spec, now_s)
        self.gpus += spec.gpus
        self._place(worker)
        return worker

    def _named(self, spec: PoolSpec, now_s: float) -> SimulatedWorker:
        role = spec.role
        worker = SimulatedWorker(spec, self._numbers[role], self._make_server(role), now_s)
        self._numbers[role] += 1
        self._workers[worker.name] = worker
        return worker

    def switched(self, worker: SimulatedWorker, now_s: float) -> SimulatedWorker:
        """Replace a worker that changes its role by a new one of the role in ``worker.switching_to``, and return the new worker.

        The new worker has the same GPUs, an empty cache and a new name. It is in state SWITCHING until it serves. ``now_s`` is the current
        simulated time in seconds.
        """
        assert worker.switching_to is not None  # noqa: S101 - the caller's
        made = self._named(self._scenario.pool(worker.switching_to), now_s)
        made.is_placed, made.state, made.switching_to = worker.is_placed, State.SWITCHING, made.role
        worker.state, worker.switching_to = State.GONE, None
        del self._workers[worker.name]
        return made

    def _place(self, worker: SimulatedWorker) -> bool:
        nodes = self._scenario.faults.node_gpus
        worker.is_placed = nodes is None or self.placed_gpus + worker.spec.gpus <= nodes
        self.placed_gpus += worker.spec.gpus if worker.is_placed else 0
        return worker.is_placed

    def place_waiting(self) -> list[SimulatedWorker]:
        """Place workers that have no node yet, as far as the nodes have GPUs that no worker holds; return the workers that were placed."""
        return [each for each in self._workers.values() if not each.is_placed and self._place(each)]

    @property
    def is_above_limit(self) -> bool:
        """Whether existing workers hold more GPUs than the GPU budget allows; False without a budget."""
        return self._limit is not None and self.gpus > self._limit

    def set_limit(self, gpus: int) -> None:
        """Set the GPU budget. No worker joins above it from now on; existing workers are not removed."""
        self._limit, self._tolerated = gpus, self.gpus

    def next_to_remove(self, role: Role) -> SimulatedWorker | None:
        """Return the worker of a role to remove next when the role is scaled down, or None if the role has none.

        It is a worker without a node; if there is none, one that is starting or down; then one that is switching to the role; then the
        ready worker with the fewest requests. Among equals, the newest is chosen.
        """
        unready = self.of(role, State.STARTING, State.DOWN)
        if unready:
            return next((each for each in reversed(unready) if not each.is_placed), unready[-1])
        if switching := self._switching_to(role):
            return switching[-1]
        return self.least_busy(role)

    def least_busy(self, role: Role) -> SimulatedWorker | None:
        """Return the ready worker of a role with the fewest requests, or None if none is ready; among equals, the newest."""
        ready = self.of(role, State.READY)
        return min(ready, key=lambda each: (len(each.jobs), -each.number), default=None)

    def _switching_to(self, role: Role) -> list[SimulatedWorker]:
        return [each for each in self._workers.values() if each.switching_to is role]

    def remove(self, worker: SimulatedWorker) -> None:
        """Remove a worker from the fleet; its GPUs no longer count as held."""
        worker.state = State.GONE
        del self._workers[worker.name]
        self.gpus -= worker.spec.gpus
        self.placed_gpus -= worker.spec.gpus if worker.is_placed else 0

    def renew(self, worker: SimulatedWorker) -> None:
        """Restart a worker that died, as a new process with an empty engine: no requests and an empty cache."""
        worker.incarnation += 1
        worker.renew(self._make_server(worker.role))

    def check_budget(self) -> None:
        """Check that existing workers hold no more GPUs than the budget.

        After the budget was lowered, the GPUs held above it are tolerated, as long as they do not increase.

        Raises:
            BudgetExceededError: existing workers hold more GPUs than the budget, and more than they held since it was lowered.
        """
        if self._limit is None:
            return
        # GPUs held above a lowered budget must not increase.
        self._tolerated = min(self._tolerated, self.gpus)
        if self.gpus > max(self._limit, self._tolerated):
            raise BudgetExceededError(f"{self.gpus} GPUs are held, {self._limit} are allowed")
