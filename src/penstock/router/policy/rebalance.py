"""Moves queued requests away from an overloaded worker, each only to the other candidate that the policy named for it.

Source: DualMap, section 3.3, equation 6, and A.7 for workers that are limited by decode. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple, TypeVar

from penstock.router.policy.arrival import QueuedRequest
from penstock.router.policy.routing_policy import Estimates, WorkerQueue

T = TypeVar("T")

_STRIDE = 32
"""About the square root of a long queue's length."""


class RebalanceParams(NamedTuple):
    """Parameters of one rebalancing: moving waiting requests from an overloaded worker to their other candidate worker.

    Attributes:
        slo_s: TTFT target in simulated seconds.
        bottleneck_s: Time without a computed prompt after which the prefills of a busy worker count as held up by its
            decodes, in simulated seconds; the time since its last computed prompt is then added to the estimated TTFT there.
        now_s: Current time in simulated seconds.
        hit_first: Whether each queue serves the requests with the most cached tokens first; otherwise in order of arrival.
    """

    slo_s: float
    bottleneck_s: float
    now_s: float
    hit_first: bool


def decode_delay_s(worker: WorkerQueue[T], estimates: Estimates, now_s: float, bottleneck_s: float) -> float:
    """Return the simulated seconds to add to the estimated TTFT at a worker whose prefills wait for its decodes; else 0.

    Such a worker is limited by decode: it has prompts to compute, and the time since it last computed a prompt exceeds the
    expected duration of its running prompts by ``bottleneck_s``. The result is then the time since it last computed a
    prompt. DualMap's paper compares this time alone with the limit, which long prompts exceed as well.

    Args:
        worker: The worker.
        estimates: Throughputs from which the duration of the running prompts is estimated.
        now_s: Current time in simulated seconds.
        bottleneck_s: Limit, in simulated seconds; inf never adds a delay.
    """
    if not worker.running:
        return 0.0
    expected_s = estimates.seconds(worker, worker.running_tokens) or 0.0
    silent_s = now_s - worker.progress_s
    return silent_s if silent_s - expected_s > bottleneck_s else 0.0


def decode_bound(
    workers: Mapping[str, WorkerQueue[T]], estimates: Estimates, now_s: float, bottleneck_s: float
) -> list[str]:
    """Return the names of the workers for which requests wait although their prefills make no progress (limited by decode).

    Such a worker has prompts to compute, and the time since it last computed a prompt exceeds the expected duration of its
    running prompts by ``bottleneck_s`` simulated seconds. Requests that wait there may be moved to another worker.

    Args:
        workers: Workers of the role, by name.
        estimates: Estimated durations and throughputs.
        now_s: Current time in simulated seconds.
        bottleneck_s: Time without progress, in simulated seconds, from which on a worker is included.
    """
    return [
        each.name
        for each in workers.values()
        if each.line.queue and decode_delay_s(each, estimates, now_s, bottleneck_s)
    ]


class _MoveTarget:
    """A worker to which requests can move, with its pending tokens including those of planned moves."""

    def __init__(self, worker: WorkerQueue[T], estimates: Estimates, params: RebalanceParams) -> None:
        self.delay_s = decode_delay_s(worker, estimates, params.now_s, params.bottleneck_s)
        self.token_s = estimates.seconds(worker, 1) or 0.0
        self.tokens = estimates.pending_tokens(worker)


def plan_moves(
    source: WorkerQueue[T],
    workers: Mapping[str, WorkerQueue[T]],
    estimates: Estimates,
    params: RebalanceParams,
) -> list[QueuedRequest[T]]:
    """Return the waiting requests to move away from the overloaded worker ``source``, to their other candidate worker.

    Requests are moved until the queue of ``source`` meets the TTFT target. They are in order of benefit (reduction of
    their estimated TTFT), the largest first. Only requests that their other candidate (which the policy named at arrival)
    would serve sooner, and within the target, are moved. A request moves at most once per call.

    Args:
        source: The overloaded worker.
        workers: All eligible workers by name.
        estimates: Estimated durations and throughputs.
        params: Target, time and order.
    """
    token_s = estimates.seconds(source, 1)
    if token_s is None or not source.line.queue:
        return []
    delay_s = decode_delay_s(source, estimates, params.now_s, params.bottleneck_s)
    queue = list(source.line.in_order(hit_first=params.hit_first))
    targets = {
        name: _MoveTarget(workers[name], estimates, params)
        for name in {queued.other for queued in queue}
        if name in workers
    }
    running = source.running_tokens - estimates.computed_tokens(source)
    before = delay_s / token_s + running + source.peer_tokens
    here_s = [tokens * token_s for tokens in accumulate((p.uncached for p in queue), initial=before)][1:]
    moves: list[QueuedRequest[T]] = []
    gone = _Gone(len(queue))
    left_s, slo_s = here_s[-1], params.slo_s
    for at in _by_benefit(queue, here_s, targets, slo_s):
        # If the last request of the queue meets the target, all do.
        if left_s <= slo_s:
            break
        queued = queue[at]
        there = targets[queued.other]
        # Earlier moves have added to the target's queue and shortened this one, at most by all the time that they saved.
        there_s = there.delay_s + (there.tokens + queued.other_uncached) * there.token_s
        benefit_s = here_s[at] - there_s
        if there_s >= slo_s or benefit_s <= 0:
            continue
        if benefit_s <= here_s[-1] - left_s and benefit_s <= gone.before(at) * token_s:
            continue
        moves.append(queued)
        gone.add(at, queued.uncached)
        left_s -= queued.uncached * token_s
        there.tokens += queued.other_uncached
    return moves


class _Gone:
    """Tokens of the requests that have left a queue, summed up to any position: in strides, so that adding and summing are fast."""

    def __init__(self, length: int) -> None:
        self._each = [0] * length
        self._strides = [0] * (length // _STRIDE + 1)

    def add(self, at: int, tokens: int) -> None:
        self._each[at] = tokens
        self._strides[at // _STRIDE] += tokens

    def before(self, at: int) -> int:
        stride = at // _STRIDE
        return sum(self._strides[:stride]) + sum(self._each[stride * _STRIDE : at])


def _by_benefit(
    queue: list[QueuedRequest[T]], here_s: list[float], targets: Mapping[str, _MoveTarget], slo_s: float
) -> list[int]:
    costs = {
        name: (there.delay_s + there.tokens * there.token_s, there.token_s) for name, there in targets.items()
    }
    benefits = []
    for at, (queued, waits_s) in enumerate(zip(queue, here_s, strict=True)):
        cost = costs.get(queued.other)
        if cost is not None:
            there_s = cost[0] + queued.other_uncached * cost[1]
            if there_s < slo_s and there_s < waits_s:
                benefits.append((there_s - waits_s, at))
    benefits.sort()
    return [at for _, at in benefits]
