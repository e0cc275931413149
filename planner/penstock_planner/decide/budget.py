"""Floors and ceilings: the GPU budget over all roles, and the bounds of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock_graph.models import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, Step
from penstock_planner.decide.observation import PoolCounts
from penstock_planner.decide.propose import Draft


def existing_gpus(pools: Mapping[Role, PoolCounts], config: DecideConfig) -> int:
    """Return the GPUs that workers hold now: ready, starting and draining ones."""
    return sum(pool.existing * config.engine_gpus(role, pool.gpus) for role, pool in pools.items())


def within_bounds(
    drafts: Sequence[Draft], gpus: int, config: DecideConfig, *, owed: Collection[Role] = ()
) -> list[Draft]:
    """Return the drafts, in order of precedence, held where a floor or a ceiling forbids them.

    Precedence when the budget allows fewer scale-ups than are asked for: a role below its floor, then one
    that another gave up GPUs for, then decode (or aggregated), then prefill. Decode goes first because a full decode pool destroys work, while a
    prefill queue only delays it: decode preempts running streams and recomputes them, and finished prefills
    pin their KV on the prefill workers until a decode worker has room, so a new prefill worker would feed a
    pool that cannot take it. A role that does not fit leaves what is free to the next one.

    GPUs of a replica scaled down by the same decision are not free yet: it drains first.

    Args:
        drafts: One per role, stabilised.
        gpus: GPUs that existing workers hold.
        config: Bounds.
        owed: Roles that GPUs were given up for.
    """
    ordered = sorted(
        drafts, key=lambda d: (d.reason is not Reason.BELOW_FLOOR, d.role not in owed, d.role is Role.PREFILL)
    )
    free = None if config.max_gpu_budget is None else config.max_gpu_budget - gpus
    granted = 0
    bounded = []
    for draft in ordered:
        decided = draft
        if draft.action is Action.DOWN:
            decided = _keep_floor(draft, config)
        elif draft.action is Action.UP:
            decided = _keep_ceiling(draft, free, granted, config)
            if decided.action is Action.UP:
                granted += draft.engine_gpus
        bounded.append(decided)
    return bounded


def _keep_floor(draft: Draft, config: DecideConfig) -> Draft:
    floor = config.floor(draft.role, draft.engine_gpus)
    inputs = {"replicas_after": draft.pool.replicas - 1, "gpus_per_engine": draft.engine_gpus}
    if draft.pool.replicas - 1 < floor:
        detail = f"{floor} {'is' if floor == draft.pool.replicas else 'would be'} the floor"
        return draft.held(Reason.AT_FLOOR, detail, Step("floor", inputs, floor, "hold"))
    return draft.passed(Step("floor", inputs, floor, "pass"))


def _keep_ceiling(draft: Draft, free: int | None, granted: int, config: DecideConfig) -> Draft:
    ceiling = config.max_replicas.get(draft.role)
    if ceiling is not None and draft.pool.replicas + 1 > ceiling:
        step = Step("max_replicas", {"replicas_after": draft.pool.replicas + 1}, ceiling, "hold")
        return draft.held(Reason.AT_MAX_REPLICAS, f"{ceiling} is the most replicas allowed", step)
    if free is None:
        return draft.passed(Step("gpu_budget", {"gpus_needed": draft.engine_gpus}, None, "pass: no ceiling"))
    used = (config.max_gpu_budget or 0) - free
    inputs = {"gpus_existing": used, "gpus_granted": granted, "gpus_needed": draft.engine_gpus}
    if draft.engine_gpus <= free - granted:
        return draft.passed(Step("gpu_budget", inputs, config.max_gpu_budget, "pass"))
    step = Step("gpu_budget", inputs, config.max_gpu_budget, "hold")
    if draft.engine_gpus <= free:
        other = Role.DECODE if draft.role is Role.PREFILL else Role.PREFILL
        detail = f"the last free GPUs of {config.max_gpu_budget} go to {other.value} first"
        return draft.held(Reason.GPU_BUDGET_YIELDED, detail, step)
    detail = f"{used + granted} + {draft.engine_gpus} GPUs exceed the budget of {config.max_gpu_budget}"
    return draft.held(Reason.GPU_BUDGET, detail, step)
