"""Rule ``yield``: a replica that only a trial keeps goes where the budget alone keeps the other role from growing."""

from __future__ import annotations

from penstock_planner.decide.bounds.gpu_budget import may_grow
from penstock_planner.decide.bounds.owner import is_left
from penstock_planner.decide.decision import Action, Reason, Step
from penstock_planner.decide.rule import Facts, Proposals


def yield_trials(proposals: Proposals, facts: Facts) -> Proposals:
    """Take a replica on trial from one role for another one that is pressed.

    What the other one asks for must itself be more than a trial, and the GPUs in use fall by enough for it.
    """
    roles, gpus, config = proposals.roles, facts.gpus, facts.config
    for taker in roles:
        is_pressed = taker.action is Action.UP and taker.reason is not Reason.SERVED_LATE
        if not is_pressed or may_grow(taker, gpus, config) or any(each.pool.draining for each in roles):
            continue
        for giver in roles:
            is_free = bool(giver.yields) and not is_left(giver.role, facts.roles[giver.role], config)
            if is_free and may_grow(taker, gpus - giver.engine_gpus, config):
                detail = (
                    f"{giver.yields}; {taker.role.value} lacks GPUs, and one of these replicas is only on "
                    "trial"
                )
                step = Step("yield", {"gpus_existing": gpus}, config.max_gpu_budget, f"to {taker.role.value}")
                given = giver.changed(Action.DOWN, Reason.SPARE_CAPACITY, detail, step)
                return proposals.of(given if each is giver else each for each in roles)
    return proposals
