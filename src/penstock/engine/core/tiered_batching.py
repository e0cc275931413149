"""Continuous batching with tiers: a waiting request of a higher tier gets room by preempting running requests of lower tiers.

docs/engine.md#tiers has the rules. A running request that finds no free block for its next token needs one in the same
step. The victim, which is preempted to free a block, is therefore always recomputed. It is a request of a lower tier,
else the latest arrival of the same tier, and as a last resort the running request itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from penstock.core.tiers import TierPriority
from penstock.engine.core.batching import Batch, Batcher, BatchLimits
from penstock.engine.core.kv_blocks import BlockPool, KvJournal
from penstock.engine.core.preemption import (
    RESUME_HEADROOM_FRACTION,
    Candidate,
    PreemptionCosts,
    PreemptionTerms,
    Reservation,
    SwapSpace,
    choose_victims,
)
from penstock.engine.core.requests import EngineRequest, PreemptionKind, RequestStage, RequestState


class TieredBatcher(Batcher):
    """A `Batcher` in which waiting requests of higher tiers preempt running requests of lower tiers.

    Attributes:
        swap: Host memory for swapped requests.
    """

    def __init__(
        self,
        limits: BatchLimits,
        pool: BlockPool,
        journal: KvJournal | None,
        *,
        terms: PreemptionTerms,
        costs: PreemptionCosts,
    ) -> None:
        super().__init__(limits, pool, journal)
        self._terms = terms
        self._costs = costs
        self._reservation = Reservation(pool.capacity, terms.reserved_blocks(pool.capacity))
        self._headroom = int(RESUME_HEADROOM_FRACTION * pool.capacity)
        self._copying: dict[RequestState, int] = {}
        self.swap = SwapSpace(terms.host_blocks, terms.host_link)

    @property
    def reserved_free(self) -> int:
        """Number of free blocks that only requests of the tiers premium and system can use now."""
        return max(0, self._pool.free - self._reservation.headroom)

    # -- a step ---------------------------------------------------------------------------------------

    def plan(self) -> Batch:
        """Choose the work of the next step, with prompts in the order of their tiers; the batch can be empty."""
        batch = Batch()
        self._grow_decodes(batch)
        self._make_places_for_loaded(batch)
        self._join_loaded(batch, self._budget_left(batch))
        for state in sorted(self.prefilling, key=self._rank):
            self._admit_before(batch, state.request.priority)
            self._continue_prefill(state, batch, self._budget_left(batch))
        self._admit_before(batch, None)
        if batch.preempted:
            batch.spans = [span for span in batch.spans if span.state.epoch == span.epoch]
            batch.joined = [state for state in batch.joined if state.status is RequestStage.DECODING]
        batch.decode_batch = len(self.decoding)
        batch.decode_kv_tokens = self.kv_tokens
        return batch

    def steady_steps(self, batch: Batch) -> int:
        """Return the number of steps, including the planned one, that will only decode.

        Returns 1 if requests of tiers below premium would meanwhile need blocks that are reserved for premium requests.

        A request that waits until enough running requests can be preempted continues to wait, because the blocks that
        these requests allocate meanwhile are not free any more.
        """
        steps = super().steady_steps(batch)
        if steps == 1:
            return 1
        end, size = self.tick + steps, self._limits.block_size
        open_blocks = sum(
            -(-(end - due) // size)
            for due, entries in self._block_due.items()
            if due < end
            for state, _ in entries
            if not _is_premium(state.request)
        )
        return steps if open_blocks <= self._reservation.headroom else 1

    def remove(self, state: RequestState) -> bool:
        """Remove ``state`` from queue or batch; return whether its blocks can be released now, which is False during a copy.

        If they can, the request's blocks in host memory are released, too.
        """
        is_quiet = super().remove(state)
        if is_quiet:
            self.swap.give_back(state)
        return is_quiet

    def release(self, state: RequestState) -> None:
        """Release the blocks of the request ``state``, and subtract them from the blocks that its tier uses."""
        if not _is_premium(state.request):
            self._reservation.give_back(state.blocks)
        super().release(state)

    def _resume_prefill(self, state: RequestState, batch: Batch, budget: int) -> int:  # noqa: ARG002 - signature of the base class
        return super()._resume_prefill(state, batch, 0)

    # -- copies ---------------------------------------------------------------------------------------

    def start_copies(self, batch: Batch, now_s: float) -> None:
        """Start the copies to and from host memory that ``batch`` has planned."""
        kv_bytes_per_token = self._costs.kv_bytes_per_token
        for state, kind in batch.preempted.items():
            if kind is PreemptionKind.SWAP:
                self.swap.out.start(state, state.computed * kv_bytes_per_token, now_s)
        for state, tokens in batch.swapped_in:
            self.swap.back.start(state, tokens * kv_bytes_per_token, now_s)

    def finish_copies(self, now_s: float) -> int:
        """Process copies between GPU and host memory that ended at or before ``now_s``.

        Returns:
            Number of the copies whose requests ended before the copy did; the blocks of these requests are released
            now.
        """
        orphans = 0
        for copies, take_in in (
            (self.swap.out.finish(now_s), self._copied_out),
            (self.swap.back.finish(now_s), self._copied_in),
        ):
            for copy in copies:
                if copy.state.epoch == copy.epoch:
                    take_in(copy.state)
                else:
                    orphans += 1
                    self._copying.pop(copy.state, None)
                    self.swap.give_back(copy.state)
                    self.release(copy.state)
        return orphans

    def _copied_out(self, state: RequestState) -> None:
        self.loading -= 1
        del self._copying[state]
        self.release(state)
        state.registered = 0
        self.enqueue(state)

    def _copied_in(self, state: RequestState) -> None:
        self.loading -= 1
        self.swap.give_back(state)
        state.status = RequestStage.LOADED
        self._register_full(state, state.computed // self._limits.block_size)
        heapq.heappush(self._loaded, self._order(state))

    # -- blocks ---------------------------------------------------------------------------------------

    def _claim(self, state: RequestState, hit_keys: Sequence[int], total: int) -> list[int] | None:
        if _is_premium(state.request):
            return super()._claim(state, hit_keys, total)
        hits = self._pool.blocks_of(hit_keys)
        if self._reservation.added(hits) + total - len(hits) > self._reservation.headroom:
            return None
        blocks = super()._claim(state, hit_keys, total)
        if blocks is not None:
            self._reservation.hold(blocks)
        return blocks

    def _blocks_wanted(self, state: RequestState, tokens: int) -> int:
        if not self._is_at_limit(state):
            return self._blocks_for(tokens)
        request = state.request
        # The last output is not computed again, so it needs no KV.
        return self._blocks_for(request.prompt_tokens + request.output_tokens - 1)

    def _missing(self, state: RequestState, hit_keys: Sequence[int], total: int) -> int:
        """Return the number of blocks that must be freed before `_claim` succeeds, without those that are being copied out."""
        hits = self._pool.blocks_of(hit_keys)
        fresh = total - len(hits)
        missing = fresh + self._pool.idle_among(hits) - self._pool.free
        if not _is_premium(state.request):
            missing = max(missing, fresh + self._reservation.added(hits) - self._reservation.headroom)
        return missing - sum(self._copying.values())

    # -- waiting requests -----------------------------------------------------------------------------

    def _budget_left(self, batch: Batch) -> int:
        planned = sum(span.end - span.start for span in batch.spans if span.state.epoch == span.epoch)
        return self._limits.max_num_batched_tokens - len(self.decoding) - planned

    def _admit_before(self, batch: Batch, priority: int | None) -> None:
        """Admit requests of a higher tier than ``priority`` from the head of the queue; None admits any."""
        while (budget := self._budget_left(batch)) > 0:
            state = self._head()
            if state is None or (priority is not None and state.request.priority >= priority):
                return
            # A request that was preempted in this step must not take back the blocks that others need.
            if state in batch.preempted:
                return
            if not self._admit_head(state, batch, budget):
                return

    def _admit_head(self, state: RequestState, batch: Batch, budget: int) -> bool:
        """Admit the head of the queue, preempting lower tiers if necessary; return False if it continues to wait."""
        hit_keys, total = self._wanted(state, budget)
        self._free_blocks(state, self._missing(state, hit_keys, total), batch)
        if self.running >= self._limits.max_num_seqs or not self._may_resume(state, hit_keys, total):
            return False
        heapq.heappop(self._waiting)
        if state.host_blocks:
            is_admitted = self._begin_copy_in(state, hit_keys, total, batch)
        else:
            is_admitted = self._try_admit(state, batch, budget) is not None
        if not is_admitted:
            heapq.heappush(self._waiting, self._order(state))
        return is_admitted

    def _wanted(self, state: RequestState, budget: int) -> tuple[Sequence[int], int]:
        """Return the cached keys that ``state`` would reuse, and the total number of blocks that it needs."""
        size = self._limits.block_size
        keys = self._keys(state)
        if state.host_blocks:
            # The next token is computed immediately, so it needs room.
            hits = self._pool.count_hits(keys, state.computed // size)
            return keys[:hits], self._blocks_wanted(state, state.computed + 1)
        target = state.prefill_target
        hits = self._pool.count_hits(keys, (target - 1) // size)
        is_complete = state.remote_pending or state.preemptions
        first = target if is_complete else min(target, hits * size + budget)
        return keys[:hits], self._blocks_wanted(state, first)

    def _may_resume(self, state: RequestState, hit_keys: Sequence[int], total: int) -> bool:
        """Return whether a preempted request has room for its full context and headroom; True for other requests."""
        if not state.preemptions or not (self.running or self.loading):
            return True
        return self._missing(state, hit_keys, total) + sum(self._copying.values()) + self._headroom <= 0

    def _begin_copy_in(self, state: RequestState, hit_keys: Sequence[int], total: int, batch: Batch) -> bool:
        blocks = self._claim(state, hit_keys, total)
        if blocks is None:
            return False
        state.blocks = blocks
        state.registered = len(hit_keys)
        state.epoch += 1
        state.status = RequestStage.LOADING
        self.loading += 1
        batch.swapped_in.append((state, state.computed - len(hit_keys) * self._limits.block_size))
        return True

    # -- victims --------------------------------------------------------------------------------------

    def _free_blocks(self, state: RequestState, blocks: int, batch: Batch) -> None:
        """Preempt running requests of lower tiers than ``state`` if that can free the missing blocks and batch slots."""
        places = self.running + 1 - self._limits.max_num_seqs
        if blocks <= 0 and places <= 0:
            return
        for victim in choose_victims(self._candidates(state), blocks=blocks, places=places):
            self._evict(victim.state, batch)

    def _make_places_for_loaded(self, batch: Batch) -> None:
        """Free a batch slot for the first request whose KV has arrived, if a lower tier occupies one."""
        while self._loaded and self._loaded[0][2].status is not RequestStage.LOADED:
            heapq.heappop(self._loaded)
            self._dead -= 1
        if self._loaded:
            self._free_blocks(self._loaded[0][2], 0, batch)

    def _candidates(self, state: RequestState) -> Iterator[Candidate]:
        for each in (*self.decoding, *self.prefilling):
            if each.request.priority <= state.request.priority or self._is_at_limit(each):
                continue
            _, cost_s = self._cheapest(each)
            left = each.request.output_tokens - self.outputs_of(each)
            yield Candidate(each, self._pool.sole(each.blocks), left, cost_s)

    def _evict(self, victim: RequestState, batch: Batch) -> None:
        kind, _ = self._cheapest(victim)  # computed again: earlier victims may have filled the swap space
        freed = self._pool.sole(victim.blocks)
        self._throw_out(victim, batch, kind)
        if kind is PreemptionKind.SWAP:
            self.swap.take(victim, self._blocks_for(victim.computed))
            victim.status = RequestStage.SWAPPING
            self.loading += 1
            self._copying[victim] = freed

    def _cheapest(self, state: RequestState) -> tuple[PreemptionKind, float]:
        tokens = state.request.prompt_tokens + self.outputs_of(state)
        can_swap = state.status is RequestStage.DECODING and self.swap.fits(len(state.blocks))
        return self._costs.cheapest(tokens, can_swap=can_swap, drop_above_s=self._terms.drop_above_s)

    def _is_at_limit(self, state: RequestState) -> bool:
        return state.preemptions >= self._terms.max_per_request

    def _preempt_one(self, batch: Batch, grower: RequestState) -> RequestState:
        """Preempt a request of a lower tier because ``grower`` needs a block now; else the latest arrival of its own tier."""
        chosen = choose_victims(self._candidates(grower), blocks=1, places=0)
        if chosen:
            victim = chosen[0].state
        else:
            equals = (each for each in (*self.decoding, *self.prefilling) if self._may_yield(each, grower))
            victim = max(equals, key=self._rank)
        self._throw_out(victim, batch)
        return victim

    def _may_yield(self, state: RequestState, grower: RequestState) -> bool:
        return state.request.priority == grower.request.priority and not self._is_at_limit(state)


def _is_premium(request: EngineRequest) -> bool:
    """Return whether a request can use the reserve: premium, system, and requests without a tier."""
    return request.priority <= TierPriority.PREMIUM
