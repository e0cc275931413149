"""The proposal of a policy, and the decision made from it.

A decision has, for each role, the replica change, one reason code, one sentence for people, and every rule (`Step`)
that was applied on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.api import Role
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.state import PolicyState, RoleState


def count_of(count: int, noun: str) -> str:
    """Return the count with its noun in singular or plural: "1 worker", "3 workers".

    Args:
        count: The number.
        noun: The noun in singular.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Action(StrEnum):
    """Direction of a role's replica change.

    Attributes:
        UP: Replicas are added.
        HOLD: The number of replicas stays the same.
        DOWN: Replicas are removed.
    """

    UP = "up"
    HOLD = "hold"
    DOWN = "down"


class Reason(StrEnum):
    """Reason code of a role's decision. The set is closed: it is the value of a metric label.

    Attributes:
        ABOVE_THRESHOLD: The load is above the threshold for growing.
        BELOW_THRESHOLD: The load is below the threshold for shrinking.
        BELOW_FLOOR: The role has fewer replicas than its minimum.
        BELOW_TOTAL_FLOOR: All roles together hold fewer GPUs than the minimum.
        NEVER_READY: A scale-up is rolled back because its replica never became ready.
        WITHIN_THRESHOLDS: The load is between both thresholds.
        METRIC_UNKNOWN: No change, because a metric is missing or stale.
        NO_READY_WORKER: No change, because no worker is ready and so no metric exists.
        REPLICA_NOT_READY: No scale-down while a replica is still starting.
        DECODE_GRACE_PERIOD: No scale-down while a new decode worker fills its KV cache.
        PREFILL_QUEUE_FALLING: No scale-up, because the prefill queue shrinks without another worker.
        WITHDRAWAL_BACKOFF: No scale-up until the back-off after a roll-back is over.
        AT_FLOOR: No scale-down below the role's minimum.
        AT_TOTAL_FLOOR: No scale-down below the minimum of GPUs of all roles.
        AT_MAX_REPLICAS: No scale-up above the role's maximum.
        GPU_BUDGET: No scale-up, because it exceeds the GPU budget or the GPU pool's grant.
        GPU_BUDGET_YIELDED: No scale-up, because the other role has precedence for the free GPUs of the budget.
        DEMAND_ABOVE_CAPACITY: More prompt tokens per second are forecast than the workers can compute.
        KV_ABOVE_CAPACITY: The KV usage projected for the time when a new replica could be ready is above the limit.
        HINDSIGHT_FLOOR: The role has fewer replicas than its learned floor: the minimum number of replicas that was
            cheapest in a simulation of fleets with different floors.
        ITL_ABOVE_TARGET: The ITL projected for the time when a new replica could be ready exceeds the target.
        BACKLOG_ABOVE_SLO: The queued prompt tokens take longer to compute than the TTFT target or a start-up allows.
        REQUESTS_REJECTED: Requests were rejected, or timed out in the queue.
        SERVED_LATE: Requests missed their latency targets, and the planner's latency model does not explain why; one
            replica is added on trial, to find out whether it reduces late requests.
        SPARE_CAPACITY: One replica fewer is enough.
        WITHIN_CAPACITY: The replicas match the demand.
        ONE_FEWER_TOO_FEW: No scale-down, because the remaining workers could not take the load.
        REQUESTS_WAITING: No scale-down while requests are waiting.
        HOLD_DOWN: No scale-down so soon after a replica was added or removed.
        ABOVE_BUDGET: The role shrinks because the workers hold more GPUs than the GPU budget or the GPU pool's grant
            allows.
        ABOVE_SCHEDULE: The role shrinks because it exceeds the scheduled maximum.
        BUDGET_SHARE: The role gives one replica up for the other role, because the budget is too small for both.
        SCALED_BY_OTHER: No change, because another client sets the replica count.
        ROLE_SWITCH: Workers change from this role to the other one without a restart.
        IDLE: All roles go to zero, or stay there, because there are no requests.
        WAKE: All roles return from zero because requests arrived.
    """

    ABOVE_THRESHOLD = "above_threshold"
    BELOW_THRESHOLD = "below_threshold"
    BELOW_FLOOR = "below_floor"
    BELOW_TOTAL_FLOOR = "below_total_floor"
    NEVER_READY = "never_ready"
    WITHIN_THRESHOLDS = "within_thresholds"
    METRIC_UNKNOWN = "metric_unknown"
    NO_READY_WORKER = "no_ready_worker"
    REPLICA_NOT_READY = "replica_not_ready"
    DECODE_GRACE_PERIOD = "decode_grace_period"
    PREFILL_QUEUE_FALLING = "prefill_queue_falling"
    WITHDRAWAL_BACKOFF = "withdrawal_backoff"
    AT_FLOOR = "at_floor"
    AT_TOTAL_FLOOR = "at_total_floor"
    AT_MAX_REPLICAS = "at_max_replicas"
    GPU_BUDGET = "gpu_budget"
    GPU_BUDGET_YIELDED = "gpu_budget_yielded"
    DEMAND_ABOVE_CAPACITY = "demand_above_capacity"
    KV_ABOVE_CAPACITY = "kv_above_capacity"
    HINDSIGHT_FLOOR = "hindsight_floor"
    ITL_ABOVE_TARGET = "itl_above_target"
    BACKLOG_ABOVE_SLO = "backlog_above_slo"
    REQUESTS_REJECTED = "requests_rejected"
    SERVED_LATE = "served_late"
    SPARE_CAPACITY = "spare_capacity"
    WITHIN_CAPACITY = "within_capacity"
    ONE_FEWER_TOO_FEW = "one_fewer_too_few"
    REQUESTS_WAITING = "requests_waiting"
    HOLD_DOWN = "hold_down"
    ABOVE_BUDGET = "above_budget"
    ABOVE_SCHEDULE = "above_schedule"
    BUDGET_SHARE = "budget_share"
    SCALED_BY_OTHER = "scaled_by_other"
    ROLE_SWITCH = "role_switch"
    IDLE = "idle"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class Step:
    """Record of one rule that was applied to a role's proposal.

    Attributes:
        name: Name of the rule.
        inputs: Values that the rule looked at, by a name that includes the unit. None means an unknown value.
        threshold: Value with which the inputs were compared. None if the rule compares nothing.
        outcome: Conclusion of the rule, in words.
    """

    name: str
    inputs: Mapping[str, float | int | str | None]
    threshold: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Retention:
    """Explanation of why a role keeps more replicas than its demand needs. Times are simulated seconds.

    Attributes:
        needs: Number of replicas that demand alone needs, >= 1.
        since_s: Time at which the cause began. None if it is unknown.
        until_s: Latest time at which the cause ends if the load does not return. None if it has no end.
    """

    needs: int
    since_s: float | None = None
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """Decision for one role.

    Attributes:
        role: Role that is decided on.
        current: Ready and starting replicas at the decision. For a roll-back, the total that the scale-up requested.
        desired: Replicas to scale to. A roll-back scales to one fewer than the scale-up requested.
        action: Direction of the change from ``current`` to ``desired``.
        reason: Reason code of the decision.
        sentence: The decision in words: "decode 2 -> 3: KV 0.93 > 0.90".
        steps: Rules that were applied, in order.
        rule: Name of the rule that decided. Empty if no rule requested or held back a change.
        retained_because: Explanation of why the role has more replicas than demand needs. None if it does not, or if
            the rule that decided is about something else.
    """

    role: Role
    current: int
    desired: int
    action: Action
    reason: Reason
    sentence: str
    steps: tuple[Step, ...]
    rule: str = ""
    retained_because: Retention | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the planner: the changes of all roles.

    Attributes:
        id: Name such as ``d000012``; unique within a ledger (decision log).
        at_s: Time of the decision, in simulated seconds.
        no_operation: Whether the planner runs in no-operation mode: the decision is recorded but not carried out.
        roles: Decisions of the roles, in the order in which they are carried out. Empty if nothing could be observed.
        gpus: GPUs held by existing workers, draining ones included.
        gpus_after: ``gpus`` plus the GPUs that this decision adds. A scale-down does not lower it, because its GPUs are
            free only after the drain.
        max_gpu_budget: GPU budget that applied; None if there was no limit.
        switched: Number of workers that change from the shrinking role to the growing role without a restart. Both
            roles then change by this number, as one request to the backend. 0 if workers are started and stopped
            instead.
    """

    id: str
    at_s: float
    no_operation: bool
    roles: tuple[RoleDecision, ...]
    gpus: int
    gpus_after: int
    max_gpu_budget: int | None
    switched: int = 0

    @property
    def is_hold(self) -> bool:
        """Return whether the decision changes the replicas of no role."""
        return all(role.action is Action.HOLD for role in self.roles)

    @property
    def changes(self) -> tuple[RoleDecision, ...]:
        """Return the roles' decisions that change replicas, in the order in which to carry them out. Empty in no-operation mode."""
        return () if self.no_operation else tuple(r for r in self.roles if r.action is not Action.HOLD)


@dataclass(frozen=True, slots=True)
class RoleProposal:
    """Proposed change of one role's replicas, to which rules that limit or replace it are applied one after another.

    The GPU budget is such a rule. What remains after the last rule becomes the decision for the role.

    Attributes:
        role: Role to change.
        pool: Replica counts at the newest metrics scrape.
        engine_gpus: GPUs of one replica, as counted against the budget.
        action: Direction of the proposed change.
        reason: Reason code of the last rule that changed the proposal.
        detail: Explanation by that last rule in words and numbers, without the name of the role.
        steps: Rules applied so far, in order.
        amount: Number of replicas that ``action`` adds or removes, >= 1; ignored if the action is HOLD.
        spare_reason: Explanation of why this role could give one of its workers to the other role now. Empty if the
            role could not.
        trial_only_reason: Explanation of why one replica is kept only because it is on trial: added to find out whether
            it reduces late requests. Empty if no replica is on trial, or if demand needs that replica too.
        workers_for_arrivals: Number of workers, such as 2.4, that the arriving requests need, not counting the queued
            requests. None if unknown.
        rule: Name of the rule that set the reason; empty if no rule did.
        retained_because: Explanation of why the role has more replicas than demand needs, as in `RoleDecision`.
    """

    role: Role
    pool: PoolCounts
    engine_gpus: int
    action: Action
    reason: Reason
    detail: str
    steps: tuple[Step, ...]
    amount: int = 1
    spare_reason: str = ""
    trial_only_reason: str = ""
    workers_for_arrivals: float | None = None
    rule: str = ""
    retained_because: Retention | None = None

    @property
    def change(self) -> int:
        """Return the replica change: a positive number of replicas to add, a negative one to remove, 0 for no change."""
        return {Action.UP: self.amount, Action.HOLD: 0, Action.DOWN: -self.amount}[self.action]

    def passed(self, step: Step) -> RoleProposal:
        """Return the proposal with ``step`` appended, the record of a rule that did not change it."""
        return replace(self, steps=(*self.steps, step))

    def changed(
        self, action: Action, reason: Reason, detail: str, step: Step, *, amount: int = 1
    ) -> RoleProposal:
        """Return the proposal as changed by a rule, with the rule's record ``step`` appended.

        Args:
            action: New direction.
            reason: New reason code.
            detail: New explanation, without the name of the role.
            step: Record of the rule; its name becomes ``rule``.
            amount: Number of replicas to add or remove, >= 1.
        """
        return replace(
            self,
            action=action,
            reason=reason,
            detail=detail,
            amount=amount,
            steps=(*self.steps, step),
            rule=step.name,
            retained_because=None,
        )

    def held(self, reason: Reason, detail: str, step: Step) -> RoleProposal:
        """Return the proposal, changed by a rule to leave the number of replicas as it is.

        The new explanation contains the original request and the reason for holding it.

        Args:
            reason: New reason code.
            detail: Reason for holding, in words and numbers.
            step: Record of the rule; its name becomes ``rule``.
        """
        return replace(
            self,
            action=Action.HOLD,
            reason=reason,
            detail=f"{self.detail}, but {detail}",
            steps=(*self.steps, step),
            rule=step.name,
            retained_because=None,
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """Result of a policy: the replica change that it proposes for each role.

    `pipeline.decide` then applies the rules (bounds, budget) to it and makes the decision.

    Attributes:
        proposals: One proposal per role of the newest metrics scrape.
        roles: State of each role, updated with the replica counts of this interval but not yet with the decision that
            follows.
        learned: Learned state of the policy, including this interval.
    """

    proposals: Sequence[RoleProposal]
    roles: Mapping[Role, RoleState]
    learned: tuple[PolicyState, ...] = ()
