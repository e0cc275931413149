"""Continuous batching as in vLLM V1: one token budget per step, and running requests before waiting ones.

The engine calls `Batcher.plan` at the start of a step and `Batcher.complete` at its end. All decoding requests advance
by one token per step. Therefore the batcher counts completed steps (ticks), and stores each request under the tick at
which it needs a new block and the tick at which it ends: the cost of a step depends on the requests that change in it,
not on the size of the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.engine.core.kv_blocks import BlockPool, KvJournal
from penstock.engine.core.requests import PreemptionKind, RequestStage, RequestState


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk of one prompt that is computed in a step.

    Attributes:
        state: The request.
        start: First token of the chunk.
        end: End of the chunk (exclusive).
        begins: Whether this is the first chunk that is computed of the request's prompt.
        epoch: Value of `RequestState.epoch` when the chunk was planned. If that has changed since, the request has left
            the batch, and the chunk is void.
    """

    state: RequestState
    start: int
    end: int
    begins: bool
    epoch: int


@dataclass(slots=True)
class Batch:
    """The work of one step.

    Attributes:
        spans: Prompt chunks to compute.
        joined: Requests that enter the batch in this step after their KV was fetched from another worker.
        loads: Requests for which a KV transfer from another worker starts now; their blocks are allocated.
        declined: Requests whose KV is on another worker, but is computed here because fetching it is not worthwhile.
        admitted: Requests that leave the waiting queue in this step.
        preempted: Requests that are preempted in this step (they leave the batch to make room), with the kind of
            preemption.
        swapped_in: Requests whose KV is copied back from host memory from now on, with the number of tokens to copy.
        decode_batch: Number of requests that decode in this step.
        decode_kv_tokens: Number of tokens that the decoding requests attend to, in total.
    """

    spans: list[Span] = field(default_factory=list)
    joined: list[RequestState] = field(default_factory=list)
    loads: list[RequestState] = field(default_factory=list)
    declined: list[RequestState] = field(default_factory=list)
    admitted: list[RequestState] = field(default_factory=list)
    preempted: dict[RequestState, PreemptionKind] = field(default_factory=dict)
    swapped_in: list[tuple[RequestState, int]] = field(default_factory=list)
    decode_batch: int = 0
    decode_kv_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes, at most `BatchLimits.max_num_batched_tokens`."""
        return self.decode_batch + sum(span.end - span.start for span in self.spans)


RECOMPUTE_TOKENS: Final = 64
"""Default of a worker's `BatchLimits.least_load_tokens`. Source: vLLM's kv_recompute_threshold."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one step of the engine.

    Attributes:
        max_num_batched_tokens: Maximum number of tokens computed per step, at least max_num_seqs.
        max_num_seqs: Maximum number of requests in the batch.
        block_size: Tokens per KV block.
        by_priority: Whether the order of waiting requests, and the choice of requests to preempt, go by (priority,
            arrival) instead of arrival alone.
        least_load_tokens: Minimum number of tokens for which KV is fetched from another worker. Tokens that are cached
            here do not count. If fewer tokens would be fetched, they are computed here. At least 1 (vLLM's
            ``kv_recompute_threshold``).
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int = 16
    by_priority: bool = False
    least_load_tokens: int = 1


class Batcher:
    """The queue of waiting requests, the running requests and their blocks.

    Attributes:
        decoding: Requests that decode, as an ordered set.
        prefilling: Requests whose prompt is being computed, as an ordered set.
        loading: Number of requests whose KV is being fetched from another worker or copied from or to host memory.
        kv_tokens: Number of tokens that the decoding requests attend to, in total.
        tick: Number of completed steps.
    """

    def __init__(self, limits: BatchLimits, pool: BlockPool, journal: KvJournal | None = None) -> None:
        self._limits = limits
        self._pool = pool
        self._journal = journal
        self._waiting: list[tuple[int, int, RequestState]] = []
        self._loaded: list[tuple[int, int, RequestState]] = []
        self._dead = 0
        self._blocked: tuple[int, int, int] | None = None
        self._block_due: dict[int, list[tuple[RequestState, int]]] = {}
        self._finish_due: dict[int, list[tuple[RequestState, int]]] = {}
        self._next_generated_key = -1
        self.decoding: dict[RequestState, None] = {}
        self.prefilling: dict[RequestState, None] = {}
        self.loading = 0
        self.kv_tokens = 0
        self.tick = 0

    @property
    def running(self) -> int:
        """Number of requests in the batch."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for capacity, without those that are fetching their KV."""
        return len(self._waiting) + len(self._loaded) - self._dead

    def outputs_of(self, state: RequestState) -> int:
        """Return the number of output tokens that the request ``state`` has generated."""
        if state.status is RequestStage.DECODING:
            return state.outputs + self.tick - state.base_tick
        return state.outputs

    def enqueue(self, state: RequestState) -> None:
        """Add a new or preempted request to the waiting queue."""
        state.status = RequestStage.WAITING
        heapq.heappush(self._waiting, self._order(state))

    def loaded(self, state: RequestState) -> None:
        """Record that the KV of ``state`` has arrived, so that it can decode and its blocks can be shared."""
        self.loading -= 1
        state.status = RequestStage.LOADED
        state.remote_pending = False
        state.computed = state.cached_tokens + state.external_tokens
        self._register_full(state, state.computed // self._limits.block_size)
        heapq.heappush(self._loaded, self._order(state))

    def remove(self, state: RequestState) -> bool:
        """Remove the request ``state`` from queue or batch; its blocks stay allocated.

        Returns:
            Whether the request's blocks can be released now; False while a transfer uses them.
        """
        status = state.status
        state.outputs = self.outputs_of(state)
        if status is RequestStage.DECODING:
            self._leave_decoding(state)
        elif status is RequestStage.PREFILLING:
            del self.prefilling[state]
        elif status in {RequestStage.LOADING, RequestStage.SWAPPING}:
            self.loading -= 1
        elif status in {RequestStage.WAITING, RequestStage.LOADED}:
            self._dead += 1
        state.epoch += 1
        state.status = RequestStage.FINISHED
        self._drop_dead()
        return status not in {RequestStage.LOADING, RequestStage.SWAPPING}

    def release(self, state: RequestState) -> None:
        """Release the blocks of ``state``."""
        self._pool.release(state.blocks)
        state.blocks = []

    def plan(self) -> Batch:
        """Choose the work of the next step and allocate its blocks; the batch can be empty."""
        batch = Batch()
        self._grow_decodes(batch)
        budget = self._limits.max_num_batched_tokens - len(self.decoding)
        budget = self._continue_prefills(batch, budget)
        if not batch.preempted:
            budget = self._join_loaded(batch, budget)
            self._admit(batch, budget)
        batch.decode_batch = len(self.decoding)
        batch.decode_kv_tokens = self.kv_tokens
        return batch

    def steady_steps(self, batch: Batch) -> int:
        """Return the number of steps, including the planned one, that will only decode; the last one may end requests.

        Before the last of these steps no request joins, is admitted, is preempted or ends, unless the caller adds,
        aborts or loads requests meanwhile. Waiting requests wait for capacity that decoding does not free. Returns 1 if
        nothing is known about later steps.
        """
        if batch.spans or batch.joined or batch.admitted or batch.preempted or not batch.decode_batch:
            return 1
        steps = min(self._finish_due) - self.tick
        end, size = self.tick + steps, self._limits.block_size
        blocks = sum(
            -(-(end - due) // size) * len(entries) for due, entries in self._block_due.items() if due < end
        )
        return steps if blocks <= self._pool.free else 1

    def skip(self, steps: int) -> None:
        """Complete ``steps`` decode-only steps and plan the next one, with the same result as alternating `complete` and `plan`.

        ``steps`` must be less than the number that `steady_steps` returned.
        """
        for tick in range(self.tick + 1, self.tick + steps + 1):
            for state, epoch in self._block_due.pop(tick, ()):
                if state.epoch == epoch:
                    self._register_full(state, len(state.blocks))
                    state.blocks.extend(self._claim(state, (), 1) or ())
                    self._block_due.setdefault(tick + self._limits.block_size, []).append((state, epoch))
        self.tick += steps
        self.kv_tokens += steps * len(self.decoding)

    def complete(self, batch: Batch) -> tuple[list[RequestState], list[RequestState]]:
        """End the step.

        Returns:
            Requests whose prompt is now completely computed (each has one more output, which may end it), and requests
            that ended. The requests that ended have left the batch, but still have their blocks.
        """
        self.tick += 1
        self.kv_tokens += len(self.decoding)
        ended = []
        for state, epoch in self._finish_due.pop(self.tick, ()):
            if state.epoch == epoch:
                self.remove(state)
                ended.append(state)
        prefilled = []
        for span in batch.spans:
            state = span.state
            if state.epoch != span.epoch:
                continue
            state.computed = span.end
            if span.end < state.prefill_target:
                continue
            state.outputs += 1
            prefilled.append(state)
            if state.outputs >= state.request.output_tokens:
                self.remove(state)
                ended.append(state)
            else:
                del self.prefilling[state]
                self._join_decoding(state)
        return prefilled, ended

    # -- blocks ---------------------------------------------------------------------------------------

    def _grow_decodes(self, batch: Batch) -> None:
        for state, epoch in self._block_due.pop(self.tick, ()):
            if state.epoch != epoch:
                continue
            self._register_full(state, len(state.blocks))
            while (block := self._claim(state, (), 1)) is None:
                if self._preempt_one(batch, state) is state:
                    break
            else:
                state.blocks += block
                due = self._block_due.setdefault(self.tick + self._limits.block_size, [])
                due.append((state, epoch))

    def _grow_prefill(self, state: RequestState, tokens: int, batch: Batch) -> bool:
        """Allocate blocks so that ``state`` has room for ``tokens`` tokens; return False if it was itself preempted."""
        missing = max(0, self._blocks_for(tokens) - len(state.blocks))
        while (fresh := self._claim(state, (), missing)) is None:
            if self._preempt_one(batch, state) is state:
                return False
        state.blocks.extend(fresh)
        self._register_full(state, tokens // self._limits.block_size)
        return True

    def _register_full(self, state: RequestState, full_blocks: int) -> None:
        prompt_keys = state.request.block_keys
        if not prompt_keys and state.request.prompt_tokens >= self._limits.block_size:
            return
        first = state.registered
        if first >= full_blocks:
            return
        missing = full_blocks - len(prompt_keys) - len(state.generated_keys)
        for _ in range(missing):
            state.generated_keys.append(self._next_generated_key)
            self._next_generated_key -= 1
        known = len(prompt_keys)
        keys = [*prompt_keys[first:full_blocks]]
        keys += state.generated_keys[max(0, first - known) : max(0, full_blocks - known)]
        if self._journal is not None:
            prompts = enumerate(prompt_keys[first:full_blocks], first)
            self._journal.stored(
                state.request, [place for place, key in prompts if not self._pool.is_cached(key)]
            )
        self._pool.register(state.blocks[first:full_blocks], keys)
        state.registered = full_blocks

    def _keys(self, state: RequestState) -> Sequence[int]:
        prompt_keys = state.request.block_keys
        return [*prompt_keys, *state.generated_keys] if state.generated_keys else prompt_keys

    def _claim(self, state: RequestState, hit_keys: Sequence[int], total: int) -> list[int] | None:  # noqa: ARG002 - TieredBatcher uses it
        return self._pool.claim(hit_keys, total)

    def _blocks_wanted(self, state: RequestState, tokens: int) -> int:  # noqa: ARG002 - TieredBatcher uses it
        return self._blocks_for(tokens)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    # -- running requests -----------------------------------------------------------------------------

    def _continue_prefills(self, batch: Batch, budget: int) -> int:
        for state in list(self.prefilling):
            budget -= self._continue_prefill(state, batch, budget)
        if batch.preempted:
            batch.spans = [span for span in batch.spans if span.state.epoch == span.epoch]
        return budget

    def _continue_prefill(self, state: RequestState, batch: Batch, budget: int) -> int:
        chunk = min(state.prefill_target - state.computed, budget)
        if chunk <= 0 or state.status is not RequestStage.PREFILLING:
            return 0
        end = state.computed + chunk
        if not self._grow_prefill(state, end, batch):
            return 0
        batch.spans.append(Span(state, state.computed, end, begins=False, epoch=state.epoch))
        return chunk

    def _preempt_one(self, batch: Batch, grower: RequestState) -> RequestState:  # noqa: ARG002 - TieredBatcher uses it
        """Preempt the running request with the lowest priority, on a tie the latest arrival, because ``grower`` needs a block."""
        victim = max((*self.decoding, *self.prefilling), key=self._rank)
        self._throw_out(victim, batch)
        return victim

    def _throw_out(
        self, victim: RequestState, batch: Batch, kind: PreemptionKind = PreemptionKind.RECOMPUTE
    ) -> None:
        self.remove(victim)
        victim.preemptions += 1
        batch.preempted[victim] = kind
        if kind is not PreemptionKind.RECOMPUTE:
            return
        self.release(victim)
        victim.registered = 0
        victim.computed = 0
        victim.prefill_target = victim.request.prompt_tokens + victim.outputs
        self.enqueue(victim)

    def _join_decoding(self, state: RequestState) -> None:
        state.status = RequestStage.DECODING
        state.epoch += 1
        state.base_tick = self.tick
        self.decoding[state] = None
        self.kv_tokens += state.computed + 1
        free_tokens = len(state.blocks) * self._limits.block_size - state.computed
        self._block_due.setdefault(self.tick + free_tokens, []).append((state, state.epoch))
        left = state.request.output_tokens - state.outputs
        self._finish_due.setdefault(self.tick + left, []).append((state, state.epoch))

    def _leave_decoding(self, state: RequestState) -> None:
        del self.decoding[state]
        state.computed += self.tick - state.base_tick
        self.kv_tokens -= state.computed + 1

    # -- waiting requests -----------------------------------------------------------------------------

    def _join_loaded(self, batch: Batch, budget: int) -> int:
        """Let requests whose KV has arrived decode; they already have blocks, so they come before waiting requests."""
        while self._loaded and budget > 0 and self.running < self._limits.max_num_seqs:
            state = heapq.heappop(self._loaded)[2]
            if state.status is not RequestStage.LOADED:
                self._dead -= 1
                continue
            batch.joined.append(state)
            if state.request.remote_tokens is not None and not state.outputs:
                budget -= self._resume_prefill(state, batch, budget)
                continue
            if not state.outputs:
                state.computed = state.request.prompt_tokens - 1
            self._join_decoding(state)
            budget -= 1
        return budget

    def _resume_prefill(self, state: RequestState, batch: Batch, budget: int) -> int:
        """Let ``state``, of which the first part of the KV has arrived, compute the rest; return the number of tokens scheduled."""
        state.status = RequestStage.PREFILLING
        state.epoch += 1
        self.prefilling[state] = None
        return self._continue_prefill(state, batch, budget)

    def _admit(self, batch: Batch, budget: int) -> None:
        """Admit requests from the head of the queue until budget, batch size or blocks are used up; no request overtakes another."""
        while budget > 0 and self.running < self._limits.max_num_seqs:
            state = self._head()
            if state is None:
                return
            attempt = (state.index, self._pool.version, budget)
            if self._blocked == attempt:
                return
            taken = self._try_admit(state, batch, budget)
            if taken is None:
                self._blocked = attempt
                return
            heapq.heappop(self._waiting)
            budget -= taken

    def _try_admit(self, state: RequestState, batch: Batch, budget: int) -> int | None:
        size = self._limits.block_size
        target = state.prefill_target
        keys = self._keys(state)
        # The last token is always computed, because its output is needed.
        hits = self._pool.count_hits(keys, (target - 1) // size)
        start = hits * size
        if state.remote_pending and self._remote_end(state) - start < self._least_load(state):
            state.remote_pending = False
            batch.declined.append(state)
        end = self._remote_end(state) if state.remote_pending else min(target, start + budget)
        chunk = end - start
        blocks = self._claim(state, keys[:hits], self._blocks_wanted(state, start + chunk))
        if blocks is None:
            return None
        state.blocks = blocks
        state.registered = hits
        if not state.preemptions:
            state.cached_tokens = start
        batch.admitted.append(state)
        state.epoch += 1
        if state.remote_pending:
            state.status = RequestStage.LOADING
            state.external_tokens = chunk
            self.loading += 1
            batch.loads.append(state)
            return 0
        state.status = RequestStage.PREFILLING
        state.computed = start
        self.prefilling[state] = None
        self._register_full(state, (start + chunk) // size)
        batch.spans.append(Span(state, start, start + chunk, begins=True, epoch=state.epoch))
        return chunk

    def _remote_end(self, state: RequestState) -> int:
        tokens = state.request.remote_tokens
        return state.prefill_target if tokens is None else min(tokens, state.prefill_target - 1)

    def _least_load(self, state: RequestState) -> int:
        return 1 if state.request.remote_tokens is None else self._limits.least_load_tokens

    def _head(self) -> RequestState | None:
        while self._waiting:
            state = self._waiting[0][2]
            if state.status is RequestStage.WAITING:
                return state
            heapq.heappop(self._waiting)
            self._dead -= 1
        return None

    def _drop_dead(self) -> None:
        if self._dead > 16 + (len(self._waiting) + len(self._loaded)) // 2:
            self._waiting = [entry for entry in self._waiting if entry[2].status is RequestStage.WAITING]
            self._loaded = [entry for entry in self._loaded if entry[2].status is RequestStage.LOADED]
            heapq.heapify(self._waiting)
            heapq.heapify(self._loaded)
            self._dead = 0

    def _rank(self, state: RequestState) -> tuple[int, int]:
        return (state.request.priority if self._limits.by_priority else 0, state.index)

    def _order(self, state: RequestState) -> tuple[int, int, RequestState]:
        return (*self._rank(state), state)
