"""Rules that keep the planner from over-compensating: grace after a new worker, queue trend, backoff."""

from __future__ import annotations

from dataclasses import replace

from penstock_graph.models import Role
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Reason, Step
from penstock_planner.decide.observation import PoolCounts, Window
from penstock_planner.decide.propose import Draft, against
from penstock_planner.decide.state import RoleState
from penstock_planner.decide.window import queue_trend


def remember(role: Role, pool: PoolCounts, before: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state as this interval sees it: grace opened, a settled scale-up forgotten.

    The grace period opens when more decode (or aggregated) workers are ready than at the last decision: a
    worker of ours, somebody else's or one back from a crash, each with an empty KV cache. The workers there
    at the first decision are not new.
    """
    is_kv = role is not Role.PREFILL
    is_new = is_kv and before.seen is not None and pool.ready > before.seen
    is_kept = before.asked is not None and pool.ready >= before.asked
    is_gone = before.asked is not None and pool.replicas < before.asked
    return RoleState(
        seen=pool.ready,
        grace=config.decode_grace_intervals if is_new else before.grace,
        asked=None if is_kept or is_gone else before.asked,
        withdrawals=0 if is_kept else before.withdrawals,
        backoff=before.backoff,
        owed=before.owed,
    )


def age(state: RoleState) -> RoleState:
    """Return the state after one more interval has been decided."""
    return replace(state, grace=max(0, state.grace - 1), backoff=max(0, state.backoff - 1))


def withdrawn(state: RoleState) -> RoleState:
    """Return the state after a scale-up that never became ready: 2, 4, 8, 16, 16... intervals of backoff."""
    withdrawals = state.withdrawals + 1
    backoff = min(2 ** min(withdrawals, 8), MAX_BACKOFF_INTERVALS)
    return replace(state, asked=None, withdrawals=withdrawals, backoff=backoff, owed=False)


def stabilise(draft: Draft, state: RoleState, window: Window, config: DecideConfig) -> Draft:
    """Return the draft after grace, not-ready, backoff and trend rules."""
    if draft.action is Action.DOWN:
        return _settle_down(draft, state, config)
    if draft.action is Action.UP:
        draft = _back_off(draft, state)
    if draft.action is Action.UP and draft.role is Role.PREFILL and draft.reason is Reason.ABOVE_THRESHOLD:
        draft = _follow_trend(draft, window, config)
    return draft


def _settle_down(draft: Draft, state: RoleState, config: DecideConfig) -> Draft:
    if draft.pool.starting:
        step = Step("all_ready", {"starting": draft.pool.starting}, 0, "hold: supply is not what it will be")
        detail = f"{draft.pool.starting} of {draft.pool.replicas} replicas not ready"
        return draft.held(Reason.REPLICA_NOT_READY, detail, step)
    if draft.role is Role.PREFILL:
        return draft
    inputs = {"intervals_left": state.grace, "grace_intervals": config.decode_grace_intervals}
    if state.grace:
        detail = f"{_intervals(state.grace)} of grace left for a new worker to fill its cache"
        return draft.held(Reason.DECODE_GRACE_PERIOD, detail, Step("decode_grace", inputs, 0, "hold"))
    return draft.passed(Step("decode_grace", inputs, 0, "pass"))


def _back_off(draft: Draft, state: RoleState) -> Draft:
    if not state.backoff:
        return draft
    inputs = {"intervals_left": state.backoff, "withdrawals": state.withdrawals}
    detail = f"{_intervals(state.backoff)} of backoff left after a replica that never became ready"
    return draft.held(Reason.WITHDRAWAL_BACKOFF, detail, Step("backoff", inputs, 0, "hold"))


def _follow_trend(draft: Draft, window: Window, config: DecideConfig) -> Draft:
    horizon_s = config.queue_buffer_intervals * config.adjustment_interval_s
    trend = queue_trend(window, horizon_s)
    if trend is None:
        inputs = {"slope_per_s": None, "predicted": None, "horizon_s": horizon_s}
        return draft.passed(Step("queue_trend", inputs, config.queue_up, "pass: too few pulls for a trend"))
    slope, predicted = trend
    inputs = {"slope_per_s": slope, "predicted": predicted, "horizon_s": horizon_s}
    if slope < 0 and predicted < config.queue_up:
        detail = (
            f"it falls by {-slope * config.adjustment_interval_s:.2f} per interval: "
            f"{against(max(predicted, 0.0), '<', config.queue_up)} in {_intervals(config.queue_buffer_intervals)}"
        )
        step = Step("queue_trend", inputs, config.queue_up, "hold: it drains by itself")
        return draft.held(Reason.PREFILL_QUEUE_FALLING, detail, step)
    return draft.passed(Step("queue_trend", inputs, config.queue_up, "pass"))


def _intervals(count: int) -> str:
    return f"{count} interval" if count == 1 else f"{count} intervals"
