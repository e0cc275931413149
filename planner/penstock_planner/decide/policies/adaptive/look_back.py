"""Learning after each decision interval: simulated fleets of every floor serve its requests, and the model is compared with reality. Pure.

A floor is the minimum number of replicas that the planner keeps. The fleets and the latency model that they follow are
explained in `shadow_fleets` and `model_comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.demand.load import may_wait_s
from penstock_planner.decide.demand.observation import Demand, Window, entry_role, kv_role
from penstock_planner.decide.demand.trend import SPAN_S
from penstock_planner.decide.objective import cost, shadow_fleets
from penstock_planner.decide.objective.cost import Objective
from penstock_planner.decide.objective.model_comparison import ModelComparison
from penstock_planner.decide.objective.shadow_fleets import Hindsight, PulledLoad
from penstock_planner.decide.objective.trial import Lateness, Trial
from penstock_planner.decide.policies.adaptive import rules
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory


def looked_back(
    cases: Mapping[Role, rules.Case], window: Window, memory: AdaptiveMemory, config: DecideConfig
) -> AdaptiveMemory:
    """Return the learned state after a decision interval, with the floors (minimum numbers of replicas) chosen again.

    The planner simulates, for each role, one fleet per possible floor, to see what each floor would have cost. In the
    result, these fleets have served the interval's demand too. Returns ``memory`` unchanged if the demand is unknown in
    every pull (metrics scrape) of the interval.

    Args:
        cases: Input of the rules, such as replica counts and demand, by role; a role without an entry is left as it is.
        window: Pulls of the decision interval, at least one.
        memory: Learned state that already includes all pulls of the interval.
        config: Targets, bounds and budget.
    """
    demands = [pull.demand for pull in window.pulls if pull.demand is not None]
    if not demands:
        return memory
    found, served = dict(memory.hindsight), memory.served
    ables = {role: _able(case, served) for role, case in cases.items()}
    work_gpu_s = _work_gpu_s(cases, demands, ables, config)
    # If the budget is full, each role has what the other one lacks, so the replica counts are no evidence of the need.
    has_headroom = existing_gpus(window.pulls[-1].pools, config) < (config.max_gpu_budget or math.inf)
    is_evidence = has_headroom and config.scale_to_zero_after_s is None
    for role, case in cases.items():
        workers_needed = rules.workers_needed(case)
        if workers_needed is None:
            continue
        known = found.get(role, Hindsight())
        load = replace(
            _load(case, demands, config, able=ables[role], workers_needed=workers_needed),
            work_gpu_s=work_gpu_s,
            is_in_time_first=memory.work.serves_in_time_first,
            existing=case.pool.replicas if is_evidence else 0,
        )
        if load.work_s is not None:
            served = _compared(served, load, case, window, known)
        known = shadow_fleets.followed(known, load)
        gpus, price = max(1, config.engine_gpus(role, case.pool.gpus)), cost.late_price_gpu_s(known, config)
        unused_s = max(load.startup_s, memory.change_startup_s(role)) + load.hold_s
        known = cost.chosen(known, Objective(config.in_time, price, gpus, unused_s))
        found[role] = known
    memory = replace(memory, hindsight=found)
    return (
        memory if served is memory.served else _tried(cases, window, replace(memory, served=served), config)
    )


def _tried(
    cases: Mapping[Role, rules.Case], window: Window, memory: AdaptiveMemory, config: DecideConfig
) -> AdaptiveMemory:
    """Return the learned state after each role's trial record has counted the interval's late requests that have no explanation."""
    pull = window.pulls[-1]
    demands = [each.demand for each in window.pulls if each.demand is not None]
    dt_s = sum(each.period_s for each in demands)
    first = sum(each.ttft_count + each.refused + each.timed_out for each in demands)
    cause = kv_role(pull.pools) if _waits_inside(window) else entry_role(pull.pools)
    # Requests that had to wait for a role's first worker are late with any number of workers of the other roles.
    if memory.unserved_s is not None and pull.at_s - memory.unserved_s < SPAN_S:
        first = 0.0
    trials = dict(memory.trials)
    late_by_itl = _late_by_itl(demands) if first else 0.0
    for role, case in cases.items():
        late = memory.served.unexplained if first and role is cause else 0.0
        late += late_by_itl if role is kv_role(pull.pools) else 0.0
        seen = Lateness(dt_s, first, late, demands[-1].oldest_wait_s or 0.0)
        trials[role] = memory.trials.get(role, Trial()).followed(case.pool, seen, 1.0 - config.in_time)
    return replace(memory, trials=trials)


def _late_by_itl(demands: Sequence[Demand]) -> float:
    """Return the number of the interval's requests over the ITL target, estimated from the gaps between tokens; 0 if unknown."""
    gaps = sum(each.itl_count for each in demands)
    late = sum(each.itl_late or 0.0 for each in demands)
    return sum(each.ttft_count for each in demands) * late / gaps if gaps else 0.0


def _waits_inside(window: Window) -> bool:
    """Return whether requests wait inside decode workers. Then late requests say nothing about prefill."""
    inside = window.pulls[-1].worker_waiting
    return Role.PREFILL in window.pulls[-1].pools and inside is not None and inside.total > 0


def _compared(
    served: ModelComparison, load: PulledLoad, case: rules.Case, window: Window, known: Hindsight
) -> ModelComparison:
    """Return the comparison after the interval's first tokens; unchanged if it is unknown in a pull how many of them were late."""
    demands = [pull.demand for pull in window.pulls if pull.demand is not None]
    lates = [each.ttft_late for each in demands if each.ttft_late is not None]
    if len(lates) < len(demands):
        return served
    away = sum(each.refused + each.timed_out for each in demands)
    return served.followed(
        load,
        case.role,
        ready=case.pool.ready,
        first=sum(each.ttft_count for each in demands) + away,
        late=sum(lates) + away,
        late_alone=_late_alone(case.role, demands, window),
        is_entry_late=not _waits_inside(window),
        slo_s=case.slo_s,
        usual_requests=known.usual_requests,
    )


def _late_alone(role: Role, demands: Sequence[Demand], window: Window) -> float | None:
    """Return the number of first tokens that were late because of their own prefill; None if the time since dispatch does not show it.

    A prefill worker gets little work at a time, and further requests wait in the router. An aggregated worker
    computes prompts alongside others and between decode steps, and full decode workers let prompts wait: in these
    cases more workers would help.
    """
    late = [each.dispatched_late for each in demands if each.dispatched_late is not None]
    is_known = role is Role.PREFILL and not _waits_inside(window) and len(late) == len(demands)
    return sum(late) if is_known else None


def _able(case: rules.Case, served: ModelComparison) -> float | None:
    """Return the prompt tokens/s that a simulated worker computes; None if unknown, or if the role computes no prompts."""
    speed = case.work.tokens_per_s if case.work is not None else None
    return speed and speed * served.share_of(case.role)


def _work_gpu_s(
    cases: Mapping[Role, rules.Case],
    demands: Sequence[Demand],
    ables: Mapping[Role, float | None],
    config: DecideConfig,
) -> float:
    """Return the GPU-seconds in which the interval's requests kept workers busy. Work of unknown length counts as 0."""
    dt_s, tokens = sum(each.period_s for each in demands), sum(each.uncached_tokens for each in demands)
    total = 0.0
    for role, case in cases.items():
        able = ables[role]
        busy_s = tokens / able if able else rules.kv_busy_workers(case) * dt_s
        total += max(1, config.engine_gpus(role, case.pool.gpus)) * busy_s
    return shadow_fleets.counted(total)


def _load(
    case: rules.Case,
    demands: Sequence[Demand],
    config: DecideConfig,
    *,
    able: float | None,
    workers_needed: float,
) -> PulledLoad:
    tokens, newest = sum(each.uncached_tokens for each in demands), demands[-1]
    speed = case.work.tokens_per_s if case.work is not None else None
    slack_s = may_wait_s(case.work.sizes, speed, case.slo_s) if case.work and speed else case.slo_s
    gpus = max(1, config.engine_gpus(case.role, case.pool.gpus))
    most = config.max_replicas.get(case.role, shadow_fleets.SIZES_MOST)
    if config.max_gpu_budget is not None:
        most = min(most, config.max_gpu_budget // gpus)
    # A long prompt occupies one worker, however many tokens it has. While another worker is idle, nothing waits for it.
    is_idle_somewhere = newest.prefilling_workers < case.pool.ready or (
        case.work and case.work.is_uncontended
    )
    return PulledLoad(
        dt_s=shadow_fleets.counted(sum(each.period_s for each in demands)),
        arrivals=sum(each.arrivals for each in demands),
        work_gpu_s=0.0,
        work_s=shadow_fleets.counted(tokens / able) if able else None,
        may_wait_s=shadow_fleets.counted(slack_s),
        kv_busy_workers=rules.kv_busy_workers(case),
        workers_needed=workers_needed,
        workers_to_keep=max(workers_needed, rules.workers_to_keep(case)),
        startup_s=math.ceil(case.horizon_s),
        hold_s=math.ceil(case.hold_s),
        sizes=max(1, most),
        least=config.floor(case.role, gpus),
        served_at_once_by=case.pool.ready if is_idle_somewhere and not newest.waiting_tokens else None,
    )
