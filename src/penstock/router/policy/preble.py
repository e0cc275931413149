"""Preble's E2: a prompt that is mostly cached goes where it is cached, any other to the worker that was given least lately.

Unlike `baselines.Preble`, the half of it that the DualMap paper describes, this one compares what each worker was given
over minutes, not what waits there now. Source: Srivatsa et al., "Preble", section 3.2, with its published code's
defaults: nothing is charged for blocks that would be evicted, and prefixes are not moved later. Pure.
"""

from __future__ import annotations

from collections import deque

from penstock.router.policy.prefix_cost import DECODE_WEIGHT
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    WorkerQueues,
    eligible,
)

WINDOW_S = 180.0
"""Over which a worker's load is summed, simulated seconds. Source: Preble's H, three minutes."""


class _GivenTokens:
    """Uncached tokens of the requests that one worker was given within the window.

    Attributes:
        tokens: Their sum, >= 0.
    """

    def __init__(self) -> None:
        self._given: deque[tuple[float, int]] = deque()
        self.tokens = 0

    def add(self, tokens: int, now_s: float) -> None:
        """Count a request; times never decrease."""
        self._given.append((now_s, tokens))
        self.tokens += tokens

    def forget(self, until_s: float) -> None:
        """Leave out what was given at ``until_s`` or before."""
        while self._given and self._given[0][0] <= until_s:
            self.tokens -= self._given.popleft()[1]


class PrebleE2:
    """Exploit a prefix that is longer than the rest of the prompt, else explore the worker of the least load.

    The load is what a worker was given to prefill within `WINDOW_S`, with the request's own uncached tokens. Preble adds
    the decoding of as many tokens as requests had on average; a router knows no output length in advance, so that
    decoding counts as in prefix cost, by the prompts being answered.
    """

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self) -> None:
        self._given: dict[str, _GivenTokens] = {}

    def worker_joined(self, name: str) -> None:
        """Begin with nothing given."""
        self._given[name] = _GivenTokens()

    def worker_left(self, name: str) -> None:
        """Forget what it was given."""
        del self._given[name]

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker with the prefix, the least loaded of several; else the least loaded of all."""
        pool = eligible(workers, arrival.avoid)
        uncached = [each.uncached(arrival) for each in pool]
        least = min(uncached)
        exploits = 2 * least < arrival.tokens
        loads = []
        for at, (worker, own) in enumerate(zip(pool, uncached, strict=True)):
            if exploits and own > least:
                continue
            given = self._given[worker.name]
            given.forget(estimates.now_s - WINDOW_S)
            load = (given.tokens + own) * estimates.relative_slowdown(worker)
            load += DECODE_WEIGHT * worker.decoding_tokens
            loads.append((load, at))
        _, at = min(loads)
        chosen = pool[at].name
        self._given[chosen].add(uncached[at], estimates.now_s)
        reason = "most of it is cached there" if exploits else "given least in the last minutes"
        return RoutingDecision(chosen, reason, uncached=uncached[at])
