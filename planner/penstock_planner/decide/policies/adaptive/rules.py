"""The rules of one role: whether it lacks workers, and whether one replica fewer would be enough.

Each rule returns a finding with its numbers whether it applies or not, so that ``planner explain`` shows all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock_planner.decide.capacity.decoding import KvView
from penstock_planner.decide.capacity.worker_model import ItlView, WorkerModel
from penstock_planner.decide.decision import Reason, Step, count_of
from penstock_planner.decide.demand.load import FULL, WorkView, idle_speed_usage
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.demand.trend import CHANCE_SIGMAS
from penstock_planner.decide.objective import cost
from penstock_planner.decide.objective.model_comparison import ModelComparison
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.objective.trial import Trial

LASTS = "a replica starts only once demand has lasted for a start-up"
"""Explanation of a rule whose condition is met but which waits for the demand to last."""
ALONE = "no requests overlap, so what a worker could compute is not known to be too little"
"""Explanation of a rule whose condition is met while no two requests overlap."""


@dataclass(frozen=True, slots=True)
class RoleFinding:
    """Result of one rule for one role: whether the role must grow, or can shrink by one replica, and why.

    Attributes:
        reason: Reason code that the decision gets if the rule applies.
        detail: Result in words and numbers, whether the rule applies or not.
        step: Record of the rule with its inputs, threshold and outcome.
        waits_for: Explanation of what keeps the rule from applying although its condition is met, such as that demand
            has not lasted long enough. Empty if nothing does.
    """

    reason: Reason
    detail: str
    step: Step
    waits_for: str = ""

    @property
    def applies(self) -> bool:
        """Whether the rule asks for its change: a rule for growing to add replicas, a condition for shrinking to remove one."""
        return self.step.outcome.startswith(("grow", "shrink"))


def grows(applies: bool) -> str:  # noqa: FBT001 - a word for a truth
    """Return the word that a rule for growing records as its outcome: "grow" if it applies, else "pass"."""
    return "grow" if applies else "pass"


@dataclass(frozen=True, slots=True)
class Case:
    """Input of one role's rules at one decision. Times are durations in simulated seconds, counted from the decision.

    Attributes:
        role: Role to decide on: prefill, decode or aggregated.
        pool: Replica counts of the role at the newest pull (metrics scrape).
        slo_s: TTFT target.
        horizon_s: Time until a replica requested now would be ready.
        hold_s: Time for which an idle replica is kept.
        arrivals_s: Time until each starting replica is expected to be ready.
        work: Prefill work; None for decode.
        kv: KV usage; None for prefill.
        itl: Expected ITL; None for prefill, and if there is no ITL target.
        oldest_wait_s: Longest time that one of the waiting requests has waited in the routers while every role had a
            ready replica. None if none waits.
        rejected: Number of requests rejected or timed out since the previous decision for lack of this role's workers.
        workers: Throughput and permitted utilisation of the workers, as observed or by a performance profile.
        hindsight: Costs of the possible floors (minimum numbers of replicas); None if none are known yet.
        served: Comparison of the late requests that the planner's latency model predicts with the requests that really
            were late. None for roles that requests do not reach first, and if the latency model is not used.
        trial: Record of late requests beyond the number that the latency model predicts, and of the trial of one more
            replica, which shows whether that replica reduces the number; None if the latency model is not used.
        allowed: Fraction of requests that are allowed to be late (over a latency target).
        price_gpu_s: GPU-seconds that are worth spending to avoid one late request.
    """

    role: Role
    pool: PoolCounts
    slo_s: float
    horizon_s: float
    hold_s: float
    arrivals_s: Sequence[float]
    work: WorkView | None
    kv: KvView | None
    itl: ItlView | None
    oldest_wait_s: float | None
    rejected: float
    workers: WorkerModel
    hindsight: Hindsight | None = None
    served: ModelComparison | None = None
    trial: Trial | None = None
    allowed: float = 0.01
    price_gpu_s: float = 0.0

    @property
    def is_early(self) -> bool:
        """Whether it is too early to start a replica for the present demand, because demand may not last.

        It is too early if waiting until demand has lasted for a start-up time would have been cheaper in the past, by
        the planner's simulation, and demand has not lasted that long now.
        """
        known = self.hindsight
        if known is None or known.growth is Growth.IMMEDIATE:
            return False
        return known.lasting(self.horizon_s) <= self.pool.replicas


def grow_findings(case: Case) -> list[RoleFinding]:
    """Return the result of each rule for growing, with an explanation. The role grows if any of the rules applies.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
    """
    found = []
    if case.work is not None:
        found.append(_demand(case, case.work))
        found.append(_backlog(case, case.work))
    if case.kv is not None:
        found.append(_kv(case, case.kv))
    if case.itl is not None:
        found.append(_itl(case.itl, case.pool.replicas))
    found.append(_rejected(case))
    if case.hindsight is not None:
        found.append(_floor(case, case.hindsight))
    return found if case.trial is None else [*found, _served_late(case, case.trial)]


def replicas_to_add(case: Case, most: int) -> int:
    """Return the number of replicas to add, from 1 to ``most``; at least one rule for growing must apply to ``case``.

    It is calculated by adding replicas one by one, each counted as starting, until no rule for growing applies.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
        most: Maximum number to return, >= 1.
    """
    count = 1
    while count < most:
        pool = replace(case.pool, starting=case.pool.starting + 1)
        case = replace(case, pool=pool, arrivals_s=(*case.arrivals_s, case.horizon_s))
        if not any(found.applies for found in grow_findings(case)):
            break
        count += 1
    return count


def shrink_findings(case: Case) -> list[RoleFinding]:
    """Return the result of each condition for removing one replica, with an explanation.

    The role shrinks only if all conditions are met.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
    """
    found = [] if case.hindsight is None else [_floor_after(case, case.hindsight)]
    if case.trial is not None:
        found.append(_trial_after(case, case.trial))
    if case.work is not None:
        found.append(_work_after(case, case.work))
    if case.kv is not None:
        found.append(_kv_after(case, case.kv))
    if case.itl is not None:
        found.append(_itl_after(case.itl, case.pool.replicas - 1))
    return found


def workers_needed(case: Case) -> float | None:
    """Return the number of workers, a fraction such as 2.4, that the expected demand needs; a role with fewer workers must grow.

    Returns None if a worker's throughput is unknown, or for decode if no worker is ready.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
    """
    if case.work is not None:
        speed = case.work.tokens_per_s
        most = case.workers.busy_most(case.role, max(1, case.pool.replicas))
        return _expected(case, case.work) / (most * speed) if speed else None
    if case.kv is None or not case.pool.ready:
        return None
    return (
        case.pool.ready
        * idle_speed_usage(_kv_expected(case, case.kv) / case.pool.ready)
        / idle_speed_usage(case.workers.restraint.kv_ahead)
    )


def kv_busy_workers(case: Case) -> float:
    """Return the number of workers, a fraction such as 2.4, whose KV caches the running answers would fill; 0 if it is unknown.

    Args:
        case: Input of the role's rules, such as replica counts and KV usage.
    """
    if case.kv is None or not case.pool.ready:
        return 0.0
    return case.pool.ready * idle_speed_usage(case.kv.load / case.pool.ready) / idle_speed_usage(FULL)


def workers_to_keep(case: Case) -> float:
    """Return the number of workers, a fraction such as 2.4, that demand needs so that the pool does not soon grow again.

    A pool (the workers of one role) with more workers can shrink. Must be called only if `workers_needed` is not None.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
    """
    kept = case.workers.restraint
    if case.work is not None:
        able = case.workers.busy_after(case.role, max(2, case.pool.replicas - 1)) * (
            case.work.tokens_per_s or 0.0
        )
        return _kept_rate(case.work, kept.sigmas) / able
    if case.kv is None or not case.pool.ready:
        return 0.0
    return case.pool.ready * idle_speed_usage(case.kv.kept_load / case.pool.ready) / idle_speed_usage(kept.kv)


def _floor(case: Case, known: Hindsight) -> RoleFinding:
    """Grow to the learned floor: the minimum number of replicas that, in hindsight, would have been best to keep.

    It does not grow after the demand that needed the floor has ended, so that GPUs become free for other roles.
    """
    words = cost.in_words(known, case.pool.gpus or 1)
    if words and case.served is not None:
        words += case.served.in_words()
    inputs: dict[str, float | int | str | None] = {
        "workers": case.pool.replicas,
        "floor": known.floor_now,
        "growth": known.growth.value,
    }
    is_past = known.is_past(case.pool.replicas + 1, case.hold_s)
    applies = case.pool.replicas < known.floor_now and not is_past
    if case.served is not None:
        inputs |= {"served_in_time": case.served.in_time, "predicted_in_time": case.served.predicted_in_time}
        inputs |= case.served.newest.inputs
    step = Step(
        "hindsight",
        inputs,
        known.floor_now,
        grows(applies) + (words and f": {words}"),
    )
    return RoleFinding(Reason.HINDSIGHT_FLOOR, words or "nothing is known yet", step)


def _floor_after(case: Case, known: Hindsight) -> RoleFinding:
    """Allow shrinking down to the learned floor, and above it only for replicas that have not been needed recently."""
    workers = case.pool.replicas
    is_idle = known.is_idle(workers, case.hold_s)
    applies = workers > known.floor_now and is_idle
    idle_s = known.idle_s[workers - 1] if 1 <= workers <= known.sizes else None
    inputs = {"floor": known.floor_now, "idle_s": idle_s, "hold_s": case.hold_s}
    step = Step("idle", inputs, None, "shrink" if applies else "hold")
    after = count_of(workers - 1, f"{case.role.value} worker")
    return RoleFinding(Reason.SPARE_CAPACITY, f"{after} would have been enough", step)


def _served_late(case: Case, trial: Trial) -> RoleFinding:
    """Grow by one replica on trial if requests that are late without explanation by the latency model cost more than a replica.

    It does not apply while a replica starts, nor after requests have stopped being late: a replica that is tried then
    would seem to help, and would keep its GPUs from another role.
    """
    gpus = case.pool.gpus or 1
    is_dear = trial.late * case.price_gpu_s > gpus * trial.seen_s
    is_late = trial.is_late(case.allowed) and is_dear and trial.late_ago_s <= case.hold_s
    inputs: dict[str, float | int | str | None] = {
        "requests": trial.requests,
        "late_unexplained": trial.share,
        "late_price_gpu_s": case.price_gpu_s,
        "late_ago_s": trial.late_ago_s,
        "tried": trial.tried,
        "helped": {None: "unknown", True: "yes", False: "no"}[trial.outcome],
    }
    applies = is_late and trial.is_over and not case.pool.starting
    in_vain = "one more replica was tried and did not help" if is_late and trial.outcome is False else ""
    step = Step("served", inputs, case.allowed, grows(applies) + (in_vain and f"; {in_vain}"))
    detail = (
        f"{trial.share:.1%} of the last {trial.requests:.0f} requests missed TTFT or ITL for reasons the "
        f"model does not explain (allowed {case.allowed:.1%})"
    ) + ("; adding one replica on trial" if applies else "")
    return RoleFinding(Reason.SERVED_LATE, detail, step, in_vain)


def _trial_after(case: Case, trial: Trial) -> RoleFinding:
    """Keep the replica on trial until it is known whether it helps, and also afterwards if it helped."""
    workers = case.pool.replicas
    applies = workers > trial.floor
    step = Step("tried", {"workers": workers}, trial.floor, "shrink" if applies else "hold")
    after = f"{count_of(workers - 1, 'worker')} {'is' if workers == 2 else 'are'}"
    return RoleFinding(Reason.SPARE_CAPACITY, f"{after} enough for the requests served on time", step)


def _demand(case: Case, work: WorkView) -> RoleFinding:
    """Compare the forecast demand in tokens/s with what the workers, starting ones included, can compute."""
    workers = case.pool.replicas
    expected = _expected(case, work)
    able = workers * (work.tokens_per_s or 0.0)
    inputs = {
        "tokens_per_s": work.rate.now,
        "tokens_per_s_ahead": work.rate.ahead,
        "tokens_per_s_error": work.rate.error,
        "tokens_per_s_lately": work.level.now,
        "tokens_per_s_lately_error": work.level.error,
        "worker_tokens_per_s": work.tokens_per_s,
        **({"tokens_per_s_recalled": work.recalled, "confidence": work.confidence} if work.recalled else {}),
        "requests_met": "no" if work.is_uncontended else "yes",
        "workers": workers,
        "horizon_s": case.horizon_s,
    }
    most = case.workers.busy_most(case.role, workers)
    is_above = work.tokens_per_s is not None and expected > most * able
    is_recalled = work.recalled > most * able
    applies = is_above and (is_recalled or not (case.is_early or work.is_uncontended))
    why = "" if case.workers.uses_learned_floor else " with a wait within the SLO"
    detail = (
        f"demand forecast for {case.horizon_s:.0f} s ahead: {expected:,.0f} tokens/s, more than "
        f"{most * able:,.0f} ({most:.0%} of the {able:,.0f} that {count_of(workers, 'worker')} can "
        f"compute{why})"
    )
    waits_for = "" if applies or not is_above else ALONE if work.is_uncontended else LASTS
    step = Step("demand", inputs, most, grows(applies))
    return RoleFinding(Reason.DEMAND_ABOVE_CAPACITY, detail, step, waits_for)


def _expected(case: Case, work: WorkView) -> float:
    """Return the uncached tokens/s for which the pool must have capacity.

    It is the largest of three forecasts: along the trend with a margin, the present rate if it has jumped, and the
    rate learned for this time of the week.
    """
    along = work.rate.ahead + case.workers.sigmas_ahead * work.rate.error
    return max(along, _jump(work), work.recalled)


def _jump(work: WorkView) -> float:
    return work.level.now - CHANCE_SIGMAS * work.level.error


def arriving_per_s(work: WorkView) -> float:
    """Return the uncached prompt tokens/s expected to arrive when a replica requested now could be ready.

    It is the largest of three forecasts: along the trend, the present rate if it has jumped, and the rate learned for
    this time of the week.

    Args:
        work: Prefill work, with these forecasts.
    """
    return max(work.rate.ahead, _jump(work), work.recalled)


def backlog_at_horizon(
    work: WorkView, pool: PoolCounts, arrivals_s: Sequence[float], horizon_s: float
) -> float:
    """Return the uncached prompt tokens that are expected to be queued or computed after ``horizon_s``.

    The result is the present and arriving tokens, minus the tokens that ready and starting workers compute until then.

    Args:
        work: Prefill work: backlog, arrival rate and a worker's throughput.
        pool: Replica counts now.
        arrivals_s: Simulated seconds from now until each starting worker is ready.
        horizon_s: Simulated seconds from now until a replica requested now could be ready.
    """
    worked_s = pool.ready * horizon_s + sum(max(0.0, horizon_s - at_s) for at_s in arrivals_s)
    arrived = work.backlog_tokens + work.level.now * horizon_s
    return max(0.0, arrived - worked_s * (work.tokens_per_s or 0.0))


def prefilled_per_s(
    work: WorkView, pool: PoolCounts, arrivals_s: Sequence[float], *, horizon_s: float, slo_s: float
) -> float:
    """Return the uncached prompt tokens/s at which prefill is expected to be completed ``horizon_s`` from now.

    It tells how many answers must then be decoded.

    The result is the arrival rate. If a backlog has to be cleared within the TTFT target, the result is higher, but at
    most the tokens/s that the workers can compute.

    Args:
        work: Prefill work: backlog, arrival rate and a worker's throughput.
        pool: Replica counts of the role that computes prompts.
        arrivals_s: Simulated seconds from now until each starting worker is ready.
        horizon_s: Simulated seconds from now until a replica requested now could be ready.
        slo_s: TTFT target, in seconds.
    """
    arriving = arriving_per_s(work)
    left = backlog_at_horizon(work, pool, arrivals_s, horizon_s)
    clearing = arriving + left / slo_s if left else 0.0
    return max(arriving, min(clearing, pool.replicas * (work.tokens_per_s or 0.0)))


def _backlog(case: Case, work: WorkView) -> RoleFinding:
    """Compare the time to clear the prompts that will be queued at the horizon with the TTFT target or a longer start-up time.

    For a shorter backlog a replica would hold its GPUs longer than it serves; the learned floor covers the requests
    that this makes late.
    """
    if work.tokens_per_s is None:
        return _first_wait(case)
    horizon_s, speed = case.horizon_s, work.tokens_per_s
    left = backlog_at_horizon(work, case.pool, case.arrivals_s, horizon_s)
    drain_rate = case.pool.replicas * speed - work.level.now
    clears_s = left / drain_rate if drain_rate > 0 else (math.inf if left else 0.0)
    most_s = max(case.slo_s, case.horizon_s) if case.workers.uses_learned_floor else case.slo_s
    applies = clears_s > most_s and not case.is_early and not work.is_uncontended
    inputs = {
        "backlog_tokens": work.backlog_tokens,
        "oldest_wait_s": case.oldest_wait_s,
        "starting": len(case.arrivals_s),
        "left_tokens": left,
        "clears_in_s": clears_s if math.isfinite(clears_s) else None,
    }
    workers = case.pool.replicas
    able = f"{count_of(workers, 'worker')} {'needs' if workers == 1 else 'need'}"
    detail = (
        f"projected backlog in {horizon_s:.0f} s: {left:,.0f} tokens; {able} more than {most_s:.0f} s to "
        "clear it"
    )
    waits_for = "" if applies or clears_s <= most_s else ALONE if work.is_uncontended else LASTS
    step = Step("backlog", inputs, most_s, grows(applies))
    return RoleFinding(Reason.BACKLOG_ABOVE_SLO, detail, step, waits_for)


def _first_wait(case: Case) -> RoleFinding:
    """Grow by one replica if a request waits too long, while no worker's throughput is known yet."""
    waits_s = case.oldest_wait_s or 0.0
    applies = waits_s > case.slo_s / 2 and not case.pool.starting
    inputs = {"oldest_wait_s": case.oldest_wait_s, "starting": case.pool.starting}
    step = Step("backlog", inputs, case.slo_s / 2, grows(applies))
    return RoleFinding(Reason.BACKLOG_ABOVE_SLO, f"a request has waited {waits_s:.1f} s", step)


def _rejected(case: Case) -> RoleFinding:
    """Grow by one replica for rejected requests. While a replica starts, the rules for demand and backlog decide about more."""
    applies = case.rejected > 0 and not case.pool.starting
    step = Step("rejected", {"requests": case.rejected}, 0, grows(applies))
    requests = count_of(round(case.rejected), "request")
    return RoleFinding(Reason.REQUESTS_REJECTED, f"{requests} rejected or timed out", step)


def _kv(case: Case, kv: KvView) -> RoleFinding:
    workers = case.pool.replicas
    expected = _kv_expected(case, kv)
    ahead = expected / workers if workers else math.inf
    most = case.workers.restraint.kv_ahead
    applies = ahead > most and not case.is_early
    inputs = {
        "kv_load": kv.load,
        "kv_load_demanded": kv.decoding.load_on(workers),
        "workers": workers,
    }
    detail = (
        f"projected KV usage of {count_of(workers, 'worker')} in {case.horizon_s:.0f} s: "
        f"{_usage_in_words(ahead)}, above {most:.2f}"
    )
    waits_for = LASTS if ahead > most and case.is_early else ""
    return RoleFinding(Reason.KV_ABOVE_CAPACITY, detail, Step("kv", inputs, most, grows(applies)), waits_for)


def _usage_in_words(usage: float) -> str:
    """Return a mean KV usage in words. Above 1 it is a capped estimate that includes waiting requests, so no number is given."""
    return "more than full" if usage > 1.0 else f"{usage:.2f}"


def _kv_expected(case: Case, kv: KvView) -> float:
    return max(kv.load, kv.decoding.load_on(case.pool.replicas))


def _kept_rate(work: WorkView, sigmas: float) -> float:
    ahead = max(work.rate.now, work.rate.ahead) + sigmas * work.rate.error
    return max(ahead, work.far_rate, work.level.now + work.level.error, work.far_recalled)


def is_enough(case: Case, workers: int) -> bool:
    """Return whether demand alone needs at most ``workers`` replicas.

    Learned floors (minimum numbers of replicas) and replicas on trial (added to find out whether they reduce late
    requests) are not taken into account.

    False for 0 workers while there is demand. ``workers`` must be less than the present number of replicas.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
        workers: Number of replicas.
    """
    if case.work is not None:
        busy, most = _busy_with(case, case.work, workers)
        if busy > most:
            return False
    if case.kv is not None and _kv_with(case, case.kv, workers) > case.workers.restraint.kv:
        return False
    return case.itl is None or (workers > 0 and case.itl.itl_with(workers) <= case.itl.after_s)


def needed(case: Case) -> int:
    """Return the number of replicas that demand alone needs.

    Learned floors (minimum numbers of replicas) and replicas on trial (added to find out whether they reduce late
    requests) are not taken into account.

    The result is from 1 to the present number of replicas, which it does not exceed even if demand needs more.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
    """
    replicas = case.pool.replicas
    if not is_enough(case, replicas - 1):
        return replicas
    return max(1, bisect_left(range(replicas), True, key=lambda workers: is_enough(case, workers)))


def _busy_with(case: Case, work: WorkView, workers: int) -> tuple[float, float]:
    """Return the utilisation of this many workers, fewer than the present ones, and its maximum."""
    rate = _kept_rate(work, case.workers.restraint.sigmas)
    able = workers * (work.tokens_per_s or 0.0)
    busy = rate / able if able else (math.inf if rate > 0 or work.backlog_tokens > 0 else 0.0)
    is_prompt = case.hindsight is None or case.hindsight.growth is Growth.IMMEDIATE
    most = (case.workers.busy_after if is_prompt else case.workers.busy_most)(case.role, workers)
    return busy, most


def _kv_with(case: Case, kv: KvView, workers: int) -> float:
    """Return the mean KV usage of this many workers, fewer than the present ones."""
    load = kv.moved(case.pool.ready, workers)
    return max(load, kv.decoding.load_on(workers)) / workers if workers else math.inf


def _work_after(case: Case, work: WorkView) -> RoleFinding:
    workers, kept = case.pool.replicas - 1, case.workers.restraint
    rate = _kept_rate(work, kept.sigmas)
    busy, most = _busy_with(case, work, workers)
    applies = busy <= most
    inputs = {
        "workers_after": workers,
        "tokens_per_s": rate,
        "worker_tokens_per_s": work.tokens_per_s,
        "busy_after": busy if math.isfinite(busy) else None,
    }
    step = Step("projected_work", inputs, most, "shrink" if applies else "hold")
    detail = (
        f"{count_of(workers, 'worker')} would be {busy:.0%} busy, within the maximum of {most:.0%}"
        if workers
        else "demand has ended"
    )
    return RoleFinding(Reason.SPARE_CAPACITY, detail, step)


def _kv_after(case: Case, kv: KvView) -> RoleFinding:
    workers, kept = case.pool.replicas - 1, case.workers.restraint
    load, usage = kv.moved(case.pool.ready, workers), _kv_with(case, kv, workers)
    applies = usage <= kept.kv
    inputs = {"workers_after": workers, "kv_load": load, "projected_kv": usage}
    step = Step("projected_kv", inputs, kept.kv, "shrink" if applies else "hold")
    return RoleFinding(
        Reason.SPARE_CAPACITY,
        f"KV usage of {count_of(workers, 'worker')} would be {_usage_in_words(usage)}, within the maximum of "
        f"{kept.kv:.2f}",
        step,
    )


def _itl(itl: ItlView, workers: int) -> RoleFinding:
    """Return the finding whether ``workers`` exceed the ITL target."""
    itl_s = itl.itl_with(workers)
    inputs = {"itl_s_ahead": itl_s if math.isfinite(itl_s) else None, "workers": workers}
    step = Step("itl", inputs, itl.target_s, grows(itl_s > itl.target_s))
    return RoleFinding(Reason.ITL_ABOVE_TARGET, _itl_words(workers, itl_s, itl.target_s), step)


def _itl_after(itl: ItlView, workers: int) -> RoleFinding:
    """Return the finding whether ``workers``, one fewer than at present, would keep within the ITL target."""
    itl_s = itl.itl_with(workers) if workers else float("inf")
    most_s = itl.after_s
    inputs = {"workers_after": workers, "itl_s_after": itl_s if math.isfinite(itl_s) else None}
    step = Step("itl_after", inputs, most_s, "shrink" if itl_s <= most_s else "hold")
    return RoleFinding(Reason.SPARE_CAPACITY, _itl_words(workers, itl_s, itl.target_s), step)


def _itl_words(workers: int, itl_s: float, target_s: float) -> str:
    shown = f"{1000 * itl_s:.1f} ms" if itl_s < float("inf") else "unbounded"
    return f"projected ITL of {count_of(workers, 'worker')}: {shown} (target {1000 * target_s:g} ms)"
