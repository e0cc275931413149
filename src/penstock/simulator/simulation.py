"""The simulation: arrivals, routers, workers, KV transfer and planner as events in one virtual time.

A request goes router → prefill worker → (KV over the link, under a lease) → decode worker, or router → aggregated worker. The engine
core, the routing policies and the planner's `decide` are the code of the live components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.api import Role
from penstock.gpu_pool.reclaim import drain_grace_s
from penstock.simulator.fleet import SimulatedFleet, SimulatedWorker, State
from penstock.simulator.frontend import FrontendCounters, GapHistogram
from penstock.simulator.jobs import Job, JobOutcome, PrefixChains, make_jobs
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.observer import Recording, RunSample, recorded, sample
from penstock.simulator.planning import Control, DecisionSummary
from penstock.simulator.request_path import RequestPath
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import Fault, PoolSpec, ProfiledModel, Scenario, WorkerFailure
from penstock.simulator.servers import EngineModel, Server, SimpleServer
from penstock.simulator.state import SimulationState
from penstock.simulator.succession import Succession
from penstock.workload.traces import TraceRequest
from penstock_planner.ledger import Ledger


@dataclass(frozen=True, slots=True)
class CutDrain:
    """A worker that was removed before it had finished draining.

    Attributes:
        at_s: Time of the removal, simulated seconds.
        worker: Name of the worker.
        requests: Indices, in the order of arrival, of the requests that the worker was still serving.
    """

    at_s: float
    worker: str
    requests: tuple[int, ...]


SWITCH_S = 2.0
"""Seconds from the end of a worker's last request in one role until the worker serves in the other role.

Chosen: the switch request, its check, and two discovery intervals of the router.
"""


class Simulation:
    """Runs one scenario in virtual time. A job is a request of the simulation.

    Attributes:
        scenario: Workers, routers, planner and faults of the run.
        kernel: Events and virtual time.
        gaps: Histogram of the gaps between output tokens.
        fleet: All existing workers.
        jobs: All requests in order of arrival.
        routers: All routers that have been the picker (the router that chooses workers) so far; the last one is the picker now.
        frontend: Request counters for the planner.
        control: The planner; None if the scenario has no planner.
    """

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[TraceRequest],
        *,
        chains: PrefixChains | None = None,
        kernel: Kernel | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            scenario: Scenario to simulate.
            requests: Requests in order of arrival.
            chains: Source of prefix keys; None creates one from the scenario's seed.
            kernel: Kernel to share with other simulations; None creates one.
            ledger: Ledger (decision log) that the planner writes as a live planner does; None writes none.
        """
        self.scenario = scenario
        self.kernel = kernel or Kernel()
        self.gaps = GapHistogram(None if scenario.planner is None else scenario.planner.itl_slo_s)
        self._chains = chains or PrefixChains(scenario.seed)
        self._start_ups = np.random.default_rng(scenario.seed)
        self._models = {
            pool.role: EngineModel(pool.role, pool.model)
            for pool in scenario.pools
            if isinstance(pool.model, ProfiledModel)
        }
        self.fleet = SimulatedFleet(scenario, self._make_server)
        tiers = scenario.router.tiers
        self.jobs = make_jobs(requests, self._chains, default_tier=tiers.default if tiers.enabled else None)
        sizes = {role: scenario.pool(role).worker_size(self._cache_tokens(role)) for role in scenario.roles}
        self._succession = Succession(
            self.kernel,
            scenario.routers,
            lambda: VirtualRouter(
                scenario.router,
                sizes,
                slo=scenario.slo,
                faults=scenario.faults,
                lease_s=scenario.lease_s,
            ),
            ready=self._update_router,
        )
        self.routers: Sequence[VirtualRouter] = self._succession.pickers
        self.frontend = FrontendCounters(self.gaps, scenario.slo.ttft_seconds)
        state = SimulationState(
            scenario, self.kernel, self.fleet, self.routers, self.jobs, self.gaps, self.frontend
        )
        self.control = (
            None
            if scenario.planner is None
            else Control(state, scenario.planner, self._scale, self._switch, ledger=ledger)
        )
        self._path = RequestPath(state, self._succession, self._chains, on_maybe_idle=self._finish_if_idle)
        self._state = state
        self._samples: list[RunSample] = []
        self._next_job = 0

    # -- running --------------------------------------------------------------------------------------

    def run(self, watch: Callable[[], None] | None = None, *, watch_events: int = 20_000) -> Recording:
        """Run until every request has ended, and return everything that was recorded.

        Args:
            watch: Callback that is called every ``watch_events`` events, for example to report progress; None calls nothing.
            watch_events: Number of events between two calls of ``watch``.

        Raises:
            BudgetExceededError: workers held more GPUs than the budget, which is a bug.
        """
        self.schedule_start()
        kernel, fleet = self.kernel, self.fleet
        while self.is_open and kernel.step():
            fleet.check_budget()
            if watch is not None and kernel.events % watch_events == 0:
                watch()
        return self.finish()

    @property
    def is_open(self) -> bool:
        """Whether some requests have not ended, and the simulation's time limit, one simulated hour after the last arrival, is not reached."""
        return self._path.open > 0 and self.kernel.now_s <= self._path.end_s

    def finish(self) -> Recording:
        """End, as failed, all requests that have not ended yet, and return everything that was recorded of the run."""
        for job in self.jobs:
            if job.outcome is None:
                self._path.end(job, JobOutcome.FAILED)
        taken = DecisionSummary() if self.control is None else self.control.taken
        return recorded(self._state, self._samples, taken)

    def set_grant(self, gpus: int, note: str) -> None:
        """Limit the GPUs that the workers hold to the number that a GPU pool grants, from now on.

        No worker joins above this number of GPUs, and the planner drains workers until the remaining ones fit into it.

        Args:
            gpus: Number of GPUs granted.
            note: Sentence for the planner's explanations that names the graphs holding GPUs which this graph lacks.
        """
        self.fleet.set_limit(gpus)
        if self.control is not None:
            self.control.planner.set_grant(gpus, note)

    def cut_drains(self, reclaim_s: float | None) -> list[CutDrain]:
        """Remove the workers that have been draining for longer than ``reclaim_s``; return them, or an empty list if there are none.

        Args:
            reclaim_s: Maximum simulated seconds from the start of a drain (the GPU pool's reclaim.graceSeconds). Drains are not limited if
                it is None, or if the workers hold no more GPUs than the pool grants.
        """
        now_s = self.kernel.now_s
        most_s = drain_grace_s(math.inf, reclaim_s=reclaim_s, is_above=self.fleet.is_above_limit)
        late = [
            worker
            for worker in self.fleet
            if worker.state is State.DRAINING
            and worker.drains_since_s is not None
            and now_s - worker.drains_since_s >= most_s
        ]
        return [
            CutDrain(now_s, worker.name, tuple(job.index for job in self._die(worker, None)))
            for worker in late
        ]

    def schedule_start(self) -> None:
        """Create the workers that exist at time 0, and schedule the first events: arrivals, resizes, failures, scrapes and planner."""
        scenario, kernel = self.scenario, self.kernel
        for pool in scenario.pools:
            for _ in range(pool.replicas):
                worker = self.fleet.join(pool.role, 0.0)
                if worker is not None:
                    worker.state = State.READY
        self._update_router()
        for resize in scenario.resizes:
            kernel.at(resize.at_s, Order.FLEET, self._scale, resize.role, resize.replicas)
        for failure in scenario.failures:
            kernel.at(failure.at_s, Order.FLEET, self._fail, failure)
        for change in scenario.faults.budget:
            kernel.at(change.at_s, Order.FLEET, self.fleet.set_limit, change.gpus)
        for period in scenario.faults.periods:
            if period.kind is Fault.ROUTER_DOWN:
                kernel.at(period.to_s, Order.FLEET, self._update_router)
        self._succession.start(self._path.end, self._path.apply)
        if self.control is not None:
            self.control.start()
        kernel.at(0.0, Order.SAMPLE, self._sample)
        self._path.start()
        self._schedule_arrival()

    def _make_server(self, role: Role) -> Server:
        pool: PoolSpec = self.scenario.pool(role)
        if isinstance(pool.model, ProfiledModel):
            return self._models[role].make(self._chains.block_keys, self.gaps)
        return SimpleServer(pool.model)

    def _cache_tokens(self, role: Role) -> int:
        model = self.scenario.pool(role).model
        return (
            self._models[role].settings.longest_tokens()
            if isinstance(model, ProfiledModel)
            else model.cache_tokens
        )

    def _sample(self) -> None:
        self._samples.append(sample(self._state))
        self.kernel.at(self.kernel.now_s + self.scenario.sample_s, Order.SAMPLE, self._sample)

    # -- arrivals and the first stage -----------------------------------------------------------------

    def _schedule_arrival(self) -> None:
        if self._next_job < len(self.jobs):
            job = self.jobs[self._next_job]
            self._next_job += 1
            self.kernel.at(job.request.arrival_s, Order.ARRIVAL, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        self._schedule_arrival()
        self._succession.arrived(job)
        if self.scenario.faults.is_on(Fault.ROUTER_DOWN, self.kernel.now_s):
            self._path.end(job, JobOutcome.FAILED)
            return
        request = job.request
        longest = min(
            (model.settings.longest_tokens(job.priority) for model in self._models.values()), default=None
        )
        if longest is not None and request.input_tokens + request.output_tokens > longest:
            self._path.end(job, JobOutcome.REJECTED)
            return
        delay_s = self._succession.delay_s(job)
        if delay_s:
            self.kernel.at(self.kernel.now_s + delay_s, Order.MESSAGE, self._path.begin, job)
        else:
            self._path.begin(job)

    # -- workers --------------------------------------------------------------------------------------

    def _finish_if_idle(self, worker: SimulatedWorker) -> None:
        is_leaving = worker.state in {State.DRAINING, State.SWITCHING}
        if not is_leaving or worker.jobs or not worker.server.is_idle(self.kernel.now_s):
            return
        if worker.state is State.DRAINING:
            self._remove(worker)
            self.fleet.check_budget()
        elif worker.switching_to is not worker.role:
            made = self.fleet.switched(worker, self.kernel.now_s)
            self.kernel.at(self.kernel.now_s + SWITCH_S, Order.FLEET, self._ready, made, made.incarnation)

    # -- joins, leaves, deaths ------------------------------------------------------------------------

    def _update_router(self) -> None:
        workers = [worker for worker in self.fleet if worker.state is State.READY]
        self._path.apply(self.routers[-1].set_workers(workers, self.kernel.now_s))

    def _scale(self, role: Role, replicas: int) -> None:
        """Set the ready and starting replicas of a role to a number; removed ready workers drain first."""
        now_s = self.kernel.now_s
        difference = replicas - self.fleet.counts(role).replicas
        for _ in range(max(0, difference)):
            worker = self.fleet.join(role, now_s)
            if worker is not None and worker.is_placed:
                self._start(worker)
        for _ in range(max(0, -difference)):
            worker = self.fleet.next_to_remove(role)
            if worker is None:
                break
            self._drain(worker)
        self.fleet.check_budget()
        self._update_router()

    def _switch(self, giver: Role, taker: Role, count: int) -> None:
        """Move ready workers of one role to the other role; each changes when it is idle."""
        for _ in range(count):
            worker = self.fleet.least_busy(giver)
            if worker is None:
                break
            worker.state, worker.switching_to = State.SWITCHING, taker
            self.kernel.at(self.kernel.now_s, Order.MESSAGE, self._finish_if_idle, worker)
        self._update_router()

    def _start(self, worker: SimulatedWorker) -> None:
        now_s, faults = self.kernel.now_s, self.scenario.faults
        is_failing = faults.failing_starts > 0 and self._start_ups.random() < faults.failing_starts
        if not is_failing and not faults.is_on(Fault.NEVER_READY, now_s):
            self.kernel.at(now_s + self._start_up_s(), Order.FLEET, self._ready, worker, 0)

    def _start_up_s(self) -> float:
        mean_s, cv = self.scenario.cold_start_s, self.scenario.cold_start_cv
        if not cv:
            return mean_s
        sigma2 = math.log(1 + cv**2)
        return mean_s * float(self._start_ups.lognormal(-sigma2 / 2, math.sqrt(sigma2)))

    def _remove(self, worker: SimulatedWorker) -> None:
        self.fleet.remove(worker)
        for placed in self.fleet.place_waiting():
            self._start(placed)

    def _drain(self, worker: SimulatedWorker) -> None:
        if worker.state in {State.READY, State.SWITCHING}:
            worker.state, worker.switching_to = State.DRAINING, None
            worker.drains_since_s = self.kernel.now_s
            self.kernel.at(self.kernel.now_s, Order.MESSAGE, self._finish_if_idle, worker)
        else:
            self._remove(worker)

    def _ready(self, worker: SimulatedWorker, incarnation: int) -> None:
        is_due = worker.state in {State.STARTING, State.DOWN} or worker.switching_to is worker.role
        if is_due and worker.incarnation == incarnation:
            worker.state, worker.switching_to = State.READY, None
            self._update_router()

    def _fail(self, failure: WorkerFailure) -> None:
        worker = self.fleet.get(failure.worker)
        if worker is None or worker.state is State.DOWN or not worker.is_placed:
            return
        self._die(worker, None if worker.state is State.DRAINING else failure.back_s)

    def _die(self, worker: SimulatedWorker, back_s: float | None) -> list[Job]:
        """Kill a worker, for good or until ``back_s``; return its jobs, which continue on other workers if possible."""
        jobs = self._path.collect_jobs(worker)
        self.fleet.renew(worker)
        worker.version += 1
        if back_s is None:
            self._remove(worker)
        else:
            # A worker that was switching restarts in its new role.
            back = worker if worker.switching_to is None else self.fleet.switched(worker, self.kernel.now_s)
            back.state, back.switching_to = State.DOWN, None
            self.kernel.at(back_s, Order.FLEET, self._ready, back, back.incarnation)
        self._path.lose(jobs)
        self._update_router()
        self._path.retry(jobs)
        return jobs
