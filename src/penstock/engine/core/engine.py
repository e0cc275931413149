"""State machine of one simulated engine: accepts requests and computes simulated steps and outputs; servers and simulators drive it.

Usage: `add` requests, call `begin_step(now)` when no step runs, and `finish_step` at the end of the step.
`next_event_s` returns when a transfer or a lease needs attention although no step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.tiers import TierPriority
from penstock.engine.core.batching import Batch, Batcher, BatchLimits
from penstock.engine.core.kv_blocks import BlockPool, KvFact, KvJournal
from penstock.engine.core.latency import LatencyModel
from penstock.engine.core.lease import LeaseTerms, PinnedPrompts
from penstock.engine.core.preemption import PreemptionCosts, PreemptionTerms
from penstock.engine.core.requests import (
    EngineCounters,
    EngineRequest,
    EngineRole,
    FinishReason,
    PreemptionKind,
    RequestState,
)
from penstock.engine.core.tiered_batching import TieredBatcher
from penstock.engine.core.transfer import LinkTerms, Transfer, TransferLink


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one worker's engine.

    Attributes:
        role: Role of the worker in disaggregated serving.
        num_blocks: Number of KV blocks, at least 1.
        kv_bytes_per_token: Bytes of KV per token.
        limits: Limits of one step.
        lease: Durations of the leases, the times for which it keeps blocks of a prompt for other workers to read.
        link: Bandwidth and latency of its incoming KV link.
        records_cache_changes: Whether changes of the cache are recorded for `Engine.take_kv_facts`.
        preemption: Limits of preemption by tier, which requires ``limits.by_priority``; None means vLLM's own
            preemption.
        ranks: Number of GPUs that share each block (tensor parallelism), at least 1; each rank has a part of every
            block.
    """

    role: EngineRole
    num_blocks: int
    kv_bytes_per_token: int
    limits: BatchLimits = field(default_factory=BatchLimits)
    lease: LeaseTerms = field(default_factory=LeaseTerms)
    link: LinkTerms = field(default_factory=LinkTerms)
    records_cache_changes: bool = False
    preemption: PreemptionTerms | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.preemption is not None and not self.limits.by_priority:
            raise ValueError("preemption by tier needs by_priority")

    def longest_tokens(self, priority: int = TierPriority.PREMIUM) -> int:
        """Return the maximum number of tokens of one request (prompt and output) that fit into the KV cache.

        Args:
            priority: Priority of the request; below premium, it cannot use the blocks reserved for premium.
        """
        blocks = self.num_blocks
        if self.preemption is not None and priority > TierPriority.PREMIUM:
            blocks -= self.preemption.reserved_blocks(blocks)
        return blocks * self.limits.block_size


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A running step; times are simulated seconds.

    Attributes:
        batch: Work that the step does.
        start_s: Start of the step.
        end_s: End of the step.
    """

    batch: Batch
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step; times are simulated seconds.

    Attributes:
        end_s: End of the step.
        gap_s: Seconds since the previous output token of the requests counted in ``steady_tokens``, the same for all of
            them.
        steady_tokens: Number of output tokens of requests that also had an output token in the previous step.
        late_gaps_s: Seconds since the previous output token, for each request that has its first one after a
            preemption.
        started: Requests that have their first output token in this step.
        finished: Requests that ended with this step.
        computed_tokens: Number of tokens computed, including those of prompts.
    """

    end_s: float
    gap_s: float
    steady_tokens: int
    late_gaps_s: list[float]
    started: list[RequestState]
    finished: list[RequestState]
    computed_tokens: int


@dataclass(slots=True)
class Events:
    """Events between steps, each list oldest first.

    Attributes:
        transfers: KV transfers that arrived.
        declined: Requests whose KV was to be fetched from another worker, but is computed here.
        expired: IDs of requests whose kept blocks were released, because no other worker had read them when the lease
            expired.
        dropped: Requests that failed because they were preempted and resuming them would have taken too long.
    """

    transfers: list[Transfer] = field(default_factory=list)
    declined: list[RequestState] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    dropped: list[RequestState] = field(default_factory=list)


class Engine:
    """Scheduler, cache, leases and KV link of one worker. Times are simulated seconds.

    Attributes:
        settings: Settings of the engine.
        counters: Cumulative counters.
        pool: The KV blocks.
        batcher: The scheduler.
        pinned: Prompts whose blocks are kept for other workers.
    """

    def __init__(self, settings: EngineSettings, latency: LatencyModel) -> None:
        self.settings = settings
        self.counters = EngineCounters()
        self._latency = latency
        self._journal = KvJournal(settings.limits.block_size) if settings.records_cache_changes else None
        self.pool = BlockPool(settings.num_blocks, self._journal)
        terms, self._tiered = settings.preemption, None
        if terms is not None:
            costs = PreemptionCosts(settings.kv_bytes_per_token, terms.host_link, latency.prefill)
            self._tiered = TieredBatcher(settings.limits, self.pool, self._journal, terms=terms, costs=costs)
        self.batcher = self._tiered or Batcher(settings.limits, self.pool, self._journal)
        self.pinned = PinnedPrompts(
            settings.lease,
            settings.role,
            ranks=settings.ranks,
            counters=self.counters,
            release=self.batcher.release,
        )
        self._link = TransferLink(settings.link)
        self._orphans = 0
        self._requests: dict[str, RequestState] = {}
        self._events = Events()
        self._next_index = 0
        self._last_end_s = 0.0

    # -- requests -------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> RequestState:
        """Queue a request and return its state; it can be scheduled from the next step on.

        Raises:
            ValueError: The request can never fit into the cache.
        """
        total = request.prompt_tokens + request.output_tokens
        # The last output is not computed again, so it needs no KV.
        if total - 1 > self.settings.longest_tokens(request.priority):
            raise ValueError(f"{request.request_id}: {total} tokens exceed the cache")
        state = RequestState(request, self._next_index, request.prompt_tokens, request.load_remote)
        self._next_index += 1
        self._requests[request.request_id] = state
        self.batcher.enqueue(state)
        return state

    def abort(self, request_id: str, now_s: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request early; return False if it is unknown or has ended.

        Blocks that a transfer is still writing are released when the transfer ends.

        Args:
            request_id: ID of the request.
            now_s: Simulated time in seconds.
            reason: Finish reason to record.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        if self.batcher.remove(state):
            self.batcher.release(state)
        else:
            self._orphans += 1
        state.finish_reason = reason
        state.finished_s = now_s
        return True

    def outputs_of(self, request_id: str) -> int:
        """Return the number of tokens generated for a request; 0 if the request is unknown or has ended."""
        state = self._requests.get(request_id)
        return 0 if state is None else self.batcher.outputs_of(state)

    def take_kv_facts(self) -> list[KvFact]:
        """Return the changes of the prefix cache since the last call, oldest first; empty if the engine keeps no journal."""
        return [] if self._journal is None else self._journal.take()

    # -- time -----------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Process transfers and copies that ended, and leases that expired, at or before ``now_s`` (simulated seconds)."""
        if self._tiered is not None:
            self._orphans -= self._tiered.finish_copies(now_s)
        for transfer in self._link.finish(now_s):
            state = transfer.state
            if state.epoch == transfer.epoch:
                self.batcher.loaded(state)
                self._events.transfers.append(transfer)
            else:
                self._orphans -= 1
                self.batcher.release(state)
        self._events.expired += self.pinned.expire(now_s)

    def next_event_s(self) -> float | None:
        """Return the simulated time at which `advance` will next change something; None if nothing is pending."""
        copied_s = None if self._tiered is None else self._tiered.swap.next_s()
        times = (self._link.next_s(), self.pinned.next_expiry_s(), copied_s)
        return min((at for at in times if at is not None), default=None)

    def take_events(self) -> Events:
        """Return the events since the last call of this method."""
        events, self._events = self._events, Events()
        return events

    def begin_step(self, now_s: float) -> EngineStep | None:
        """Plan and start the next step at ``now_s`` (simulated seconds); return None if no request can run."""
        self.advance(now_s)
        batch = self._plan(now_s)
        if batch is None:
            return None
        chunks = [(span.start, span.end, span.begins) for span in batch.spans]
        duration_s = self._latency.step_s(chunks, batch.decode_batch, batch.decode_kv_tokens)
        return EngineStep(batch, now_s, now_s + duration_s)

    def finish_step(self, step: EngineStep) -> StepOutcome:
        """Complete ``step`` and return its outcome; call this at the step's ``end_s``."""
        now_s = step.end_s
        decoded = len(self.batcher.decoding)
        prefilled, ended = self.batcher.complete(step.batch)
        started, late_gaps, from_decode = self._note_first_outputs(step, prefilled)
        for state in ended:
            self._end(state, now_s)
        gap_s = now_s - self._last_end_s
        self._last_end_s = now_s
        self.counters.generation_tokens += decoded + len(prefilled)
        self.counters.steps += 1
        return StepOutcome(now_s, gap_s, decoded - from_decode, late_gaps, started, ended, step.batch.tokens)

    def _plan(self, now_s: float) -> Batch | None:
        while True:
            batch = self.batcher.plan()
            self._note_plan(batch, now_s)
            if batch.spans or batch.decode_batch:
                return batch
            # A plan that only preempted admitted no request; a waiting request may fit now.
            if not batch.preempted:
                return None

    def predict_end_times(self, step: EngineStep) -> list[float]:
        """Return the end of the running step, and the ends of the following steps as long as requests only decode.

        The list becomes invalid if a request is added or aborted, or if leases change. It ends with the first step
        that may end a request, or at which a transfer or lease has to be processed, since the step after it must be
        planned.
        """
        ends = [step.end_s]
        steady = self.batcher.steady_steps(step.batch)
        if steady == 1:
            return ends
        until_s = self.next_event_s()
        end_s, batch, kv_tokens = step.end_s, step.batch.decode_batch, step.batch.decode_kv_tokens
        decode_s = self._latency.decode.step_s
        for _ in range(steady - 1):
            if until_s is not None and end_s >= until_s:
                break
            kv_tokens += batch
            end_s += decode_s(batch, kv_tokens)
            ends.append(end_s)
        return ends

    def skip(self, step: EngineStep, ends: Sequence[float], steps: int) -> EngineStep:
        """Complete ``steps`` foreseen steps at once and return the step that then runs; the state is the same as after single steps.

        Args:
            step: The running step.
            ends: Result of `predict_end_times`.
            steps: Number of steps to complete, less than the length of ``ends``.
        """
        batch = step.batch.decode_batch
        self.batcher.skip(steps)
        self.counters.generation_tokens += steps * batch
        self.counters.steps += steps
        self._last_end_s = ends[steps - 1]
        rest = Batch(decode_batch=batch, decode_kv_tokens=self.batcher.kv_tokens)
        return EngineStep(rest, ends[steps - 1], ends[steps])

    def _note_plan(self, batch: Batch, now_s: float) -> None:
        counters = self.counters
        for state in batch.admitted:
            if not state.preemptions:
                counters.prefix_queries += state.request.prompt_tokens
                counters.prefix_hits += state.cached_tokens
            if not state.remote_pending:
                state.note_scheduled(now_s)
        for state in batch.joined:
            state.note_scheduled(now_s)
        for state in batch.loads:
            counters.external_queries += state.request.prompt_tokens - state.cached_tokens
            counters.external_hits += state.external_tokens
            self._link.start(state, state.external_tokens * self.settings.kv_bytes_per_token, now_s)
        self._events.declined += batch.declined
        for state, kind in batch.preempted.items():
            counters.preemptions += 1
            counters.preemptions_by[kind, state.request.priority] += 1
            if state.outputs:
                state.last_token_s = self._last_end_s
            if kind is PreemptionKind.DROP:
                del self._requests[state.request.request_id]
                self.batcher.release(state)
                state.finish_reason = FinishReason.ERROR
                state.finished_s = now_s
                self._events.dropped.append(state)
        if self._tiered is not None:
            self._tiered.start_copies(batch, now_s)

    def _note_first_outputs(
        self, step: EngineStep, prefilled: list[RequestState]
    ) -> tuple[list[RequestState], list[float], int]:
        """Return the requests with their first output in this step, the gaps of resumed requests, and how many of both were decoding."""
        started: list[RequestState] = []
        late_gaps: list[float] = []
        from_decode = 0
        for state in (*prefilled, *step.batch.joined):
            if state.finish_reason is not None:
                continue
            noted = len(started) + len(late_gaps)
            if state.first_token_s is None:
                if self.batcher.outputs_of(state):
                    state.first_token_s = step.end_s
                    self.counters.prompt_tokens += state.request.prompt_tokens
                    self.counters.prompt_tokens_cached += state.cached_tokens + state.external_tokens
                    started.append(state)
            elif state.last_token_s is not None:
                late_gaps.append(step.end_s - state.last_token_s)
                state.last_token_s = None
            if step.batch.joined and state not in prefilled:
                from_decode += len(started) + len(late_gaps) - noted
        return started, late_gaps, from_decode

    def _end(self, state: RequestState, now_s: float) -> None:
        request = state.request
        del self._requests[request.request_id]
        state.finish_reason = request.ends_by
        state.finished_s = now_s
        if request.pin_blocks:
            self.pinned.keep(state, now_s)
        else:
            self.batcher.release(state)

    # -- gauges ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def kv_usage_fraction(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return self.pool.used / self.pool.capacity

    @property
    def swapped_blocks(self) -> int:
        """Number of host memory blocks that are used, or reserved, for the KV of preempted requests."""
        return 0 if self._tiered is None else self._tiered.swap.used

    @property
    def reserved_free_blocks(self) -> int:
        """Number of free blocks that only premium and system requests can use now."""
        return 0 if self._tiered is None else self._tiered.reserved_free

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting, and no blocks are kept or being transferred."""
        return not (self._requests or len(self.pinned) or self._orphans)
