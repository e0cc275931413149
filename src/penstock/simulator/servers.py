"""The server inside a simulated worker: the engine core, or the simple server of the DualMap artefact.

Runs of uniform decode steps of the engine core are computed in one event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import takewhile

from penstock.api import Role
from penstock.engine import profiles
from penstock.engine.core.batching import RECOMPUTE_TOKENS, BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings, EngineStep, StepOutcome
from penstock.engine.core.lease import Read
from penstock.engine.core.requests import EngineRequest, EngineRole
from penstock.simulator.frontend import GapHistogram
from penstock.simulator.jobs import Job
from penstock.simulator.scenario import ProfiledModel, SimpleModel
from penstock.workload.traces import BLOCK_TOKENS


class ServiceStage(Enum):
    """Stage of a job (a request of the simulation) that a simulated engine reports.

    PREFILLED: the prompt is computed. LOADED: the prompt's KV has arrived at the decode worker. FIRST_TOKEN: the first output token is
    generated. ENDED: the answer is complete. DROPPED: the engine can never serve the job.
    """

    PREFILLED = auto()
    LOADED = auto()
    FIRST_TOKEN = auto()
    ENDED = auto()
    DROPPED = auto()


Report = tuple[Job, ServiceStage]


class SimpleServer:
    """Prefills one prompt at a time in order of arrival, in a constant time per uncached token. Decoding takes no time.

    At least the last prompt token is always computed, since the first output token follows from it. Times are simulated seconds.
    """

    def __init__(self, model: SimpleModel) -> None:
        self._model = model
        # Cached blocks by key, with their number of tokens (512, or fewer in a last block), the least recently used first.
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._end_s = 0.0
        self._wake_s = 0.0

    def add(self, job: Job, now_s: float) -> None:
        """Queue a request (``job``) that arrives at ``now_s``, in simulated seconds."""
        self._queue.append(job)
        self._wake_s = now_s

    def next_s(self) -> float | None:
        """Return the simulated time at which `run` must be called next, in seconds; None if no request is running or queued.

        This is the end of the running request or, if requests are queued and none runs, the time of the last arrival.
        """
        if self._running is not None:
            return self._end_s
        return self._wake_s if self._queue else None

    def run(self, now_s: float) -> list[Report]:
        """Finish the running request if its time is over, start the next one, and return pairs of a request and the stage that it reached.

        ``now_s`` is the current simulated time. The stages are those of `ServiceStage`, such as FIRST_TOKEN. Returns no pairs while a
        request still runs.
        """
        reports = []
        at_s = now_s
        if self._running is not None:
            if self._end_s > now_s:
                return []
            job, at_s = self._running, self._end_s
            self._running = None
            self._keep(job)
            stages = (ServiceStage.PREFILLED, ServiceStage.FIRST_TOKEN, ServiceStage.ENDED)
            reports = [(job, stage) for stage in stages]
        if self._queue:
            job = self._queue.popleft()
            self._running = job
            job.cached_tokens = min(self.cached_tokens(job), job.prompt_tokens - 1)
            work = job.prompt_tokens - job.cached_tokens
            self._end_s = at_s + work * self._model.prefill_s_per_token
        return reports

    def cached_tokens(self, job: Job) -> int:
        """Return the number of leading prompt tokens of a request (``job``) whose KV is in this server's cache."""
        hits = sum(1 for _ in takewhile(self._blocks.__contains__, job.chain))
        return min(hits * BLOCK_TOKENS, job.prompt_tokens)

    def _keep(self, job: Job) -> None:
        """Cache the complete prompt, and evict the least recently used blocks that no longer fit, the ends of prompts first."""
        blocks = self._blocks
        last = len(job.chain) - 1
        for place in range(last, -1, -1):
            key = job.chain[place]
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = BLOCK_TOKENS if place < last else job.prompt_tokens - BLOCK_TOKENS * last
                self._tokens += blocks[key]
        while self._tokens > self._model.cache_tokens:
            self._tokens -= blocks.popitem(last=False)[1]

    def kv_usage_fraction(self, now_s: float) -> float:  # noqa: ARG002 - the same at any time
        """Return the fraction of the cache that the running prompt uses, 0-1; cached blocks that no running prompt needs do not count.

        ``now_s`` is the current simulated time in seconds.
        """
        if self._running is None:
            return 0.0
        return min(1.0, self._running.prompt_tokens / self._model.cache_tokens)

    @property
    def waiting(self) -> int:
        """Number of queued requests, without the running one."""
        return len(self._queue)

    def is_idle(self, now_s: float) -> bool:  # noqa: ARG002 - the same at any time
        """Return whether no request is running or queued; ``now_s`` is ignored."""
        return self._running is None and not self._queue


class EngineModel:
    """The engine settings and latency model that all workers of one pool share; `make` returns an engine for a new worker.

    They are shared so that the latency profile is read only once.
    """

    def __init__(self, role: Role, spec: ProfiledModel) -> None:
        """Read the latency profile, and prepare the settings.

        Args:
            role: Role of the pool's workers.
            spec: Engine of the pool.
        """
        profile = profiles.load(spec.profile)
        limits = BatchLimits(
            spec.max_num_batched_tokens,
            spec.max_num_seqs,
            spec.block_size,
            by_priority=spec.preemption is not None,
            least_load_tokens=RECOMPUTE_TOKENS,
        )
        self.settings = EngineSettings(
            EngineRole(role.value),
            max(1, (spec.kv_tokens or profile.kv_capacity_tokens) // spec.block_size),
            profile.kv.bytes_per_token,
            limits,
            spec.lease,
            spec.link,
            preemption=None if spec.preemption is None else spec.preemption.terms(profile, spec.block_size),
        )
        self._latency = profile.latency()

    def make(self, keys_of: Callable[[Job, int], Sequence[int]], gaps: GapHistogram) -> SimulatedEngine:
        """Return a new simulated engine with an empty cache.

        Args:
            keys_of: Function that gets a request and a block size, and returns one prefix key for each KV block of the prompt.
            gaps: Histogram that receives the gaps between output tokens.
        """
        return SimulatedEngine(Engine(self.settings, self._latency), keys_of, gaps)


class SimulatedEngine:
    """A simulated inference engine with a latency profile, in virtual time. Times are simulated seconds.

    Attributes:
        engine: The engine's core (queue, batches, KV blocks), which a simulated worker on a cluster runs too.
        gaps: Histogram that receives the gaps between output tokens.
        gap_s: Cumulative sum of the gaps before the engine's output tokens, seconds; first tokens of requests have no gap.
        gap_tokens: Number of output tokens whose gaps are in ``gap_s``; ``gap_s / gap_tokens`` is the mean gap.
    """

    def __init__(
        self, engine: Engine, keys_of: Callable[[Job, int], Sequence[int]], gaps: GapHistogram
    ) -> None:
        """Create an idle engine.

        Args:
            engine: The engine core.
            keys_of: Function of a job and a block size that returns the keys of the prompt's KV blocks.
            gaps: Histogram that receives the gaps between output tokens.
        """
        self.engine = engine
        self.gaps = gaps
        self._role = engine.settings.role
        self._block_size = engine.settings.limits.block_size
        self._keys_of = keys_of
        self._jobs: dict[str, Job] = {}
        self._step: EngineStep | None = None
        self._ends: list[float] = []
        self._first = 0
        self._wake_s: float | None = None
        self.gap_s, self.gap_tokens = 0.0, 0

    # -- requests -------------------------------------------------------------------------------------

    def add(self, job: Job, now_s: float) -> None:
        """Queue a request (``job``) at the simulated time ``now_s``.

        A prefill engine computes the request's prompt, a decode engine fetches the prompt's KV from the prefill worker and decodes, and an
        aggregated engine computes the prompt and decodes.
        """
        self._cut(now_s)
        is_prefill = self._role is EngineRole.PREFILL
        self.engine.add(
            EngineRequest(
                job.name,
                job.prompt_tokens,
                1 if is_prefill else job.outputs_left,
                job.request.arrival_s,
                self._keys_of(job, self._block_size),
                job.priority,
                load_remote=self._role is EngineRole.DECODE and not job.is_deflected,
                pin_blocks=is_prefill,
            )
        )
        self._jobs[job.name] = job
        self._wake(now_s)

    def abort(self, name: str, now_s: float) -> None:
        """Abort the request whose id is ``name`` at the simulated time ``now_s``, and free its KV blocks. Does nothing if it is unknown."""
        self._cut(now_s)
        self.engine.abort(name, now_s)
        self._jobs.pop(name, None)
        self._wake(now_s)

    def outputs_of(self, job: Job, now_s: float) -> int:
        """Return the number of output tokens generated for ``job`` until the simulated time ``now_s``.

        Returns 0 if the engine does not have the request, or if it has ended.
        """
        self._catch_up(now_s)
        return self.engine.outputs_of(job.name)

    def end_leases(self, names: Sequence[str], now_s: float) -> list[str]:
        """Free the KV that is kept for the requests in ``names``, since decode workers have read it.

        A prefill engine keeps a prompt's KV for a limited time, the lease. ``now_s`` is the current simulated time in seconds.

        Returns:
            Names without a lease, because they are unknown or their lease has expired; empty if all had one.
        """
        self._cut(now_s)
        unknown = self.engine.pinned.read(Read(name) for name in names)
        self._wake(now_s)
        return unknown

    def extend_leases(self, names: Sequence[str], now_s: float) -> list[str]:
        """Keep the KV of the requests in ``names`` for one more lease from the simulated time ``now_s`` on, as a heartbeat asks.

        A lease is the time for which a prefill engine keeps a prompt's KV for the decode worker.

        Returns:
            Names without a lease, because they are unknown or their lease has expired; empty if all had one.
        """
        self._cut(now_s)
        return self.engine.pinned.renew(names, now_s)

    # -- time -----------------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """Return the simulated time at which `run` must be called next, in seconds; None if nothing is pending.

        The engine computes several of its next steps at once. The result is the end of the last of these steps or, if no step runs, the
        next KV transfer, expiry of kept KV, or arrival.
        """
        if self._step is not None:
            return self._ends[-1]
        times = [at_s for at_s in (self._wake_s, self.engine.next_event_s()) if at_s is not None]
        return min(times, default=None)

    def run(self, now_s: float) -> list[Report]:
        """Finish the engine's running steps if they are over, start the next ones, and return pairs of a request and the stage that it reached.

        ``now_s`` is the current simulated time. The stages are those of `ServiceStage`, such as FIRST_TOKEN. Returns no pairs while the
        steps still run.
        """
        reports: list[Report] = []
        if self._step is not None:
            if self._ends[-1] > now_s:
                return reports
            self._skip(len(self._ends) - 1 - self._first)
            outcome = self.engine.finish_step(self._step)
            self._step = None
            self._note(outcome, reports)
            now_s = outcome.end_s
        self._wake_s = None
        self._begin(now_s)
        self._take_events(reports)
        return reports

    def _begin(self, now_s: float) -> None:
        self._step = self.engine.begin_step(now_s)
        if self._step is not None:
            self._ends = self.engine.predict_end_times(self._step)
            self._first = 0

    def _skip(self, steps: int) -> None:
        if steps > 0 and self._step is not None:
            first, ends = self._first, self._ends
            batch = self._step.batch.decode_batch
            # Steps without a change in the batch have nearly equal durations, so their mean is used for each.
            mean_s = (ends[first + steps - 1] - self._step.start_s) / steps
            self._count_gaps(mean_s, steps * batch)
            rest = ends[first:] if first else ends
            self._step = self.engine.skip(self._step, rest, steps)
            self._first = first + steps

    def _catch_up(self, now_s: float) -> None:
        """Advance the engine to the step that runs at ``now_s``; a step that ends exactly then still counts as running."""
        if self._step is not None:
            ended = bisect_left(self._ends, now_s)
            self._skip(min(ended, len(self._ends) - 1) - self._first)

    def _cut(self, now_s: float) -> None:
        """Discard all predicted steps after the running one; called before the engine's requests change."""
        self._catch_up(now_s)
        if self._step is not None:
            self._ends = [self._ends[self._first]]
            self._first = 0

    def _wake(self, now_s: float) -> None:
        if self._step is None:
            self._wake_s = now_s

    # -- reports --------------------------------------------------------------------------------------

    def _note(self, outcome: StepOutcome, reports: list[Report]) -> None:
        if outcome.steady_tokens:
            self._count_gaps(outcome.gap_s, outcome.steady_tokens)
        for gap_s in outcome.late_gaps_s:
            self._count_gaps(gap_s, 1)
        for state in outcome.started:
            job = self._jobs.get(state.request.request_id)
            if job is None:
                continue
            if self._role is not EngineRole.DECODE:
                job.cached_tokens = state.cached_tokens
                reports.append((job, ServiceStage.PREFILLED))
            if self._role is not EngineRole.PREFILL:
                reports.append((job, ServiceStage.FIRST_TOKEN))
        for state in outcome.finished:
            job = self._jobs.pop(state.request.request_id, None)
            if job is not None and self._role is not EngineRole.PREFILL:
                reports.append((job, ServiceStage.ENDED))

    def _count_gaps(self, gap_s: float, tokens: int) -> None:
        self.gaps.add(gap_s, tokens)
        self.gap_s += gap_s * tokens
        self.gap_tokens += tokens

    def _take_events(self, reports: list[Report]) -> None:
        events = self.engine.take_events()
        for transfer in events.transfers:
            job = self._jobs.get(transfer.state.request.request_id)
            if job is not None:
                reports.append((job, ServiceStage.LOADED))
        for state in events.dropped:
            job = self._jobs.pop(state.request.request_id, None)
            if job is not None:
                reports.append((job, ServiceStage.DROPPED))

    # -- gauges ---------------------------------------------------------------------------------------

    def cached_tokens(self, job: Job) -> int:
        """Return the number of prompt tokens of a request (``job``) whose KV blocks are in this engine's cache now."""
        keys = self._keys_of(job, self._block_size)
        return self.engine.pool.count_hits(keys) * self._block_size

    def kv_usage_fraction(self, now_s: float) -> float:
        """Return the fraction of the engine's KV blocks in use at the simulated time ``now_s``, 0-1."""
        self._catch_up(now_s)
        return self.engine.kv_usage_fraction

    @property
    def waiting(self) -> int:
        """Number of requests that wait in the engine and are not in its running batch."""
        return self.engine.batcher.waiting

    def is_idle(self, now_s: float) -> bool:
        """Return whether no request is running or queued, and no KV is being transferred or kept for a decode worker, at ``now_s``."""
        self._catch_up(now_s)
        return self.engine.is_idle


Server = SimpleServer | SimulatedEngine
"""The server inside a worker.

After jobs were added, ``run`` must be called at the time that ``next_s`` returns; it reports the jobs' stages.
"""
