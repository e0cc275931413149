"""Threshold rules: a role's signal over an interval, the change it needs, and requests rejected before they showed in it.

Unknown values bound a signal from below, and keep a role from shrinking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import Pull, Window, turned_away
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.reading import Quality

WAITING_KV = 0.02
"""KV usage that a waiting request adds; the figure of the document's planner."""

_NEWEST = 3
"""Chosen: the trend is that of the newest third of the known pulls, ten of thirty: long enough for a line, short enough
that a queue which has turned is seen to have turned."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One role's load over an interval, with bounds for what is unknown.

    Attributes:
        mean: Mean of what is known; None when nothing is.
        low: The same with every unknown counted as 0: the load is at least this. None when nothing is known.
        is_complete: Every pull knew every ready worker; only then may the role shrink.
        pulls: Pulls in the interval.
        unknown: Pulls that missed something.
        source: Who gave the newest value.
        why: Why something is unknown, from the newest such pull.
    """

    mean: float | None
    low: float | None
    is_complete: bool
    pulls: int
    unknown: int
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class _Gaps:
    unknown: int
    source: str
    why: str


def kv_signal(pulls: Sequence[Pull]) -> Signal:
    """Return the mean over the pulls of the mean KV usage fraction over the ready workers.

    A request that waits inside the workers, and in an aggregated graph one that waits in the routers, adds
    `WAITING_KV` of one worker: a saturated pool whose KV is not full is busy. May exceed 1.

    A pull with an unknown worker gives two numbers: the mean of the known workers, for people, and a lower
    bound with the unknown counted as empty, as the Kubernetes HPA does before it scales up. A pull without any
    known worker counts as 0 in the bound and is left out of the mean.

    Example: two workers at 0.98 and unknown: mean 0.98, low 0.49, incomplete.
    """
    means: list[float] = []
    low_sum = 0.0
    unknown = 0
    source = why = ""
    for pull in pulls:
        kv = pull.kv
        if kv.fresh:
            load = kv.total + WAITING_KV * _waiting(pull)
            means.append(load / kv.fresh)
            low_sum += load / (kv.fresh + kv.unknown)
            source = kv.source
        if kv.unknown or not kv.fresh:
            unknown += 1
            why = kv.why or "no ready worker"
    return _signal(means, low_sum, len(pulls), _Gaps(unknown, source, why))


def _waiting(pull: Pull) -> float:
    inside = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    is_aggregated = Role.AGGREGATED in pull.pools
    return inside + (pull.demand.waiting if is_aggregated and pull.demand is not None else 0.0)


def queue_signal(pulls: Sequence[Pull], *, per_worker: bool) -> Signal:
    """Return the mean over the pulls of queued requests, ``per_worker`` divided by ready prefill workers.

    A pull without a known queue, or without a ready prefill worker to divide by, is unknown: 0 in the lower
    bound and left out of the mean. A queue that is only a lower bound counts with its value and makes the
    interval incomplete.
    """
    points, gaps = _queue_points(pulls, per_worker=per_worker)
    values = [value for _, value in points]
    return _signal(values, sum(values), len(pulls), gaps)


def queue_trend(window: Window, horizon_s: float, *, per_worker: bool) -> tuple[float, float] | None:
    """Return (slope, predicted) of the queue.

    The slope is the least-squares line through the newest third of the interval's known pulls (t, q), two at least,
    ``b = sum((t - mean t)(q - mean q)) / sum((t - mean t)^2)`` in requests per second. The line's value at the
    interval's end plus ``b * horizon_s`` is the prediction; it may be below 0. The newest third rather than all: a
    queue that fell and rises again is rising, and a burst that is over is over.

    Example: pulls at t = 1..30 s with q = 4 - 0.05 t. b = -0.05, the line ends at 2.5, and three intervals
    of 30 s later it is 2.5 - 0.05 * 90 = -2.0, below 0.5: the queue drains by itself.
    With q = 4 - 0.01 t it ends at 3.7 and predicts 3.7 - 0.9 = 2.8: scale up.

    Returns:
        None when fewer than two pulls at different times are known in full: no trend.
    """
    complete = [pull for pull in window.pulls if pull.queue is None or not pull.queue.at_least]
    points, _ = _queue_points(complete, per_worker=per_worker)
    if len(points) < 2:
        return None
    points = points[-max(2, len(points) // _NEWEST) :]
    mean_t = sum([t for t, _ in points]) / len(points)
    mean_q = sum([q for _, q in points]) / len(points)
    spread = product = 0.0
    for t, q in points:
        spread += (t - mean_t) * (t - mean_t)
        product += (t - mean_t) * (q - mean_q)
    if spread == 0:
        return None
    slope = product / spread
    return slope, mean_q + slope * (window.end_s - mean_t + horizon_s)


def _queue_points(pulls: Iterable[Pull], *, per_worker: bool) -> tuple[list[tuple[float, float]], _Gaps]:
    points: list[tuple[float, float]] = []
    unknown = 0
    source = why = ""
    # Looked up once: this loop is most of what a decision costs.
    prefill, is_fresh = Role.PREFILL, Quality.FRESH
    for pull in pulls:
        queue = pull.queue
        pool = pull.pools.get(prefill)
        if queue is None or queue.value is None or queue.quality is not is_fresh:
            unknown += 1
            why = queue.why if queue is not None else "not reported"
        elif pool is None or pool.ready == 0:
            unknown += 1
            why = "no ready worker"
        else:
            points.append((pull.at_s, queue.value / pool.ready if per_worker else queue.value))
            source = queue.source
            if queue.at_least:
                unknown += 1
                why = f"{queue.source} sees only the workers' own queues"
    return points, _Gaps(unknown, source, why)


def _signal(values: Sequence[float], low_sum: float, pulls: int, gaps: _Gaps) -> Signal:
    return Signal(
        mean=sum(values) / len(values) if values else None,
        low=low_sum / pulls if values else None,
        is_complete=bool(values) and gaps.unknown == 0,
        pulls=pulls,
        unknown=gaps.unknown,
        source=gaps.source,
        why=gaps.why,
    )


REJECTED_MOST = 0.01
"""Share of arrivals that may be turned away before a role grows: the goal is 99% in time, and a request without an answer is
in no time."""


def propose(role: Role, pulls: Sequence[Pull], signal: Signal, config: DecideConfig) -> RoleProposal:
    """Return what floor, rejections and thresholds ask for, before stabilisation and budget.

    Up needs the lower bound (unknown counted as 0) above the up-threshold; down needs a complete interval
    with its mean below the down-threshold. Both comparisons are strict. Requests that were turned away would have waited:
    more than `REJECTED_MOST` of the arrivals grow the role, any keep it from shrinking.
    """
    pool = pulls[-1].pools[role]
    down, up = config.thresholds(role)
    gpus = config.engine_gpus(role, pool.gpus)
    floor = config.floor(role, gpus)
    step = Step(
        "signal",
        {
            "mean": signal.mean,
            "at_least": signal.low,
            "pulls": signal.pulls,
            "pulls_with_unknown": signal.unknown,
            "source": signal.source,
        },
        None,
        "complete" if signal.is_complete else f"incomplete: {signal.why or 'no pulls'}",
    )
    blank = RoleProposal(role, pool, gpus, Action.HOLD, Reason.WITHIN_THRESHOLDS, "", (step,))
    if pool.replicas < floor:
        return _below_floor(blank, floor)
    name = "KV" if role is not Role.PREFILL else "queue per worker" if config.queue_per_worker else "queue"
    action, reason, detail = _compare(name, signal, down, up)
    threshold = {Action.UP: up, Action.DOWN: down, Action.HOLD: None}[action]
    compared = Step("thresholds", {"mean": signal.mean, "down": down, "up": up}, threshold, reason.value)
    proposal = replace(blank, action=action, reason=reason, detail=detail, steps=(step, compared))
    return _with_rejected(proposal, turned_away(pulls, role), pulls)


def _with_rejected(proposal: RoleProposal, requests: float, pulls: Sequence[Pull]) -> RoleProposal:
    """Return the proposal with rejected requests counted as demand."""
    pool = proposal.pool
    if not requests or proposal.action is Action.UP or pool.starting or not pool.ready:
        return proposal
    arrivals = sum(pull.demand.arrivals for pull in pulls if pull.demand is not None)
    most = REJECTED_MOST * arrivals
    detail = f"{requests:.0f} of {arrivals:.0f} requests rejected or timed out"
    inputs = {"requests": requests, "arrivals": arrivals}
    if requests <= most:
        step = Step("rejected", inputs, most, "hold")
        is_down = proposal.action is Action.DOWN
        return proposal.held(Reason.REQUESTS_REJECTED, detail, step) if is_down else proposal.passed(step)
    proposal = proposal.passed(Step("rejected", inputs, most, Reason.REQUESTS_REJECTED.value))
    return replace(proposal, action=Action.UP, reason=Reason.REQUESTS_REJECTED, detail=detail)


def _below_floor(blank: RoleProposal, floor: int) -> RoleProposal:
    step = Step("floor", {"replicas": blank.pool.replicas, "floor": floor}, floor, Reason.BELOW_FLOOR.value)
    return replace(
        blank.passed(step),
        action=Action.UP,
        reason=Reason.BELOW_FLOOR,
        detail=f"{blank.pool.replicas} below the floor of {floor}",
    )


def _compare(name: str, signal: Signal, down: float, up: float) -> tuple[Action, Reason, str]:
    if signal.mean is None or signal.low is None:
        reason = Reason.NO_READY_WORKER if signal.why == "no ready worker" else Reason.METRIC_UNKNOWN
        return Action.HOLD, reason, f"{name} unknown ({signal.why or 'no pulls'})"
    if signal.low > up:
        return Action.UP, Reason.ABOVE_THRESHOLD, f"{name} {against(signal.low, '>', up)}"
    if signal.mean > up:
        detail = f"{name} {against(signal.mean, '>', up)} of what is known, but at least {signal.low:.2f} ({signal.why})"
        return Action.HOLD, Reason.METRIC_UNKNOWN, detail
    if signal.mean >= down:
        return (
            Action.HOLD,
            Reason.WITHIN_THRESHOLDS,
            f"{name} {signal.mean:.2f} within {down:.2f} and {up:.2f}",
        )
    if not signal.is_complete:
        detail = f"{name} {against(signal.mean, '<', down)} of what is known, but {signal.unknown} of {signal.pulls} pulls incomplete ({signal.why})"
        return Action.HOLD, Reason.METRIC_UNKNOWN, detail
    return Action.DOWN, Reason.BELOW_THRESHOLD, f"{name} {against(signal.mean, '<', down)}"


def against(value: float, sign: str, threshold: float) -> str:
    """Return "0.93 > 0.90", with as many decimals as it takes to see the difference.

    Example: 0.9004 against 0.9 gives "0.9004 > 0.9000".
    """
    for decimals in range(2, 18):
        left, right = f"{value:.{decimals}f}", f"{threshold:.{decimals}f}"
        if left != right:
            return f"{left} {sign} {right}"
    return f"{value!r} {sign} {threshold!r}"
