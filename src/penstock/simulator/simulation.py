"""The world: arrivals, routers, workers, hand-over and planner on one event heap.

A request goes router → prefill worker → (KV over the link, under a lease) → decode worker, or router →
aggregated worker. The bodies are the live ones: engine core, routing policies, `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from penstock.api import Role
from penstock.engine.core.request_slots import SlotState
from penstock.router.core.retries import Assignment, Effects, RefusalReason
from penstock.simulator.fleet import SimulatedFleet, SimulatedWorker, State
from penstock.simulator.frontend import FrontendCounters, GapHistogram
from penstock.simulator.handover import Heartbeats
from penstock.simulator.jobs import Job, JobOutcome, PrefixChains, make_jobs
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.observer import Recording, RunSample, recorded, sample
from penstock.simulator.planning import Control
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import Fault, PoolSpec, ProfiledModel, Scenario, WorkerFailure
from penstock.simulator.servers import EngineModel, Server, ServiceStage, SimpleServer
from penstock.simulator.state import Scrapes, SimulationState
from penstock.simulator.succession import Succession
from penstock.workload.traces import TraceRequest

SWITCH_S = 2.0
"""Chosen: from idle to serving the other role: the call, its check, and two looks of the router's discovery."""

PATIENCE_S = 3600.0
"""Chosen: how long after the last arrival the world goes on; what has not ended then has failed."""


class Simulation:
    """One run."""

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[TraceRequest],
        *,
        chains: PrefixChains | None = None,
        kernel: Kernel | None = None,
    ) -> None:
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
            lambda: VirtualRouter(scenario.router, sizes, faults=scenario.faults, lease_s=scenario.lease_s),
            ready=self._update_router,
            end=self._end,
            apply=self._apply,
        )
        self.routers: Sequence[VirtualRouter] = self._succession.pickers
        self.frontend = FrontendCounters(self.gaps, scenario.slo_s)
        state = SimulationState(
            scenario, self.kernel, self.fleet, self.routers, self.jobs, self.gaps, self.frontend
        )
        self.control = (
            None if scenario.planner is None else Control(state, scenario.planner, self._scale, self._switch)
        )
        self._heartbeats = Heartbeats(self.kernel, self.fleet, settle=self._settle, lost=self._kv_lost)
        self._scrapes = Scrapes(state, self._apply)
        self._state = state
        self._samples: list[RunSample] = []
        self._open = len(self.jobs)
        self._next_job = 0
        self._last_s = self.jobs[-1].request.arrival_s if self.jobs else 0.0

    # -- running --------------------------------------------------------------------------------------

    def run(self, watch: Callable[[], None] | None = None, *, watch_events: int = 20_000) -> Recording:
        """Run until every job has ended, with a look each so many events."""
        self.schedule_start()
        kernel, fleet = self.kernel, self.fleet
        while self.is_open and kernel.step():
            fleet.check_budget()
            if watch is not None and kernel.events % watch_events == 0:
                watch()
        return self.finish()

    @property
    def is_open(self) -> bool:
        """Whether jobs have not ended, and may yet."""
        return self._open > 0 and self.kernel.now_s <= self._last_s + PATIENCE_S

    def finish(self) -> Recording:
        """Let what has not ended fail, and return everything."""
        for job in self.jobs:
            if job.outcome is None:
                self._end(job, JobOutcome.FAILED)
        decisions = [] if self.control is None else self.control.planner.decisions
        return recorded(self._state, self._samples, decisions)

    def set_grant(self, gpus: int) -> None:
        """Hold no more GPUs from now on than a pool grants; what is there above them is drained."""
        self.fleet.set_limit(gpus)
        if self.control is not None:
            self.control.planner.set_grant(gpus)

    def schedule_start(self) -> None:
        """Put the workers of time 0 in place, and the first events on the heap."""
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
        self._succession.start()
        if self.control is not None:
            self.control.start()
        kernel.at(0.0, Order.SAMPLE, self._sample)
        self._scrapes.start()
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
        self._succession.came(job)
        if self.scenario.faults.is_on(Fault.ROUTER_DOWN, self.kernel.now_s):
            self._end(job, JobOutcome.FAILED)
            return
        request = job.request
        longest = min(
            (model.settings.longest_tokens(job.priority) for model in self._models.values()), default=None
        )
        if longest is not None and request.input_tokens + request.output_tokens > longest:
            self._end(job, JobOutcome.REJECTED)
            return
        delay_s = self._succession.delay_s(job)
        if delay_s:
            self.kernel.at(self.kernel.now_s + delay_s, Order.MESSAGE, self._submit, job)
        else:
            self._submit(job)

    def _submit(self, job: Job, *, again: bool = False) -> None:
        if job.outcome is not None:
            return
        job.router = len(self.routers) - 1
        router = self.routers[-1]
        now_s = self.kernel.now_s
        if router.core.deflection is not None and not again:
            self._scrapes.count_decode(router)
        effects = router.acquire(job, now_s, again=again)
        if not again:
            self.frontend.arrived(job, router.uncached_tokens(job))
        self.frontend.queued(job)
        self._apply(effects)
        if job.outcome is None:
            self._expire_later(router, job, self.scenario.entry_role)

    def _expire_later(self, router: VirtualRouter, job: Job, role: Role) -> None:
        for wait_s in router.longest_waits_s(job, role):
            due_s = self.kernel.now_s + wait_s
            if due_s <= self._last_s + PATIENCE_S:
                self.kernel.at(due_s, Order.MESSAGE, self._expire)

    def _expire(self) -> None:
        self._apply(self.routers[-1].expire(self.kernel.now_s))

    def _apply(self, effects: Effects[Job]) -> None:
        reached: set[str] = set()
        for effect in effects:
            if isinstance(effect, Assignment):
                self._dispatched(effect, reached)
                continue
            job = effect.item
            router = self.routers[job.router]
            if effect.reason is RefusalReason.QUEUE_TIMEOUT and job.prefilled_s is not None:
                self._heartbeats.give_back(job)
                if router.retry_unread(job, self.kernel.now_s):
                    self._start_over(job, may_retry=True)
                    continue
            self.frontend.not_taken(job, effect.reason)
            router.rejected(job, effect.reason)
            self._end(job, JobOutcome.REJECTED)

    def _dispatched(self, assignment: Assignment[Job], reached: set[str]) -> None:
        """Send a job to its worker; ``reached`` are the jobs that have just got one."""
        job, worker = assignment.item, self.fleet[assignment.worker.name]
        slot = worker.slots.enter(job.index, job.priority)
        if slot is SlotState.REJECTED:
            self._turned_away(assignment)
            return
        if worker.role is Role.DECODE:
            job.decode_assignment, job.decoder = assignment, worker.name
            job.is_deflected = job.prefilled_s is None
            if job.is_deflected:
                job.assignment, job.handed_s = None, self.kernel.now_s
                self.frontend.given(job, worker.name)
            else:
                self._heartbeats.track(worker, job)
        else:
            now_s = self.kernel.now_s
            job.assignment, job.decode_assignment = assignment, None
            job.worker, job.incarnation, job.handed_s = worker.name, worker.incarnation, now_s
            job.pending_tokens = job.request.input_tokens - worker.server.cached_tokens(job)
            worker.pending_tokens += job.pending_tokens
            self.frontend.given(job, worker.name)
        worker.jobs[job.index] = job
        worker.prompt_tokens += job.request.input_tokens
        if slot is SlotState.QUEUED:
            return
        if worker.name in reached:
            # Requests reach a worker one after the other: an idle one begins with the first alone.
            self.kernel.at(self.kernel.now_s, Order.MESSAGE, self._deliver_later, worker, job, job.attempt)
        else:
            reached.add(worker.name)
            self._deliver(worker, job)

    def _turned_away(self, assignment: Assignment[Job]) -> None:
        """Ask another worker for a job that one has no room for, each at most once."""
        job, now_s = assignment.item, self.kernel.now_s
        if not self.routers[job.router].turned_away(assignment, now_s):
            self.frontend.not_taken(job, RefusalReason.ALL_BUSY)
            self._end(job, JobOutcome.REJECTED)
        elif assignment.role is Role.DECODE and job.prefilled_s is not None:
            self._decode(job)
        else:
            self._submit(job, again=True)

    def _deliver(self, worker: SimulatedWorker, job: Job) -> None:
        worker.server.add(job, self.kernel.now_s)
        self._rearm(worker)

    def _deliver_later(self, worker: SimulatedWorker, job: Job, attempt: int) -> None:
        if worker.jobs.get(job.index) is job and job.attempt == attempt:
            self._deliver(worker, job)

    # -- workers --------------------------------------------------------------------------------------

    def _rearm(self, worker: SimulatedWorker) -> None:
        """Schedule a worker's next wake-up; an older one becomes void."""
        due_s = worker.server.next_s()
        worker.version += 1
        if due_s is not None:
            due_s = max(due_s, self.kernel.now_s)
            self.kernel.at(due_s, Order.ENGINE, self._wake, worker, worker.version)

    def _wake(self, worker: SimulatedWorker, version: int) -> None:
        if version != worker.version:
            return
        for job, stage in worker.server.run(self.kernel.now_s):
            self._hear(worker, job, stage)
        self._rearm(worker)
        self._let_go_if_idle(worker)

    def _hear(self, worker: SimulatedWorker, job: Job, stage: ServiceStage) -> None:
        now_s = self.kernel.now_s
        if stage is ServiceStage.PREFILLED:
            self._prefilled(worker, job)
        elif stage is ServiceStage.LOADED:
            self._heartbeats.read(worker, job)
        elif stage is ServiceStage.FIRST_TOKEN:
            job.first_token_s = now_s
            self._apply(self.routers[job.router].first_token(job, now_s))
            self.frontend.first_token(job, now_s)
        elif stage is ServiceStage.DROPPED:
            worker.pending_tokens -= job.pending_tokens
            job.pending_tokens = 0
            self.frontend.lost(job)
            self._leave(worker, job, JobOutcome.FAILED)
        else:
            worker.ended_outputs += job.request.output_tokens
            self.frontend.completed(job)
            self._leave(worker, job, JobOutcome.OK)

    def _leave(self, worker: SimulatedWorker, job: Job, outcome: JobOutcome) -> None:
        now_s = self.kernel.now_s
        self._quit(worker, job)
        router = self.routers[job.router]
        held = job.decode_assignment if worker.role is Role.DECODE else job.assignment
        effects = router.left(held, now_s)
        self._end(job, outcome)
        self._apply(effects)

    def _prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        job.prefilled_s = self.kernel.now_s
        computed = job.request.input_tokens - job.cached_tokens
        worker.busy_tokens += computed
        worker.pending_tokens -= job.pending_tokens
        job.pending_tokens = 0
        self.frontend.prefilled(job)
        self._succession.computed(job)
        router = self.routers[job.router]
        effects = router.prefilled(job, self.kernel.now_s)
        if worker.role is Role.PREFILL:
            self._quit(worker, job)
            effects += router.left(job.assignment, self.kernel.now_s)
            if job.is_orphan:
                self._end(job, JobOutcome.FAILED)
            else:
                self._decode(job)
        self._apply(effects)

    def _quit(self, worker: SimulatedWorker, job: Job) -> None:
        if worker.jobs.pop(job.index, None) is not None:
            worker.prompt_tokens -= job.request.input_tokens
        following = worker.slots.leave(job.index)
        if following is not None:
            queued = worker.jobs[following]
            self.kernel.at(
                self.kernel.now_s, Order.MESSAGE, self._deliver_later, worker, queued, queued.attempt
            )

    def _let_go_if_idle(self, worker: SimulatedWorker) -> None:
        is_leaving = worker.state in {State.DRAINING, State.SWITCHING}
        if not is_leaving or worker.jobs or not worker.server.is_idle(self.kernel.now_s):
            return
        if worker.state is State.DRAINING:
            self._remove(worker)
            self.fleet.check_budget()
        elif worker.takes is not worker.role:
            made = self.fleet.switched(worker, self.kernel.now_s)
            self.kernel.at(self.kernel.now_s + SWITCH_S, Order.FLEET, self._ready, made, made.incarnation)

    def _settle(self, source: SimulatedWorker) -> None:
        self._rearm(source)
        self._let_go_if_idle(source)

    # -- the second stage -----------------------------------------------------------------------------

    def _decode(self, job: Job) -> None:
        router = self.routers[job.router]
        self._scrapes.count_decode(router)
        self._apply(router.acquire_decode(job, self.kernel.now_s))
        if job.outcome is None and job.decode_assignment is None:
            self._expire_later(router, job, Role.DECODE)

    # -- ends -----------------------------------------------------------------------------------------

    def _end(self, job: Job, outcome: JobOutcome) -> None:
        assert job.outcome is None  # noqa: S101 - each job ends once
        job.outcome = JobOutcome.FAILED if job.is_orphan else outcome
        self._succession.left(job)
        job.ended_s = self.kernel.now_s
        self.routers[job.router].ended(job, self.kernel.now_s)
        job.keys = None
        self._open -= 1

    def _kv_lost(self, decoder: SimulatedWorker, job: Job) -> None:
        """Try a job again whose KV did not reach its decode worker, if its router allows it."""
        self._quit(decoder, job)
        self._rearm(decoder)
        self._start_over(job, may_retry=self.routers[job.router].retry_without_kv(job, self.kernel.now_s))

    def _start_over(self, job: Job, *, may_retry: bool) -> None:
        """Try a job again from the router, or end it."""
        if not may_retry or job.is_orphan:
            self._end(job, JobOutcome.FAILED)
            return
        job.attempt += 1
        job.worker = job.decoder = ""
        job.handed_s = job.prefilled_s = None
        self._submit(job, again=True)

    # -- joins, leaves, deaths ------------------------------------------------------------------------

    def _update_router(self) -> None:
        workers = [worker for worker in self.fleet if worker.state is State.READY]
        self._apply(self.routers[-1].set_workers(workers, self.kernel.now_s))

    def _scale(self, role: Role, replicas: int) -> None:
        """Bring ready + starting replicas of a role to a number; leaves drain first."""
        now_s = self.kernel.now_s
        difference = replicas - self.fleet.counts(role).replicas
        for _ in range(max(0, difference)):
            worker = self.fleet.join(role, now_s)
            if worker is not None and worker.is_placed:
                self._start(worker)
        for _ in range(max(0, -difference)):
            worker = self.fleet.victim(role)
            if worker is None:
                break
            self._drain(worker)
        self.fleet.check_budget()
        self._update_router()

    def _switch(self, giver: Role, taker: Role, count: int) -> None:
        """Turn ready workers of one role into workers of the other, each once it is idle."""
        for _ in range(count):
            worker = self.fleet.least_busy(giver)
            if worker is None:
                break
            worker.state, worker.takes = State.SWITCHING, taker
            self.kernel.at(self.kernel.now_s, Order.MESSAGE, self._let_go_if_idle, worker)
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
            worker.state, worker.takes = State.DRAINING, None
            self.kernel.at(self.kernel.now_s, Order.MESSAGE, self._let_go_if_idle, worker)
        else:
            self._remove(worker)

    def _ready(self, worker: SimulatedWorker, incarnation: int) -> None:
        is_due = worker.state in {State.STARTING, State.DOWN} or worker.takes is worker.role
        if is_due and worker.incarnation == incarnation:
            worker.state, worker.takes = State.READY, None
            self._update_router()

    def _fail(self, failure: WorkerFailure) -> None:
        worker = self.fleet.get(failure.worker)
        if worker is None or worker.state is State.DOWN or not worker.is_placed:
            return
        jobs = list(worker.jobs.values())
        was_draining = worker.state is State.DRAINING
        for job in jobs:
            job.pending_tokens = 0
        self._heartbeats.forget(worker)
        self.fleet.renew(worker)
        worker.version += 1
        if failure.back_s is None or was_draining:
            self._remove(worker)
        else:
            # One that was to switch comes back in its new role.
            back = worker if worker.takes is None else self.fleet.switched(worker, self.kernel.now_s)
            back.state, back.takes = State.DOWN, None
            self.kernel.at(failure.back_s, Order.FLEET, self._ready, back, back.incarnation)
        now_s = self.kernel.now_s
        for job in jobs:
            self.frontend.lost(job)
            held = job.decode_assignment if worker.role is Role.DECODE else job.assignment
            assert held is not None  # noqa: S101 - it was dispatched to this worker
            self.routers[job.router].lost(held, now_s)
        self._update_router()
        for job in jobs:
            may_retry = job.first_token_s is None and self.routers[job.router].retry(job, now_s)
            self._start_over(job, may_retry=may_retry)
