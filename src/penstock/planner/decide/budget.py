"""Floors and ceilings: of each role, of all roles' GPUs, and GPUs that move from one role to another.

The total floor counts what stays: ready and starting replicas, without draining ones and what one role gives up for another. Where
floor and budget cannot both be kept, the budget is. To rebalance, one decision shrinks the idle role and remembers, in the recorded
state, that the GPUs are reserved for the role under load; a later one, made once they are free, lets it grow first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import PoolCounts
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.stabilise import back_off, is_left
from penstock.planner.decide.state import RoleState


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
        room = ceiling - proposal.pool.replicas
        step = Step(
            "max_replicas",
            {"replicas_after": proposal.pool.replicas + proposal.amount},
            ceiling,
            "hold" if room < 1 else "pass",
        )
        if room < 1:
            return proposal.held(Reason.AT_MAX_REPLICAS, f"{ceiling} is the most replicas allowed", step)
        proposal = _at_most(proposal, room, step)
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
        detail = f"the last free GPUs of {config.max_gpu_budget} go to {other.value} first"
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
        if each.action is Action.UP and _has_room(each, gpus, config)
    )
    if staying + added >= config.total_floor:
        return list(proposals)
    grown = {each.role: _grown(each, staying, seen[each.role], config) for each in proposals}
    able = [
        each
        for each in proposals
        if each.action is not Action.UP
        and grown[each.role].action is Action.UP
        and _has_room(each, gpus + added, config)
    ]
    able = [each for each in able if not is_left(each.role, seen[each.role], config)]
    chosen = min(able, key=lambda each: (each.pool.replicas, each.role is Role.PREFILL), default=None)
    step = Step(TOTAL_FLOOR, {"gpus_staying": staying}, config.total_floor, "no role has room to grow")
    if chosen is None:
        return [each.passed(step) for each in proposals]
    return [grown[each.role] if each is chosen else each for each in proposals]


def kept(proposals: Sequence[RoleProposal], config: DecideConfig) -> list[RoleProposal]:
    """Return the bounded proposals, scale-downs held or lessened where fewer GPUs than the floor would stay."""
    added = sum(each.engine_gpus * each.amount for each in proposals if each.action is Action.UP)
    claimed = sum(each.engine_gpus for each in proposals if each.reason is Reason.GPU_BUDGET)
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
    raised_one = replace(
        proposal.passed(step),
        action=Action.UP,
        reason=Reason.BELOW_TOTAL_FLOOR,
        detail=f"{staying} GPUs in all are below the total floor of {floor}",
        amount=1,
    )
    return back_off(raised_one, state)


def _has_room(proposal: RoleProposal, gpus: int, config: DecideConfig) -> bool:
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


_NOT_FREED = frozenset({Reason.GPU_BUDGET, Reason.GPU_BUDGET_YIELDED, Reason.AT_MAX_REPLICAS})


def release(proposals: Sequence[RoleProposal], owed: frozenset[Role]) -> list[RoleProposal]:
    """Return the proposals; a role that no longer asks for its reserved GPUs says that it releases them."""
    return [
        _released(proposal, "it asks for no more")
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
            why = f"no more than {freeable} of {proposal.engine_gpus} GPUs can come free for it"
            decided = _rebalanced(proposal, f"not begun: {why}")
        elif proposal.reason is Reason.GPU_BUDGET and (givers or (role in owed and is_draining)):
            why = (
                f"{givers[0].value} gives up one for it"
                if givers
                else "what was given up for it still drains"
            )
            decided = _rebalanced(proposal, f"waits: {why}", why)
            reserved.add(role)
        elif role in owed and proposal.action is Action.UP:
            decided = _rebalanced(proposal, "freed: it grows")
        elif role in owed and proposal.reason in _NOT_FREED:
            decided = _released(proposal, "no GPUs came free for it")
        decisions.append(decided)
    return decisions, frozenset(reserved)


def _released(proposal: RoleProposal, why: str) -> RoleProposal:
    return _rebalanced(proposal, f"abandoned: {why}", f"rebalance abandoned: {why}")


def _rebalanced(proposal: RoleProposal, outcome: str, words: str = "") -> RoleProposal:
    detail = f"{proposal.detail}; {words}" if words else proposal.detail
    step = Step("rebalance", {"gpus_needed": proposal.engine_gpus}, None, outcome)
    return replace(proposal.passed(step), detail=detail)
