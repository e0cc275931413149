"""The policies that compare workers: prefix cost, which is the default, round-robin, least-loaded, and published ones. Pure.

Prefix cost: what a request computes again delays not only itself but all behind it, and pushes another prefix out of a
cache. A policy that minimises its own TTFT counts such a token once, leaves caches too early under load, and so makes the
load that it flees from. bench/dualmap measures it. Among equals the worker that remembers the fewest blocks is taken, so
that idle workers fill their caches evenly.

Sources: the DualMap paper's baselines; Preble; Dynamo's router documentation for the KV cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Annotated, Any, Final, Self

from pydantic import Field

from penstock.api import RouterConfig, SloConfig
from penstock.router.policy.parameters import parameters
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    WorkerQueue,
    WorkerQueues,
    eligible,
)

_PREBLE_SHARE = 0.5
"""Share of a prompt that must be cached for affinity. Source: Preble, as the DualMap paper states it."""


class _Memoryless:
    """A policy that does not track which workers join and leave."""

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def worker_joined(self, name: str) -> None:
        """Record nothing."""

    def worker_left(self, name: str) -> None:
        """Record nothing."""


class RoundRobin(_Memoryless):
    """Each worker with room in turn, in the order given."""

    assigns = AssignTime.WHEN_FREE

    def __init__(self) -> None:
        self._turn = 0

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:  # noqa: ARG002 - the next in turn, whatever comes
        """Return the next worker."""
        names = list(workers)
        name = names[self._turn % len(names)]
        self._turn += 1
        return RoutingDecision(name, "next in turn")


class LeastLoaded(_Memoryless):
    """The emptiest worker: least KV in use where every worker's is known, then fewest tokens in flight.

    Prefill and aggregated workers without a KV reading are compared by tokens alone. Equals take turns, so
    that an idle pool does not send everything to its first worker.
    """

    assigns = AssignTime.WHEN_FREE
    reads_usage = True

    def __init__(self) -> None:
        self._turn = 0

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:  # noqa: ARG002 - loads decide, not prompts
        """Return the least loaded worker."""
        turn = self._turn
        self._turn += 1
        pool = list(workers.values())
        count = len(pool)
        if count == 1:
            return RoutingDecision(pool[0].name, "only candidate")
        # One unknown reading makes the comparison unfair either way, so tokens decide for all.
        known: list[float] = []
        for each in pool:
            usage = each.projected_kv_usage(estimates.now_s)
            if usage is None:
                break
            known.append(usage)
        by_kv = len(known) == count
        best, best_load = pool[0], (2.0, 0, 0, 0)
        for index, each in enumerate(pool):
            load = (
                known[index] if by_kv else 0.0,
                each.inflight_tokens,
                each.load.inflight_requests,
                (index - turn) % count,
            )
            if index == 0 or load < best_load:
                best, best_load = each, load
        if by_kv:
            reason = f"least KV in use: {best_load[0]:.3f}, {best_load[1]} tokens in flight"
        else:
            reason = f"fewest tokens in flight: {best_load[1]}"
        return RoutingDecision(best.name, reason)


class _Cheapest(_Memoryless, ABC):
    """The worker of the lowest cost, of equals the one that remembers least; within ``noise`` costs are equal."""

    noise = 0.0
    reason: str

    @abstractmethod
    def costs(self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> list[float]:
        """Return what a request costs at each worker."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the cheapest worker."""
        pool = eligible(workers, arrival.avoid)
        costs = self.costs(pool, arrival, estimates)
        as_good = min(costs) * (1 + self.noise)
        _, at = min([(pool[at].index.count, at) for at, cost in enumerate(costs) if cost <= as_good])
        return RoutingDecision(pool[at].name, self.reason)


class LeastPending(_Memoryless):
    """The fewest uncached tokens pending, whatever is cached where: the paper's Least Loaded."""

    reason = "fewest pending tokens"

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the least loaded worker."""
        pool = eligible(workers, arrival.avoid)
        best = min(pool, key=lambda each: (estimates.pending_tokens(each, arrival), each.index.count))
        return RoutingDecision(best.name, self.reason)


class MinTtft(_Cheapest):
    """The smallest estimated TTFT over all workers; by tokens alone while no throughput is known."""

    noise = 0.05
    """Chosen: measured throughputs of equal GPUs differ by less."""
    reason = "smallest estimated TTFT"

    def costs(self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> list[float]:
        """Return the estimates."""
        return [
            (estimates.pending_tokens(each, arrival) + each.uncached(arrival))
            / (estimates.tokens_per_s(each) or 1.0)
            for each in pool
        ]


class KvCost(_Cheapest):
    """Dynamo's cost in blocks: pending and own uncached prefill, plus all blocks that requests there occupy.

    ``prefill_load_scale`` and the overlap credit are 1, and the weight of a request 0: its defaults. Blocks
    of decoding requests are counted from dispatch to the computed prompt, all that a router in front of
    prefill workers sees of them. What the request itself will occupy is the same everywhere.
    """

    reason = "lowest KV cost"

    def costs(self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> list[float]:
        """Return the costs in tokens."""
        return [
            estimates.pending_tokens(each, arrival) + each.uncached(arrival) + each.running_prompt_tokens
            for each in pool
        ]


class Preble(LeastPending):
    """Affinity when more than half of the prompt is cached somewhere, else load: what the DualMap paper has of Preble."""

    reason = "little is cached anywhere: least loaded"

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the largest hit, or the least loaded one."""
        uncached, _, _, worker = min(
            (each.uncached(arrival), estimates.pending_tokens(each, arrival), at, each)
            for at, each in enumerate(eligible(workers, arrival.avoid))
        )
        if uncached < (1 - _PREBLE_SHARE) * arrival.tokens:
            return RoutingDecision(worker.name, "more than half is cached there")
        return super().route(arrival, workers, estimates)


HIT_WEIGHT: Final = 4
"""Waiting tokens that one recomputed token is worth: one for its own time, which is longer on a slower worker, and three for
what it does to caches, which costs as much on any. Chosen: of 1, 1.5, 2, 3, 4, 6, 10 and 20 the smallest
behind which capacity no longer grows clearly, on all of bench/dualmap's workloads; 1 is min-TTFT."""

DECODE_WEIGHT: Final = 0.1
"""Waiting tokens that a prompt token is worth whose answer is being decoded, where workers do both. Chosen: on 8
simulated A100s at 4 Conversation requests/s, 0.05 to 0.25 bring P99 of the time per output token from 97 to 56-62 ms
and of complete requests from 35 to 24 s, with TTFT unchanged; 1 costs TTFT a third."""


EXCESS_WEIGHT = 0.4
"""The same, on top, of what a worker decodes beyond `_EXCESS_FROM` times the mean of the workers compared. Chosen: 40 agents of
50 turns, whose prompts are cached, pile up where they began: E2E p99 falls from 32 to 22 s, TPOT p99 from 82 to 51 ms. A weight
of 0.5 of all tokens gives 15 s, and costs TTFT p50 up to a third where all workers decode alike; see bench/routing/RESULTS.md."""
_EXCESS_FROM: Final = 1.5
"""Chosen: from 1 on TTFT rises by a tenth on Conversation, from 2 on agents gain half as much."""


def prefix_cost(worker: WorkerQueue[Any], arrival: Arrival, uncached: int, estimates: Estimates) -> float:
    """Return what a request costs at a worker, in waiting tokens: 4 x its own uncached tokens and what is before it.

    At a worker that takes s times as long for a token: (3 + s) x its own uncached tokens and s x what is before it.
    ``uncached`` are the request's tokens to compute there.
    """
    before = worker.pending_for(arrival) + uncached
    if worker.running:
        before -= estimates.computed_tokens(worker)
    slowdown = worker.relative_slowdown
    if slowdown != 1.0:
        slowdown = estimates.relative_slowdown(worker)
    prefill = before * slowdown + (HIT_WEIGHT - 1) * uncached
    return prefill + DECODE_WEIGHT * worker.decoding_tokens


ALL_UP_TO: Final = 64
"""Chosen: up to this many workers all are compared, in some 30 us; sampling would save little."""
_IDLEST: Final = 16
_IN_TURN: Final = 8
"""Chosen: the entire fleet of 1,024 is seen once in 128 requests, within a second where such a fleet is busy."""
_HOLDERS: Final = 4
"""Chosen: workers remembered of each beginning; the fifth to hold a prefix is found by its load."""
_PREFIXES: Final = 1 << 16
"""Chosen: beginnings remembered, least recently used forgotten; 20 MB at most."""


def beginnings_of(keys: tuple[int, ...]) -> list[int]:
    """Return the keys of a prompt's first 1, 2, 4, ... blocks, and of the complete prompt."""
    found, blocks = [], 1
    while blocks < len(keys):
        found.append(keys[blocks - 1])
        blocks *= 2
    return [*found, *keys[-1:]]


_NOISE = 0.02
"""Chosen: a last block that another prompt's does not share, and no more."""


def cheapest(
    pool: Sequence[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates
) -> tuple[WorkerQueue[Any], int]:
    """Return the worker to take, of nearly equals the one that remembers least, and its tokens to compute there.

    Costs are computed of those alone that may be among the cheapest: nothing costs less than `HIT_WEIGHT` - 1 times its
    own tokens, so that a hit rules out whatever holds nothing.
    """
    uncached = [each.uncached(arrival) for each in pool]
    usual = _EXCESS_FROM * sum(each.decoding_tokens for each in pool) / len(pool)
    as_good, costs = inf, list[tuple[float, int]]()
    for at in sorted(range(len(pool)), key=uncached.__getitem__):
        own = uncached[at]
        if (HIT_WEIGHT - 1) * own > as_good:
            break
        cost = prefix_cost(pool[at], arrival, own, estimates)
        cost += EXCESS_WEIGHT * max(0.0, pool[at].decoding_tokens - usual)
        if cost <= as_good:
            costs.append((cost, at))
            as_good = min(as_good, cost * (1 + _NOISE))
    _, at = min((pool[at].index.count, at) for cost, at in costs if cost <= as_good)
    return pool[at], uncached[at]


def idle_sooner(
    pool: Sequence[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates, *, than_s: float
) -> tuple[WorkerQueue[Any], int] | None:
    """Return the worker without work at which a request is served soonest, and its tokens to compute there.

    None where none is served before ``than_s``, simulated seconds. Of equals the one that remembers least is taken.
    """
    idle = [
        (ttft_s, each.index.count, at, own)
        for at, each in enumerate(pool)
        if not each.running
        and not each.pending_tokens
        and (ttft_s := estimates.ttft_s(each, own := each.uncached(arrival))) is not None
        and ttft_s < than_s
    ]
    if not idle:
        return None
    _, _, at, own = min(idle)
    return pool[at], own


@dataclass(frozen=True, slots=True)
class PrefixCostParameters:
    """What `PrefixCost` reads of ``policyParameters``.

    Attributes:
        idle_slo_share: A request that is expected to take more than this share of its TTFT target at the cheapest worker
            goes to one without work that is sooner; None: it waits for its hit. Chosen: the largest that lets estimates
            err by a fifth; 1 serves fewer in time on the planner's *shared*, 0.6 fewer on arXiv (bench/routing/RESULTS.md).
    """

    idle_slo_share: Annotated[float, Field(gt=0, le=1)] | None = 0.8


class PrefixCost:
    """The worker with the smallest pending + 4 x uncached tokens, more on a slower one; of a large fleet's shortlist.

    Where it decodes too, what it decodes counts as well, and more where others decode less. Among nearly equals the one that remembers least is taken.

    For the shortlist a prompt's first 1, 2, 4, 8, ... blocks and the complete prompt are remembered: another prompt that
    shares n blocks with it is found to share more than n/2 of them, and the worker's own index then says how many.
    """

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self, given: PrefixCostParameters = PrefixCostParameters()) -> None:
        self._idle_slo_share = given.idle_slo_share
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._idlest: list[str] = []
        self._names: list[str] = []
        self._turn = 0

    @classmethod
    def from_config(cls, config: RouterConfig, _slo: SloConfig) -> Self:
        """Return the policy that a graph's router section asks for."""
        return cls(parameters(PrefixCostParameters, config))

    def worker_joined(self, name: str) -> None:
        """Take a worker into the turn, and among the idlest until its load is known."""
        self._names.append(name)
        self._idlest.append(name)

    def worker_left(self, name: str) -> None:
        """Leave a worker out."""
        self._names.remove(name)
        if name in self._idlest:
            self._idlest.remove(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the cheapest worker."""
        if len(workers) <= ALL_UP_TO:
            return self._choose(eligible(workers, arrival.avoid), arrival, estimates)
        beginnings = beginnings_of(arrival.chain)
        pool = self._candidates(beginnings, workers, estimates)
        if arrival.avoid:
            pool = [each for each in pool if each.name not in arrival.avoid]
        decision = self._choose(pool or eligible(workers, arrival.avoid), arrival, estimates)
        self._remember(beginnings, decision.worker)
        return decision

    def _choose(
        self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates
    ) -> RoutingDecision:
        worker, uncached = cheapest(pool, arrival, estimates)
        share, slo_s = self._idle_slo_share, estimates.ttft_slo_s
        if share is not None and slo_s is not None:
            ttft_s = estimates.ttft_s(worker, uncached)
            if ttft_s is not None and ttft_s > share * slo_s:
                sooner = idle_sooner(pool, arrival, estimates, than_s=ttft_s)
                if sooner is not None:
                    return RoutingDecision(sooner[0].name, "idle: sooner than its hit", uncached=sooner[1])
        return RoutingDecision(worker.name, "lowest prefix cost", uncached=uncached)

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Remember of a large fleet which worker another router's prompt went to."""
        if len(workers) > ALL_UP_TO:
            self._remember(beginnings_of(arrival.chain), worker)

    def _candidates(
        self, beginnings: Iterable[int], workers: WorkerQueues, estimates: Estimates
    ) -> list[WorkerQueue[Any]]:
        names, first = self._names, self._turn
        self._turn = (first + _IN_TURN) % max(1, len(names))
        in_turn = names[first : first + _IN_TURN]
        idlest = [workers[name] for name in dict.fromkeys((*self._idlest, *in_turn)) if name in workers]
        # Of so few, sorting all is quicker than a heap.
        pending = estimates.pending_tokens
        idlest.sort(key=lambda each: (pending(each), each.index.count))
        del idlest[_IDLEST:]
        self._idlest = [each.name for each in idlest]
        known = self._holders
        holders = chain.from_iterable([known[key] for key in beginnings if key in known])
        return [workers[name] for name in dict.fromkeys((*holders, *self._idlest)) if name in workers]

    def _remember(self, beginnings: Iterable[int], name: str) -> None:
        holders = self._holders
        for key in beginnings:
            known = holders.get(key, ())
            if known[:1] != (name,):
                holders[key] = (name, *(each for each in known if each != name))[:_HOLDERS]
            holders.move_to_end(key)
        while len(holders) > _PREFIXES:
            holders.popitem(last=False)


WINDOW_S = 180.0
"""Over which a worker's load is summed, simulated seconds. Source: Preble's H, three minutes."""


class PrebleE2:
    """Preble's E2: exploit a prefix longer than the rest of the prompt, else explore the worker that was given least lately.

    Unlike `Preble`, it compares what each worker was given over minutes, not what waits there now. Source: Srivatsa et al.,
    "Preble", section 3.2, with its published code's defaults: nothing is charged for blocks that would be evicted, and
    prefixes are not moved later.

    The load is what a worker was given to prefill within `WINDOW_S`, with the request's own uncached tokens. Preble adds
    the decoding of as many tokens as requests had on average; a router knows no output length in advance, so that
    decoding counts as in prefix cost, by the prompts being answered.
    """

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self) -> None:
        # What was given within the window, the oldest first: when, to whom, and the tokens; and their sums by worker.
        self._given: deque[tuple[float, str, int]] = deque()
        self._sums: dict[str, int] = {}

    def worker_joined(self, name: str) -> None:
        """Begin with nothing given."""
        self._sums[name] = 0

    def worker_left(self, name: str) -> None:
        """Forget what it was given."""
        del self._sums[name]
        self._given = deque(each for each in self._given if each[1] != name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the prefix, the least loaded of several; else the least loaded of all."""
        given, sums = self._given, self._sums
        while given and given[0][0] <= estimates.now_s - WINDOW_S:
            _, name, tokens = given.popleft()
            sums[name] -= tokens
        pool = eligible(workers, arrival.avoid)
        uncached = [each.uncached(arrival) for each in pool]
        least = min(uncached)
        exploits = 2 * least < arrival.tokens
        loads = []
        for at, (worker, own) in enumerate(zip(pool, uncached, strict=True)):
            if exploits and own > least:
                continue
            load = (sums[worker.name] + own) * estimates.relative_slowdown(worker)
            load += DECODE_WEIGHT * worker.decoding_tokens
            loads.append((load, at))
        _, at = min(loads)
        chosen = pool[at].name
        given.append((estimates.now_s, chosen, uncached[at]))
        sums[chosen] += uncached[at]
        reason = "most of it is cached there" if exploits else "given least in the last minutes"
        return RoutingDecision(chosen, reason, uncached=uncached[at])
