"""Which workers are busy or at capacity, kept up with every load event, and when the first will take requests. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds, Excess, rank_loads, worker_excess
from penstock.router.policy.drain_rate import DrainRate
from penstock.router.policy.load import WorkerLoad

ALL_BUSY = "Service temporarily unavailable: All workers are busy, please retry later"
"""What a rejected client is told. Source: NVIDIA Dynamo's document "Request Rejection", "Error Response"."""

_STAY_WEIGHT = 0.1
"""Chosen: of the newest request in the mean stay, so that about the last ten count."""

AT_CAPACITY_S = 1.0
"""Chosen: one interval of health checks; a worker that refused for want of room is asked again after this long even if
nothing else is heard of it, simulated seconds."""


class BusyWorkers:
    """The workers of one stage that take no new requests for now.

    Attributes:
        thresholds: Above which a worker is busy.
        batch_tokens: Most tokens of one step of a worker; None: unknown.
    """

    def __init__(
        self, thresholds: BusyThresholds = NO_THRESHOLDS, *, batch_tokens: int | None = None
    ) -> None:
        """Begin with no worker known to be busy."""
        self.thresholds = thresholds
        self.batch_tokens = batch_tokens
        self._computed = DrainRate()
        # Workers with prompts to compute, and how long requests have stayed lately.
        self._computing: set[str] = set()
        self._stay_s: float | None = None
        # By name: seconds until it is not busy any more, and when it refused a request for want of room.
        self._busy: dict[str, float] = {}
        self._at_capacity: dict[str, float] = {}
        # Of the busy ones, those above the threshold of KV blocks.
        self._out_of_blocks: set[str] = set()

    # ------------------------------------------------------------------ load events

    def refresh(
        self,
        load: WorkerLoad,
        *,
        prefill_tokens: int,
        peer_tokens: int,
        now_s: float,
        prompts: Sequence[int] = (),
    ) -> None:
        """Decide again whether a worker is busy.

        Args:
            load: The worker's.
            prefill_tokens: Prompt tokens that it has still to compute, those that wait for it included.
            peer_tokens: Tokens that other routers have in flight there, as far as known.
            now_s: Simulated seconds.
            prompts: Those of ``prefill_tokens`` whose prompts are known, one by one; used where it has several ranks.
        """
        if not self.thresholds.is_set:
            return
        (self._computing.add if prefill_tokens else self._computing.discard)(load.name)
        self._computed.at_work(len(self._computing), now_s)
        usages = load.kv_ranks_now(load.inflight_tokens + peer_tokens, now_s)
        ranks = rank_loads(usages, prompts, max(0, prefill_tokens - sum(prompts)))
        excess = worker_excess(ranks, self.thresholds, self.batch_tokens)
        self._out_of_blocks.discard(load.name)
        if excess is None:
            self._busy.pop(load.name, None)
        else:
            if excess.decode_blocks_fraction:
                self._out_of_blocks.add(load.name)
            self._busy[load.name] = self._free_in_s(load, excess, ranks=len(usages), now_s=now_s)

    def computed(self, tokens: int, now_s: float) -> None:
        """Count prompt tokens that a worker has computed."""
        self._computed.drained(tokens, now_s)

    def released(self, load: WorkerLoad, stay_s: float) -> None:
        """Note that a request has left its worker after some simulated seconds: there is room for another."""
        known_s = stay_s if self._stay_s is None else self._stay_s
        self._stay_s = known_s + _STAY_WEIGHT * (max(0.0, stay_s) - known_s)
        self._at_capacity.pop(load.name, None)

    def load_read(self, load: WorkerLoad) -> None:
        """Take note of a new reading of a worker's metrics: what it refused before says nothing any more."""
        self._at_capacity.pop(load.name, None)

    def refused(self, name: str, now_s: float) -> None:
        """Take note that a worker has refused a request for want of room."""
        self._at_capacity[name] = now_s

    def keep_only(self, names: Collection[str], now_s: float) -> None:
        """Forget the workers that have left, and refusals of long ago."""
        self._busy = {name: wait_s for name, wait_s in self._busy.items() if name in names}
        self._out_of_blocks &= self._busy.keys()
        self._computing &= set(names)
        self._at_capacity = {
            name: at_s
            for name, at_s in self._at_capacity.items()
            if name in names and 0 <= now_s - at_s < AT_CAPACITY_S
        }

    def set_thresholds(self, thresholds: BusyThresholds) -> None:
        """Take new thresholds; every worker has to be refreshed."""
        self.thresholds = thresholds
        self._busy.clear()
        self._out_of_blocks.clear()

    # ------------------------------------------------------------------ decisions

    @property
    def is_any(self) -> bool:
        """Whether any worker takes no new requests."""
        return bool(self._busy or self._at_capacity)

    def at_capacity(self) -> frozenset[str]:
        """Return the workers that have refused a request for want of room since they were last heard of."""
        return frozenset(self._at_capacity)

    def none_takes(self, names: frozenset[str]) -> bool:
        """Return whether there are workers, and each of them is busy or at capacity."""
        busy, full = self._busy, self._at_capacity
        if not names or len(busy) + len(full) < len(names):
            return False
        return all(name in busy or name in full for name in names) if full else names <= busy.keys()

    def all_at_capacity(self, names: frozenset[str]) -> bool:
        """Return whether there are workers, and each of them has refused a request for want of room."""
        return bool(names) and len(self._at_capacity) >= len(names) and names <= self._at_capacity.keys()

    def have_blocks(self, names: frozenset[str]) -> bool:
        """Return whether some worker has KV blocks and room: prompts to be computed are all that keeps it busy."""
        return not names <= self._out_of_blocks | self._at_capacity.keys()

    def has_blocks(self, name: str) -> bool:
        """Return whether a worker is not known to be above its threshold of KV blocks."""
        return name not in self._out_of_blocks

    def not_taking(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of some workers that take no new requests; none when that is all of them."""
        found = names & (self._busy.keys() | self._at_capacity)
        return frozenset() if len(found) == len(names) else found

    def prefill_limit_exceeded(self, share: float) -> bool:
        """Return whether every worker is busy, each with an even share of the tokens that wait in a central queue."""
        limit = self.thresholds.prefill_limit(self.batch_tokens)
        return limit is not None and share > limit

    def free_in_s(self) -> float | None:
        """Return the seconds until the first busy worker is expected to take requests again; None: unknown."""
        soonest = min(self._busy.values(), default=inf)
        return None if soonest == inf else soonest

    def _free_in_s(self, load: WorkerLoad, excess: Excess, *, ranks: int, now_s: float) -> float:
        """Return the time in which a worker drains what is above the thresholds.

        Prompts leave as fast as workers compute them, KV blocks by the tokens there over the time that requests stay:
        10,000 tokens that stay 5 s are 2,000 tokens/s, whether as many have come lately or not.
        """
        waits: list[float | None] = []
        if excess.prefill_tokens:
            rate = self._computed.tokens_per_s(now_s)
            waits.append(None if rate is None else excess.prefill_tokens * ranks / rate)
        if excess.decode_blocks_fraction:
            tokens = excess.decode_blocks_fraction * (load.kv_capacity_tokens or 0)
            is_known = self._stay_s is not None and tokens > 0 and load.inflight_tokens > 0
            waits.append(tokens * (self._stay_s or 0.0) / load.inflight_tokens if is_known else None)
        known = [wait_s for wait_s in waits if wait_s is not None]
        return max(known) if known and len(known) == len(waits) else inf
