"""Determines which workers are busy or refuse requests, after every change of load, and when the first one will be free. Pure.

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
    """Load above which a worker is busy and gets no new requests. Exceeding one threshold suffices; None disables a threshold.

    A worker with several data-parallel ranks is only busy if each rank is above the threshold.

    Attributes:
        active_decode_blocks_threshold: Fraction of the KV blocks in use, 0-1.
        active_prefill_tokens_threshold: Number of prompt tokens to be computed, >= 0.
        active_prefill_tokens_threshold_frac: Number of prompt tokens to be computed, as a multiple of the worker's maximum
            tokens per engine step, >= 0.
    """

    active_decode_blocks_threshold: _Fraction | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: _Multiple | None = None

    @property
    def is_set(self) -> bool:
        """Whether at least one threshold is set."""
        return any(each is not None for each in self)

    def prefill_limit(self, batch_tokens: int | None) -> float | None:
        """Return the lower of both prefill thresholds, in tokens; None if neither applies.

        ``batch_tokens`` is the worker's maximum number of tokens per engine step; if it is None, the threshold ``..._frac``
        is ignored.
        """
        tokens, fraction = self.active_prefill_tokens_threshold, self.active_prefill_tokens_threshold_frac
        if fraction is None or batch_tokens is None:
            return tokens
        limit = fraction * batch_tokens
        return limit if tokens is None else min(tokens, limit)


NO_THRESHOLDS: Final = BusyThresholds()


class Excess(NamedTuple):
    """Amount by which a busy worker exceeds its thresholds, from which it is estimated when the worker takes requests again.

    Attributes:
        decode_blocks_fraction: Excess of KV blocks, as a fraction of all blocks, >= 0.
        prefill_tokens: Excess of prompt tokens to be computed, >= 0.
    """

    decode_blocks_fraction: float = 0.0
    prefill_tokens: float = 0.0


def busy_thresholds(config: AdmissionConfig) -> BusyThresholds:
    """Return the thresholds in a graph's admission section; mode ``none`` disables all of them."""
    if config.mode is AdmissionMode.NONE:
        return NO_THRESHOLDS
    return BusyThresholds(*(getattr(config, name) for name in BusyThresholds._fields))


def check_flags(config: AdmissionConfig, given: Mapping[str, Any]) -> None:
    """Check that busy thresholds passed as command-line flags have an effect.

    Args:
        config: The admission section after the flags were applied.
        given: Values of the flags that were passed, by field name of the admission section.

    Raises:
        ConfigError: a threshold was passed, and the admission mode is none.
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
    """Return by how much a worker exceeds the busy thresholds, at the data-parallel rank with the smallest excess.

    Returns None if it is not busy. A worker is busy only if all its ranks are, because a rank with capacity takes the
    next request. Unknown values make no rank busy. It is assumed that the worker balances complete prompts over its ranks
    in order of arrival: three prompts of 9,000 tokens over two ranks are 18,000 and 9,000 tokens, and not 13,500 each.

    Args:
        usages: Fraction of the KV blocks in use, by rank, 0-1, or above 1 if more is in flight than fits; None if unknown.
        prompts: Number of tokens to be computed of each prompt there, the oldest first.
        rest: Number of further tokens to be computed there, whose prompts are not known; they are distributed evenly.
        thresholds: Busy thresholds, the same for all workers.
        batch_tokens: Maximum number of tokens per engine step of the worker; None if unknown.
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
"""Chosen: tens of prompts; older ones have a weight of a third or less. Seconds of work of one worker."""


class DrainRate:
    """Tokens per second that one worker computes while it has work, weighted exponentially with a time constant of 10 s of work.

    Time in which no worker has work is not counted, so that under light traffic the result is the workers' capability and
    not the traffic. All times are in simulated seconds. If the clock is set back, no time passes.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._worked_s = 0.0
        self._workers = 0
        self._seen_s = 0.0

    def at_work(self, workers: int, now_s: float) -> None:
        """Record that ``workers`` workers have work from ``now_s`` (simulated seconds) on, until the next call.

        Only time in which a worker has work counts for the rate.
        """
        worked_s = self._workers * max(0.0, now_s - self._seen_s)
        kept = exp(-worked_s / _WINDOW_S)
        self._tokens *= kept
        self._worked_s = self._worked_s * kept + _WINDOW_S * (1.0 - kept)
        self._seen_s = max(self._seen_s, now_s)
        self._workers = workers

    def drained(self, tokens: float, now_s: float) -> None:
        """Add ``tokens`` tokens, computed by the workers just before ``now_s`` (simulated seconds), to those of the rate."""
        self.at_work(self._workers, now_s)
        self._tokens += tokens

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the tokens per simulated second that one worker computes while it has work; None if nothing was counted yet."""
        self.at_work(self._workers, now_s)
        return self._tokens / self._worked_s if self._tokens > 0 and self._worked_s > 0 else None


ALL_BUSY = "Service temporarily unavailable: All workers are busy, please retry later"
"""Message to a client whose request is rejected. Source: NVIDIA Dynamo's document "Request Rejection", "Error Response"."""

_RESIDENCE_WEIGHT = 0.1
"""Chosen: weight of the newest request in the mean duration of requests, so that about the last ten count."""

AT_CAPACITY_S = 1.0
"""Time in simulated seconds after which a worker that refused a request for lack of capacity is tried again, even if its metrics
were not scraped since. Chosen: one interval of health checks."""


class BusyWorkers:
    """Tracks which workers of one stage take no new requests now.

    A worker is busy if it exceeds the thresholds (`worker_excess`), and at capacity if it has itself refused a request within
    the last simulated second (`AT_CAPACITY_S`), and since then neither its metrics were scraped nor one of its requests ended.

    Attributes:
        thresholds: Thresholds in effect.
        has_thresholds: Whether any threshold is set.
        batch_tokens: Maximum number of tokens per engine step of a worker; None if unknown.
    """

    def __init__(
        self, thresholds: BusyThresholds = NO_THRESHOLDS, *, batch_tokens: int | None = None
    ) -> None:
        self.thresholds = thresholds
        self.has_thresholds = thresholds.is_set
        self.batch_tokens = batch_tokens
        self._computed = DrainRate()
        # Workers with prompts to compute, and the mean duration of recent requests.
        self._computing: set[str] = set()
        self._residence_s: float | None = None
        # By worker name: seconds until it is no longer busy, and the time at which it refused a request for lack of capacity.
        self._busy: dict[str, float] = {}
        self._at_capacity: dict[str, float] = {}
        # Busy workers that exceed the threshold of KV blocks.
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
        """Decide again whether a worker is busy (above a threshold), given its present load; does nothing if no threshold is set.

        Args:
            load: Load of the worker.
            prefill_tokens: Number of prompt tokens that the worker still has to compute, including those of requests queued
                for it.
            peer_tokens: Number of tokens that other routers have in flight there, as far as known; added to this router's
                own.
            now_s: Current time in simulated seconds.
            prompts: Tokens of the individual prompts in ``prefill_tokens``, as far as they are known; used if the worker
                has several data-parallel ranks, to estimate the load of each rank.
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
        """Count ``tokens`` prompt tokens that a worker has computed by ``now_s`` (simulated seconds).

        From their rate it is estimated when a busy worker takes requests again.
        """
        self._computed.drained(tokens, now_s)

    def computed_tokens_per_s(self, now_s: float) -> float | None:
        """Return the prompt tokens per simulated second that one worker computes while it has work; None if not measured yet."""
        return self._computed.tokens_per_s(now_s)

    def released(self, load: WorkerLoad, residence_s: float) -> None:
        """Record that a request has left the worker of ``load``: a refusal for lack of capacity before that no longer counts.

        ``residence_s`` is the time from the request's dispatch to its end, in simulated seconds; used to estimate when busy
        workers take requests again.
        """
        known_s = residence_s if self._residence_s is None else self._residence_s
        self._residence_s = known_s + _RESIDENCE_WEIGHT * (max(0.0, residence_s) - known_s)
        self._at_capacity.pop(load.name, None)

    def load_read(self, load: WorkerLoad) -> None:
        """Record that the metrics of the worker of ``load`` were scraped, so that it may be sent requests again.

        A refusal for lack of capacity before the scrape no longer counts.
        """
        self._at_capacity.pop(load.name, None)

    def refused(self, name: str, now_s: float) -> None:
        """Record that the worker ``name`` has refused a request for lack of capacity, so that it gets none for a simulated second.

        The time ends earlier if one of the worker's requests ends, or if the worker's metrics are scraped.
        """
        self._at_capacity[name] = now_s

    def keep_only(self, names: Collection[str], now_s: float) -> None:
        """Delete the state of workers that are not in ``names``, and refusals older than one simulated second (`AT_CAPACITY_S`)."""
        self._busy = {name: wait_s for name, wait_s in self._busy.items() if name in names}
        self._out_of_blocks &= self._busy.keys()
        self._computing &= set(names)
        self._at_capacity = {
            name: at_s
            for name, at_s in self._at_capacity.items()
            if name in names and 0 <= now_s - at_s < AT_CAPACITY_S
        }

    def set_thresholds(self, thresholds: BusyThresholds) -> None:
        """Replace the thresholds; no worker is busy until the caller calls `refresh` for it again."""
        self.thresholds = thresholds
        self.has_thresholds = thresholds.is_set
        self._busy.clear()
        self._out_of_blocks.clear()

    # ------------------------------------------------------------------ decisions

    @property
    def is_any(self) -> bool:
        """Whether any worker takes no new requests now, because it is above a threshold or has just refused one."""
        return bool(self._busy or self._at_capacity)

    def at_capacity(self) -> frozenset[str]:
        """Return the names of the workers that have refused a request for lack of capacity within the last simulated second.

        A worker whose metrics were scraped since then, or one of whose requests has ended, is not included.
        """
        return frozenset(self._at_capacity)

    def are_all_busy(self, names: frozenset[str]) -> bool:
        """Return whether none of the workers ``names`` takes new requests; False if ``names`` is empty.

        A worker takes none if it is above a threshold, or has just refused a request for lack of capacity.
        """
        busy, full = self._busy, self._at_capacity
        if not names or len(busy) + len(full) < len(names):
            return False
        return all(name in busy or name in full for name in names) if full else names <= busy.keys()

    def all_at_capacity(self, names: frozenset[str]) -> bool:
        """Return whether all workers ``names`` have just refused a request for lack of capacity; False if ``names`` is empty."""
        return bool(names) and len(self._at_capacity) >= len(names) and names <= self._at_capacity.keys()

    def any_has_blocks(self, names: frozenset[str]) -> bool:
        """Return whether one of the workers ``names`` can store the KV of another request, even if it is busy with prefills.

        Such a worker is not above the threshold of KV blocks, and has not just refused a request for lack of capacity.
        """
        return not names <= self._out_of_blocks | self._at_capacity.keys()

    def has_blocks(self, name: str) -> bool:
        """Return False if a worker was above the threshold of KV blocks when its load was last checked; True otherwise.

        The result is also True for a worker whose load is unknown.
        """
        return name not in self._out_of_blocks

    def unavailable(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of the workers ``names`` that take no new requests, so that they can be passed over.

        A worker takes none if it is above a threshold, or has just refused a request for lack of capacity. If this applies
        to all of ``names``, an empty set is returned, because no worker is then a better choice than the others.
        """
        return _empty_if_all(names, names & (self._busy.keys() | self._at_capacity))

    def out_of_blocks(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of the workers ``names`` that have no KV blocks for a new request, so that they can be passed over.

        A worker has none if it is above the threshold of KV blocks, or has just refused a request for lack of capacity. If
        this applies to all of ``names``, an empty set is returned, because no worker is then a better choice than the
        others.
        """
        return _empty_if_all(names, names & (self._out_of_blocks | self._at_capacity.keys()))

    def prefill_limit_exceeded(self, share: float) -> bool:
        """Return whether more prompt tokens wait per worker than the prefill threshold allows.

        ``share`` is the number of prompt tokens that wait for no particular worker, divided by the number of workers, so
        that it would be added to the work of each if they were distributed evenly; >= 0, in tokens. Returns
        False if no prefill threshold applies.
        """
        limit = self.thresholds.prefill_limit(self.batch_tokens)
        return limit is not None and share > limit

    def free_in_s(self) -> float | None:
        """Return the simulated seconds until the first busy worker is expected to take requests again; None if unknown or none is busy."""
        soonest = min(self._busy.values(), default=inf)
        return None if soonest == inf else soonest

    def _free_in_s(self, load: WorkerLoad, excess: Excess, *, ranks: int, now_s: float) -> float:
        """Return the time in which a worker's excess over the thresholds is expected to be gone; inf if unknown.

        Prompts are computed at the measured rate. KV blocks are freed at the rate of the tokens in flight divided by the mean
        duration of requests: 10,000 tokens with a mean duration of 5 s are 2,000 tokens/s, whether or not as many have
        arrived recently.
        """
        wait_s = 0.0
        if excess.prefill_tokens:
            rate = self._computed.tokens_per_s(now_s)
            wait_s = inf if rate is None else excess.prefill_tokens * ranks / rate
        if excess.decode_blocks_fraction:
            tokens, residence_s = (
                excess.decode_blocks_fraction * (load.kv_capacity_tokens or 0),
                self._residence_s,
            )
            is_known = residence_s is not None and tokens > 0 and load.inflight_tokens > 0
            wait_s = max(wait_s, tokens * (residence_s or 0.0) / load.inflight_tokens if is_known else inf)
        return wait_s


def _empty_if_all(names: frozenset[str], found: frozenset[str]) -> frozenset[str]:
    """Return ``found``, or an empty set if it contains all of ``names``, so that some worker takes the request."""
    return frozenset() if len(found) == len(names) else found
