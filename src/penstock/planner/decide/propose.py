"""Threshold rules: what one role's signal asks for, and requests that were turned away before they could show in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import Pull, turned_away
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.window import Signal

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
    """Return the proposal with what was turned away counted as demand."""
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
