"""Rule ``yield``: a replica that is only on trial is removed if the GPU budget alone keeps the other role from growing."""

from __future__ import annotations

from penstock_planner.decide.bounds.gpu_budget import may_grow
from penstock_planner.decide.bounds.owner import is_ceded
from penstock_planner.decide.decision import Action, Reason, Step
from penstock_planner.decide.rule import Facts, Proposals


def reclaim_trial_replica(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals, changed to remove one role's replica on trial if the other role could grow with its GPUs.

    A replica is on trial if it was added to find out whether it reduces late requests. The other role must want to grow
    for another reason than a trial, and removing the replica must free enough GPUs for it. Does nothing while a replica
    is draining.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    roles, gpus, config = proposals.roles, facts.gpus, facts.config
    for taker in roles:
        is_pressed = taker.action is Action.UP and taker.reason is not Reason.SERVED_LATE
        if not is_pressed or may_grow(taker, gpus, config) or any(each.pool.draining for each in roles):
            continue
        for giver in roles:
            is_free = bool(giver.trial_only_reason) and not is_ceded(
                giver.role, facts.roles[giver.role], config
            )
            if is_free and may_grow(taker, gpus - giver.engine_gpus, config):
                detail = (
                    f"{giver.trial_only_reason}; {taker.role.value} lacks GPUs, and one of these replicas is only on "
                    "trial"
                )
                step = Step("yield", {"gpus_existing": gpus}, config.max_gpu_budget, f"to {taker.role.value}")
                given = giver.changed(Action.DOWN, Reason.SPARE_CAPACITY, detail, step)
                return proposals.with_roles(given if each is giver else each for each in roles)
    return proposals
