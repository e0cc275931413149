"""Decides by demand and worker throughput: follows the pulls, then proposes one change per role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.adaptive import hindsight, kv, rules, supply, trend, work, zero
from penstock.planner.decide.adaptive.hindsight import Growth, Hindsight, Load, Objective
from penstock.planner.decide.adaptive.memory import AdaptiveMemory, write
from penstock.planner.decide.adaptive.workers import Workers
from penstock.planner.decide.bounds import back_off, existing_gpus, remember
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, PlannerState, Proposal, Reason, RoleProposal, Step
from penstock.planner.decide.observation import (
    Demand,
    PoolCounts,
    Pull,
    Window,
    entry_role,
    kv_role,
    turned_away,
)

MOST_AT_ONCE = 64
"""Chosen: more replicas than this are never added by one decision, regardless of `max_step`."""

MIXED_SHARE = 0.7
"""Chosen: of its throughput what an aggregated worker of a shadow fleet does: requests wait in each worker and decoding comes
between prompts. At 0.8 aggregated-sine was left to three workers, 96.5% in time, at 0.7 to four, 100%. Prefill workers share one
queue and do all of it: at 0.9 a shadow fleet of five counted 9.3% of bursts late, where real ones served 0.2% late."""

REGRET_S = 60.0
"""Chosen: a worker is removed only if demand this long after two start-ups from now allows it."""


def proposed(
    window: Window, state: PlannerState, memory: AdaptiveMemory, workers: Workers, config: DecideConfig
) -> Proposal:
    """Return one change per role.

    Args:
        window: With one pull at least.
        state: What the last decision left.
        memory: With all pulls of the window followed.
        workers: What they are taken to be able to do.
        config: Targets, bounds and budget.
    """
    pools = window.pulls[-1].pools
    seen = {role: remember(role, pool, state.of(role), config) for role, pool in pools.items()}
    cases = _cases(window, memory, workers, config)
    memory = _looked_back(cases, window, memory, config)
    cases = {role: replace(case, hindsight=_advice(memory, role, workers)) for role, case in cases.items()}
    proposals = [_draft(role, window, memory, cases.get(role), config) for role in pools]
    proposals = [back_off(each, seen[each.role]) if each.action is Action.UP else each for each in proposals]
    proposals = zero.applied(proposals, window, memory, config)
    return Proposal(_within_budget(proposals, pools, config), seen, write(memory))


def followed(memory: AdaptiveMemory, pull: Pull, config: DecideConfig) -> AdaptiveMemory:
    """Return the memory after one pull; what the pull does not know leaves its part as it was."""
    roles = {role: supply.followed(memory.of(role), pool, pull.at_s) for role, pool in pull.pools.items()}
    dt_s = 0.0 if memory.pulled_s is None else pull.at_s - memory.pulled_s
    holder = kv_role(pull.pools)
    entry = entry_role(pull.pools)
    made, usage, demand = memory.work, memory.kv, pull.demand
    if demand is not None and entry in pull.pools:
        made = work.followed(made, demand, config.ttft_slo_s)
    load = kv.load_of(pull, holder)
    if load is not None and holder in pull.pools and dt_s > 0:
        tokens = 0.0 if demand is None else demand.prefilled_tokens
        usage = kv.followed(usage, load, tokens, ready=pull.pools[holder].ready, dt_s=dt_s)
    quiet_since_s = (
        None if config.scale_to_zero_after_s is None else zero.quiet_since_s(memory.quiet_since_s, pull)
    )
    is_served = all(pool.ready for pool in pull.pools.values())
    unserved_s = memory.unserved_s if is_served else pull.at_s
    return replace(
        memory,
        pulled_s=pull.at_s,
        work=made,
        kv=usage,
        roles={**memory.roles, **roles},
        quiet_since_s=quiet_since_s,
        unserved_s=unserved_s,
    )


def _cases(
    window: Window, memory: AdaptiveMemory, workers: Workers, config: DecideConfig
) -> dict[Role, rules.Case]:
    """Return the input of the rules, for each role whose newest pull is complete."""
    pull = window.pulls[-1]
    known = [role for role in pull.pools if pull.demand is not None and not _unknown(role, pull)]
    return {role: case_of(role, window, memory, workers, config) for role in known}


def _advice(memory: AdaptiveMemory, role: Role, workers: Workers) -> Hindsight | None:
    """Return the hindsight of a role; where another rule has the waits, only how long its replicas have idled."""
    known = memory.hindsight.get(role)
    return known if known is None or workers.has_shadows else replace(known, floor=0, growth=Growth.PROMPT)


def _looked_back(
    cases: Mapping[Role, rules.Case], window: Window, memory: AdaptiveMemory, config: DecideConfig
) -> AdaptiveMemory:
    """Return the memory after every role's fleets of all floors have served the window, and with the floors that follow."""
    demands = [pull.demand for pull in window.pulls if pull.demand is not None]
    if not demands:
        return memory
    gpus_held = existing_gpus(window.pulls[-1].pools, config)
    is_in_time_first = work.serves_in_time_first(memory.work)
    found = dict(memory.hindsight)
    for role, case in cases.items():
        grows_at = rules.grows_at(case)
        if grows_at is None:
            continue
        known = found.get(role, Hindsight())
        load = _load(
            case, demands, config, grows_at=grows_at, gpus_held=gpus_held, is_in_time_first=is_in_time_first
        )
        known = hindsight.followed(known, load)
        if known.arrivals > 0:
            gpus = max(1, config.engine_gpus(role, case.pool.gpus))
            price = config.gpu_percent_per_point * known.gpu_s / known.arrivals
            objective = Objective(config.in_time, price, gpus, load.startup_s + load.hold_s)
            known = hindsight.chosen(known, objective)
        found[role] = known
    return replace(memory, hindsight=found)


def _load(
    case: rules.Case,
    demands: Sequence[Demand],
    config: DecideConfig,
    *,
    grows_at: float,
    gpus_held: int,
    is_in_time_first: bool,
) -> Load:
    dt_s, arrivals = sum(each.period_s for each in demands), sum(each.arrivals for each in demands)
    tokens, newest = sum(each.uncached_tokens for each in demands), demands[-1]
    speed = case.work.tokens_per_s if case.work is not None else None
    own_s = tokens / arrivals / speed if speed and arrivals else 0.0
    able = speed and speed * (MIXED_SHARE if case.role is Role.AGGREGATED else 1.0)
    gpus = max(1, config.engine_gpus(case.role, case.pool.gpus))
    most = config.max_replicas.get(case.role, hindsight.SIZES_MOST)
    if config.max_gpu_budget is not None:
        most = min(most, config.max_gpu_budget // gpus)
    # A long prompt occupies one worker, however many tokens it has: with another one idle nothing waits for it.
    is_idle_somewhere = not newest.waiting_tokens and newest.prefilling_workers < case.pool.ready
    return Load(
        dt_s=hindsight.counted(dt_s),
        arrivals=arrivals,
        gpus=gpus_held,
        work_s=hindsight.counted(tokens / able) if able else None,
        may_wait_s=hindsight.counted(work.may_wait_s(own_s, case.slo_s)),
        is_in_time_first=is_in_time_first,
        held=rules.held(case),
        grows_at=grows_at,
        shrinks_at=max(grows_at, rules.shrinks_at(case)),
        startup_s=math.ceil(case.horizon_s),
        hold_s=math.ceil(supply.hold_s(case.horizon_s)),
        sizes=max(1, most),
        least=config.floor(case.role, gpus),
        served_at_once_by=case.pool.ready if is_idle_somewhere else None,
    )


def _draft(
    role: Role, window: Window, memory: AdaptiveMemory, case: rules.Case | None, config: DecideConfig
) -> RoleProposal:
    pull = window.pulls[-1]
    pool = pull.pools[role]
    gpus = config.engine_gpus(role, pool.gpus)
    blank = RoleProposal(role, pool, gpus, Action.HOLD, Reason.WITHIN_CAPACITY, "supply fits demand", ())
    floor = config.floor(role, gpus)
    if pool.replicas < floor:
        step = Step("floor", {"replicas": pool.replicas, "floor": floor}, floor, Reason.BELOW_FLOOR.value)
        detail = f"{pool.replicas} below the floor of {floor}"
        amount = _at_most(floor - pool.replicas, config)
        return replace(
            blank.passed(step), action=Action.UP, reason=Reason.BELOW_FLOOR, detail=detail, amount=amount
        )
    if case is None:
        step = Step("known", {"demand": "unknown" if pull.demand is None else "known"}, None, "hold")
        return replace(blank.passed(step), reason=Reason.METRIC_UNKNOWN, detail=_unknown(role, pull))
    findings = rules.lacks(case)
    blank = replace(blank, steps=tuple(found.step for found in findings))
    for found in findings:
        if found.applies:
            amount = rules.missing(case, _at_most(MOST_AT_ONCE, config))
            return replace(blank, action=Action.UP, reason=found.reason, detail=found.detail, amount=amount)
    return _spared(blank, case, window, memory)


def _at_most(replicas: int, config: DecideConfig) -> int:
    return replicas if config.max_step is None else min(replicas, config.max_step)


def _spared(blank: RoleProposal, case: rules.Case, window: Window, memory: AdaptiveMemory) -> RoleProposal:
    """Return the proposal for one fewer if every condition allows it, else held by the first that does not."""
    pull, pool, role = window.pulls[-1], blank.pool, blank.role
    waiting = _waiting(role, pull)
    findings = rules.spares(case)
    proposal = replace(blank, steps=(*blank.steps, *(found.step for found in findings)))
    if not all(found.applies for found in findings):
        return proposal
    proposal = replace(
        proposal, reason=Reason.SPARE_CAPACITY, detail="; ".join(found.detail for found in findings)
    )
    gap = next((_unknown(role, each) for each in window.pulls if _unknown(role, each)), "")
    if gap:
        return proposal.held(
            Reason.METRIC_UNKNOWN, gap, Step("known", {"pulls": len(window.pulls)}, None, "hold")
        )
    if waiting:
        step = Step("waiting", {"requests": waiting}, 0, "hold")
        return proposal.held(Reason.REQUESTS_WAITING, f"{waiting:.0f} requests wait", step)
    if pool.starting:
        step = Step("all_ready", {"starting": pool.starting}, 0, "hold: supply is not what it will be")
        detail = f"{pool.starting} of {pool.replicas} replicas not ready"
        return proposal.held(Reason.REPLICA_NOT_READY, detail, step)
    left_s = supply.held_s(memory.of(role), case.horizon_s, window.end_s)
    step = Step("hold_down", {"left_s": left_s}, 0, "hold" if left_s > 0 else "pass")
    if left_s > 0:
        return proposal.held(Reason.HOLD_DOWN, f"{left_s:.0f} s of hold-down are left", step)
    return replace(proposal.passed(step), action=Action.DOWN)


def case_of(
    role: Role, window: Window, memory: AdaptiveMemory, workers: Workers, config: DecideConfig
) -> rules.Case:
    """Return the input of a role's rules; the newest pull knows the demand."""
    pull = window.pulls[-1]
    at_s, demand = pull.at_s, pull.demand
    assert demand is not None  # noqa: S101 - the caller's
    startup_s = supply.startup_s(memory, role, at_s)
    horizon_s = startup_s + config.metric_pulling_interval_s
    ahead_s, far_s = (horizon_s, 2 * horizon_s + REGRET_S) if workers.follows_trend else (0.0, 0.0)
    made = work.view(memory.work, demand, workers, horizon_s=ahead_s, far_s=far_s)
    entry = entry_role(pull.pools)
    due_s = supply.arrivals_s(memory.of(entry), supply.startup_s(memory, entry, at_s), at_s)
    prefilled_per_s = rules.prefilled_per_s(
        made, pull.pools[entry], due_s, horizon_s=horizon_s, slo_s=config.ttft_slo_s
    )
    has_kv = role is not Role.PREFILL
    load = trend.forecast(memory.kv.load, horizon_s, kv.LOAD_TAU_S)
    return rules.Case(
        role=role,
        pool=pull.pools[role],
        slo_s=config.ttft_slo_s,
        horizon_s=horizon_s,
        arrivals_s=supply.arrivals_s(memory.of(role), startup_s, at_s),
        work=None if role is Role.DECODE else made,
        kv=kv.KvView(load, workers.decoding(memory.kv, prefilled_per_s)) if has_kv else None,
        gaps=workers.gaps(prefilled_per_s) if has_kv else None,
        oldest_wait_s=_served_wait_s(demand, memory, at_s),
        rejected=turned_away(window.pulls, role),
        workers=workers,
    )


def _served_wait_s(demand: Demand, memory: AdaptiveMemory, at_s: float) -> float | None:
    """Return the longest wait at the frontend while every role had a ready replica: for the first, more would not help."""
    wait_s = demand.oldest_wait_s
    return wait_s if wait_s is None or memory.unserved_s is None else min(wait_s, at_s - memory.unserved_s)


def _waiting(role: Role, pull: Pull) -> float:
    """Return the requests that wait for the role: in the routers before prefill, in the workers otherwise."""
    frontend = pull.demand.waiting if pull.demand is not None else 0.0
    inside = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    return {Role.PREFILL: frontend, Role.DECODE: inside}.get(role, frontend + inside)


def _unknown(role: Role, pull: Pull) -> str:
    """Return what of a role a pull does not know, empty when it knows all."""
    if pull.demand is None:
        return "demand unknown"
    if role is Role.PREFILL:
        return ""
    if pull.kv.unknown or not pull.kv.fresh:
        return f"KV unknown ({pull.kv.why or 'no ready worker'})"
    inside = pull.worker_waiting
    return f"waiting requests unknown ({inside.why})" if inside is not None and inside.unknown else ""


def _within_budget(
    proposals: list[RoleProposal], pools: Mapping[Role, PoolCounts], config: DecideConfig
) -> list[RoleProposal]:
    """Shrink one role while the replicas that stay hold more GPUs than a lowered budget allows.

    The role is the one with most replicas above its floor; the drain is waited for, so nothing running is lost.
    """
    if config.max_gpu_budget is None:
        return proposals
    staying = {role: replace(pool, draining=0) for role, pool in pools.items()}
    held = existing_gpus(staying, config)
    if held <= config.max_gpu_budget:
        return proposals
    spare = {d.role: d.pool.replicas - config.floor(d.role, d.engine_gpus) for d in proposals}
    victim = max(spare, key=lambda role: spare[role])
    if spare[victim] < 1:
        return proposals
    step = Step("above_budget", {"gpus_staying": held}, config.max_gpu_budget, "shrink")
    detail = f"{held} GPUs exceed the budget of {config.max_gpu_budget}"
    return [
        replace(d.passed(step), action=Action.DOWN, reason=Reason.ABOVE_BUDGET, detail=detail, amount=1)
        if d.role is victim
        else d
        for d in proposals
    ]
