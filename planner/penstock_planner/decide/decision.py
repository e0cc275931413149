"""What a policy proposes, and the decision: per role what changes, one reason, one sentence, and every step that led there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from penstock.api import Role
from penstock_planner.decide.observation import PoolCounts

Memory = Mapping[str, Any]
"""What a mode remembers, by its own names: dataclasses and plain values, which the ledger gives back as JSON has them."""


def count_of(count: int, noun: str) -> str:
    """Return "1 worker" or "3 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, slots=True)
class RoleState:
    """Memory of one role.

    Attributes:
        seen: Ready replicas at the last decision; None before the first.
        grace: Intervals left in which decode (or aggregated) is not scaled down.
        asked: Replicas of the last scale-up that has not become ready yet; None when none is outstanding.
        withdrawals: Scale-ups in a row that never became ready.
        failed: Replicas that the last of them asked for; None when that many have been ready since.
        backoff: Intervals left in which the role is not scaled up after a withdrawal.
        writer: Who else set the role's replicas last; empty if there was none lately.
        owed: GPUs that another role gives up are reserved for this one, which grows once they are free.
    """

    seen: int | None = None
    grace: int = 0
    asked: int | None = None
    withdrawals: int = 0
    failed: int | None = None
    backoff: int = 0
    owed: bool = False
    writer: str = ""
    foreign_writes: int = 0
    since_write: int = 0


@dataclass(frozen=True, slots=True)
class PlannerState:
    """Memory of the planner.

    Attributes:
        sequence: Decisions and withdrawals so far; the next id is made of it.
        memory: What the mode remembers besides; each mode reads and writes its own keys.
        interval_s: Simulated seconds until the next decision; None: the mode's interval.
    """

    sequence: int = 0
    roles: Mapping[Role, RoleState] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    interval_s: float | None = None

    def of(self, role: Role) -> RoleState:
        """Return the role's memory, a blank one if there is none."""
        return self.roles.get(role, _BLANK)


_BLANK = RoleState()


class Action(StrEnum):
    """What happens to a pool."""

    UP = "up"
    HOLD = "hold"
    DOWN = "down"


class Reason(StrEnum):
    """Why; closed set, exported as a metric label."""

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
    """One rule applied.

    Attributes:
        inputs: The numbers it looked at, by name with unit.
        threshold: What they were compared with; None when the rule compares nothing.
        outcome: What it concluded, in words.
    """

    name: str
    inputs: Mapping[str, float | int | str | None]
    threshold: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Why replicas stay that demand alone does not need.

    Attributes:
        needs: Replicas that demand alone asks to keep, >= 1.
        since_s: When the cause began, simulated seconds; None: not known.
        until_s: When it ends at the latest unless load returns, simulated seconds; None: it has no end.
    """

    needs: int
    since_s: float | None = None
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """What happens to one role.

    Attributes:
        desired: At most ``max_step`` from current; a withdrawal asks for one less than the scale-up did.
        sentence: For people: "decode 2 -> 3: KV 0.93 > 0.90".
        rule: Name of the rule that decided; empty: no rule asked for a change, or held one back.
        kept: What demand alone needs, where ``rule`` keeps more than that; None: it keeps no more.
    """

    role: Role
    current: int
    desired: int
    action: Action
    reason: Reason
    sentence: str
    steps: tuple[Step, ...]
    rule: str = ""
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One adjustment.

    Attributes:
        id: ``d000012``; unique within a ledger.
        roles: In the order in which they are carried out; empty when nothing could be observed.
        gpus: GPUs that existing workers hold, draining ones included.
        gpus_after: The same plus what this decision adds; a scale-down frees its GPUs only once drained.
        max_gpu_budget: The ceiling that applied; None: none.
        switched: Workers that the role which shrinks gives to the one which grows: both change by as many, as one.
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
        """Return whether no role is to change."""
        return all(role.action is Action.HOLD for role in self.roles)

    @property
    def changes(self) -> tuple[RoleDecision, ...]:
        """Return the roles to scale; none in no-operation mode."""
        return () if self.no_operation else tuple(r for r in self.roles if r.action is not Action.HOLD)


@dataclass(frozen=True, slots=True)
class RoleProposal:
    """One role's decision on its way through the rules.

    Attributes:
        pool: Counts at the interval's newest pull.
        engine_gpus: GPUs that one replica is charged with.
        reason: The rule that asked last.
        detail: That rule in words and numbers, without the role.
        amount: Replicas that ``action`` adds or removes, >= 1; of no meaning for a hold.
        gives: Why the other role could have one of its workers now, in words; empty: it keeps all that it does not remove.
        yields: Why nothing but a trial keeps one of its replicas, in words; empty: more does, or none is on trial.
        arriving_worth: Workers' worth that what arrives asks for, without what queues; None: not known.
        rule: Name of the rule that gave the reason; empty: none did.
        kept: As of the decision.
    """

    role: Role
    pool: PoolCounts
    engine_gpus: int
    action: Action
    reason: Reason
    detail: str
    steps: tuple[Step, ...]
    amount: int = 1
    gives: str = ""
    yields: str = ""
    arriving_worth: float | None = None
    rule: str = ""
    kept: Kept | None = None

    @property
    def change(self) -> int:
        """Return the replicas to add; below 0 those to remove."""
        return {Action.UP: self.amount, Action.HOLD: 0, Action.DOWN: -self.amount}[self.action]

    def passed(self, step: Step) -> RoleProposal:
        """Return the proposal with a rule that changed nothing."""
        return replace(self, steps=(*self.steps, step))

    def changed(
        self, action: Action, reason: Reason, detail: str, step: Step, *, amount: int = 1
    ) -> RoleProposal:
        """Return the proposal as a rule changed it."""
        return replace(
            self,
            action=action,
            reason=reason,
            detail=detail,
            amount=amount,
            steps=(*self.steps, step),
            rule=step.name,
            kept=None,
        )

    def held(self, reason: Reason, detail: str, step: Step) -> RoleProposal:
        """Return the proposal held by a rule; the original request stays readable in ``detail``."""
        return replace(
            self,
            action=Action.HOLD,
            reason=reason,
            detail=f"{self.detail}, but {detail}",
            steps=(*self.steps, step),
            rule=step.name,
            kept=None,
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
