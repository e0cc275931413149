"""Rules that keep the planner from over-compensating: grace after a new worker, queue trend, backoff."""

from __future__ import annotations

from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide import ownership
from penstock.planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import PoolCounts, Window, turned_away
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.propose import against, kv_signal, queue_trend
from penstock.planner.decide.state import RoleState


def remember(role: Role, pool: PoolCounts, before: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state as this interval sees it: grace opened, a settled scale-up forgotten.

    The grace period opens when more decode (or aggregated) workers are ready than at the last decision: a
    worker of ours, somebody else's or one back from a crash, each with an empty KV cache; and at the first
    decision, for the workers that started with the graph.
    """
    is_kv = role is not Role.PREFILL
    is_new = is_kv and pool.ready > (before.seen or 0)
    is_kept = before.asked is not None and pool.ready >= before.asked
    is_gone = before.asked is not None and pool.replicas < before.asked
    if before.failed is not None and pool.ready >= before.failed:
        before = replace(before, withdrawals=0, failed=None, backoff=0)
    return replace(
        before,
        seen=pool.ready,
        grace=config.decode_grace_intervals if is_new else before.grace,
        asked=None if is_kept or is_gone else before.asked,
        withdrawals=0 if is_kept else before.withdrawals,
        failed=None if is_kept else before.failed,
    )


def age(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after one more interval has been decided."""
    state = ownership.aged(state, config)
    return replace(state, grace=max(0, state.grace - 1), backoff=max(0, state.backoff - 1))


def rolled_back(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after a scale-up that never became ready: 2, 4, 8, 16, 16... intervals of backoff.

    They are adjustment intervals; a mode that decides more often counts as many decisions more.
    """
    withdrawals = state.withdrawals + 1
    backoff = min(2 ** min(withdrawals, 8), MAX_BACKOFF_INTERVALS) * config.decisions_per_adjustment
    return replace(
        state, asked=None, withdrawals=withdrawals, failed=state.asked, backoff=backoff, owed=False
    )


def stabilise(proposal: RoleProposal, state: RoleState, window: Window, config: DecideConfig) -> RoleProposal:
    """Return the proposal after grace, not-ready, backoff and trend rules."""
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
    if proposal.pool.starting:
        step = Step(
            "all_ready", {"starting": proposal.pool.starting}, 0, "hold: supply is not what it will be"
        )
        detail = f"{proposal.pool.starting} of {proposal.pool.replicas} replicas not ready"
        return proposal.held(Reason.REPLICA_NOT_READY, detail, step)
    if proposal.role is Role.PREFILL:
        return proposal
    inputs = {"intervals_left": state.grace, "grace_intervals": config.decode_grace_intervals}
    if state.grace:
        detail = f"{_intervals(state.grace)} of grace left for a new worker to fill its cache"
        return proposal.held(Reason.DECODE_GRACE_PERIOD, detail, Step("decode_grace", inputs, 0, "hold"))
    return proposal.passed(Step("decode_grace", inputs, 0, "pass"))


def _carry_on(proposal: RoleProposal, window: Window, config: DecideConfig) -> RoleProposal:
    """Hold a decode (or aggregated) scale-down that the rest could not carry, or that only an outage asks for."""
    if not _sees_frontend(window):
        step = Step("door", {"pulls": len(window.pulls)}, None, "hold: idle workers may only be cut off")
        return proposal.held(Reason.METRIC_UNKNOWN, "the routers' queue is unknown", step)
    load = kv_signal(window.pulls).mean or 0.0
    left = proposal.pool.replicas - 1
    after = load * proposal.pool.replicas / left if left else 0.0
    inputs = {"mean": load, "workers_after": left, "mean_after": after}
    if after > config.kv_up:
        step = Step("scale_down_check", inputs, config.kv_up, "hold")
        return proposal.held(
            Reason.ONE_FEWER_TOO_FEW, f"{left} would stand at {against(after, '>', config.kv_up)}", step
        )
    return proposal.passed(Step("scale_down_check", inputs, config.kv_up, "pass"))


def _sees_frontend(window: Window) -> bool:
    """Return whether the routers were seen in every pull, or workers were seen to be busy without them.

    Behind routers that cannot be read, workers fall idle and report fresh zeros.
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


def back_off(proposal: RoleProposal, state: RoleState) -> RoleProposal:
    """Return a scale-up held after a failed one, regardless of ready replicas: the next one would be refused too."""
    if not state.backoff or proposal.action is not Action.UP:
        return proposal
    inputs = {"intervals_left": state.backoff, "withdrawals": state.withdrawals}
    detail = f"{_intervals(state.backoff)} of backoff left after a replica that never became ready"
    return proposal.held(Reason.WITHDRAWAL_BACKOFF, detail, Step("backoff", inputs, 0, "hold"))


def _follow_trend(proposal: RoleProposal, window: Window, config: DecideConfig) -> RoleProposal:
    horizon_s = config.queue_buffer_intervals * config.adjustment_interval_s
    trend = queue_trend(window, horizon_s, per_worker=config.queue_per_worker)
    inputs: dict[str, float | None] = {"slope_per_s": None, "predicted": None, "horizon_s": horizon_s}
    if trend is None:
        return proposal.passed(
            Step("queue_trend", inputs, config.queue_up, "pass: too few pulls for a trend")
        )
    slope, predicted = trend
    rejected = turned_away(window.pulls, Role.PREFILL)
    inputs |= {"slope_per_s": slope, "predicted": predicted, "rejected": rejected}
    if rejected:
        return proposal.passed(Step("queue_trend", inputs, config.queue_up, "pass: it falls by refusals"))
    if slope <= 0 and predicted < config.queue_up:
        falls = -slope * config.adjustment_interval_s
        how = f"it falls by {falls:.2f} per interval" if falls >= 0.005 else "it is worked off"
        left = against(max(predicted, 0.0), "<", config.queue_up)
        detail = f"{how}: {left} in {_intervals(config.queue_buffer_intervals)}"
        step = Step("queue_trend", inputs, config.queue_up, "hold: it drains by itself")
        return proposal.held(Reason.PREFILL_QUEUE_FALLING, detail, step)
    return proposal.passed(Step("queue_trend", inputs, config.queue_up, "pass"))


def _intervals(count: int) -> str:
    return f"{count} interval" if count == 1 else f"{count} intervals"
