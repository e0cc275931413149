"""Rule ``gpu_budget``: all workers together must fit into the GPU budget.

If the budget does not allow all requested scale-ups, the order of precedence is: a role below its minimum, a role for
which GPUs are reserved (`rebalance`), decode (or aggregated), prefill. Decode comes before prefill because a full
decode pool destroys work, while a prefill queue only delays it: decode preempts running streams and recomputes them.
Finished prefills also keep their KV on the prefill workers until a decode worker has room, so a new prefill worker
would feed a pool that cannot take its output. A role that does not fit leaves the free GPUs to the next role.

GPUs of a replica that the same decision scales down are not free yet, because the replica drains first.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.api import Role
from penstock_planner.decide.bounds.replicas import at_most
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.rule import Facts, Proposals


def keep_budget(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals with the scale-ups that exceed the GPU budget held back or reduced.

    The result has the roles in order of precedence: roles below their minimum, then roles for which GPUs that another
    role gives up are reserved, then decode before prefill. The changes are carried out in this order.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    reserved_before, granted, bounded = facts.reserved_roles, 0, []
    ordered = sorted(
        proposals.roles,
        key=lambda each: (
            each.reason is not Reason.BELOW_FLOOR,
            each.role not in reserved_before,
            each.role is Role.PREFILL,
        ),
    )
    for proposal in ordered:
        decided = (
            _fitting(proposal, facts.gpus, granted, facts.config)
            if proposal.action is Action.UP
            else proposal
        )
        if decided.action is Action.UP:
            granted += decided.engine_gpus * decided.amount
        bounded.append(decided)
    return proposals.with_roles(bounded)


def _fitting(proposal: RoleProposal, used: int, granted: int, config: DecideConfig) -> RoleProposal:
    budget, needed = config.max_gpu_budget, proposal.engine_gpus * proposal.amount
    if budget is None:
        return proposal.passed(Step("gpu_budget", {"gpus_needed": needed}, None, "pass: no ceiling"))
    inputs = {"gpus_existing": used, "gpus_granted": granted, "gpus_needed": needed}
    free = budget - used
    if proposal.engine_gpus <= free - granted:
        fitting = (free - granted) // proposal.engine_gpus if proposal.engine_gpus else proposal.amount
        return at_most(proposal, fitting, Step("gpu_budget", inputs, budget, "pass"))
    step = Step("gpu_budget", inputs, budget, "hold")
    if proposal.engine_gpus <= free:
        other = Role.DECODE if proposal.role is Role.PREFILL else Role.PREFILL
        detail = f"the last free GPUs of the budget of {budget} are given to {other.value} first"
        return proposal.held(Reason.GPU_BUDGET_YIELDED, detail, step)
    detail = f"{used + granted} + {proposal.engine_gpus} GPUs exceed the budget of {budget}"
    return proposal.held(Reason.GPU_BUDGET, detail, step)


def existing_gpus(pools: Mapping[Role, PoolCounts], config: DecideConfig) -> int:
    """Return the GPUs held by all workers: ready, starting and draining ones.

    Args:
        pools: Replica counts by role.
        config: Configuration with the GPUs of one replica; if ``pools`` has a larger number, that one counts.
    """
    return sum(pool.existing * config.engine_gpus(role, pool.gpus) for role, pool in pools.items())


def may_grow(proposal: RoleProposal, gpus: int, config: DecideConfig) -> bool:
    """Return whether one more replica fits the role's maximum and the GPU budget.

    Args:
        proposal: Proposal with the role and its replica counts; its action is ignored.
        gpus: GPUs held by the workers of all roles.
        config: Configuration with the maximum and the budget.
    """
    ceiling = config.max_replicas.get(proposal.role)
    if proposal.engine_gpus < 1 or (ceiling is not None and proposal.pool.replicas >= ceiling):
        return False
    return config.max_gpu_budget is None or gpus + proposal.engine_gpus <= config.max_gpu_budget
