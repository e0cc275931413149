"""Mode ``load``: the rule of NVIDIA Dynamo's planner documentation: thresholds on prefill queue and KV usage, one replica at a time.

Unknown metrics make a role's load signal a lower bound, and keep the role from shrinking. Four rules prevent
over-compensation: the grace period, waiting for replicas that start, the trend of the queue, and the load that one
replica fewer could carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock_planner.decide.bounds.backoff import back_off, with_observed_counts
from penstock_planner.decide.bounds.replicas import below_floor
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Proposal, Reason, RoleProposal, Step, count_of
from penstock_planner.decide.demand.observation import Pull, Window, unserved
from penstock_planner.decide.demand.reading import Quality
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, RoleState


def load(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return the number of replicas that mode load proposes for each role, with the reason, before most bounds apply.

    Thresholds on the prefill queue and on KV usage decide (`propose`). A change is held back by a grace period after
    starts, by the back-off after a failed scale-up, and by a falling queue (`stabilise`).

    Args:
        window: Pulls (metrics scrapes) of the interval, at least one.
        state: State left by the last decision.
        config: Thresholds and bounds.
    """
    pools = window.pulls[-1].pools
    seen = {role: with_observed_counts(role, pool, state.of(role), config) for role, pool in pools.items()}
    proposals = []
    for role in pools:
        is_prefill = role is Role.PREFILL
        signal = (
            queue_signal(window.pulls, per_worker=config.queue_per_worker)
            if is_prefill
            else kv_signal(window.pulls)
        )
        proposals.append(stabilise(propose(role, window.pulls, signal, config), seen[role], window, config))
    return Proposal(proposals, seen)


WAITING_KV = 0.02
"""KV usage that a waiting request adds, as a fraction of one worker: 0.02, the figure of NVIDIA Dynamo's planner
documentation."""

_NEWEST = 3
"""Divisor of the number of known pulls: the trend uses the newest third of them, such as ten of thirty.

Chosen: enough for a line, and few enough that a queue that has turned is recognised soon."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One role's load (KV usage fraction or queued requests) over an interval, with a lower bound that allows for unknown values.

    Attributes:
        mean: Mean of the known values; None if all are unknown.
        low: Lower bound of the load: the mean with every unknown value counted as 0. None if all are unknown.
        pulls: Number of pulls (metrics scrapes) in the interval.
        unknown: Number of pulls in which the queue length, or the KV usage of at least one worker, was unknown.
        source: Name of the metrics source of the newest known value; empty if there is none.
        why: Reason of the newest unknown value; empty if there is none.
    """

    mean: float | None
    low: float | None
    pulls: int
    unknown: int
    source: str
    why: str

    @property
    def is_complete(self) -> bool:
        """Return whether every pull (metrics scrape) of the interval had the values of all ready workers.

        The role can shrink only then.
        """
        return self.mean is not None and not self.unknown


def kv_signal(pulls: Sequence[Pull]) -> Signal:
    """Return the mean KV usage fraction of the ready decode (or aggregated) workers, averaged over the pulls.

    A request that waits inside the workers adds 0.02 (`WAITING_KV`) of one worker, and in an aggregated graph so does
    one that waits in the routers: saturated workers are busy even if their KV caches are not full. The result can
    exceed 1.

    A pull (metrics scrape) with a worker of unknown usage gives two numbers: the mean of the known workers, for people,
    and a lower bound in which the unknown ones count as empty, like the Kubernetes HPA does before it scales up. A pull
    without any known worker counts as 0 in the bound and is left out of the mean.

    Example with one pull: two workers, one at 0.98 and one unknown, give mean 0.98, lower bound 0.49, and a signal that
    is not complete.
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
            why = kv.unknown_reasons or "no ready worker"
    mean, low = (sum(means) / len(means), low_sum / len(pulls)) if means else (None, None)
    return Signal(mean, low, len(pulls), unknown, source, why)


def _waiting(pull: Pull) -> float:
    inside = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    is_aggregated = Role.AGGREGATED in pull.pools
    return inside + (pull.demand.waiting if is_aggregated and pull.demand is not None else 0.0)


def queue_signal(pulls: Sequence[Pull], *, per_worker: bool) -> Signal:
    """Return the number of requests that wait for prefill, as mean over the pulls (metrics scrapes) and as lower bound.

    A pull is unknown if its queue is unknown or no prefill worker is ready. The lower bound allows for unknown values:
    such a pull counts as 0 in it and is left out of the mean. A queue of which only a part could be measured
    (`Reading.at_least`) counts with that value, and as one unknown value in the result. The mean and the lower bound are
    None if every pull is unknown.

    Args:
        pulls: Pulls of the interval.
        per_worker: Whether to divide the number by the ready prefill workers.
    """
    points, unknown, source, why = _queue_points(pulls, per_worker=per_worker)
    total = sum([value for _, value in points])
    mean, low = (total / len(points), total / len(pulls)) if points else (None, None)
    return Signal(mean, low, len(pulls), unknown, source, why)


def queue_trend(window: Window, horizon_s: float, *, per_worker: bool) -> tuple[float, float] | None:
    """Return the slope of the prefill queue and its predicted length, in requests per second and requests.

    The slope is that of the least-squares line through the newest third of the interval's known pulls (t, q), at
    least two: ``b = sum((t - mean t)(q - mean q)) / sum((t - mean t)^2)``. The prediction is the line's value at the
    interval's end plus ``b * horizon_s``; it can be negative. Only the newest third is used so that a queue that fell
    and rises again counts as rising, and a burst that has ended counts as ended.

    Example: pulls at t = 1..30 s with q = 4 - 0.05 t. b = -0.05, the line ends at 2.5, and three intervals of 30 s
    later it is 2.5 - 0.05 * 90 = -2.0, below 0.5: the queue drains by itself. With q = 4 - 0.01 t it ends at 3.7 and
    predicts 3.7 - 0.9 = 2.8: scale up.

    Args:
        window: Pulls (metrics scrapes) of the interval.
        horizon_s: Simulated seconds from the interval's end to the predicted time.
        per_worker: Whether to use the queue per ready prefill worker.

    Returns:
        (slope, predicted), or None if the queue is completely known in fewer than two pulls at different times.
    """
    complete = [pull for pull in window.pulls if pull.queue is None or not pull.queue.at_least]
    points, *_ = _queue_points(complete, per_worker=per_worker)
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


def _queue_points(
    pulls: Iterable[Pull], *, per_worker: bool
) -> tuple[list[tuple[float, float]], int, str, str]:
    """Return the known queues as (time, length), the number of unknown or partly known pulls, the newest source, and the reason."""
    points: list[tuple[float, float]] = []
    unknown = 0
    source = why = ""
    # Looked up before the loop, because this loop is most of the cost of a decision.
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
                why = f"{queue.source} reports only the workers' own queues"
    return points, unknown, source, why


REJECTED_MOST = 0.01
"""Maximum fraction of arrivals (0.01) that may be rejected or time out without growing the role.

The goal is to serve 99% of requests on time, and a request without a response is not on time."""


def propose(role: Role, pulls: Sequence[Pull], signal: Signal, config: DecideConfig) -> RoleProposal:
    """Return whether a role should grow, shrink or stay in mode load, as a proposal that is not yet delayed or limited.

    A role below its minimum grows. Otherwise rejected requests and thresholds on its load decide.

    Growing needs the lower bound of the load above the up threshold. Shrinking needs an interval without unknown
    values, with its mean below the down threshold. Both comparisons are strict. Requests that were rejected or timed
    out would have waited: if they are more than 1% (`REJECTED_MOST`) of the arrivals, the role grows, and a single such
    request keeps the role from shrinking.

    Args:
        role: Role to decide on.
        pulls: Pulls (metrics scrapes) of the interval, at least one.
        signal: Load of the role over the interval.
        config: Thresholds and bounds.
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
        return below_floor(blank, floor)
    name = "KV" if role is not Role.PREFILL else "queue per worker" if config.queue_per_worker else "queue"
    action, reason, detail = _compare(name, signal, down, up)
    threshold = {Action.UP: up, Action.DOWN: down, Action.HOLD: None}[action]
    compared = Step("thresholds", {"mean": signal.mean, "down": down, "up": up}, threshold, reason.value)
    rule = "" if reason is Reason.WITHIN_THRESHOLDS else compared.name
    proposal = replace(blank, action=action, reason=reason, detail=detail, steps=(step, compared), rule=rule)
    return _with_rejected(proposal, unserved(pulls, role), pulls)


def _with_rejected(proposal: RoleProposal, requests: float, pulls: Sequence[Pull]) -> RoleProposal:
    """Return the proposal with rejected and timed-out requests counted as demand."""
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
    step = Step("rejected", inputs, most, Reason.REQUESTS_REJECTED.value)
    return proposal.changed(Action.UP, Reason.REQUESTS_REJECTED, detail, step)


def _compare(name: str, signal: Signal, down: float, up: float) -> tuple[Action, Reason, str]:
    if signal.mean is None or signal.low is None:
        reason = Reason.NO_READY_WORKER if signal.why == "no ready worker" else Reason.METRIC_UNKNOWN
        return Action.HOLD, reason, f"{name} unknown ({signal.why or 'no pulls'})"
    if signal.low > up:
        return Action.UP, Reason.ABOVE_THRESHOLD, f"{name} {against(signal.low, '>', up)}"
    if signal.mean > up:
        detail = (
            f"{name} of known workers: {against(signal.mean, '>', up)}; of all workers: at least "
            f"{signal.low:.2f} ({signal.why})"
        )
        return Action.HOLD, Reason.METRIC_UNKNOWN, detail
    if signal.mean >= down:
        return (
            Action.HOLD,
            Reason.WITHIN_THRESHOLDS,
            f"{name} {signal.mean:.2f} is between {down:.2f} and {up:.2f}",
        )
    if not signal.is_complete:
        detail = (
            f"{name} of known workers: {against(signal.mean, '<', down)}; but {signal.unknown} of "
            f"{signal.pulls} pulls are incomplete ({signal.why})"
        )
        return Action.HOLD, Reason.METRIC_UNKNOWN, detail
    return Action.DOWN, Reason.BELOW_THRESHOLD, f"{name} {against(signal.mean, '<', down)}"


def against(value: float, sign: str, threshold: float) -> str:
    """Return a comparison as text, such as "0.93 > 0.90", with as many decimals as are needed to show the difference.

    Example: 0.9004 against 0.9 gives "0.9004 > 0.9000".

    Args:
        value: Number on the left.
        sign: Sign between the numbers, such as ">".
        threshold: Number on the right.
    """
    for decimals in range(2, 18):
        left, right = f"{value:.{decimals}f}", f"{threshold:.{decimals}f}"
        if left != right:
            return f"{left} {sign} {right}"
    return f"{value!r} {sign} {threshold!r}"


def stabilise(proposal: RoleProposal, state: RoleState, window: Window, config: DecideConfig) -> RoleProposal:
    """Return mode load's proposal, held back if it is too early for the change.

    A role does not shrink while a new decode worker fills its KV cache or a replica is not ready. It does not grow for
    some time after a failed scale-up, nor if the prefill queue is about to drain by itself.

    Args:
        proposal: Proposal of `propose`.
        state: State of the role, updated with the replica counts of this interval.
        window: Pulls (metrics scrapes) of the interval.
        config: Configuration with grace period, intervals and thresholds of mode load.
    """
    if proposal.action is Action.DOWN:
        proposal = _settle_down(proposal, state, config)
    if proposal.action is Action.DOWN and proposal.role is not Role.PREFILL:
        proposal = _carry_on(proposal, window, config)
    proposal = back_off(proposal, state)
    if (
        proposal.action is Action.UP
        and proposal.role is Role.PREFILL
        and proposal.reason is Reason.ABOVE_THRESHOLD
    ):
        proposal = _follow_trend(proposal, window, config)
    return proposal


def _settle_down(proposal: RoleProposal, state: RoleState, config: DecideConfig) -> RoleProposal:
    pool = proposal.pool
    if pool.starting:
        step = Step("all_ready", {"starting": pool.starting}, 0, "hold: supply is still changing")
        detail = f"{pool.starting} of {pool.replicas} replicas not ready"
        return proposal.held(Reason.REPLICA_NOT_READY, detail, step)
    if proposal.role is Role.PREFILL:
        return proposal
    inputs = {"intervals_left": state.grace, "grace_intervals": config.decode_grace_intervals}
    if state.grace:
        detail = f"a new worker has {count_of(state.grace, 'interval')} of grace left to fill its cache"
        return proposal.held(Reason.DECODE_GRACE_PERIOD, detail, Step("decode_grace", inputs, 0, "hold"))
    return proposal.passed(Step("decode_grace", inputs, 0, "pass"))


def _carry_on(proposal: RoleProposal, window: Window, config: DecideConfig) -> RoleProposal:
    """Hold a decode (or aggregated) scale-down if the remaining workers could not carry the load, or if the routers cannot be read.

    If the routers cannot be read, idle workers may be cut off from them rather than not needed.
    """
    if not _sees_frontend(window):
        step = Step(
            "frontend_queue_unknown",
            {"pulls": len(window.pulls)},
            None,
            "hold: idle workers may be disconnected from the routers",
        )
        return proposal.held(Reason.METRIC_UNKNOWN, "the routers' queue is unknown", step)
    load = kv_signal(window.pulls).mean or 0.0
    left = proposal.pool.replicas - 1
    after = load * proposal.pool.replicas / left if left else 0.0
    inputs = {"mean": load, "workers_after": left, "mean_after": after}
    if after > config.kv_up:
        step = Step("scale_down_check", inputs, config.kv_up, "hold")
        return proposal.held(
            Reason.ONE_FEWER_TOO_FEW,
            f"{count_of(left, 'worker')} would run at {against(after, '>', config.kv_up)}",
            step,
        )
    return proposal.passed(Step("scale_down_check", inputs, config.kv_up, "pass"))


def _sees_frontend(window: Window) -> bool:
    """Return whether the routers were readable in every pull, or the workers were busy in the pulls in which they were not.

    Workers cut off from unreachable routers become idle and report fresh zeros.
    """
    for pull in window.pulls:
        if pull.demand is not None:
            continue
        queue = pull.queue
        if queue is not None and (not queue.is_known or queue.at_least):
            return False
        if queue is None and pull.kv.total == 0:
            return False
    return True


def _follow_trend(proposal: RoleProposal, window: Window, config: DecideConfig) -> RoleProposal:
    horizon_s = config.queue_buffer_intervals * config.adjustment_interval_s
    trend = queue_trend(window, horizon_s, per_worker=config.queue_per_worker)
    inputs: dict[str, float | None] = {"slope_per_s": None, "predicted": None, "horizon_s": horizon_s}
    if trend is None:
        return proposal.passed(
            Step("queue_trend", inputs, config.queue_up, "pass: too few pulls for a trend")
        )
    slope, predicted = trend
    rejected = unserved(window.pulls, Role.PREFILL)
    inputs |= {"slope_per_s": slope, "predicted": predicted, "rejected": rejected}
    if rejected:
        return proposal.passed(
            Step("queue_trend", inputs, config.queue_up, "pass: it shrinks because requests are rejected")
        )
    if slope <= 0 and predicted < config.queue_up:
        falls = -slope * config.adjustment_interval_s
        how = f"it shrinks by {falls:.2f} per interval" if falls >= 0.005 else "it is being cleared"
        left = against(max(predicted, 0.0), "<", config.queue_up)
        detail = f"{how}: {left} in {count_of(config.queue_buffer_intervals, 'interval')}"
        step = Step("queue_trend", inputs, config.queue_up, "hold: it clears without another worker")
        return proposal.held(Reason.PREFILL_QUEUE_FALLING, detail, step)
    return proposal.passed(Step("queue_trend", inputs, config.queue_up, "pass"))


POLICY = PlannerPolicy(load, waits_for_adjustments=True)
"""Mode load as a policy."""
