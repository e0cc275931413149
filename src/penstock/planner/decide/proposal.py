"""What a policy asks for, before bounds and budget: one proposal per role, and what the policy remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.api import Role
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import PoolCounts
from penstock.planner.decide.state import Memory, RoleState


@dataclass(frozen=True, slots=True)
class RoleProposal:
    """One role's decision on its way through the rules.

    Attributes:
        pool: Counts at the interval's newest pull.
        engine_gpus: GPUs that one replica is charged with.
        reason: The rule that asked last.
        detail: That rule in words and numbers, without the role.
        amount: Replicas that ``action`` adds or removes, >= 1; of no meaning for a hold.
    """

    role: Role
    pool: PoolCounts
    engine_gpus: int
    action: Action
    reason: Reason
    detail: str
    steps: tuple[Step, ...]
    amount: int = 1

    @property
    def change(self) -> int:
        """Return the replicas to add; below 0 those to remove."""
        return {Action.UP: self.amount, Action.HOLD: 0, Action.DOWN: -self.amount}[self.action]

    def passed(self, step: Step) -> RoleProposal:
        """Return the proposal with a rule that changed nothing."""
        return replace(self, steps=(*self.steps, step))

    def held(self, reason: Reason, detail: str, step: Step) -> RoleProposal:
        """Return the proposal held by a rule; the original request stays readable in ``detail``."""
        return replace(
            self,
            action=Action.HOLD,
            reason=reason,
            detail=f"{self.detail}, but {detail}",
            steps=(*self.steps, step),
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one policy asks for; `pipeline.decide` bounds it, counts the budget and makes the decision.

    Attributes:
        proposals: One per role of the newest pull.
        roles: Each role's memory as this interval sees it, before the decision is counted in.
    """

    proposals: Sequence[RoleProposal]
    roles: Mapping[Role, RoleState]
    memory: Memory = field(default_factory=dict)
