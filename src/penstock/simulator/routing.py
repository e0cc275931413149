"""The routers of a simulation: the live router's core, driven in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import inf

from penstock.api import Role, RouterConfig, SloConfig
from penstock.router.core.build import build_router
from penstock.router.core.limits import worker_wait_s
from penstock.router.core.retries import (
    Assignment,
    Effects,
    RefusalReason,
    RetryRules,
    RunningAt,
    Verdict,
)
from penstock.router.core.router import RouterCore
from penstock.router.core.worker import Worker, WorkerSize, WorkerSpec
from penstock.router.policy.busy import busy_thresholds
from penstock.router.policy.routing_policy import Arrival, AssignTime, reads_usage
from penstock.router.policy.slo_monitor import EndedRequest
from penstock.simulator.fleet import SimulatedWorker
from penstock.simulator.jobs import Job, JobOutcome
from penstock.simulator.scenario import Fault, Faults


class VirtualRouter:
    """One router of a simulation, with jobs instead of HTTP requests and simulated seconds instead of a clock.

    A job is a request of the simulation. Methods that return effects leave these actions to the caller: each effect is a job that was
    assigned to a worker, or that was refused.

    Attributes:
        core: The core of a router (queues, routing policy, view of the workers), the same as in a router on a cluster.
        retries: Rules that decide whether a job is sent to a worker again after an attempt failed.
        reads_usage: Whether the routing policy or the admission thresholds use the scraped KV cache usage of the prefill (or aggregated)
            workers, so that the caller has to pass it by `set_usage`.
        is_down: Whether its process is dead; it then dispatches nothing.
    """

    def __init__(
        self,
        config: RouterConfig,
        sizes: Mapping[Role, WorkerSize],
        *,
        slo: SloConfig = SloConfig(),  # noqa: B008 - frozen
        faults: Faults = Faults(),  # noqa: B008 - frozen
        lease_s: float = inf,
    ) -> None:
        """Create a router without workers.

        Args:
            config: Router section of the manifest.
            sizes: Capacity of a worker, by role.
            slo: Latency targets.
            faults: Faults of the scenario; only router outages are used.
            lease_s: Seconds for which a prefill worker keeps a prompt's KV at first; infinite if there is no time limit.
        """
        wait_s = worker_wait_s(config.retries)
        self.core: RouterCore[Job] = build_router(
            config, sizes, slo=slo, lease_s=lease_s, worker_wait_s=wait_s, is_supervised=True
        )
        self.retries = RetryRules(self.core.pool, config.retries, 0.0)
        queue = self.core.entry_queue
        frees_slots = queue.settings.tiers is not None or queue.settings.slot_tokens is None
        has_slots = queue.settings.slot_requests is not None or not frees_slots
        self._reads_prompts = queue.policy.assigns is AssignTime.ON_ARRIVAL
        # As in the live router, a request at an aggregated worker without slots counts until its answer ends. With tiers, its
        # slot is free as soon as its prompt is computed.
        self._holds_answers = self._reads_prompts or (self.core.entry is Role.AGGREGATED and not has_slots)
        self.reads_usage = reads_usage(queue.policy) or busy_thresholds(config.admission).is_set
        self._sizes = sizes
        self._faults = faults
        self.is_down = False

    # ------------------------------------------------------------------ requests

    def learn_prefix(self, job: Job) -> None:
        """Record that a worker has computed a request's prompt, which another router reports, so that its prefix counts as cached there."""
        self.core.learn(job.worker, self._arrival(job))

    def remove_waiting(self, job: Job, now_s: float) -> bool:
        """Remove a request (``job``) from the router's queues at the simulated time ``now_s``; return whether it was waiting in one."""
        role = self._waits_for(job)
        if role is not None:
            self.core.cancel(job, role, now_s)
        return role is not None

    def take_over(self, job: Job, before: VirtualRouter, now_s: float) -> Effects[Job]:
        """Take over a request from the previous picker, the router that chose workers before.

        A waiting request is queued again and keeps its waiting time; a running one stays at its worker. Does nothing for a request that is
        neither waiting nor running, since it will arrive by itself.

        Args:
            job: The request to take over.
            before: The previous picker.
            now_s: Current simulated time, seconds.

        Returns:
            The assignments to workers and the refusals that the caller has to carry out; empty for a running request.
        """
        if job.machine is not None:
            job.machine.rules = self.retries
        role = before._waits_for(job)
        if role is not None:
            since_s = next(
                each.since_s for each in before.core.queues[role].waiting_requests() if each.item is job
            )
            before.core.cancel(job, role, now_s)
            return self._at(now_s).acquire(
                job, role, self._arrival_at(job, role), now_s, waited_s=now_s - since_s
            )
        if job.assignment is not None and job.assignment.is_open:
            self._adopt(job, job.assignment, now_s)
        return []

    def _adopt(self, job: Job, held: Assignment[Job], now_s: float) -> None:
        is_prefilled = (
            job.first_token_s is not None if held.role is Role.DECODE else job.prefilled_s is not None
        )
        stay = RunningAt(held.worker.name, held.tokens, is_prefilled=is_prefilled)
        adopted = self.core.adopt(job, held.role, self._arrival_at(job, held.role), stay, now_s)
        if adopted is not None:
            job.assignment = adopted
            held.on_verdict = partial(_pass_on, adopted)

    def _waits_for(self, job: Job) -> Role | None:
        for role, queue in self.core.queues.items():
            if queue.waits(job):
                return role
        return None

    def acquire(self, job: Job, now_s: float, *, is_retry: bool = False) -> Effects[Job]:
        """Ask the router for a prefill (or aggregated) worker for a request, which it assigns to a worker, queues or refuses.

        Args:
            job: The request.
            now_s: Current simulated time, seconds.
            is_retry: Whether an earlier attempt has failed. The request then precedes new ones, and is not refused because of overload.

        Returns:
            The assignments to workers and the refusals that the caller has to carry out; empty if the request only waits.
        """
        if not is_retry:
            self.retries.budget.request_arrived()
        return self._at(now_s).acquire(job, self.core.entry, self._arrival(job), now_s, is_retry=is_retry)

    def acquire_decode(self, job: Job, now_s: float) -> Effects[Job]:
        """Ask the router for a decode worker for a request (``job``), which it assigns to a worker, queues or refuses.

        ``now_s`` is the current simulated time in seconds.

        The caller must have updated the loads of the decode workers (`Scrapes.count_decode`).

        Returns:
            The assignments to workers and the refusals that the caller has to carry out; empty if the request only waits.
        """
        return self._at(now_s).acquire(job, Role.DECODE, self._arrival_at(job, Role.DECODE), now_s)

    def loads_read(self, workers: Iterable[Worker], now_s: float) -> Effects[Job]:
        """Record that the metrics of ``workers`` were read at the simulated time ``now_s``, so that their loads are current.

        Returns the assignments of waiting requests that this allows, which the caller has to carry out; empty if there are none.
        """
        effects: Effects[Job] = []
        for worker in workers:
            effects += self._at(now_s).load_read(worker, now_s)
        return effects

    def prefilled(self, job: Job, now_s: float) -> Effects[Job]:
        """Record that a request's worker has computed the prompt, and return the assignments of other requests that this allows.

        The request no longer counts as dispatched to the worker, which makes room for a waiting request. Exception: if the worker is
        aggregated, or if the routing policy asks for it, a request counts until its answer ends. The caller has to carry out the
        assignments. ``now_s`` is the current simulated time in seconds.
        """
        assignment = _assigned(job)
        if assignment.role is not self.core.entry:
            return self._at(now_s).prefilled(assignment, now_s)
        effects = self._at(now_s).prefilled(assignment, now_s, cached_tokens=job.cached_tokens)
        if self._holds_answers:
            return effects
        assignment.succeeded()
        return effects + self.release(job, now_s)

    def first_token(self, job: Job, now_s: float) -> None:
        """Record a request's TTFT, from its arrival to ``now_s``, in the statistics of its priority tier.

        From these, the router judges whether the tier meets its latency targets. Does nothing if tiers are not used.
        """
        if self.core.tiers is not None:
            self.core.tiers.first_token(job.tier, now_s - job.request.arrival_s, now_s)

    def ended(self, job: Job, now_s: float) -> None:
        """Record the outcome and latencies of a request that ended at ``now_s`` in the statistics of its priority tier.

        From these, the router judges whether the tier meets its latency targets. Does nothing if tiers are not used, or if the
        request was rejected before it was assigned to a worker.
        """
        tiers = self.core.tiers
        if tiers is None or (job.outcome is JobOutcome.REJECTED and job.assignment is None):
            return
        e2e_s = now_s - job.request.arrival_s
        ttft_s = None if job.first_token_s is None else job.first_token_s - job.request.arrival_s
        is_failed = job.outcome is not JobOutcome.OK
        ended = EndedRequest.after(ttft_s, e2e_s, job.request.output_tokens, is_failed=is_failed)
        tiers.ended(job.tier, ended, now_s)

    def rejected(self, job: Job, reason: RefusalReason) -> None:
        """Add a request that was rejected without having been assigned to a worker to the count of its priority tier.

        Does nothing if tiers are not used, or if the router has counted the rejection already: a router itself counts requests that
        were shed (rejected in favour of a higher tier) and requests that waited too long. ``reason`` says why the request was
        rejected.
        """
        counted = {RefusalReason.SHED, RefusalReason.QUEUE_TIMEOUT}
        if self.core.tiers is not None and job.assignment is None and reason not in counted:
            self.core.tiers.rejected(job.tier)

    def longest_waits_s(self, job: Job, role: Role) -> tuple[float, ...]:
        """Return the waits, in simulated seconds from now, after each of which the caller must call `expire` for a waiting request.

        The request may then have waited too long. The first wait is the queue timeout. If the planner is starting workers for the waiting
        requests, two more follow: the seconds until these workers are expected to be ready, and that time plus the queue timeout. An
        infinite queue timeout means that the request never times out.

        Args:
            job: The waiting request.
            role: Role of the worker that it waits for.
        """
        settings = self.core.queues[role].settings
        own_s = settings.longest_wait_s(job.tier, is_interrupted=job.is_continuation)
        startup_s = self.core.max_startup_wait_s
        return (own_s,) if startup_s == inf else (own_s, startup_s, startup_s + own_s)

    def release(self, job: Job, now_s: float, *, is_quiet: bool = False) -> Effects[Job]:
        """End a request's assignment to its worker, so that it no longer counts there; return the assignments that this allows.

        Args:
            job: The request, which must be assigned to a worker.
            now_s: Current simulated time, seconds.
            is_quiet: Whether to assign no waiting request to any worker yet; the result is then empty.
        """
        core = self._at(now_s)
        if is_quiet:
            core.paused = tuple(core.queues)
        return core.release(_assigned(job), now_s)

    def lost(self, job: Job, now_s: float) -> None:
        """Record that the worker of a request (``job``) died at ``now_s``, and end the request's assignment to it.

        No waiting request is assigned to a worker until `set_workers` is called.
        """
        _assigned(job).failed(now_s, "broke off")
        self.release(job, now_s, is_quiet=True)

    # ------------------------------------------------------------------ workers and time

    def set_workers(self, workers: Iterable[SimulatedWorker], now_s: float) -> Effects[Job]:
        """Set the workers that are ready from the simulated time ``now_s`` on, and return the assignments and refusals that follow.

        Requests that are queued for a worker which is no longer ready are queued for another one. The caller has to carry out the result.
        """
        specs = [
            WorkerSpec(each.name, each.role, "", supervised=True, incarnation=str(each.incarnation))
            for each in workers
        ]
        effects = self._at(now_s).set_workers(specs, now_s)
        for worker in self.core.pool:
            worker.kv_capacity_tokens = self._sizes[worker.spec.role].kv_tokens
        self._fit_caches()
        return effects

    def expire(self, now_s: float) -> Effects[Job]:
        """Refuse the requests that have waited too long at the simulated time ``now_s``; return the refusals, which the caller reports."""
        return self._at(now_s).expire(now_s)

    def tick(self, now_s: float) -> Effects[Job]:
        """Do the router's periodic work: judge the tiers' targets, move waiting requests, and dispatch those that fit.

        The caller calls this once per simulated second, with the current time ``now_s``.

        Returns the assignments and refusals that the caller has to carry out; empty if there are none.
        """
        self._fit_caches()
        return self._at(now_s).tick(now_s)

    def set_usage(
        self, usage: Mapping[str, float], tokens: Mapping[str, tuple[int, int]], now_s: float
    ) -> Effects[Job]:
        """Set the scraped metrics of the prefill (or aggregated) workers.

        Args:
            usage: KV cache usage, 0-1, by worker name; unknown for workers that are missing.
            tokens: Prompt tokens of the requests at each worker at the scrape, by worker name: (all, not yet computed); (0, 0) for workers
                that are missing.
            now_s: Current simulated time, seconds.

        Returns:
            The assignments of waiting requests that this allows, which the caller has to carry out; empty if there are none.
        """
        effects: Effects[Job] = []
        for worker in list(self.core.pool):
            if worker.spec.role is self.core.entry:
                held, uncomputed = tokens.get(worker.name, (0, 0))
                worker.record_scrape(
                    usage.get(worker.name), tokens=held, uncomputed_tokens=uncomputed, now_s=now_s
                )
                effects += self.loads_read((worker,), now_s)
        return effects

    # ------------------------------------------------------------------ gauges

    def uncached_tokens(self, job: Job) -> int:
        """Return the number of prompt tokens of a request (``job``) that are not expected in a cache; all of them if it was refused."""
        expected = self.core.entry_queue.uncached_tokens(job)
        return job.prompt_tokens if expected is None else expected

    # ------------------------------------------------------------------ internal

    def _at(self, now_s: float) -> RouterCore[Job]:
        """Return the core, paused as far as the router's process is down at ``now_s``."""
        has_outage = self._faults.is_on(Fault.ROUTER_DOWN, now_s)
        self.core.paused = (
            tuple(self.core.queues) if self.is_down else (self.core.entry,) if has_outage else ()
        )
        return self.core

    def _arrival_at(self, job: Job, role: Role) -> Arrival:
        if role is Role.DECODE:
            return Arrival(
                (),
                job.prompt_tokens,
                job.tries.avoid,
                tier=job.tier,
                is_continuation=job.is_continuation,
                alone_at=_alone_at(job),
            )
        return self._arrival(job)

    def _arrival(self, job: Job) -> Arrival:
        chain, parts = (job.chain, job.sub_block_keys) if self._reads_prompts else ((), 1)
        tokens, avoid = job.prompt_tokens, job.tries.avoid
        return Arrival(
            chain,
            tokens,
            avoid,
            sub_block_keys=parts,
            tier=job.tier,
            is_continuation=job.is_continuation,
            alone_at=_alone_at(job),
        )

    def _fit_caches(self) -> None:
        for worker in self.core.pool:
            if worker.spec.role is self.core.entry:
                self.core.entry_queue.workers.fit_cache(worker.name)


def _assigned(job: Job) -> Assignment[Job]:
    assert job.assignment is not None  # noqa: S101 - only asked for once the job was dispatched
    return job.assignment


def _alone_at(job: Job) -> tuple[Role, ...]:
    return () if job.machine is None else job.machine.alone_at


def _pass_on(adopted: Assignment[Job], verdict: Verdict, _: str) -> None:
    """Forward a verdict on the previous picker's assignment to the new picker's assignment of the same job."""
    if verdict is Verdict.FIRST_PART_OK:
        adopted.first_part_ok()
    elif verdict is Verdict.SUCCEEDED:
        adopted.succeeded()
