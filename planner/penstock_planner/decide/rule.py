"""What a rule of a decision is: its name, the reasons that it gives, and a function from proposals and facts to proposals.

`pipeline.RULES` lists them in the order in which they apply. The name is in the record's steps, in ``explain``, in
the documentation's table and in the label ``rule`` of the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import is_

from penstock.api import Role
from penstock.gpu_pool.bid import RoleBid
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, RoleState
from penstock_planner.decide.observation import PoolCounts, Window
from penstock_planner.decide.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules look at; built once per decision, and the same for every rule.

    Attributes:
        window: The interval's pulls, one at least.
        pools: Replica counts of the newest pull.
        gpus: GPUs that workers hold now, draining ones included.
        roles: Each role's memory as this interval sees it.
        config: With the schedule's bounds, and with a pool's grant as the budget.
        schedule: The entries that hold now.
    """

    window: Window
    pools: Mapping[Role, PoolCounts]
    gpus: int
    roles: Mapping[Role, RoleState]
    config: DecideConfig
    schedule: Schedule = ()

    @property
    def owed(self) -> frozenset[Role]:
        """Return the roles for which an earlier decision reserved GPUs."""
        return frozenset(role for role in self.pools if self.roles[role].owed)


@dataclass(frozen=True, slots=True)
class Proposals:
    """What is proposed so far, on its way through the rules.

    Attributes:
        roles: One per role, in the order in which they are to be carried out.
        bids: What each role asks of the graph's GPU pool; empty for a graph in none.
        reserved: Roles for which GPUs are reserved after this decision.
        switched: Workers that go from one role to the other.
        again_s: Simulated seconds until the next decision; None: the mode's interval.
    """

    roles: tuple[RoleProposal, ...]
    bids: Mapping[Role, RoleBid] = field(default_factory=dict)
    reserved: frozenset[Role] = frozenset()
    switched: int = 0
    again_s: float | None = None

    def of(self, roles: Iterable[RoleProposal]) -> Proposals:
        """Return the same with other proposals for the roles; itself where a rule has changed none, as most do."""
        changed = tuple(roles)
        if len(changed) == len(self.roles) and all(map(is_, changed, self.roles)):
            return self
        return replace(self, roles=changed)

    def staying_gpus(self) -> int:
        """Return the GPUs of ready and starting replicas."""
        return sum(each.pool.replicas * each.engine_gpus for each in self.roles)

    def added_gpus(self) -> int:
        """Return the GPUs of the replicas that are to start."""
        return sum(each.engine_gpus * each.amount for each in self.roles if each.action is Action.UP)


Apply = Callable[[Proposals, Facts], Proposals]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: One word for it everywhere: the step in a record, the row in the documentation, the label of the metric.
            A rule that acts at two places of the order is listed twice.
        reasons: What a decision's ``reason`` is where this rule decided; empty: it only notes, or lessens an amount.
        apply: Returns the proposals after the rule. It adds a step to each proposal that it looked at closely.
        binds_switch: Whether it also applies to a decision that switches workers between roles, which holds the same
            GPUs before and after.
    """

    name: str
    reasons: tuple[Reason, ...]
    apply: Apply
    binds_switch: bool = True
