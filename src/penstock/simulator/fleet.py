"""The simulated workers: joining, draining, dying, coming back; and the GPUs that they hold.

A worker holds its GPUs from being asked for until it is gone; `SimulatedFleet.check_budget` is called after every event.
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
from penstock_planner.decide.observation import PoolCounts


class BudgetExceededError(PenstockError):
    """Existing workers hold more GPUs than allowed: a bug of any caller."""


class State(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SWITCHING = "switching"
    DOWN = "down"
    GONE = "gone"


class SimulatedWorker:
    """One worker.

    Attributes:
        name: ``role-number``, never used twice.
        is_placed: A node has its GPUs.
        incarnation: Raised with each death.
        version: Of its wake-up event; older ones are void.
        pending_tokens: Prompt tokens that it has yet to compute.
        prompt_tokens: Of the jobs in flight.
        ended_outputs: Tokens generated for jobs that have left.
        busy_tokens: Prompt tokens computed so far.
        kv_usage_fraction: As last scraped, with the tokens then in flight; None before the first scrape.
        slots: Which of its jobs run and which wait for its engine, by index.
        drains_since_s: When its drain began; None: it does not drain.
        takes: The role that it switches to, once it is idle, or has switched to and does not serve yet; None: it stays.
    """

    def __init__(self, spec: PoolSpec, number: int, server: Server, joined_s: float) -> None:
        self.spec = spec
        self.joined_s = joined_s
        self.is_placed = False
        self.number = number
        self.name = f"{spec.role.value}-{number}"
        self.state = State.STARTING
        self.incarnation = 0
        self.version = 0
        self.busy_tokens = 0
        self.takes: Role | None = None
        self.drains_since_s: float | None = None
        self.renew(server)

    def renew(self, server: Server) -> None:
        """Begin with nothing: a new process."""
        self.server = server
        self.jobs: dict[int, Job] = {}
        self.pending_tokens = 0
        self.prompt_tokens = 0
        self.ended_outputs = 0
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
        """Return the role of the worker's pool."""
        return self.spec.role


class SimulatedFleet:
    """Every worker that ever joined, by name; ``gpus`` are held by existing workers, of which ``placed_gpus`` on a node."""

    def __init__(self, scenario: Scenario, make_server: Callable[[Role], Server]) -> None:
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
        """Return a worker that exists, by name."""
        return self._workers.get(name)

    def of(self, role: Role, *states: State) -> list[SimulatedWorker]:
        """Return the workers of a role that are in one of the states, in order of joining."""
        return [each for each in self._workers.values() if each.spec.role is role and each.state in states]

    def counts(self, role: Role) -> PoolCounts:
        """Return a pool's replicas as the planner sees them; a dead worker that comes back is starting."""
        spec = self._scenario.pool(role)
        switching = len(self._taken(role))
        return PoolCounts(
            ready=len(self.of(role, State.READY)),
            starting=len(self.of(role, State.STARTING, State.DOWN)) + switching,
            draining=len(self.of(role, State.DRAINING)),
            gpus=spec.gpus,
            switching=switching,
        )

    def join(self, role: Role, now_s: float) -> SimulatedWorker | None:
        """Add a worker, on a node if one is free; return None where the budget does not allow it."""
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
        """Return the worker in the role that it takes, with the same GPUs, an empty cache and another name."""
        assert worker.takes is not None  # noqa: S101 - the caller's
        made = self._named(self._scenario.pool(worker.takes), now_s)
        made.is_placed, made.state, made.takes = worker.is_placed, State.SWITCHING, made.role
        worker.state, worker.takes = State.GONE, None
        del self._workers[worker.name]
        return made

    def _place(self, worker: SimulatedWorker) -> bool:
        nodes = self._scenario.faults.node_gpus
        worker.is_placed = nodes is None or self.placed_gpus + worker.spec.gpus <= nodes
        self.placed_gpus += worker.spec.gpus if worker.is_placed else 0
        return worker.is_placed

    def place_waiting(self) -> list[SimulatedWorker]:
        """Find nodes for pending workers, and return the ones that got one."""
        return [each for each in self._workers.values() if not each.is_placed and self._place(each)]

    @property
    def is_above_limit(self) -> bool:
        """Whether existing workers hold more than the budget."""
        return self._limit is not None and self.gpus > self._limit

    def set_limit(self, gpus: int) -> None:
        """Change the budget: no worker joins above it from now on; existing ones may stay."""
        self._limit, self._tolerated = gpus, self.gpus

    def victim(self, role: Role) -> SimulatedWorker | None:
        """Return the workers to remove, newest first.

        One that has no node, else one that does not serve yet, else the one with the fewest jobs.
        """
        unready = self.of(role, State.STARTING, State.DOWN)
        if unready:
            return next((each for each in reversed(unready) if not each.is_placed), unready[-1])
        if taken := self._taken(role):
            return taken[-1]
        return self.least_busy(role)

    def least_busy(self, role: Role) -> SimulatedWorker | None:
        """Return the ready worker with the fewest jobs, the newest of several."""
        ready = self.of(role, State.READY)
        return min(ready, key=lambda each: (len(each.jobs), -each.number), default=None)

    def _taken(self, role: Role) -> list[SimulatedWorker]:
        return [each for each in self._workers.values() if each.takes is role]

    def remove(self, worker: SimulatedWorker) -> None:
        """Let a worker go; its GPUs are free."""
        worker.state = State.GONE
        del self._workers[worker.name]
        self.gpus -= worker.spec.gpus
        self.placed_gpus -= worker.spec.gpus if worker.is_placed else 0

    def renew(self, worker: SimulatedWorker) -> None:
        """Give a worker that died a new, empty inside."""
        worker.incarnation += 1
        worker.renew(self._make_server(worker.role))

    def check_budget(self) -> None:
        """Assert that the budget holds."""
        if self._limit is None:
            return
        # What a lowered budget found above it may only become less.
        self._tolerated = min(self._tolerated, self.gpus)
        if self.gpus > max(self._limit, self._tolerated):
            raise BudgetExceededError(f"{self.gpus} GPUs are held, {self._limit} are allowed")
