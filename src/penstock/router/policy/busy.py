"""Which workers are busy or at capacity, kept up with every load event, and when the first will take requests. Pure.

Source: NVIDIA Dynamo's document "Request Rejection", "Busy Detection Logic".
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import exp, inf
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from penstock.api import AdmissionConfig, AdmissionMode
from penstock.core.errors import ConfigError
from penstock.router.policy.routing_policy import WorkerLoad

_Fraction = Annotated[int, Meta(ge=0, le=1)] | Annotated[float, Meta(ge=0, le=1)]
_Multiple = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class BusyThresholds(NamedTuple):
    """Above which load a rank is busy; either threshold suffices, one that is None never does.

    Attributes:
        active_decode_blocks_threshold: Fraction of the KV blocks in use, 0-1.
        active_prefill_tokens_threshold: Prompt tokens to be computed, >= 0.
        active_prefill_tokens_threshold_frac: The same as a multiple of the worker's batch token limit, >= 0.
    """

    active_decode_blocks_threshold: _Fraction | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: _Multiple | None = None

    @property
    def is_set(self) -> bool:
        """Whether any threshold can make a worker busy."""
        return any(each is not None for each in self)

    def prefill_limit(self, batch_tokens: int | None) -> float | None:
        """Return the lower of both prefill thresholds in tokens; None: no such threshold.

        Without ``batch_tokens``, the most tokens of one step of the worker, the fraction is ignored.
        """
        tokens, fraction = self.active_prefill_tokens_threshold, self.active_prefill_tokens_threshold_frac
        if fraction is None or batch_tokens is None:
            return tokens
        limit = fraction * batch_tokens
        return limit if tokens is None else min(tokens, limit)


NO_THRESHOLDS: Final = BusyThresholds()


class Excess(NamedTuple):
    """How far a busy worker is above its thresholds: KV blocks as a fraction of all, and prompt tokens; both >= 0."""

    decode_blocks_fraction: float = 0.0
    prefill_tokens: float = 0.0


def busy_thresholds(config: AdmissionConfig) -> BusyThresholds:
    """Return the thresholds that a graph's admission section asks for; mode ``none`` clears them all."""
    if config.mode is AdmissionMode.NONE:
        return NO_THRESHOLDS
    return BusyThresholds(*(getattr(config, name) for name in BusyThresholds._fields))


def check_flags(config: AdmissionConfig, given: Mapping[str, Any]) -> None:
    """Refuse thresholds that are given as flags and change nothing.

    Raises:
        ConfigError: its mode is none.
    """
    idle = [f"--{name.replace('_', '-')}" for name in given if name.startswith("active_")]
    if idle and config.mode is AdmissionMode.NONE:
        raise ConfigError(
            f"{', '.join(idle)}: without effect under admission mode none; add --admission-control token-capacity"
        )


def worker_excess(
    usages: Sequence[float | None],
    prompts: Iterable[int],
    rest: float,
    *,
    thresholds: BusyThresholds,
    batch_tokens: int | None = None,
) -> Excess | None:
    """Return how far a worker is above its thresholds, at the rank that is nearest to them; None: it is not busy.

    A worker is busy only if all its ranks are: one with room takes the next request. What is unknown makes no rank
    busy. The worker balances complete prompts over its ranks as they come: three prompts of 9,000 tokens over two ranks
    are 18,000 and 9,000, and not 13,500 twice.

    Args:
        usages: KV blocks in use, by rank, 0-1, or above 1 where more is on its way; None: unknown.
        prompts: Tokens to be computed of each prompt there, the oldest first.
        rest: Further tokens to be computed there whose prompts are not known; they count evenly.
        thresholds: Of the model.
        batch_tokens: Most tokens of one step of the worker; None: unknown.
    """
    tokens = [rest / len(usages)] * len(usages)
    ranks = sorted(range(len(usages)), key=lambda rank: usages[rank] or 0.0)
    for prompt in prompts:
        tokens[min(ranks, key=tokens.__getitem__)] += prompt
    blocks_limit = thresholds.active_decode_blocks_threshold
    tokens_limit = thresholds.prefill_limit(batch_tokens)
    found = []
    for used, own in zip(usages, tokens, strict=True):
        blocks = 0.0 if used is None or blocks_limit is None else used - blocks_limit
        excess = 0.0 if tokens_limit is None else own - tokens_limit
        if blocks <= 0 and excess <= 0:
            return None
        found.append(Excess(max(0.0, blocks), max(0.0, excess)))
    return min(found)


_WINDOW_S = 10.0
"""Chosen: some tens of prompts; older ones count for a third and less. Seconds of work of one worker."""


class DrainRate:
    """Tokens per second of a worker at work, exponentially weighted.

    Idle time of all workers is not counted, so that light traffic measures what the workers can and not
    what came. A clock that steps back counts as standing.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._worked_s = 0.0
        self._workers = 0
        self._seen_s = 0.0

    def at_work(self, workers: int, now_s: float) -> None:
        """Set how many workers have work from now on, simulated seconds."""
        worked_s = self._workers * max(0.0, now_s - self._seen_s)
        kept = exp(-worked_s / _WINDOW_S)
        self._tokens *= kept
        self._worked_s = self._worked_s * kept + _WINDOW_S * (1.0 - kept)
        self._seen_s = max(self._seen_s, now_s)
        self._workers = workers

    def drained(self, tokens: float, now_s: float) -> None:
        """Count tokens that have left just now."""
        self.at_work(self._workers, now_s)
        self._tokens += tokens

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return one worker's rate; None while it is unknown."""
        self.at_work(self._workers, now_s)
        return self._tokens / self._worked_s if self._tokens > 0 and self._worked_s > 0 else None


ALL_BUSY = "Service temporarily unavailable: All workers are busy, please retry later"
"""Message to a rejected client. Source: NVIDIA Dynamo's document "Request Rejection", "Error Response"."""

_STAY_WEIGHT = 0.1
"""Chosen: of the newest request in the mean stay, so that about the last ten count."""

AT_CAPACITY_S = 1.0
"""Chosen: one interval of health checks; a worker that refused for lack of room is tried again after this long even if
it reports nothing else, simulated seconds."""


class BusyWorkers:
    """The workers of one stage that take no new requests for now.

    Attributes:
        batch_tokens: Most tokens of one step of a worker; None: unknown.
    """

    def __init__(
        self, thresholds: BusyThresholds = NO_THRESHOLDS, *, batch_tokens: int | None = None
    ) -> None:
        self.thresholds = thresholds
        self.has_thresholds = thresholds.is_set
        self.batch_tokens = batch_tokens
        self._computed = DrainRate()
        # Workers with prompts to compute, and how long requests have stayed lately.
        self._computing: set[str] = set()
        self._stay_s: float | None = None
        # By name: seconds until it is not busy any more, and when it refused a request for lack of room.
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
            prefill_tokens: Prompt tokens that it has still to compute, including those of requests that wait for it.
            peer_tokens: Tokens that other routers have in flight there, as far as known.
            now_s: Simulated seconds.
            prompts: Those of ``prefill_tokens`` whose prompts are known, one by one; used where it has several ranks.
        """
        if not self.has_thresholds:
            return
        (self._computing.add if prefill_tokens else self._computing.discard)(load.name)
        self._computed.at_work(len(self._computing), now_s)
        usages = load.kv_ranks_now(load.inflight_tokens + peer_tokens, now_s)
        rest = max(0, prefill_tokens - sum(prompts))
        excess = worker_excess(
            usages, prompts, rest, thresholds=self.thresholds, batch_tokens=self.batch_tokens
        )
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

    def computed_tokens_per_s(self, now_s: float) -> float | None:
        """Return the prompt tokens/s that one worker computes while it has any to compute; None: not measured yet."""
        return self._computed.tokens_per_s(now_s)

    def released(self, load: WorkerLoad, stay_s: float) -> None:
        """Record that a request has left its worker after some simulated seconds: there is room for another."""
        known_s = stay_s if self._stay_s is None else self._stay_s
        self._stay_s = known_s + _STAY_WEIGHT * (max(0.0, stay_s) - known_s)
        self._at_capacity.pop(load.name, None)

    def load_read(self, load: WorkerLoad) -> None:
        """Record a new reading of a worker's metrics: its earlier refusal no longer counts."""
        self._at_capacity.pop(load.name, None)

    def refused(self, name: str, now_s: float) -> None:
        """Record that a worker has refused a request for lack of room."""
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
        self.has_thresholds = thresholds.is_set
        self._busy.clear()
        self._out_of_blocks.clear()

    # ------------------------------------------------------------------ decisions

    @property
    def is_any(self) -> bool:
        """Whether any worker takes no new requests."""
        return bool(self._busy or self._at_capacity)

    def at_capacity(self) -> frozenset[str]:
        """Return the workers that have refused a request for lack of room since their last report."""
        return frozenset(self._at_capacity)

    def none_takes(self, names: frozenset[str]) -> bool:
        """Return whether there are workers, and each of them is busy or at capacity."""
        busy, full = self._busy, self._at_capacity
        if not names or len(busy) + len(full) < len(names):
            return False
        return all(name in busy or name in full for name in names) if full else names <= busy.keys()

    def all_at_capacity(self, names: frozenset[str]) -> bool:
        """Return whether there are workers, and each of them has refused a request for lack of room."""
        return bool(names) and len(self._at_capacity) >= len(names) and names <= self._at_capacity.keys()

    def have_blocks(self, names: frozenset[str]) -> bool:
        """Return whether some worker has KV blocks and room: prompts to be computed are all that keeps it busy."""
        return not names <= self._out_of_blocks | self._at_capacity.keys()

    def has_blocks(self, name: str) -> bool:
        """Return whether a worker is not known to be above its threshold of KV blocks."""
        return name not in self._out_of_blocks

    def not_taking(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of some workers that take no new requests; none when that is all of them."""
        return _unless_all(names, names & (self._busy.keys() | self._at_capacity))

    def full(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of some workers without KV blocks or room, whatever prompts are to be computed; none when that is all."""
        return _unless_all(names, names & (self._out_of_blocks | self._at_capacity.keys()))

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
        wait_s = 0.0
        if excess.prefill_tokens:
            rate = self._computed.tokens_per_s(now_s)
            wait_s = inf if rate is None else excess.prefill_tokens * ranks / rate
        if excess.decode_blocks_fraction:
            tokens, stay_s = excess.decode_blocks_fraction * (load.kv_capacity_tokens or 0), self._stay_s
            is_known = stay_s is not None and tokens > 0 and load.inflight_tokens > 0
            wait_s = max(wait_s, tokens * (stay_s or 0.0) / load.inflight_tokens if is_known else inf)
        return wait_s


def _unless_all(names: frozenset[str], found: frozenset[str]) -> frozenset[str]:
    """Return those of some workers that were found; none when that is all of them, so that someone takes a request."""
    return frozenset() if len(found) == len(names) else found
