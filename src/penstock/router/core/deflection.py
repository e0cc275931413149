"""Which decode workers may compute a prompt themselves while all prefill workers are behind. Pure; `RouterCore` asks.

An engine computes a prompt in steps of this many tokens, between the tokens of its streams. So a deflected prompt makes no gap
longer than what gaps are lately and one such step, as long as prompts are deflected one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from penstock.api import Role
from penstock.api.router_queues import PrefillDeflectionConfig
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.retries import Assignment, Effects
from penstock.router.core.worker import Worker
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.busy import DrainRate

T = TypeVar("T")

_LEAST_TOKENS: Final = 50
"""Output tokens for a new estimate of a worker's ITL. Chosen: as in `speeds`."""

_STEP_MARGIN: Final = 1.25
"""Chosen: times the step at the speed of prefill. Streams come and grow meanwhile: without it 1 to 2% of all gaps were up to
7% above the target in bursts with steps of 512 tokens (a100-llama-8b-bf16-tp1)."""


@dataclass(slots=True)
class _Gaps:
    """Counts of a worker at its last estimate, and that estimate in simulated seconds; None: none yet."""

    tokens: int = 0
    decode_s: float = 0.0
    itl_s: float | None = None


class PrefillDeflection:
    """The deflected prompts of one router.

    Attributes:
        total: Prompts deflected so far.
    """

    def __init__(self, config: PrefillDeflectionConfig, batch_tokens: int | None) -> None:
        """Begin; ``batch_tokens`` are the most of one step of a decode worker, None: unknown, perhaps a complete prompt."""
        self._config = config
        self._batch_tokens = batch_tokens
        self._gaps: dict[str, _Gaps] = {}
        # The worker that computes a prompt now, by request.
        self._computing: dict[Any, str] = {}
        # Of one prefill worker that has prompts to compute.
        self._rate = DrainRate()
        self.total = 0

    def assign(  # noqa: PLR0917 - as the core has them
        self,
        item: T,
        arrival: Arrival,
        queues: Mapping[Role, DispatchQueue[T]],
        routable: Mapping[Role, Sequence[Worker]],
        now_s: float,
        dispatch: Callable[[], Effects[T]],
    ) -> Effects[T]:
        """Give a new request to a decode worker that computes its prompt; empty: none may now.

        Args:
            item: The request.
            arrival: As prefill's policy sees it.
            queues: Prefill's and decode's.
            routable: Their workers that requests are sent to.
            now_s: Simulated seconds.
            dispatch: Dispatches what waits for decode.
        """
        queue, workers = queues[Role.DECODE], routable[Role.DECODE]
        if queue.waiting or not routable[Role.PREFILL]:
            return []
        prefill = queues[Role.PREFILL], routable[Role.PREFILL]
        takers = self.takers(arrival.tokens, *prefill, workers, now_s) - arrival.avoid
        if not takers:
            return []
        others = frozenset(each.name for each in workers) - takers
        queue.submit(item, Arrival((), arrival.tokens, arrival.avoid | others), now_s)
        # Nothing else waits there.
        effects = dispatch()
        for each in effects:
            if isinstance(each, Assignment):
                self._computing[item] = each.worker.name
                self.total += 1
        if not effects:
            queue.cancel(item)
        return effects

    def takers(
        self,
        tokens: int,
        prefill: DispatchQueue[Any],
        prefill_workers: Sequence[Worker],
        decode: Iterable[Worker],
        now_s: float,
    ) -> frozenset[str]:
        """Return the decode workers that may compute a prompt of this many tokens; none while a prefill worker keeps up.

        What is unknown of a worker keeps it out.

        Args:
            tokens: Of the prompt.
            prefill: The first stage's queue.
            prefill_workers: Its workers that requests are sent to, one or more.
            decode: Workers that requests are sent to.
            now_s: Simulated seconds.
        """
        self._rate.at_work(len(prefill.prompt_tokens.pending), now_s)
        rate = self._rate.tokens_per_s(now_s)
        if rate is None or not self._are_behind(prefill, prefill_workers, rate):
            return frozenset()
        step_tokens = tokens if self._batch_tokens is None else min(tokens, self._batch_tokens)
        return frozenset(
            each.name
            for each in decode
            if self._has_headroom(each, tokens, step_s=_STEP_MARGIN * step_tokens / rate, now_s=now_s)
        )

    def computed(self, tokens: int, pending: Mapping[str, int], now_s: float) -> None:
        """Count prompt tokens that a prefill worker has computed; ``pending`` are those that each still has to."""
        self._rate.drained(tokens, now_s)
        self._rate.at_work(len(pending), now_s)

    def ended(self, item: Hashable) -> None:
        """Record that a prompt is computed, or its request has left."""
        self._computing.pop(item, None)

    def _are_behind(self, prefill: DispatchQueue[Any], workers: Sequence[Worker], rate: float) -> bool:
        """Return whether a prompt would wait too long at each prefill worker."""
        limit = self._config.queue_seconds * rate
        if prefill.backlog_tokens:
            return prefill.backlog_tokens > limit * len(workers)
        return all(prefill.prefill_tokens(each.name) > limit for each in workers)

    def _has_headroom(self, worker: Worker, tokens: int, *, step_s: float, now_s: float) -> bool:
        itl_s, capacity = self._itl_s(worker), worker.kv_capacity_tokens
        if itl_s is None or not capacity or worker.name in self._computing.values():
            return False
        most, usages = self._config.max_kv_usage_fraction, worker.kv_ranks_now(worker.inflight_tokens, now_s)
        return itl_s + step_s <= self._config.itl_seconds and all(
            usage is not None and usage + tokens / capacity <= most for usage in usages
        )

    def _itl_s(self, worker: Worker) -> float | None:
        """Return the mean ITL since the last estimate, or that one; 0 without streams; None: not known."""
        gaps, speed = self._gaps.setdefault(worker.name, _Gaps()), worker.speed
        tokens = speed.output_tokens - gaps.tokens
        if tokens < 0:
            gaps = self._gaps[worker.name] = _Gaps()
            tokens = speed.output_tokens
        if tokens >= _LEAST_TOKENS:
            itl_s = (speed.decode_s - gaps.decode_s) / tokens
            self._gaps[worker.name] = gaps = _Gaps(speed.output_tokens, speed.decode_s, itl_s)
        return 0.0 if not worker.inflight_requests else gaps.itl_s
