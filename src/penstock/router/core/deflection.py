"""Prefill deflection: decode workers compute prompts themselves while all prefill workers are behind. Pure; used by `RouterCore`.

A decode worker's engine computes a prompt in steps of at most ``batch_tokens`` tokens, between the tokens of its streams. So
a deflected prompt makes the gaps between tokens at most one such step longer than they are now, as long as a worker computes
one deflected prompt at a time.
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

_MIN_TOKENS: Final = 50
"""Minimum number of output tokens for a new estimate of a worker's ITL. Chosen: as in `speeds`."""

_STEP_MARGIN: Final = 1.25
"""Factor on the duration of a step at the speed of prefill. Chosen: streams arrive and grow meanwhile; without it 1 to 2% of all
gaps were up to 7% above the target in bursts with steps of 512 tokens (a100-llama-8b-bf16-tp1)."""


@dataclass(slots=True)
class _Gaps:
    """Token count and total gaps of a worker at its last ITL estimate, and that estimate in simulated seconds; None if there was none."""

    tokens: int = 0
    decode_s: float = 0.0
    itl_s: float | None = None


class PrefillDeflection:
    """Chooses decode workers that compute the prompts of new requests while all prefill workers are behind, for one router.

    The prefill workers are behind if each has more prompt tokens to compute than it computes in ``queueSeconds`` at its
    measured speed. ``config`` contains ``queueSeconds`` and the other limits; ``batch_tokens`` is the maximum number of
    tokens of one engine step of a decode worker; None if unknown. All times are in simulated seconds.

    Attributes:
        total: Number of prompts since the router started that were sent to a decode worker to be computed there.
    """

    def __init__(self, config: PrefillDeflectionConfig, batch_tokens: int | None) -> None:
        """Create the state of a router that has deflected no prompt yet.

        ``batch_tokens`` is the maximum number of tokens of one engine step of a decode worker; None if it is unknown, and a
        step may then contain a complete prompt.
        """
        self._config = config
        self._batch_tokens = batch_tokens
        self._gaps: dict[str, _Gaps] = {}
        # The worker that computes a prompt now, by request.
        self._computing: dict[Any, str] = {}
        # Prefill throughput of one prefill worker while it has prompts to compute.
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
        """Assign a new request to a decode worker that also computes its prompt, if one is allowed to now.

        Returns a list with the request's `Assignment`, by which the caller then sends the request to its worker; or with
        its `Refuse`, if ``dispatch`` rejects it. Returns an empty list, and changes nothing, if at least one prefill worker
        can compute the prompts that it has to compute within ``queueSeconds`` (of the configuration), if requests
        wait for a decode worker already, or if no decode worker may compute the prompt; the caller then sends the
        request to a prefill worker as usual.

        Args:
            item: The request.
            arrival: The request's number of prompt tokens, and the workers that it must avoid.
            queues: Dispatch queues by role, those of prefill and decode.
            routable: By role (prefill and decode), the workers that can be routed to.
            now_s: Current time in simulated seconds.
            dispatch: Chooses a worker for each request in the decode queue, and returns the assignments and rejections. This
                method puts the request into that queue, which was empty before, and then calls it, so that its result
                concerns this request alone and becomes the result of this method.
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
        # The decode queue was empty, so the effects concern this request alone.
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
        """Return the names of the decode workers that may compute a new request's prompt; empty unless all prefill workers are behind.

        Prefill workers are behind if each has more prompt tokens to compute than it computes in ``queueSeconds``. A
        decode worker may compute the prompt if three conditions hold: it computes no other such prompt now; its recent mean
        ITL plus the duration of one engine step with the prompt is at most ``itlSeconds``; and its KV usage with the prompt
        is at most ``maxKvUsageFraction``.

        A worker with unknown ITL, KV capacity or KV usage is not included.

        Args:
            tokens: Number of tokens of the prompt.
            prefill: Queue of the first stage.
            prefill_workers: Prefill workers that can be routed to, at least one.
            decode: Decode workers that can be routed to.
            now_s: Current time in simulated seconds.
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
        """Count prompt tokens that a prefill worker has just computed, to measure the speed of prefill (tokens per simulated second).

        ``pending`` contains the uncached tokens that each prefill worker still has to compute, by name.
        """
        self._rate.drained(tokens, now_s)
        self._rate.at_work(len(pending), now_s)

    def ended(self, item: Hashable) -> None:
        """Record that the prompt of ``item`` was computed, or that the request has left its worker (also when it is cancelled).

        If a decode worker was computing the prompt in place of a prefill worker, it can then take another such prompt. Does
        nothing for other requests.
        """
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
        """Return a worker's mean ITL since the last estimate, or the last estimate; 0 if it has no streams, None if unknown."""
        gaps, speed = self._gaps.setdefault(worker.name, _Gaps()), worker.speed
        tokens = speed.output_tokens - gaps.tokens
        if tokens < 0:
            gaps = self._gaps[worker.name] = _Gaps()
            tokens = speed.output_tokens
        if tokens >= _MIN_TOKENS:
            itl_s = (speed.decode_s - gaps.decode_s) / tokens
            self._gaps[worker.name] = gaps = _Gaps(speed.output_tokens, speed.decode_s, itl_s)
        return 0.0 if not worker.inflight_requests else gaps.itl_s
