"""Drives each job's state machine (`penstock.router.core.request`) in virtual time: choose, send, stream, retry, end.

The proxy does this over HTTP; here, function calls replace the messages. The simulated workers report stages, and each report is the
answer to the job's last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from penstock.api import Role
from penstock.engine.core.request_slots import SlotState
from penstock.router.core.limits import worker_wait_s
from penstock.router.core.request import BROKEN, RequestMachine, RequestPlan
from penstock.router.core.request_steps import (
    CLIENT_DISCONNECTED,
    AcquireWorker,
    AwaitOutage,
    BuildContinuation,
    ConfirmLease,
    Continuation,
    End,
    EndKind,
    Notification,
    PrefillFinished,
    Problem,
    PromptComputed,
    RefusedAtCapacity,
    ReleaseKv,
    ReleaseWorker,
    ResponseStarted,
    Retry,
    SendRequest,
    Step,
    StepResult,
    StreamEnding,
)
from penstock.router.core.retries import Assignment, Effects, FailedTry, RefusalReason, RetryScope
from penstock.simulator.fleet import SimulatedWorker
from penstock.simulator.heartbeats import Heartbeats
from penstock.simulator.jobs import Job, JobOutcome, PrefixChains
from penstock.simulator.kernel import Order
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.servers import ServiceStage, SimulatedEngine
from penstock.simulator.state import Scrapes, SimulationState
from penstock.simulator.succession import Succession

PATIENCE_S = 3600.0
"""Seconds after the last arrival for which the simulation continues; jobs that have not ended by then have failed. Chosen."""

_DROPPED: Final = "dropped"
"""Failure reason of a request that its engine can never serve."""
_BEGAN: Final = ResponseStarted(is_stream=True, can_resume=True)


class RequestPath:
    """Moves all jobs (requests) of a run from arrival to end. Times are simulated seconds from the start of the run.

    Attributes:
        heartbeats: Sends the heartbeats of decode workers. A heartbeat extends the lease, the time for which a prefill worker keeps the KV
            that a decode worker waits for.
        open: Number of jobs that have not ended yet; those that have not arrived count.
        end_s: Time at which the simulation stops even if jobs have not ended: one hour (`PATIENCE_S`) after the last arrival.
    """

    def __init__(
        self,
        state: SimulationState,
        succession: Succession,
        chains: PrefixChains,
        *,
        on_maybe_idle: Callable[[SimulatedWorker], None],
    ) -> None:
        """Prepare the run's jobs.

        Args:
            state: State of the simulation.
            succession: Decides which router is the picker, the one that chooses workers.
            chains: Source of the prefix keys.
            on_maybe_idle: Callback that receives a worker that may have become idle, so that it can be removed if it drains.
        """
        scenario = state.scenario
        entry, retries = scenario.entry_role, scenario.router.retries
        self._plan = RequestPlan(
            entry,
            entry is Role.PREFILL,
            lease_s=scenario.lease_s,
            max_continuations=retries.max_continuations,
            worker_wait_s=worker_wait_s(retries),
        )
        self._state, self._kernel, self._fleet = state, state.kernel, state.fleet
        self._routers, self._frontend, self._succession = state.routers, state.frontend, succession
        self._chains, self._on_maybe_idle = chains, on_maybe_idle
        self._scrapes = Scrapes(state, self.apply)
        self.heartbeats = Heartbeats(self._kernel, self._fleet, settle=self._settle, lost=self._kv_lost)
        self.open = len(state.jobs)
        self.end_s = PATIENCE_S + (state.jobs[-1].request.arrival_s if state.jobs else 0.0)

    def start(self) -> None:
        """Start the scrapes of the workers' metrics, once per simulated second; the first one is now."""
        self._scrapes.start()

    def begin(self, job: Job) -> None:
        """Start a request (``job``) that has reached the picker, the router that chooses workers. Does nothing if it has ended already."""
        if job.outcome is None:
            job.machine = RequestMachine(self._plan, self._routers[-1].retries, job.tries, self._now_s)
            self._go_on(job, None)

    def apply(self, effects: Effects[Job]) -> None:
        """Carry out the router's decisions: send assigned requests to their workers, and retry or end refused ones.

        ``effects`` are these decisions, which the router leaves to its caller: one assignment or refusal per request.
        """
        reached: set[str] = set()
        for effect in effects:
            job = effect.item
            if isinstance(effect, Assignment):
                job.assignment = effect
                self._go_on(job, effect, reached)
            else:
                self._go_on(job, effect.reason)

    def end(self, job: Job, outcome: JobOutcome) -> None:
        """End a request (``job``) with an outcome. A request must be ended exactly once.

        An orphan (a request whose client lost its connection when a router died) ends as failed, whatever ``outcome`` is.
        """
        assert job.outcome is None  # noqa: S101 - each job ends once
        job.outcome = JobOutcome.FAILED if job.is_orphan else outcome
        self._succession.ended(job)
        job.ended_s = self._now_s()
        self._router_of(job).ended(job, job.ended_s)
        job.keys = job.machine = None
        self.open -= 1

    def _now_s(self) -> float:
        return self._kernel.now_s

    def _router_of(self, job: Job) -> VirtualRouter:
        return self._routers[job.picker_index]

    # -- the machine's steps --------------------------------------------------------------------------

    def _go_on(self, job: Job, answer: StepResult, reached: set[str] | None = None) -> None:
        """Feed an answer to the job's machine, and carry out the steps that follow.

        ``reached`` are the names of workers that have received a job in the same call of `apply`.
        """
        machine = job.machine
        assert machine is not None  # noqa: S101 - it has begun, and has not ended
        effects: Effects[Job] = []
        step: Step | End | None = None
        while step is None:
            step = machine.advance(answer)
            if job.is_orphan and self._needs_client(step):
                step = machine.advance(CLIENT_DISCONNECTED)
            # After a failed try, waiting jobs are dispatched with the next event.
            effects += self._carry_out(job, machine.steps, is_quiet=isinstance(answer, FailedTry | Problem))
            match step:
                case AcquireWorker():
                    self._acquire(job, step)
                case SendRequest() if not self._send_request(job, reached):
                    step, answer = None, Problem.AT_CAPACITY
                case ConfirmLease():
                    step, answer = None, True
                case AwaitOutage():
                    step, answer = None, None
                case BuildContinuation():
                    step, answer = None, self._build_continuation(job)
                case Retry():
                    job.continuations += step.is_continuation
                    self._start_over(job)
                    step, answer = None, None
                case End():
                    self._ended(job, step, answer)
        self.apply(effects)

    def _needs_client(self, step: Step | End) -> bool:
        """Return whether a step is skipped if the client is gone with its router."""
        if isinstance(step, AcquireWorker):
            return step.role is not self._plan.entry
        return isinstance(step, Retry | BuildContinuation)

    def _carry_out(self, job: Job, steps: list[Notification], *, is_quiet: bool) -> Effects[Job]:
        effects: Effects[Job] = []
        router, now_s = self._router_of(job), self._now_s()
        for step in steps:
            match step:
                case PrefillFinished():
                    effects += router.prefilled(job, now_s)
                case ReleaseWorker():
                    effects += router.release(job, now_s, is_quiet=is_quiet)
                case RefusedAtCapacity():
                    router.core.refused_at_capacity(step.worker, now_s)
                case ReleaseKv() if not job.is_orphan:
                    self.heartbeats.release(job)
        steps.clear()
        return effects

    def _acquire(self, job: Job, step: AcquireWorker) -> None:
        now_s, is_entry = self._now_s(), step.role is self._plan.entry
        if is_entry:
            job.picker_index = len(self._routers) - 1
        router = self._router_of(job)
        if not is_entry or (router.core.deflection is not None and not step.is_retry):
            self._scrapes.count_decode(router)
        if is_entry:
            effects = router.acquire(job, now_s, is_retry=step.is_retry)
            if not step.is_retry:
                self._frontend.arrived(job, router.uncached_tokens(job))
            self._frontend.queued(job)
        else:
            effects = router.acquire_decode(job, now_s)
        self.apply(effects)
        if job.outcome is None and (is_entry or not job.is_assigned):
            for wait_s in router.longest_waits_s(job, step.role):
                if now_s + wait_s <= self.end_s:
                    self._kernel.at(now_s + wait_s, Order.MESSAGE, self._expire)

    def _expire(self) -> None:
        self.apply(self._routers[-1].expire(self._now_s()))

    def _send_request(self, job: Job, reached: set[str] | None) -> bool:
        """Send a job to its assigned worker; return False if the worker has no capacity for it."""
        assignment = job.assignment
        assert assignment is not None  # noqa: S101 - it was just chosen
        worker = self._fleet[assignment.worker.name]
        slot = worker.slots.enter(job.index, job.priority)
        if slot is SlotState.REJECTED:
            return False
        if worker.role is Role.DECODE:
            job.decoder = worker.name
            job.is_deflected = job.prefilled_s is None
            if job.is_deflected:
                job.dispatched_s = self._now_s()
                self._frontend.dispatched(job, worker.name)
            else:
                self.heartbeats.track(worker, job)
        else:
            job.worker, job.incarnation, job.dispatched_s = worker.name, worker.incarnation, self._now_s()
            job.pending_tokens = job.prompt_tokens - worker.server.cached_tokens(job)
            worker.pending_tokens += job.pending_tokens
            self._frontend.dispatched(job, worker.name)
        worker.jobs[job.index] = job
        worker.prompt_tokens += job.prompt_tokens
        if slot is SlotState.QUEUED:
            return True
        if reached is None or worker.name in reached:
            # Requests reach a worker one after the other, so an idle worker starts with the first one alone.
            self._kernel.at(self._now_s(), Order.MESSAGE, self._deliver_later, worker, job, job.attempt)
        else:
            reached.add(worker.name)
            self._deliver(worker, job)
        return True

    def _deliver(self, worker: SimulatedWorker, job: Job) -> None:
        worker.server.add(job, self._now_s())
        self.rearm(worker)

    def _deliver_later(self, worker: SimulatedWorker, job: Job, attempt: int) -> None:
        if worker.jobs.get(job.index) is job and job.attempt == attempt:
            self._deliver(worker, job)

    def _start_over(self, job: Job) -> None:
        job.attempt += 1
        job.worker = job.decoder = ""
        job.dispatched_s = job.prefilled_s = None

    def _build_continuation(self, job: Job) -> Continuation | StreamEnding:
        """Prepare the continuation of a broken stream: its prompt includes the tokens generated so far."""
        if job.emitted_tokens >= job.request.output_tokens:
            return StreamEnding(b"")
        self._chains.extend(job)
        return Continuation.READY

    def _ended(self, job: Job, end: End, answer: StepResult) -> None:
        router, now_s = self._router_of(job), self._now_s()
        if end.kind is EndKind.SERVED:
            self.end(job, JobOutcome.OK)
        elif job.is_continuation:
            # The client has received the first part of the stream.
            self._frontend.forget(job)
            self.end(job, JobOutcome.FAILED)
        elif end.kind is EndKind.ALL_BUSY and end.role is not None:
            router.core.rejections[end.role].add(now_s)
            self._frontend.rejected(job, RefusalReason.ALL_BUSY)
            self.end(job, JobOutcome.REJECTED)
        elif isinstance(answer, RefusalReason) and end.kind is not EndKind.CLIENT_DISCONNECTED:
            self._frontend.rejected(job, answer)
            router.rejected(job, answer)
            self.end(job, JobOutcome.REJECTED)
        else:
            self.end(job, JobOutcome.FAILED)

    # -- reports of workers ---------------------------------------------------------------------------

    def rearm(self, worker: SimulatedWorker) -> None:
        """Schedule the next step of the worker's engine at the time that the engine names; a step that was scheduled before is cancelled."""
        due_s = worker.server.next_s()
        worker.version += 1
        if due_s is not None:
            due_s = max(due_s, self._now_s())
            self._kernel.at(due_s, Order.ENGINE, self._wake, worker, worker.version)

    def _wake(self, worker: SimulatedWorker, version: int) -> None:
        if version != worker.version:
            return
        for job, stage in worker.server.run(self._now_s()):
            self._hear(worker, job, stage)
        self.rearm(worker)
        self._on_maybe_idle(worker)

    def _hear(self, worker: SimulatedWorker, job: Job, stage: ServiceStage) -> None:
        if stage is ServiceStage.PREFILLED:
            self._prefilled(worker, job)
        elif stage is ServiceStage.LOADED:
            self.heartbeats.read(worker, job)
        elif stage is ServiceStage.FIRST_TOKEN:
            self._first_token(job)
        elif stage is ServiceStage.DROPPED:
            self._dropped(worker, job)
        else:
            worker.ended_output_tokens += job.outputs_left
            self._frontend.completed(job)
            self._quit(worker, job)
            self._go_on(job, None)

    def _prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        job.prefilled_s = self._now_s()
        worker.computed_tokens += job.prompt_tokens - job.cached_tokens
        worker.pending_tokens -= job.pending_tokens
        job.pending_tokens = 0
        self._frontend.prefilled(job)
        self._succession.prefilled(job)
        if worker.role is Role.PREFILL:
            self._quit(worker, job)
            self._go_on(job, PromptComputed(job.cached_tokens, kv=True))

    def _first_token(self, job: Job) -> None:
        now_s, is_first = self._now_s(), job.first_token_s is None
        if is_first:
            job.first_token_s = now_s
        self._go_on(job, _BEGAN)
        if job.machine is not None and job.machine.alone_at:
            # Workers die only as the scenario says, so a request suspected of crashing workers is cleared at its first token.
            job.machine.clear()
        if is_first:
            self._router_of(job).first_token(job, now_s)
            self._frontend.first_token(job, now_s)
        else:
            self._frontend.prefilled(job)
            self._state.gaps.add(now_s - job.broken_s, 1)

    def _dropped(self, worker: SimulatedWorker, job: Job) -> None:
        worker.pending_tokens -= job.pending_tokens
        job.pending_tokens = 0
        self._frontend.left_worker(job)
        self._quit(worker, job)
        assignment = job.assignment
        assert assignment is not None  # noqa: S101 - it was dispatched to this worker
        assignment.succeeded()
        effects = self._router_of(job).release(job, self._now_s())
        self._go_on(job, FailedTry(_DROPPED, RetryScope.NOWHERE, (assignment.worker,)))
        self.apply(effects)

    def _quit(self, worker: SimulatedWorker, job: Job) -> None:
        if worker.jobs.pop(job.index, None) is not None:
            worker.prompt_tokens -= job.prompt_tokens
        following = worker.slots.leave(job.index)
        if following is not None:
            queued = worker.jobs[following]
            self._kernel.at(self._now_s(), Order.MESSAGE, self._deliver_later, worker, queued, queued.attempt)

    def _settle(self, source: SimulatedWorker) -> None:
        self.rearm(source)
        self._on_maybe_idle(source)

    def _kv_lost(self, decoder: SimulatedWorker, job: Job) -> None:
        """Retry a job whose KV did not reach its decode worker, if its router allows it."""
        self._quit(decoder, job)
        self.rearm(decoder)
        self._go_on(job, Problem.KV_LOST)

    # -- deaths ---------------------------------------------------------------------------------------

    def collect_jobs(self, worker: SimulatedWorker) -> list[Job]:
        """Return the requests of a worker that dies now, so that the caller can retry them.

        Before that, record for each request how many output tokens the worker had generated, which a retry need not generate.
        """
        jobs, server, now_s = list(worker.jobs.values()), worker.server, self._now_s()
        for job in jobs:
            job.pending_tokens, job.broken_s = 0, now_s
            if worker.role is not Role.PREFILL and isinstance(server, SimulatedEngine):
                job.emitted_tokens += server.outputs_of(job, now_s)
        self.heartbeats.forget(worker)
        return jobs

    def lose(self, jobs: Iterable[Job]) -> None:
        """Report to the routers that the worker of these requests (``jobs``) has died.

        The routers assign no request to a worker until they have the new list of workers.
        """
        for job in jobs:
            self._frontend.left_worker(job)
            self._router_of(job).lost(job, self._now_s())

    def retry(self, jobs: Iterable[Job]) -> None:
        """Retry the requests (``jobs``) whose worker has died, or let them fail if the retry rules do not allow a further attempt.

        Call it after `lose`, when the routers have the new list of workers.
        """
        for job in jobs:
            assert job.assignment is not None  # noqa: S101 - it was dispatched to that worker
            self._go_on(job, FailedTry(BROKEN, RetryScope.ANYWHERE, (job.assignment.worker,)))
