"""What binds every policy: grace, back-off and other writers of a role, floors and ceilings, and GPUs that move between roles.

A role of ``scaling.managedBy: external`` never belongs to the planner. Any other role that another client writes
is left to the writer for one adjustment interval, and for twice as long after each further write: a writer that keeps
writing (an autoscaler) is overridden less and less often; after a single write (a person's) planning soon resumes.

The total floor counts what stays: ready and starting replicas, without draining ones and what one role gives up for another. Where
floor and budget cannot both be kept, the budget is. To rebalance, one decision shrinks the idle role and remembers, in the recorded
state, that the GPUs are reserved for the role under load; a later one, made once they are free, lets it grow first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, RoleState, Step, count_of
from penstock_planner.decide.observation import PoolCounts


def remember(role: Role, pool: PoolCounts, before: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state as this interval sees it: grace opened, a settled scale-up forgotten.

    The grace period opens when more decode (or aggregated) workers are ready than at the last decision: a
    worker of ours, another writer's or one back from a crash, each with an empty KV cache; and at the first
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


def aged(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after one more interval; a writer is forgotten once it has been silent for long enough."""
    state = replace(state, grace=max(0, state.grace - 1), backoff=max(0, state.backoff - 1))
    if not state.foreign_writes:
        return state
    since = state.since_write + 1
    if since >= _span(state, config) + MAX_BACKOFF_INTERVALS * config.decisions_per_adjustment:
        return replace(state, writer="", foreign_writes=0, since_write=0)
    return replace(state, since_write=since)


def rolled_back(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after a scale-up that never became ready: 2, 4, 8, 16, 16... intervals of backoff.

    They are adjustment intervals; a mode that decides more often counts as many decisions more.
    """
    withdrawals = state.withdrawals + 1
    backoff = min(2 ** min(withdrawals, 8), MAX_BACKOFF_INTERVALS) * config.decisions_per_adjustment
    return replace(
        state, asked=None, withdrawals=withdrawals, failed=state.asked, backoff=backoff, owed=False
    )


def below_floor(blank: RoleProposal, floor: int, amount: int = 1) -> RoleProposal:
    """Return a proposal to grow a role that has fewer replicas than its floor."""
    replicas = blank.pool.replicas
    step = Step("floor", {"replicas": replicas, "floor": floor}, floor, Reason.BELOW_FLOOR.value)
    detail = f"{replicas} below the floor of {floor}"
    return blank.changed(Action.UP, Reason.BELOW_FLOOR, detail, step, amount=amount)


def back_off(proposal: RoleProposal, state: RoleState) -> RoleProposal:
    """Return a scale-up held after a failed one, regardless of ready replicas: the next one would be refused too."""
    if not state.backoff or proposal.action is not Action.UP:
        return proposal
    inputs = {"intervals_left": state.backoff, "withdrawals": state.withdrawals}
    detail = f"{count_of(state.backoff, 'interval')} of backoff left after a replica that never became ready"
    return proposal.held(Reason.WITHDRAWAL_BACKOFF, detail, Step("backoff", inputs, 0, "hold"))


UNHEARD_WRITES = 3
"""Chosen: from this write in a row on, one that comes while the role is left to its writer changes nothing, so that a
writer of every few seconds is fought again only after the whole time."""


def is_left(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether the planner leaves a role's replicas to another writer now."""
    return role in config.external or state.since_write < _span(state, config) - 1


def owner(role: Role, state: RoleState, config: DecideConfig, writers: Mapping[Role, str]) -> str:
    """Return whom a role's replicas are left to, in words; empty: the planner sets them."""
    if role in config.external:
        return writers.get(role) or "others"
    return state.writer if state.since_write < _span(state, config) else ""


def is_heard(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether one more write by another client changes what the planner does."""
    return state.foreign_writes < UNHEARD_WRITES or not is_left(role, state, config)


def written(state: RoleState, writer: str) -> RoleState:
    """Return the state after another writer has set the role's replicas: nothing is outstanding."""
    return replace(state, asked=None, writer=writer, foreign_writes=state.foreign_writes + 1, since_write=0)


def left(
    proposals: Sequence[RoleProposal], seen: Mapping[Role, RoleState], config: DecideConfig
) -> list[RoleProposal]:
    """Return the proposals, held for the roles that others scale; one of them alone keeps a graph from zero."""
    owned = {each.role for each in proposals if is_left(each.role, seen[each.role], config)}
    return [
        _held(each, seen[each.role], owned)
        if each.role in owned or (owned and each.reason is Reason.IDLE)
        else each
        for each in proposals
    ]


def _held(proposal: RoleProposal, state: RoleState, owned: set[Role]) -> RoleProposal:
    if proposal.action is Action.HOLD:
        return proposal
    detail = f"{' and '.join(sorted(owned))} is scaled by {state.writer or 'others'}"
    inputs = {"foreign_writes": state.foreign_writes, "since_write": state.since_write}
    return proposal.held(Reason.SCALED_BY_OTHER, detail, Step("owner", inputs, None, "hold"))


def _span(state: RoleState, config: DecideConfig) -> int:
    if not state.foreign_writes:
        return 0
    intervals: int = min(2 ** min(state.foreign_writes - 1, 8), MAX_BACKOFF_INTERVALS)
    return intervals * config.decisions_per_adjustment


def existing_gpus(pools: Mapping[Role, PoolCounts], config: DecideConfig) -> int:
    """Return the GPUs that workers hold now: ready, starting and draining ones."""
    return sum(pool.existing * config.engine_gpus(role, pool.gpus) for role, pool in pools.items())


def within_bounds(
    proposals: Sequence[RoleProposal], gpus: int, config: DecideConfig, *, owed: Collection[Role] = ()
) -> list[RoleProposal]:
    """Return the proposals, in order of precedence, held where a floor or a ceiling forbids them.

    Precedence when the budget allows fewer scale-ups than are asked for: a role below its floor, then one
    that another gave up GPUs for, then decode (or aggregated), then prefill. Decode goes first because a full decode pool destroys work, while a
    prefill queue only delays it: decode preempts running streams and recomputes them, and finished prefills
    pin their KV on the prefill workers until a decode worker has room, so a new prefill worker would feed a
    pool that cannot take it. A role that does not fit leaves what is free to the next one.

    GPUs of a replica scaled down by the same decision are not free yet: it drains first. ``gpus`` are those that existing
    workers hold; for ``owed`` roles some are reserved.
    """
    ordered = sorted(
        proposals,
        key=lambda d: (d.reason is not Reason.BELOW_FLOOR, d.role not in owed, d.role is Role.PREFILL),
    )
    free = None if config.max_gpu_budget is None else config.max_gpu_budget - gpus
    granted = 0
    bounded = []
    for proposal in ordered:
        decided = proposal
        if proposal.action is Action.DOWN:
            decided = _keep_floor(proposal, config)
        elif proposal.action is Action.UP:
            decided = _keep_ceiling(proposal, free, granted, config)
            if decided.action is Action.UP:
                granted += proposal.engine_gpus * decided.amount
        bounded.append(decided)
    return bounded


def _keep_floor(proposal: RoleProposal, config: DecideConfig) -> RoleProposal:
    floor = 0 if proposal.reason is Reason.IDLE else config.floor(proposal.role, proposal.engine_gpus)
    spare = proposal.pool.replicas - floor
    inputs = {
        "replicas_after": proposal.pool.replicas - proposal.amount,
        "gpus_per_engine": proposal.engine_gpus,
    }
    if spare < 1:
        detail = f"{floor} {'is' if floor == proposal.pool.replicas else 'would be'} the floor"
        return proposal.held(Reason.AT_FLOOR, detail, Step("floor", inputs, floor, "hold"))
    return _at_most(proposal, spare, Step("floor", inputs, floor, "pass"))


def _keep_ceiling(
    proposal: RoleProposal, free: int | None, granted: int, config: DecideConfig
) -> RoleProposal:
    ceiling = config.max_replicas.get(proposal.role)
    if ceiling is not None and proposal.pool.replicas + proposal.amount > ceiling:
        headroom = ceiling - proposal.pool.replicas
        step = Step(
            "max_replicas",
            {"replicas_after": proposal.pool.replicas + proposal.amount},
            ceiling,
            "hold" if headroom < 1 else "pass",
        )
        if headroom < 1:
            return proposal.held(Reason.AT_MAX_REPLICAS, f"{ceiling} is the maximum number of replicas", step)
        proposal = _at_most(proposal, headroom, step)
    needed = proposal.engine_gpus * proposal.amount
    if free is None:
        return proposal.passed(Step("gpu_budget", {"gpus_needed": needed}, None, "pass: no ceiling"))
    used = (config.max_gpu_budget or 0) - free
    inputs = {"gpus_existing": used, "gpus_granted": granted, "gpus_needed": needed}
    if proposal.engine_gpus <= free - granted:
        fitting = (free - granted) // proposal.engine_gpus if proposal.engine_gpus else proposal.amount
        return _at_most(proposal, fitting, Step("gpu_budget", inputs, config.max_gpu_budget, "pass"))
    step = Step("gpu_budget", inputs, config.max_gpu_budget, "hold")
    if proposal.engine_gpus <= free:
        other = Role.DECODE if proposal.role is Role.PREFILL else Role.PREFILL
        detail = (
            f"the last free GPUs of the budget of {config.max_gpu_budget} are given to {other.value} first"
        )
        return proposal.held(Reason.GPU_BUDGET_YIELDED, detail, step)
    detail = f"{used + granted} + {proposal.engine_gpus} GPUs exceed the budget of {config.max_gpu_budget}"
    return proposal.held(Reason.GPU_BUDGET, detail, step)


def _at_most(proposal: RoleProposal, most: int, step: Step) -> RoleProposal:
    if proposal.amount <= most:
        return proposal.passed(step)
    return replace(proposal.passed(replace(step, outcome=f"limited to {most}")), amount=most)


TOTAL_FLOOR = "total_floor"


def staying_gpus(proposals: Sequence[RoleProposal]) -> int:
    """Return the GPUs of ready and starting replicas."""
    return sum(each.pool.replicas * each.engine_gpus for each in proposals)


def raised(
    proposals: Sequence[RoleProposal], gpus: int, config: DecideConfig, *, seen: Mapping[Role, RoleState]
) -> list[RoleProposal]:
    """Return the proposals; below the floor the role with fewest replicas that has room grows by one, decode on equal terms.

    What the proposals add counts first, and a role that something was just taken back from (by ``seen``, its
    memory) is left in peace. ``gpus`` counts draining workers' too.
    """
    staying = staying_gpus(proposals)
    added = sum(
        each.engine_gpus * each.amount
        for each in proposals
        if each.action is Action.UP and _may_grow(each, gpus, config)
    )
    if staying + added >= config.total_floor:
        return list(proposals)
    grown = {each.role: _grown(each, staying, seen[each.role], config) for each in proposals}
    able = [
        each
        for each in proposals
        if each.action is not Action.UP
        and grown[each.role].action is Action.UP
        and _may_grow(each, gpus + added, config)
    ]
    able = [each for each in able if not is_left(each.role, seen[each.role], config)]
    chosen = min(able, key=lambda each: (each.pool.replicas, each.role is Role.PREFILL), default=None)
    step = Step(TOTAL_FLOOR, {"gpus_staying": staying}, config.total_floor, "no role has room to grow")
    if chosen is None:
        return [each.passed(step) for each in proposals]
    return [grown[each.role] if each is chosen else each for each in proposals]


def kept(proposals: Sequence[RoleProposal], config: DecideConfig, *, freeable: int) -> list[RoleProposal]:
    """Return the bounded proposals, scale-downs held or lessened where fewer GPUs than the floor would stay.

    What the budget holds back counts as if it were there, if ``freeable`` GPUs suffice for it: a scale-down makes way.
    """
    added = sum(each.engine_gpus * each.amount for each in proposals if each.action is Action.UP)
    held_back = (each for each in proposals if each.reason is Reason.GPU_BUDGET)
    claimed = sum(each.engine_gpus for each in held_back if each.engine_gpus <= freeable)
    left = staying_gpus(proposals) + added + claimed
    decided = []
    for proposal in proposals:
        kept_one = _kept(proposal, left, config) if proposal.action is Action.DOWN else proposal
        if kept_one.action is Action.DOWN:
            left -= kept_one.engine_gpus * kept_one.amount
        decided.append(kept_one)
    return decided


def _grown(proposal: RoleProposal, staying: int, state: RoleState, config: DecideConfig) -> RoleProposal:
    floor = config.total_floor
    step = Step(TOTAL_FLOOR, {"gpus_staying": staying}, floor, Reason.BELOW_TOTAL_FLOOR.value)
    detail = f"{count_of(staying, 'GPU')} in all {'is' if staying == 1 else 'are'} below the total floor of {floor}"
    return back_off(proposal.changed(Action.UP, Reason.BELOW_TOTAL_FLOOR, detail, step), state)


def _may_grow(proposal: RoleProposal, gpus: int, config: DecideConfig) -> bool:
    ceiling = config.max_replicas.get(proposal.role)
    if proposal.engine_gpus < 1 or (ceiling is not None and proposal.pool.replicas >= ceiling):
        return False
    return config.max_gpu_budget is None or gpus + proposal.engine_gpus <= config.max_gpu_budget


def _kept(proposal: RoleProposal, left: int, config: DecideConfig) -> RoleProposal:
    floor, size = config.total_floor, proposal.engine_gpus
    spare = (left - floor) // size if size else proposal.amount
    if spare >= proposal.amount:
        return proposal
    inputs = {"gpus_after": left - size * proposal.amount}
    if spare >= 1:
        return replace(proposal.passed(Step(TOTAL_FLOOR, inputs, floor, f"limited to {spare}")), amount=spare)
    detail = f"{left} - {size} GPUs in all are below the total floor of {floor}"
    return proposal.held(Reason.AT_TOTAL_FLOOR, detail, Step(TOTAL_FLOOR, inputs, floor, "hold"))


def yielded(
    proposals: Sequence[RoleProposal], gpus: int, config: DecideConfig, *, seen: Mapping[Role, RoleState]
) -> list[RoleProposal]:
    """Return the proposals; a role gives up a replica that is only on trial where the budget alone keeps another from growing.

    What the other one asks for must itself be more than a trial, and ``gpus``, which all workers hold, fall by enough for it.
    """
    for taker in proposals:
        is_pressed = taker.action is Action.UP and taker.reason is not Reason.SERVED_LATE
        if not is_pressed or _may_grow(taker, gpus, config) or any(each.pool.draining for each in proposals):
            continue
        for giver in proposals:
            is_free = bool(giver.yields) and not is_left(giver.role, seen[giver.role], config)
            if is_free and _may_grow(taker, gpus - giver.engine_gpus, config):
                detail = (
                    f"{giver.yields}; {taker.role.value} lacks GPUs, and one of these replicas is only on "
                    "trial"
                )
                step = Step("yield", {"gpus_existing": gpus}, config.max_gpu_budget, f"to {taker.role.value}")
                given = giver.changed(Action.DOWN, Reason.SPARE_CAPACITY, detail, step)
                return [given if each is giver else each for each in proposals]
    return list(proposals)


_NOT_FREED = frozenset({Reason.GPU_BUDGET, Reason.GPU_BUDGET_YIELDED, Reason.AT_MAX_REPLICAS})


def release(proposals: Sequence[RoleProposal], owed: frozenset[Role]) -> list[RoleProposal]:
    """Return the proposals; a role that no longer asks for its reserved GPUs says that it releases them."""
    return [
        _released(proposal, "it no longer asks for more")
        if proposal.role in owed and proposal.action is not Action.UP
        else proposal
        for proposal in proposals
    ]


def reserve(
    proposals: Sequence[RoleProposal],
    owed: frozenset[Role],
    pools: Mapping[Role, PoolCounts],
    *,
    freeable: int,
) -> tuple[list[RoleProposal], frozenset[Role]]:
    """Return the bounded proposals with the outcome of every reservation, and the roles with a reservation now.

    A reservation begins when the budget alone holds a role back and another one shrinks in the same decision, if
    enough for one engine can come free at all. It is kept while a worker still drains or shrinks for it, ends when the role grows, and is released when
    nothing that could free GPUs is under way. ``owed`` have one from earlier decisions; ``freeable`` GPUs are free, drain, or
    stand above the floors of roles that shrink.
    """
    givers = [proposal.role for proposal in proposals if proposal.action is Action.DOWN]
    is_draining = any(pool.draining for pool in pools.values())
    decisions: list[RoleProposal] = []
    reserved: set[Role] = set()
    for proposal in proposals:
        role, decided = proposal.role, proposal
        if proposal.reason is Reason.GPU_BUDGET and givers and freeable < proposal.engine_gpus:
            why = f"only {freeable} of the {proposal.engine_gpus} GPUs that it needs can be freed"
            decided = _rebalanced(proposal, f"not begun: {why}")
        elif proposal.reason is Reason.GPU_BUDGET and (givers or (role in owed and is_draining)):
            why = (
                f"{givers[0].value} releases one replica for it"
                if givers
                else "the replica released for it is still draining"
            )
            decided = _rebalanced(proposal, f"waits: {why}", why)
            reserved.add(role)
        elif role in owed and proposal.action is Action.UP:
            decided = _rebalanced(proposal, "freed: it grows")
        elif role in owed and proposal.reason in _NOT_FREED:
            decided = _released(proposal, "no GPUs were freed for it")
        decisions.append(decided)
    return decisions, frozenset(reserved)


def _released(proposal: RoleProposal, why: str) -> RoleProposal:
    return _rebalanced(proposal, f"abandoned: {why}", f"rebalance abandoned: {why}")


def _rebalanced(proposal: RoleProposal, outcome: str, words: str = "") -> RoleProposal:
    detail = f"{proposal.detail}; {words}" if words else proposal.detail
    step = Step("rebalance", {"gpus_needed": proposal.engine_gpus}, None, outcome)
    return replace(proposal.passed(step), detail=detail)
