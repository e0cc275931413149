"""Mode ``adaptive``: proposes a number of replicas for each role, from demand at the frontend and the workers' throughput.

The learned state is updated with each pull of the interval, then the rules of each role are applied. Mode sla calls the
same functions with workers of a performance profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.bounds.backoff import back_off, with_observed_counts
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.bounds.replicas import below_floor
from penstock_planner.decide.capacity.decoding import KvView
from penstock_planner.decide.capacity.observed import OBSERVED
from penstock_planner.decide.capacity.worker_model import WorkerModel
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Proposal, Reason, RoleProposal, Step
from penstock_planner.decide.demand.load import WorkView, kv_load_of
from penstock_planner.decide.demand.observation import (
    Demand,
    PoolCounts,
    Pull,
    Window,
    entry_role,
    kv_role,
    unserved,
)
from penstock_planner.decide.demand.trend import RATE_TAU_S
from penstock_planner.decide.demand.week import WeekForecast
from penstock_planner.decide.objective.cost import late_price_gpu_s
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.policies.adaptive import rules
from penstock_planner.decide.policies.adaptive.look_back import looked_back
from penstock_planner.decide.policies.adaptive.memory import HOLD_S, AdaptiveMemory, hold_s
from penstock_planner.decide.policies.adaptive.retention import Clock, kept_by
from penstock_planner.decide.policies.adaptive.scale_to_zero import quiet_since, to_zero_or_back
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import Learned, PlannerState

MOST_AT_ONCE = 64
"""Maximum number of replicas that one decision adds, regardless of `max_step`."""

GIVES_AFTER_S = RATE_TAU_S
"""Simulated seconds after a scale-up (40) during which a role gives no worker to the other role.

After this time the average of its load reflects the scale-up."""


def adaptive(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return the number of replicas that mode adaptive proposes for each role, with the reason, before most bounds apply.

    It is calculated from demand at the frontend, from ready and starting replicas, and from the throughput of a worker
    as learned from observations. Rules against oscillation are included.

    Args:
        window: Pulls (metrics scrapes) of the interval, at least one.
        state: State left by the last decision.
        config: Latency targets, bounds and budget.
    """
    memory = begun(remembered(state.learned, config), config)
    for pull in window.pulls:
        memory = followed(memory, pull, config)
    return proposed(window, state, memory, OBSERVED, config)


def begun(known: Learned, config: DecideConfig) -> AdaptiveMemory:
    """Return the learned state from which a decision starts: that of the last decision, with present settings written into it.

    The settings are the identity of the planner, the start-up times of the manifest, and the longest start-up to wait
    for. The metrics scrapes of the interval are not included yet.

    Args:
        known: Learned state of all policies, as `remembered` returns it.
        config: Configuration with the identity of the planner and the start-up times of the manifest.
    """
    return replace(
        AdaptiveMemory.read(known),
        learnt_from=config.learning_identity,
        stated_s=config.startups_s,
        startup_timeout_s=config.startup_timeout_s,
    )


def remembered(known: Learned, config: DecideConfig) -> Learned:
    """Return the planner's learned state, or an empty one if it was learned from another model, engine, profile or time scale.

    Args:
        known: Learned state of all policies, as the last decision left it.
        config: Configuration with the identity of the present model, engine, profile and time scale.
    """
    return known if AdaptiveMemory.read(known).is_of(config.learning_identity) else {}


def proposed(
    window: Window,
    state: PlannerState,
    memory: AdaptiveMemory,
    workers: WorkerModel,
    config: DecideConfig,
) -> Proposal:
    """Return the number of replicas that modes adaptive and sla propose for each role, with the reason, before most bounds apply.

    A role grows if any rule for growing asks for it, shrinks by one replica if all conditions for that are met, and
    keeps its replicas otherwise. The result also has the learned state after the interval.

    Args:
        window: Pulls (metrics scrapes) of the decision interval, at least one.
        state: State left by the last decision.
        memory: Learned state in which all pulls of the window are already included.
        workers: Throughput and permitted utilisation of the workers, as observed or by a performance profile.
        config: Targets, bounds and budget.
    """
    pools = window.pulls[-1].pools
    seen = {role: with_observed_counts(role, pool, state.of(role), config) for role, pool in pools.items()}
    cases = _cases(window, memory, workers, config)
    memory = looked_back(cases, window, memory, config)
    entry = entry_role(pools)
    cases = {
        role: replace(
            case,
            hindsight=_advice(memory, role, workers),
            served=memory.served if role is entry and workers.uses_learned_floor else None,
            trial=memory.trials.get(role) if workers.uses_learned_floor else None,
            allowed=1.0 - config.in_time,
            price_gpu_s=late_price_gpu_s(memory.hindsight[role], config) if role in memory.hindsight else 0.0,
        )
        for role, case in cases.items()
    }
    proposals = [_draft(role, window, memory, cases.get(role), config) for role in pools]
    proposals = [back_off(each, seen[each.role]) if each.action is Action.UP else each for each in proposals]
    proposals = to_zero_or_back(proposals, window, memory, config)
    return Proposal(_within_budget(proposals, pools, config), seen, (memory,))


def followed(memory: AdaptiveMemory, pull: Pull, config: DecideConfig) -> AdaptiveMemory:
    """Return the learned state updated with one metrics scrape. Parts for which the scrape has no value stay unchanged.

    Args:
        memory: Learned state that includes all earlier scrapes, such as demand, throughput and start-up times.
        pull: The metrics scrape.
        config: Configuration with the TTFT target and the time zone.
    """
    roles = {role: memory.of(role).followed(pool, pull.at_s) for role, pool in pull.pools.items()}
    dt_s = 0.0 if memory.pulled_s is None else pull.at_s - memory.pulled_s
    holder, demand = kv_role(pull.pools), pull.demand
    work, kv, week = memory.work, memory.kv, memory.week
    if demand is not None and entry_role(pull.pools) in pull.pools:
        work = work.followed(demand, config.ttft_slo_s, entry_role(pull.pools))
        if pull.wall_s is not None:
            week = week.followed(demand.arrivals, demand.period_s, pull.wall_s, config.time_zone)
    load = kv_load_of(pull, holder)
    if load is not None and holder in pull.pools and dt_s > 0:
        tokens = 0.0 if demand is None else demand.prefilled_tokens
        held = 0.0 if demand is None else demand.in_flight.get(holder, 0.0)
        # By Little's law.
        lasts_s = held / work.rate.first if work.rate.first > 0 else 0.0
        kv = kv.followed(load, tokens, ready=pull.pools[holder].ready, dt_s=dt_s, lasts_s=lasts_s)
    quiet_since_s = None if config.scale_to_zero_after_s is None else quiet_since(memory.quiet_since_s, pull)
    is_served = all(pool.ready for pool in pull.pools.values())
    return replace(
        memory,
        pulled_s=pull.at_s,
        work=work,
        kv=kv,
        week=week,
        roles={**memory.roles, **roles},
        quiet_since_s=quiet_since_s,
        unserved_s=memory.unserved_s if is_served else pull.at_s,
    )


def _cases(
    window: Window, memory: AdaptiveMemory, workers: WorkerModel, config: DecideConfig
) -> dict[Role, rules.Case]:
    """Return the input of the rules for each role whose newest pull is complete."""
    pull = window.pulls[-1]
    known = [role for role in pull.pools if pull.demand is not None and not _unknown(role, pull)]
    return {role: case_of(role, window, memory, workers, config) for role in known}


def _advice(memory: AdaptiveMemory, role: Role, workers: WorkerModel) -> Hindsight | None:
    """Return the hindsight of a role. If the queueing formula handles waits, the result only tells how long replicas were idle."""
    known = memory.hindsight.get(role)
    return (
        known
        if known is None or workers.uses_learned_floor
        else replace(known, floor=0, growth=Growth.IMMEDIATE)
    )


def _draft(
    role: Role, window: Window, memory: AdaptiveMemory, case: rules.Case | None, config: DecideConfig
) -> RoleProposal:
    pull = window.pulls[-1]
    pool = pull.pools[role]
    gpus = config.engine_gpus(role, pool.gpus)
    blank = RoleProposal(role, pool, gpus, Action.HOLD, Reason.WITHIN_CAPACITY, "supply matches demand", ())
    floor = config.floor(role, gpus)
    if pool.replicas < floor:
        return below_floor(blank, floor, _at_most(floor - pool.replicas, config))
    if case is None:
        step = Step("known", {"demand": "unknown" if pull.demand is None else "known"}, None, "hold")
        return blank.changed(Action.HOLD, Reason.METRIC_UNKNOWN, _unknown(role, pull), step)
    findings = rules.grow_findings(case)
    steps = tuple(found.step for found in findings)
    blank = replace(blank, steps=steps, workers_for_arrivals=rules.workers_needed(case))
    for found in findings:
        if found.applies:
            amount = rules.replicas_to_add(case, _at_most(MOST_AT_ONCE, config))
            return replace(
                blank,
                action=Action.UP,
                reason=found.reason,
                detail=found.detail,
                amount=amount,
                rule=found.step.name,
            )
    spared = _explained(_spared(blank, case, window, memory), case, findings, pull, config)
    made = replace(spared, trial_only_reason=_trial_only_reason(blank, case, window, memory))
    return replace(made, spare_reason=_spare_reason(case, window, memory)) if config.switches_roles else made


def _explained(
    proposal: RoleProposal,
    case: rules.Case,
    lacking: Sequence[rules.RoleFinding],
    pull: Pull,
    config: DecideConfig,
) -> RoleProposal:
    """Return a proposal that changes nothing with an explanation of what holds it, unless demand itself does."""
    if proposal.reason is not Reason.WITHIN_CAPACITY:
        return proposal
    for found in lacking:
        if found.waits_for:
            return replace(proposal, detail=f"{found.detail}, but {found.waits_for}", rule=found.step.name)
    needs, clock = rules.needed(case), Clock.of(pull, config)
    kept = kept_by(case, clock) if needs < case.pool.replicas else None
    if kept is None:
        return proposal
    return replace(
        proposal, detail=kept.in_words(needs, clock), rule=kept.rule, retained_because=kept.kept(needs)
    )


def _at_most(replicas: int, config: DecideConfig) -> int:
    return replicas if config.max_step is None else min(replicas, config.max_step)


def _spared(blank: RoleProposal, case: rules.Case, window: Window, memory: AdaptiveMemory) -> RoleProposal:
    """Return the proposal for one replica fewer if every condition allows it; else the proposal held by the first that does not."""
    pull, pool, role = window.pulls[-1], blank.pool, blank.role
    findings = rules.shrink_findings(case)
    proposal = replace(blank, steps=(*blank.steps, *(found.step for found in findings)))
    if not all(found.applies for found in findings):
        return proposal
    proposal = replace(
        proposal, reason=Reason.SPARE_CAPACITY, detail="; ".join(found.detail for found in findings)
    )
    if gaps := [gap for each in window.pulls if (gap := _unknown(role, each))]:
        detail = f"{gaps[0]} in {len(gaps)} of {len(window.pulls)} readings"
        step = Step("known", {"pulls": len(window.pulls)}, None, "hold")
        return proposal.held(Reason.METRIC_UNKNOWN, detail, step)
    if waiting := _waiting(role, pull):
        step = Step("waiting", {"requests": waiting}, 0, "hold")
        return proposal.held(Reason.REQUESTS_WAITING, f"{waiting:.0f} requests are waiting", step)
    left_s = memory.hold_down_s(role, window.end_s)
    step = Step("hold_down", {"left_s": left_s}, 0, "hold" if left_s > 0 else "pass")
    if left_s > 0:
        return proposal.held(Reason.HOLD_DOWN, f"{left_s:.0f} s of hold-down remain", step)
    proposal = replace(proposal.passed(step), action=Action.DOWN)
    if not pool.starting:
        return proposal
    step = Step(
        "starting", {"starting": pool.starting}, 0, "withdraw: replicas that are not ready are removed first"
    )
    return replace(
        proposal.passed(step), detail=f"{proposal.detail}; a replica that is still starting is removed first"
    )


def _trial_only_reason(blank: RoleProposal, case: rules.Case, window: Window, memory: AdaptiveMemory) -> str:
    """Return why one replica fewer would be enough without the trial that keeps one. Empty if demand needs it, or none is on trial."""
    if case.trial is None or case.pool.replicas > case.trial.floor:
        return ""
    untried = _spared(blank, replace(case, trial=None), window, memory)
    return untried.detail if untried.action is Action.DOWN else ""


def _spare_reason(case: rules.Case, window: Window, memory: AdaptiveMemory) -> str:
    """Return why the role can spare a worker that it could get back without a start-up. Empty if it cannot.

    So neither hold-down nor the learned floor count, because both assume a start-up. But a role that has just grown
    first uses what it got.
    """
    pull, role = window.pulls[-1], case.role
    grown_s = memory.of(role).grown_s
    is_new = grown_s is not None and window.end_s - grown_s < GIVES_AFTER_S
    if (
        is_new
        or case.pool.starting
        or _waiting(role, pull)
        or any(_unknown(role, each) for each in window.pulls)
    ):
        return ""
    findings = rules.shrink_findings(replace(case, hindsight=None, trial=None))
    return "; ".join(each.detail for each in findings) if all(each.applies for each in findings) else ""


def case_of(
    role: Role, window: Window, memory: AdaptiveMemory, workers: WorkerModel, config: DecideConfig
) -> rules.Case:
    """Return the input of the rules that decide whether a role grows or shrinks, such as replica counts, demand and forecasts.

    Args:
        role: Role to decide on.
        window: Pulls (metrics scrapes) of the decision interval; the demand of the newest must be known.
        memory: Learned state that already includes all pulls of the interval.
        workers: Throughput and permitted utilisation of the workers, as observed or by a performance profile.
        config: Configuration with the latency targets.
    """
    pull = window.pulls[-1]
    at_s, demand = pull.at_s, pull.demand
    assert demand is not None  # noqa: S101 - the caller's
    startup_s = memory.startup_s(role, at_s)
    horizon_s = startup_s + config.metric_pulling_interval_s
    ahead_s, far_s = (horizon_s, 2 * horizon_s + HOLD_S) if workers.follows_trend else (0.0, 0.0)
    work, size = memory.work, memory.work.size
    along = work.arriving(ahead_s)
    recalled, far_recalled = (
        WeekForecast()
        if pull.wall_s is None or not until_s
        else memory.week.recalled(until_s, pull.wall_s, config.time_zone)
        for until_s in (ahead_s, far_s)
    )
    view = WorkView(
        tokens_per_s=workers.tokens_per_s(work),
        rate=workers.arriving(along).times(size),
        level=work.recent_rate.times(size),
        far_rate=workers.arriving(work.arriving(far_s)).ahead * size,
        backlog_tokens=demand.waiting_tokens + demand.in_flight_tokens,
        sizes=work.sizes,
        is_uncontended=workers.uses_learned_floor and work.is_uncontended,
        recalled=recalled.rate * size,
        far_recalled=far_recalled.rate * size,
        confidence=recalled.confidence,
    )
    entry = entry_role(pull.pools)
    due_s = memory.of(entry).arrivals_s(memory.startup_s(entry, at_s), at_s)
    prefilled_per_s = rules.prefilled_per_s(
        view, pull.pools[entry], due_s, horizon_s=horizon_s, slo_s=config.ttft_slo_s
    )
    has_kv = role is not Role.PREFILL
    load = memory.kv.load.forecast(0.0, RATE_TAU_S)
    return rules.Case(
        role=role,
        pool=pull.pools[role],
        slo_s=config.ttft_slo_s,
        horizon_s=horizon_s,
        hold_s=hold_s(memory.hold_startup_s(role, at_s) + config.metric_pulling_interval_s),
        arrivals_s=memory.of(role).arrivals_s(startup_s, at_s),
        work=None if role is Role.DECODE else view,
        kv=KvView(load.now, workers.decoding(memory.kv, prefilled_per_s), load.error) if has_kv else None,
        itl=workers.itl(prefilled_per_s) if has_kv else None,
        oldest_wait_s=_served_wait_s(demand, memory, at_s),
        rejected=unserved(window.pulls, role),
        workers=workers,
    )


def _served_wait_s(demand: Demand, memory: AdaptiveMemory, at_s: float) -> float | None:
    """Return the longest wait at the frontend while every role had a ready replica. None if no request waits.

    Waiting for the first replica of a role is left out, because more replicas would not have shortened it.
    """
    wait_s = demand.oldest_wait_s
    return wait_s if wait_s is None or memory.unserved_s is None else min(wait_s, at_s - memory.unserved_s)


def _waiting(role: Role, pull: Pull) -> float:
    """Return the number of requests that wait for the role.

    They wait in the routers for prefill, in the workers for decode, and in both for aggregated.
    """
    frontend = pull.demand.waiting if pull.demand is not None else 0.0
    inside = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    return {Role.PREFILL: frontend, Role.DECODE: inside}.get(role, frontend + inside)


def _unknown(role: Role, pull: Pull) -> str:
    """Return what a pull does not know about a role, in words; empty if it knows everything."""
    if pull.demand is None:
        return "demand unknown"
    if role is Role.PREFILL:
        return ""
    if pull.kv.unknown or not pull.kv.fresh:
        return f"KV unknown ({pull.kv.unknown_reasons or 'no ready worker'})"
    inside = pull.worker_waiting
    return (
        f"waiting requests unknown ({inside.unknown_reasons})"
        if inside is not None and inside.unknown
        else ""
    )


def _within_budget(
    proposals: list[RoleProposal], pools: Mapping[Role, PoolCounts], config: DecideConfig
) -> list[RoleProposal]:
    """Shrink one role while the remaining replicas hold more GPUs than a lowered budget allows.

    It is the role with the most replicas above its minimum. It shrinks by draining, so no running request is lost.
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
        each.changed(Action.DOWN, Reason.ABOVE_BUDGET, detail, step) if each.role is victim else each
        for each in proposals
    ]


POLICY = PlannerPolicy(adaptive, follows_demand=True, states=(AdaptiveMemory,))
"""Mode adaptive as a policy."""
