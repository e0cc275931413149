"""DualMap: two candidates per prefix from two hash rings; cache affinity until the SLO is at risk, then load.

Source: the DualMap paper, sections 3.2 to 3.4 and A.7. Differences from the paper are listed in docs/routing.md. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Any, Self

from penstock.api import RouterConfig, SloConfig
from penstock.router.policy.parameters import parameters
from penstock.router.policy.policies import LeastPending, prefix_cost
from penstock.router.policy.rings import WINDOW, HashRing, HotnessTree, pair
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    WorkerQueue,
    WorkerQueues,
    eligible,
)


class PairChoice(StrEnum):
    """How the DualMap policy chooses one of the two candidate workers that its hash rings give for a prompt.

    Attributes:
        SLO_AWARE: The one with more cached tokens, unless it would miss the TTFT target; then the less loaded one.
        CACHE_AFFINITY: The one with more cached tokens. An ablation of DualMap's paper, like the next two.
        LEAST_LOADED: The one with fewer pending tokens.
        MIN_TTFT: The one with fewer pending and uncached tokens together.
        PREFIX_COST: The one with the lower prefix cost: the tokens that wait there plus 4 times the uncached tokens of the
            request. Not in the paper.
    """

    SLO_AWARE = "slo-aware"
    CACHE_AFFINITY = "cache-affinity"
    LEAST_LOADED = "least-loaded"
    MIN_TTFT = "min-ttft"
    PREFIX_COST = "prefix-cost"


@dataclass(eq=False)
class DualMap:
    """The DualMap policy: maps each prefix to two candidate workers, one of which is chosen.

    The first blocks of a prompt are the hash key, which two hash rings (`HashRing`) map to two workers. A prefix that a
    large fraction of the recent requests share is hot: its key has one block more, so that these requests are spread over
    more workers.

    Attributes:
        slo_s: TTFT target in simulated seconds, > 0.
        choice: How one of the two candidates is chosen.
        rebalance: Whether queued requests are moved to their other candidate if both would miss the TTFT target.
        adaptive_prefix: Whether keys are made longer where a prefix is hot (`HotnessTree`); otherwise each key is
            ``start_depth`` blocks.
        hot_window: Minimum number of recent requests over which it is counted which prefixes are hot.
        hot_share: Fraction of these requests above which a prefix is hot, 0-1; None uses 2/n for n workers.
        cold_share: Fraction of these requests below which a prefix is no longer hot, 0-1; None uses 1/n.
        start_depth: Number of blocks of a key while no prefix is hot.
        decode_bottleneck_s: Simulated seconds without a computed prompt after which a worker counts as limited by decode,
            so that requests that wait for it may be moved; T in DualMap's paper.
    """

    slo_s: float = 5.0
    choice: PairChoice = PairChoice.SLO_AWARE
    rebalance: bool = True
    adaptive_prefix: bool = True
    hot_window: int = WINDOW
    hot_share: float | None = None
    cold_share: float | None = None
    start_depth: int = 1
    decode_bottleneck_s: float = 3.0

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __post_init__(self) -> None:
        """Create empty rings."""
        self._rings = HashRing(seed=1), HashRing(seed=2)
        self._hotness = HotnessTree(self.hot_window, self.start_depth, self.hot_share, self.cold_share)

    @classmethod
    def from_config(cls, config: RouterConfig, slo: SloConfig) -> Self:
        """Return the policy as configured by a graph's router section (``config``) and SLO targets (``slo``)."""
        return parameters(cls, config, _own_keys(config, slo))

    @property
    def bottleneck_s(self) -> float:
        """Simulated seconds without a computed prompt after which requests that wait for a worker may be moved to another one.

        It is the value of `decode_bottleneck_s`; inf if waiting requests are not moved.
        """
        return self.decode_bottleneck_s if self.rebalance else inf

    def worker_joined(self, name: str) -> None:
        """Add a worker to both hash rings, so that it becomes a candidate of some prompts."""
        for ring in self._rings:
            ring.add(name)

    def worker_left(self, name: str) -> None:
        """Remove a worker from both hash rings, so that its prompts get other candidates."""
        for ring in self._rings:
            ring.remove(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the better of the two candidate workers that the hash rings give for the prompt, by the configured `choice`.

        The other candidate is `RoutingDecision.other`. If both candidates have failed the request, the worker with the
        fewest tokens still to compute of all others is returned, and `RoutingDecision.other` is empty.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
        names = pair(*self._rings, self._key(arrival, len(workers)))
        if arrival.avoid:
            usable = [name for name in names if name not in arrival.avoid]
            if len(usable) < len(names) < len(workers) and not usable:
                # Both candidates have failed the request: any other worker is better than one of them.
                pool = eligible(workers, arrival.avoid)
                return RoutingDecision(
                    min(pool, key=lambda each: estimates.pending_tokens(each, arrival)).name,
                    "its pair has failed it",
                )
            names = tuple(usable) or names
        if len(names) == 1:
            return RoutingDecision(names[0], "only candidate")
        return self._choose(arrival, workers[names[0]], workers[names[1]], estimates)

    def _key(self, arrival: Arrival, count: int) -> int:
        if self.adaptive_prefix:
            return self._hotness.key(arrival.chain, count)
        return arrival.chain[: self.start_depth][-1] if arrival.chain else 0

    def _choose(
        self, arrival: Arrival, first: WorkerQueue[Any], second: WorkerQueue[Any], estimates: Estimates
    ) -> RoutingDecision:
        own_first, own_second = first.uncached(arrival), second.uncached(arrival)
        work_first = estimates.pending_tokens(first, arrival)
        work_second = estimates.pending_tokens(second, arrival)
        late_first = _is_late(estimates.seconds(first, work_first + own_first), self.slo_s)
        late_second = _is_late(estimates.seconds(second, work_second + own_second), self.slo_s)
        is_first_nearer = own_first <= own_second
        match self.choice:
            case PairChoice.LEAST_LOADED:
                takes_first, reason = work_first <= work_second, "less loaded of its pair"
            case PairChoice.MIN_TTFT:
                takes_first = work_first + own_first <= work_second + own_second
                reason = "sooner of its pair"
            case PairChoice.PREFIX_COST:
                cost_first = prefix_cost(first, arrival, own_first, estimates)
                takes_first = cost_first <= prefix_cost(second, arrival, own_second, estimates)
                reason = "lowest prefix cost of its pair"
            case _ if own_first == own_second:
                takes_first, reason = work_first <= work_second, "equal hits: less loaded of its pair"
            case PairChoice.SLO_AWARE if late_first if is_first_nearer else late_second:
                takes_first, reason = (
                    work_first <= work_second,
                    "hit would miss the SLO: less loaded of its pair",
                )
            case _:
                takes_first, reason = is_first_nearer, "larger hit of its pair"
        is_hot = self.rebalance and late_first and late_second
        if takes_first:
            return RoutingDecision(first.name, reason, second.name, is_hot, own_first, own_second)
        return RoutingDecision(second.name, reason, first.name, is_hot, own_second, own_first)


class PairCost(DualMap):
    """The DualMap policy with the lower prefix cost as the choice between its two candidates. This is not in the paper.

    Prefix cost counts the tokens that wait for a worker and, with 4 times the weight, the request's own uncached tokens.
    """

    @classmethod
    def from_config(cls, config: RouterConfig, slo: SloConfig) -> Self:
        """Return the policy as configured by a graph's router section (``config``) and SLO targets (``slo``)."""
        given = parameters(cls, config, {**_own_keys(config, slo), "choice": PairChoice.PREFIX_COST})
        return replace(given, start_depth=max(PAIR_COST_DEPTH, given.start_depth))


PAIR_COST_DEPTH = 2
"""Minimum number of blocks of a key. Chosen: the first block is the same in all Conversation prompts, so that a key of one block
has the same two candidates for all."""


class CacheAffinity(LeastPending):
    """One hash ring: equal prefixes always go to the same worker, however busy it is; a baseline of the DualMap paper."""

    reason = "its worker has failed it"

    def __init__(self) -> None:
        self._ring = HashRing(seed=1)
        self._hotness = HotnessTree()

    def worker_joined(self, name: str) -> None:
        """Add a worker to the hash ring, which then maps some prompts to it."""
        self._ring.add(name)

    def worker_left(self, name: str) -> None:
        """Remove a worker from the hash ring, which then maps its prompts to other workers."""
        self._ring.remove(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker to which the hash ring maps the prompt, and the reason.

        If that worker has failed the request, the worker with the fewest uncached tokens still to compute is returned.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
        name = self._ring.find(self._hotness.key(arrival.chain, len(workers)))
        if name is None or name in arrival.avoid:
            return super().route(arrival, workers, estimates)
        return RoutingDecision(name, "prefix's worker on the ring")


def _own_keys(config: RouterConfig, slo: SloConfig) -> dict[str, Any]:
    section = config.dualmap
    return {
        "slo_s": slo.ttft_seconds,
        "rebalance": section.rebalance,
        "hot_window": section.hot_window,
        "decode_bottleneck_s": section.decode_bottleneck_seconds,
    }


def _is_late(ttft_s: float | None, slo_s: float) -> bool:
    return ttft_s is not None and ttft_s > slo_s
