"""The world: arrivals, routers, workers, hand-over and planner on one event heap.

A request goes router → prefill worker → (KV over the link, under a lease) → decode worker, or router →
aggregated worker. The bodies are the live ones: engine core, routing policies, `decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock_graph.models import Role
from penstock_planner.decide.decision import Decision
from penstock_router.policy.baselines import LeastLoaded
from penstock_router.policy.candidate import Candidate, RoutedRequest
from penstock_simulator.engine_server import EngineModel, EngineServer
from penstock_simulator.fleet import Fleet, State, Worker
from penstock_simulator.gaps import GapHistogram
from penstock_simulator.handover import Heartbeats
from penstock_simulator.jobs import Fate, Job, PrefixChains
from penstock_simulator.kernel import Kernel, Order
from penstock_simulator.observer import Observer, Recording
from penstock_simulator.planning import Sight, VirtualPlanner
from penstock_simulator.routing import Routing, make_routing
from penstock_simulator.scenario import Failure, PoolSpec, ProfiledModel, Resize, Scenario
from penstock_simulator.servers import Server, SimpleServer, Stage
from penstock_workload.traces import TraceRequest

SCRAPE_S = 1.0
"""Between two scrapes of the workers' metrics; the live router's default."""

PATIENCE_S = 3600.0
"""Chosen: how long after the last arrival the world goes on; what has not ended then has failed."""


class World:
    """One run.

    Attributes:
        kernel: Its time.
        gaps: Between successive tokens, over all workers.
        fleet: Its workers.
        jobs: In order of arrival.
        planner: None without one.
    """

    def __init__(
        self, scenario: Scenario, requests: Sequence[TraceRequest], *, chains: PrefixChains | None = None
    ) -> None:
        """Build everything; nothing runs yet.

        Args:
            scenario: The world.
            requests: Arrivals never decrease.
            chains: Makes the prefix keys; None: from the requests' ids and the scenario's seed.

        Raises:
            ConfigError: no such profile or policy.
        """
        self.scenario = scenario
        self.kernel = Kernel()
        self.gaps = GapHistogram()
        self._chains = chains or PrefixChains(scenario.seed)
        self._models = {
            pool.role: EngineModel(pool.role, pool.model)
            for pool in scenario.pools
            if isinstance(pool.model, ProfiledModel)
        }
        self.fleet = Fleet(scenario, self._make_server)
        self.jobs = [
            Job(index, request, self._chains.chain(request), head_parts=self._chains.head_parts)
            for index, request in enumerate(requests)
        ]
        self._routers: list[Routing] = [
            make_routing(
                scenario.router,
                scenario.entry_role,
                slo_s=scenario.slo_s,
                cache_tokens=self._cache_tokens(scenario.entry_role),
            )
            for _ in range(scenario.router.routers)
        ]
        self.planner = None if scenario.planner is None else VirtualPlanner(scenario.planner)
        self._decode_policy = LeastLoaded()
        self._decode_state = self._decode_policy.new_state()
        self._heartbeats = Heartbeats(self)
        self._observer = Observer(self)
        self._open = len(self.jobs)
        self._next_job = 0
        self._last_s = self.jobs[-1].request.arrival_s if self.jobs else 0.0

    # -- running --------------------------------------------------------------------------------------

    def run(
        self, on_progress: Callable[[int], None] | None = None, *, progress_events: int = 20_000
    ) -> Recording:
        """Run until every job has ended.

        Args:
            on_progress: Called with the number of jobs that have ended, now and then.
            progress_events: Events between two calls.
        """
        self._schedule_start()
        kernel, fleet = self.kernel, self.fleet
        end_s = self._last_s + PATIENCE_S
        while self._open and kernel.step():
            fleet.check_budget()
            if kernel.now_s > end_s:
                break
            if on_progress is not None and kernel.events % progress_events == 0:
                on_progress(len(self.jobs) - self._open)
        for job in self.jobs:
            if job.fate is None:
                self._end(job, Fate.FAILED)
        return self._observer.finish()

    def _schedule_start(self) -> None:
        scenario, kernel = self.scenario, self.kernel
        for pool in scenario.pools:
            for _ in range(pool.replicas):
                worker = self.fleet.join(pool.role)
                if worker is not None:
                    worker.state = State.READY
        self._tell_routers()
        for resize in scenario.resizes:
            kernel.at(resize.at_s, Order.FLEET, self._resize, resize)
        for failure in scenario.failures:
            kernel.at(failure.at_s, Order.FLEET, self._fail, failure)
        if self.planner is not None:
            kernel.at(self.planner.next_s, Order.PLANNER, self._plan)
        kernel.at(0.0, Order.SAMPLE, self._sample)
        kernel.at(0.0, Order.NEWS, self._scrape)
        self._schedule_arrival()

    def _make_server(self, role: Role) -> Server:
        pool: PoolSpec = self.scenario.pool(role)
        if isinstance(pool.model, ProfiledModel):
            return self._models[role].make(self._chains.block_keys, self.gaps)
        return SimpleServer(pool.model)

    def _cache_tokens(self, role: Role) -> int:
        model = self.scenario.pool(role).model
        return self._models[role].longest_tokens() if isinstance(model, ProfiledModel) else model.cache_tokens

    def _sample(self) -> None:
        self._observer.sample(self.kernel.now_s)
        self.kernel.at(self.kernel.now_s + self.scenario.sample_s, Order.SAMPLE, self._sample)

    # -- arrivals and the first stage -----------------------------------------------------------------

    def _schedule_arrival(self) -> None:
        if self._next_job < len(self.jobs):
            job = self.jobs[self._next_job]
            self._next_job += 1
            self.kernel.at(job.request.arrival_s, Order.ARRIVAL, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        self._schedule_arrival()
        job.router = job.index % len(self._routers)
        request = job.request
        longest = min((model.longest_tokens() for model in self._models.values()), default=None)
        if longest is not None and request.input_tokens + request.output_tokens > longest:
            self._end(job, Fate.REJECTED)
        else:
            self._submit(job)

    def _submit(self, job: Job, *, is_retry: bool = False) -> None:
        router = self._routers[job.router]
        now_s = self.kernel.now_s
        if not router.submit(job, now_s, is_retry=is_retry):
            self._end(job, Fate.REJECTED)
            return
        if self.scenario.router.max_wait_s is not None:
            self.kernel.at(now_s + self.scenario.router.max_wait_s, Order.NEWS, self._expire, router)
        self._hand_out(router)

    def _expire(self, router: Routing) -> None:
        for job in router.expired(self.kernel.now_s):
            self._end(job, Fate.REJECTED)

    def _hand_out(self, router: Routing) -> None:
        now_s = self.kernel.now_s
        given: set[str] = set()
        for job, name in router.take(now_s):
            worker = self.fleet[name]
            job.worker, job.incarnation, job.handed_s = name, worker.incarnation, now_s
            job.pending_tokens = job.request.input_tokens - worker.server.cached_tokens(job)
            worker.pending_tokens += job.pending_tokens
            self._count_in(worker, job)
            if name in given:
                # Requests reach a worker one after the other: an idle one begins with the first alone.
                self.kernel.at(now_s, Order.NEWS, self._deliver_later, worker, job, job.attempt)
            else:
                given.add(name)
                self._deliver(worker, job)

    def _count_in(self, worker: Worker, job: Job) -> None:
        worker.jobs[job.index] = job
        worker.prompt_tokens += job.request.input_tokens

    def _deliver(self, worker: Worker, job: Job) -> None:
        worker.server.add(job, self.kernel.now_s)
        self.rearm(worker)

    def _deliver_later(self, worker: Worker, job: Job, attempt: int) -> None:
        if worker.jobs.get(job.index) is job and job.attempt == attempt:
            self._deliver(worker, job)

    # -- workers --------------------------------------------------------------------------------------

    def rearm(self, worker: Worker) -> None:
        """Schedule a worker's next wake-up; an older one becomes void."""
        due_s = worker.server.next_s()
        worker.version += 1
        if due_s is not None:
            due_s = max(due_s, self.kernel.now_s)
            self.kernel.at(due_s, Order.ENGINE, self._wake, worker, worker.version)

    def _wake(self, worker: Worker, version: int) -> None:
        if version != worker.version:
            return
        for report in worker.server.run(self.kernel.now_s):
            self._hear(worker, report.job, report.stage)
        self.rearm(worker)
        if worker.state is State.DRAINING:
            self.let_go_if_idle(worker)

    def _hear(self, worker: Worker, job: Job, stage: Stage) -> None:
        now_s = self.kernel.now_s
        if stage is Stage.PREFILLED:
            self._prefilled(worker, job)
        elif stage is Stage.LOADED:
            self._heartbeats.read(worker, job)
        elif stage is Stage.FIRST_TOKEN:
            job.first_token_s = now_s
        else:
            self.quit(worker, job)
            worker.ended_outputs += job.request.output_tokens
            if worker.role is not Role.DECODE:
                self._routers[job.router].ended(job, now_s)
            self._end(job, Fate.OK)

    def _prefilled(self, worker: Worker, job: Job) -> None:
        job.prefilled_s = self.kernel.now_s
        computed = job.request.input_tokens - job.cached_tokens
        worker.busy_tokens += computed
        worker.pending_tokens -= job.pending_tokens
        job.pending_tokens = 0
        router = self._routers[job.router]
        router.prefilled(job, worker.name, self.kernel.now_s)
        if worker.role is Role.PREFILL:
            self.quit(worker, job)
            router.ended(job, self.kernel.now_s)
            self._decode(job)
        self._hand_out(router)

    def quit(self, worker: Worker, job: Job) -> None:
        """Take a job off a worker."""
        if worker.jobs.pop(job.index, None) is not None:
            worker.prompt_tokens -= job.request.input_tokens

    def let_go_if_idle(self, worker: Worker) -> None:
        """Remove a draining worker once nothing is left on it."""
        if worker.state is State.DRAINING and not worker.jobs and worker.server.is_idle(self.kernel.now_s):
            self.fleet.remove(worker)
            self.fleet.check_budget()

    # -- the second stage -----------------------------------------------------------------------------

    def _decode(self, job: Job) -> None:
        workers = self.fleet.of(Role.DECODE, State.READY)
        if not workers:
            self.start_over(job)
            return
        candidates = [
            Candidate(
                each.name,
                Role.DECODE,
                len(each.jobs),
                self._tokens_on(each),
                each.kv_usage_fraction,
                each.scraped_tokens,
            )
            for each in workers
        ]
        choice = self._decode_policy.choose(
            candidates, RoutedRequest(job.request.input_tokens), self._decode_state
        )
        worker = self.fleet[choice.candidate.name]
        job.decoder = worker.name
        self._heartbeats.track(worker, job)
        self._count_in(worker, job)
        self._deliver(worker, job)

    def _tokens_on(self, worker: Worker) -> int:
        """Return prompts in flight plus what was generated for them so far."""
        server = worker.server
        assert isinstance(server, EngineServer)  # noqa: S101 - decode pools are never simple, the scenario says
        server.kv_usage_fraction(self.kernel.now_s)
        return worker.prompt_tokens + max(0, server.engine.counters.generation_tokens - worker.ended_outputs)

    def _scrape(self) -> None:
        """Read the workers' gauges; the routers know them ``news_delay_s`` later."""
        now_s, delay_s = self.kernel.now_s, self.scenario.router.news_delay_s
        usage = {}
        for worker in self.fleet.of(Role.DECODE, State.READY, State.DRAINING):
            usage[worker.name] = (
                worker.incarnation,
                worker.server.kv_usage_fraction(now_s),
                self._tokens_on(worker),
            )
        self.kernel.at(now_s + delay_s, Order.NEWS, self._spread_news, usage, self._others_tokens())
        if any(router.reads_usage for router in self._routers):
            entry = self.fleet.of(self.scenario.entry_role, State.READY)
            gauges = {worker.name: worker.server.kv_usage_fraction(now_s) for worker in entry}
            for router in self._routers:
                tokens = router.inflight_tokens()
                self.kernel.at(now_s + delay_s, Order.NEWS, router.heard_usage, gauges, tokens)
        for router in self._routers:
            router.tick(now_s)
            self._hand_out(router)
        self.kernel.at(now_s + SCRAPE_S, Order.NEWS, self._scrape)

    def _others_tokens(self) -> list[dict[str, int]]:
        """Return, for each router, what the others have pending at each entry worker."""
        if len(self._routers) == 1:
            return []
        names = [worker.name for worker in self.fleet.of(self.scenario.entry_role, State.READY)]
        own = [[router.pending_tokens(name) for name in names] for router in self._routers]
        total = [sum(column) for column in zip(*own, strict=True)]
        return [
            {name: whole - part for name, whole, part in zip(names, total, parts, strict=True)}
            for parts in own
        ]

    def _spread_news(
        self, usage: Mapping[str, tuple[int, float, int]], others: Sequence[Mapping[str, int]]
    ) -> None:
        for name, (incarnation, fraction, tokens) in usage.items():
            worker = self.fleet.get(name)
            if worker is not None and worker.incarnation == incarnation:
                worker.kv_usage_fraction, worker.scraped_tokens = fraction, tokens
        if others:
            for router, tokens_of in zip(self._routers, others, strict=True):
                router.heard(tokens_of)

    # -- ends -----------------------------------------------------------------------------------------

    def _end(self, job: Job, fate: Fate) -> None:
        assert job.fate is None  # noqa: S101 - each job ends once
        job.fate = fate
        job.ended_s = self.kernel.now_s
        job.keys = None
        self._open -= 1

    def start_over(self, job: Job) -> None:
        """Try a job again from the router, unless its first token is out or its retries are used up."""
        if job.first_token_s is not None or job.retries >= self.scenario.router.max_retries:
            self._end(job, Fate.FAILED)
            return
        job.retries += 1
        job.attempt += 1
        job.worker = job.decoder = ""
        job.handed_s = job.prefilled_s = None
        self._submit(job, is_retry=True)

    # -- joins, leaves, deaths ------------------------------------------------------------------------

    def _tell_routers(self) -> None:
        names = [worker.name for worker in self.fleet.of(self.scenario.entry_role, State.READY)]
        for router in self._routers:
            router.set_workers(names, self.kernel.now_s)
            self._hand_out(router)

    def scale(self, role: Role, replicas: int) -> None:
        """Bring ready + starting replicas of a role to a number; leaves drain first."""
        now_s = self.kernel.now_s
        difference = replicas - self.fleet.counts(role).replicas
        for _ in range(max(0, difference)):
            worker = self.fleet.join(role)
            if worker is not None:
                self.kernel.at(now_s + self.scenario.cold_start_s, Order.FLEET, self._ready, worker, 0)
        for _ in range(max(0, -difference)):
            worker = self.fleet.victim(role)
            if worker is None:
                break
            self._drain(worker)
        self.fleet.check_budget()
        self._tell_routers()

    def _drain(self, worker: Worker) -> None:
        if worker.state is State.READY:
            worker.state = State.DRAINING
            self.kernel.at(self.kernel.now_s, Order.NEWS, self.let_go_if_idle, worker)
        else:
            self.fleet.remove(worker)

    def _ready(self, worker: Worker, incarnation: int) -> None:
        if worker.state in {State.STARTING, State.DOWN} and worker.incarnation == incarnation:
            worker.state = State.READY
            self._tell_routers()

    def _resize(self, resize: Resize) -> None:
        self.scale(resize.role, resize.replicas)

    def _fail(self, failure: Failure) -> None:
        worker = self.fleet.get(failure.worker)
        if worker is None or worker.state is State.DOWN:
            return
        jobs = list(worker.jobs.values())
        was_draining = worker.state is State.DRAINING
        for job in jobs:
            job.pending_tokens = 0
        self._heartbeats.forget(worker)
        self.fleet.renew(worker)
        worker.version += 1
        if failure.back_s is None or was_draining:
            self.fleet.remove(worker)
        else:
            worker.state = State.DOWN
            self.kernel.at(failure.back_s, Order.FLEET, self._ready, worker, worker.incarnation)
        for job in jobs:
            if job.prefilled_s is None:
                self._routers[job.router].lost(job, worker.name, self.kernel.now_s)
            elif worker.role is not Role.DECODE:
                self._routers[job.router].ended(job, self.kernel.now_s)
        self._tell_routers()
        for job in jobs:
            self.start_over(job)

    # -- planner --------------------------------------------------------------------------------------

    def _plan(self) -> None:
        planner = self.planner
        assert planner is not None  # noqa: S101 - only scheduled with one
        decision = planner.tick(self.kernel.now_s, self._sight())
        if decision is not None:
            self._carry_out(decision)
        self.kernel.at(planner.next_s, Order.PLANNER, self._plan)

    def _sight(self) -> Sight:
        fleet = self.fleet
        roles = [pool.role for pool in self.scenario.pools]
        kv_role = Role.DECODE if self.scenario.is_disaggregated else Role.AGGREGATED
        now_s = self.kernel.now_s
        waiting = sum(router.waiting for router in self._routers)
        return Sight(
            pools={role: fleet.counts(role) for role in roles},
            is_adjusting=any(fleet.of(role, State.STARTING, State.DRAINING) for role in roles),
            kv={each.name: each.server.kv_usage_fraction(now_s) for each in fleet.of(kv_role, State.READY)},
            waiting=waiting if self.scenario.is_disaggregated else None,
            age_s=self.scenario.router.news_delay_s,
        )

    def _carry_out(self, decision: Decision) -> None:
        for role in decision.changes:
            self.scale(role.role, role.desired)

    # -- for the observer -----------------------------------------------------------------------------

    def queued_tokens(self, worker: Worker) -> int:
        """Return the prompt tokens that wait in routers for one worker."""
        return sum(router.queued_tokens(worker.name) for router in self._routers)

    @property
    def waiting(self) -> int:
        """Jobs that wait in routers."""
        return sum(router.waiting for router in self._routers)
