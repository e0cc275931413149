"""Routing policies that compare workers: prefix cost (the default), round-robin, least-loaded, and published ones. Pure.

Prefix cost: tokens that a request computes again delay not only this request but all after it, and evict another prefix from a
cache. A policy that minimises only its own TTFT counts such a token once, moves away from cached prefixes too early under load, and
so creates the load that it avoids. bench/dualmap measures this. Among workers of about equal cost the one with the fewest blocks in
its prefix index is chosen, so that idle workers fill their caches evenly.

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
"""Fraction of a prompt that must be cached for affinity. Source: Preble, as described in the DualMap paper."""


class _Memoryless:
    """A policy that does not track which workers join and leave."""

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def worker_joined(self, name: str) -> None:
        """Do nothing: the policy does not track workers."""

    def worker_left(self, name: str) -> None:
        """Do nothing: the policy does not track workers."""


class RoundRobin(_Memoryless):
    """Assigns requests to the workers with free capacity in turn, in the order in which `route` is given them."""

    assigns = AssignTime.WHEN_FREE

    def __init__(self) -> None:
        self._turn = 0

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:  # noqa: ARG002 - the next in turn, whatever comes
        """Return the worker that is next in turn, and the reason.

        ``workers`` are the workers to choose from, by name. The request ``arrival`` and the ``estimates`` are not used.
        """
        names = list(workers)
        name = names[self._turn % len(names)]
        self._turn += 1
        return RoutingDecision(name, "next in turn")


class LeastLoaded(_Memoryless):
    """Chooses the least loaded worker: the smallest KV usage if it is known for every worker, then the fewest tokens in flight.

    If a worker's KV usage is unknown, all workers are compared by tokens alone. Equally loaded workers take turns, so that an
    idle pool does not send everything to its first worker.
    """

    assigns = AssignTime.WHEN_FREE
    reads_usage = True

    def __init__(self) -> None:
        self._turn = 0

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:  # noqa: ARG002 - loads decide, not prompts
        """Return the least loaded of ``workers``: by the fraction of KV blocks in use, then by tokens in flight.

        If the fraction is unknown for one of them, tokens in flight alone decide. Equally loaded workers take turns. The
        request ``arrival`` is not used, and of ``estimates`` only the present time.
        """
        turn = self._turn
        self._turn += 1
        pool = list(workers.values())
        count = len(pool)
        if count == 1:
            return RoutingDecision(pool[0].name, "only candidate")
        # If one worker's usage is unknown, no comparison by usage is fair, so all are compared by tokens.
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
    """Chooses the worker with the lowest cost, and of about equal ones the one with the fewest blocks in its prefix index.

    Costs that differ by a fraction of at most ``noise`` count as equal.
    """

    noise = 0.0
    reason: str

    @abstractmethod
    def costs(self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> list[float]:
        """Return the cost of a request at each worker of ``pool``, in the same order."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the lowest of `costs`."""
        pool = eligible(workers, arrival.avoid)
        costs = self.costs(pool, arrival, estimates)
        as_good = min(costs) * (1 + self.noise)
        _, at = min([(pool[at].index.count, at) for at, cost in enumerate(costs) if cost <= as_good])
        return RoutingDecision(pool[at].name, self.reason)


class LeastPending(_Memoryless):
    """Chooses the worker with the fewest uncached tokens still to compute, regardless of what its cache contains.

    The DualMap paper calls this Least Loaded.
    """

    reason = "fewest pending tokens"

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the fewest uncached prompt tokens to compute before the request, and the reason.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
        pool = eligible(workers, arrival.avoid)
        best = min(pool, key=lambda each: (estimates.pending_tokens(each, arrival), each.index.count))
        return RoutingDecision(best.name, self.reason)


class MinTtft(_Cheapest):
    """Chooses the worker with the smallest estimated TTFT, so that cached prompts and short queues both count.

    While no prefill throughput is known, it chooses the worker with the fewest tokens to compute before the first token.
    """

    noise = 0.05
    """Chosen: the measured throughputs of equal GPUs differ by less."""
    reason = "smallest estimated TTFT"

    def costs(self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> list[float]:
        """Return the estimated TTFT of the request ``arrival`` at each worker of ``pool``, in simulated seconds.

        The values are in the order of ``pool``; the worker with the lowest is chosen. ``estimates`` contains the measured
        throughputs. While no throughput is known, the values are numbers of tokens to compute before the first token instead.
        """
        return [
            (estimates.pending_tokens(each, arrival) + each.uncached(arrival))
            / (estimates.tokens_per_s(each) or 1.0)
            for each in pool
        ]


class KvCost(_Cheapest):
    """Chooses the worker by Dynamo's cost: uncached prompt tokens (pending there, and the request's own) plus KV blocks in use.

    Dynamo's parameters have their defaults: ``prefill_load_scale`` and the overlap credit are 1, and the weight of a
    request is 0. KV blocks are counted from a request's dispatch until its prompt is computed, which is all that a router
    in front of prefill workers observes. The blocks of the request itself are the same on every worker and are left out.
    """

    reason = "lowest KV cost"

    def costs(self, pool: list[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates) -> list[float]:
        """Return the cost of the request ``arrival`` at each worker of ``pool``, in the order of ``pool``; the lowest is chosen.

        The cost is a number of tokens: the uncached prompt tokens that wait there and of the request, plus the tokens in use in
        the KV cache. ``estimates`` are the estimated durations at the time of the decision.
        """
        return [
            estimates.pending_tokens(each, arrival) + each.uncached(arrival) + each.running_prompt_tokens
            for each in pool
        ]


class Preble(LeastPending):
    """Chooses the worker with the largest cached part if that is more than half of the prompt, else the least loaded worker.

    This is Preble as the DualMap paper describes it; the algorithm that Preble's authors published is `PrebleE2`.
    """

    reason = "little is cached anywhere: least loaded"

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the largest cached part of the prompt if that is more than half, else the least loaded worker.

        The least loaded worker is the one with the fewest uncached prompt tokens to compute before the request.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
        uncached, _, _, worker = min(
            (each.uncached(arrival), estimates.pending_tokens(each, arrival), at, each)
            for at, each in enumerate(eligible(workers, arrival.avoid))
        )
        if uncached < (1 - _PREBLE_SHARE) * arrival.tokens:
            return RoutingDecision(worker.name, "more than half is cached there")
        return super().route(arrival, workers, estimates)


HIT_WEIGHT: Final = 4
"""Cost of a recomputed token, in waiting tokens: one for its own time, which is longer on a slower worker, and three for its effect
on caches, which is the same on every worker. Chosen: of 1, 1.5, 2, 3, 4, 6, 10 and 20 the smallest value above which capacity no
longer grows clearly, on all of bench/dualmap's workloads; 1 is min-TTFT."""

DECODE_WEIGHT: Final = 0.1
"""Cost, in waiting tokens, of a prompt token whose response is being decoded, on workers that do prefill and decode. Chosen: on 8
simulated A100s at 4 Conversation requests/s, 0.05 to 0.25 reduce P99 of the time per output token from 97 to 56-62 ms and of
complete requests from 35 to 24 s, with TTFT unchanged; with 1, TTFT is a third longer."""


EXCESS_WEIGHT = 0.4
"""Additional cost, like `DECODE_WEIGHT`, of the tokens that a worker decodes beyond `_EXCESS_FROM` times the mean of the compared
workers. Chosen: 40 agents of 50 turns, whose prompts are cached, accumulate on the workers on which they started: E2E p99 falls
from 32 to 22 s, TPOT p99 from 82 to 51 ms. A weight of 0.5 of all tokens gives 15 s, but increases TTFT p50 by up to a third if all
workers decode alike; see bench/routing/RESULTS.md."""
_EXCESS_FROM: Final = 1.5
"""Chosen: below it, from 1 on, TTFT increases by a tenth on Conversation; from 2 on, agents gain half as much."""


def prefix_cost(worker: WorkerQueue[Any], arrival: Arrival, uncached: int, estimates: Estimates) -> float:
    """Return the cost of a request at a worker, in tokens: the tokens that wait there plus 4 times its own uncached tokens.

    On a worker that takes s times as long per token as all workers together, the cost is s times the tokens that wait
    there, plus (3 + s) times the request's own uncached tokens. On workers that decode as well, the prompt tokens of the
    requests being decoded are added with a weight of 0.1 (`DECODE_WEIGHT`), and a higher one for a worker that decodes much
    more than the others.

    Args:
        worker: The worker.
        arrival: The request.
        uncached: Number of the request's tokens to compute on the worker.
        estimates: Estimates at the time of the decision.
    """
    before = worker.pending_for(arrival) + uncached
    if worker.running:
        before -= estimates.computed_tokens(worker)
    slowdown = worker.relative_slowdown
    if slowdown != 1.0:
        slowdown = estimates.relative_slowdown(worker)
    prefill = before * slowdown + (HIT_WEIGHT - 1) * uncached
    return prefill + DECODE_WEIGHT * worker.decoding_tokens


MAX_COMPARED_WORKERS: Final = 64
"""Maximum number of workers that are all compared. Chosen: takes about 30 us; a shortlist would save little."""
_MAX_IDLEST: Final = 16
_IN_TURN: Final = 8
"""Chosen: an entire fleet of 1,024 workers is considered once in 128 requests, within a second if such a fleet is busy."""
_MAX_HOLDERS: Final = 4
"""Chosen: number of workers remembered per prefix; a fifth worker with the prefix is found by its load."""
_PREFIXES: Final = 1 << 16
"""Chosen: number of prefixes remembered, the least recently used of which are deleted; 20 MB at most."""


def prefix_keys_of(keys: tuple[int, ...]) -> list[int]:
    """Return the keys under which the worker of a prompt is remembered: of its first 1, 2, 4, ... blocks and of the entire prompt.

    A later prompt that shares a first part is found by one of them, without comparing all lengths. Returns an empty list if
    ``keys`` is empty.

    ``keys`` are the keys of the prompt, one per block, each of which depends on all blocks before it.
    """
    found, blocks = [], 1
    while blocks < len(keys):
        found.append(keys[blocks - 1])
        blocks *= 2
    return [*found, *keys[-1:]]


_NOISE = 0.02
"""Chosen: the cost of a last block that is not shared with another prompt, and no more."""


def cheapest(
    pool: Sequence[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates
) -> tuple[WorkerQueue[Any], int]:
    """Return the worker of ``pool`` with the lowest prefix cost, and the number of tokens to compute there.

    The prefix cost is the number of tokens that wait there, plus 4 times the request's own uncached tokens; tokens cost
    more on a slow worker. Of workers whose cost is within 2% of the lowest, the one with the fewest blocks in its prefix
    index is chosen. Costs are only calculated for workers that can be among the cheapest: the cost is never less than
    `HIT_WEIGHT` - 1 times the request's own tokens, so that a worker with a large cached part rules out the workers without
    one.

    Args:
        pool: Workers to compare, at least one.
        arrival: The request.
        estimates: Estimated durations at the time of the decision.
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
    """Return the idle worker of ``pool`` with the smallest estimated TTFT, and the number of the prompt's tokens to compute there.

    Returns None if no idle worker's estimated TTFT is below ``than_s``. Of equal ones, the worker with the fewest blocks in
    its prefix index is chosen.

    Args:
        pool: Workers to compare.
        arrival: The request.
        estimates: Estimated durations at the time of the decision.
        than_s: Estimated TTFT at the worker that would be chosen otherwise, in simulated seconds.
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
    """Parameters of `PrefixCost` in ``policyParameters``.

    Attributes:
        idle_slo_share: Fraction of the TTFT target, in (0, 1]. A request whose estimated TTFT at the cheapest worker
            exceeds this fraction of the target goes to an idle worker whose estimated TTFT is smaller. None always waits
            for the cheapest worker. Chosen: the largest value that tolerates estimates which are wrong by a fifth; 1 serves
            fewer requests on time on the workload *shared* of the planner's benchmark, 0.6 fewer on arXiv
            (bench/routing/RESULTS.md).
    """

    idle_slo_share: Annotated[float, Field(gt=0, le=1)] | None = 0.8


class PrefixCost:
    """Chooses the worker with the lowest prefix cost; if there are more than 64 workers, the cheapest of a shortlist.

    The prefix cost of a worker is the number of tokens that wait there, plus 4 times the request's own uncached tokens.

    On workers that decode as well, decoding tokens count too, with a higher weight if other workers decode fewer. Of
    workers with about equal cost, the one with the fewest blocks in its prefix index is chosen.

    The shortlist contains workers that served a similar prompt, idle ones, and some others in turn. For it, the workers
    that served a prompt's first 1, 2, 4, 8, ... blocks and the complete prompt are remembered. So for another prompt that
    shares n blocks with it, a match of more than n/2 blocks is found, and the worker's own index then gives the exact
    number.
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
        """Return the policy with the parameters in ``config``, the router section of a graph; the SLO section is not used."""
        return cls(parameters(PrefixCostParameters, config))

    def worker_joined(self, name: str) -> None:
        """Add the worker ``name`` to those that `route` compares; until its load is known, it counts as idle."""
        self._names.append(name)
        self._idlest.append(name)

    def worker_left(self, name: str) -> None:
        """Remove the worker ``name`` from those that `route` compares."""
        self._names.remove(name)
        if name in self._idlest:
            self._idlest.remove(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the lowest prefix cost, or an idle worker that would answer sooner.

        The prefix cost counts the tokens that wait for a worker and 4 times the request's own uncached tokens. An idle
        worker is only chosen if the estimated TTFT at the cheapest worker exceeds the fraction ``idle_slo_share`` of the
        TTFT target.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
        if len(workers) <= MAX_COMPARED_WORKERS:
            return self._choose(eligible(workers, arrival.avoid), arrival, estimates)
        prefix_keys = prefix_keys_of(arrival.chain)
        pool = self._candidates(prefix_keys, workers, estimates)
        if arrival.avoid:
            pool = [each for each in pool if each.name not in arrival.avoid]
        decision = self._choose(pool or eligible(workers, arrival.avoid), arrival, estimates)
        self._remember(prefix_keys, decision.worker)
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
        """Remember that the worker ``worker`` has the prompt of ``arrival`` in its cache, because another router has sent it there.

        Does nothing if there are at most 64 ``workers`` (`MAX_COMPARED_WORKERS`), which are all compared for each request.
        """
        if len(workers) > MAX_COMPARED_WORKERS:
            self._remember(prefix_keys_of(arrival.chain), worker)

    def _candidates(
        self, prefix_keys: Iterable[int], workers: WorkerQueues, estimates: Estimates
    ) -> list[WorkerQueue[Any]]:
        names, first = self._names, self._turn
        self._turn = (first + _IN_TURN) % max(1, len(names))
        in_turn = names[first : first + _IN_TURN]
        idlest = [workers[name] for name in dict.fromkeys((*self._idlest, *in_turn)) if name in workers]
        # With this few workers, sorting all is faster than a heap.
        pending = estimates.pending_tokens
        idlest.sort(key=lambda each: (pending(each), each.index.count))
        del idlest[_MAX_IDLEST:]
        self._idlest = [each.name for each in idlest]
        known = self._holders
        holders = chain.from_iterable([known[key] for key in prefix_keys if key in known])
        return [workers[name] for name in dict.fromkeys((*holders, *self._idlest)) if name in workers]

    def _remember(self, prefix_keys: Iterable[int], name: str) -> None:
        holders = self._holders
        for key in prefix_keys:
            known = holders.get(key, ())
            if known[:1] != (name,):
                holders[key] = (name, *(each for each in known if each != name))[:_MAX_HOLDERS]
            holders.move_to_end(key)
        while len(holders) > _PREFIXES:
            holders.popitem(last=False)


WINDOW_S = 180.0
"""Window over which a worker's load is summed, in simulated seconds. Source: Preble's H, three minutes."""


class PrebleE2:
    """Preble's E2: chooses by a cached prefix if it is longer than the rest of the prompt, else by load alone.

    It compares the load that each worker was assigned over minutes, and not the requests that wait there now. Source:
    Srivatsa et al., "Preble", section 3.2, with the defaults of its published code: blocks that would be evicted cost
    nothing, and prefixes are not moved later.

    The load is the number of uncached tokens that a worker was assigned within the last three minutes (`WINDOW_S`,
    simulated), plus the request's own. Preble adds the decode time of as many tokens as requests had on average. A router
    does not know the output length in advance. So the number of tokens in the prompts of the requests that the worker is
    decoding, multiplied by `DECODE_WEIGHT`, is added instead.
    """

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self) -> None:
        # Assignments within the window, the oldest first: time, worker's name, and uncached tokens; and the sums of tokens by
        # worker.
        self._given: deque[tuple[float, str, int]] = deque()
        self._sums: dict[str, int] = {}

    def worker_joined(self, name: str) -> None:
        """Start to sum the tokens that are assigned to the new worker ``name``; the sum starts at 0."""
        self._sums[name] = 0

    def worker_left(self, name: str) -> None:
        """Delete the record of the tokens that were assigned to the worker ``name``, which can no longer be chosen."""
        del self._sums[name]
        self._given = deque(each for each in self._given if each[1] != name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker for a request and the reason.

        If the longest prefix of the prompt that any worker has cached is longer than the rest of the prompt, the result
        is the least loaded of the workers that have this prefix; otherwise the least loaded of all. The load is the
        number of uncached tokens that a worker was assigned within the last 3 simulated minutes.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
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
