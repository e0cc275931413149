"""The rules that every policy's proposal passes through. A rule has a name, the reason codes that it sets, and a function.

`pipeline.RULES` lists the rules in the order in which they are applied. A rule's name is used in the recorded steps,
in ``planner explain``, in the table of the documentation, and as the metric label ``rule``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import is_

from penstock.api import Role
from penstock.gpu_pool.bid import RoleBid
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal
from penstock_planner.decide.demand.observation import PoolCounts, Window
from penstock_planner.decide.schedule import Schedule
from penstock_planner.decide.state import RoleState


@dataclass(frozen=True, slots=True)
class Facts:
    """Input of the rules that change the proposals. Built once per decision and the same for every rule.

    Attributes:
        window: Pulls (metrics scrapes) of the interval, at least one.
        pools: Replica counts of the newest pull.
        gpus: GPUs held by workers at the newest pull, draining ones included.
        roles: State of each role, updated with the replica counts of the newest pull.
        config: Configuration with the bounds of the active schedule entries, and with the GPU pool's grant as the
            budget.
        schedule: Schedule entries that are active now.
    """

    window: Window
    pools: Mapping[Role, PoolCounts]
    gpus: int
    roles: Mapping[Role, RoleState]
    config: DecideConfig
    schedule: Schedule = ()

    @property
    def reserved_roles(self) -> frozenset[Role]:
        """Return the roles for which an earlier decision reserved GPUs that another role gives up."""
        return frozenset(role for role in self.pools if self.roles[role].reserved)


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposals of all roles, while the rules are applied to them one after another.

    Attributes:
        roles: One proposal per role, in the order in which they will be carried out.
        bids: Replicas that each role requests from the graph's GPU pool. Empty if the graph is in no pool.
        reserved: Roles for which GPUs are reserved after this decision.
        switched: Number of workers that change from one role to the other without a restart; 0 for none.
        next_decision_s: Simulated seconds until the next decision. None means the regular interval of the mode.
    """

    roles: tuple[RoleProposal, ...]
    bids: Mapping[Role, RoleBid] = field(default_factory=dict)
    reserved: frozenset[Role] = frozenset()
    switched: int = 0
    next_decision_s: float | None = None

    def with_roles(self, roles: Iterable[RoleProposal]) -> Proposals:
        """Return a copy with ``roles`` as the proposals, one per role; this object itself if they are the same objects as before."""
        changed = tuple(roles)
        if len(changed) == len(self.roles) and all(map(is_, changed, self.roles)):
            return self
        return replace(self, roles=changed)

    def staying_gpus(self) -> int:
        """Return the GPUs of the ready and starting replicas of all roles, not counting draining ones and the proposed changes."""
        return sum(each.pool.replicas * each.engine_gpus for each in self.roles)

    def added_gpus(self) -> int:
        """Return the GPUs of the replicas that the proposals to grow would start."""
        return sum(each.engine_gpus * each.amount for each in self.roles if each.action is Action.UP)


Apply = Callable[[Proposals, Facts], Proposals]
"""Function of a rule: takes the proposals and the facts, and returns the proposals after the rule."""


def each_role(change: Callable[[RoleProposal, Facts], RoleProposal]) -> Apply:
    """Return a function that applies ``change`` to the proposal of each role separately, for a rule that looks at one role only."""

    def apply(proposals: Proposals, facts: Facts) -> Proposals:
        return proposals.with_roles([change(each, facts) for each in proposals.roles])

    return apply


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule that is applied to every policy's proposals.

    Attributes:
        name: Name of the rule in records, in the documentation and in the metric. A rule that is applied at two
            positions of the order is listed twice with the same name.
        reasons: Reason codes that a decision can have if this rule decided. Empty if the rule only adds notes or
            reduces an amount.
        apply: Function that returns the proposals after the rule. It appends a step to each proposal that it
            examined.
        binds_switch: Whether the rule also applies if the decision switches workers between roles without a restart.
            False for rules about the number of GPUs, which a switch does not change.
    """

    name: str
    reasons: tuple[Reason, ...]
    apply: Apply
    binds_switch: bool = True
