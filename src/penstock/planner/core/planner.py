"""The planner as a state machine without I/O: events in, effects out.

A tick is: observe the backend; finish what a killed process left; wait for the adjustment under way, or roll back what
never becomes ready; else pull, and decide at the interval's end. A decision is recorded before it is carried out, so
that a killed planner continues as if it had not been killed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from penstock.api import Role
from penstock.planner.core import records
from penstock.planner.core.records import (
    Change,
    DecisionKind,
    Outcome,
    Record,
    Starts,
    added,
    finished,
    without_oldest,
)
from penstock.planner.core.state import (
    Actuation,
    Append,
    BeginLedger,
    Checkpoint,
    CoreSettings,
    CoreState,
    DecisionRecorded,
    Effect,
    Event,
    History,
    Log,
    Notify,
    ObserveAt,
    PlannerPhase,
    Pulled,
    ReadMetrics,
    RecordDecision,
    Scale,
    Scaled,
    Schedule,
    Started,
    TargetUnavailable,
)
from penstock.planner.decide.budget import existing_gpus
from penstock.planner.decide.by_demand import resumed
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import NO_WORKERS, PoolCounts, Pull
from penstock.planner.decide.pipeline import decide, roll_back
from penstock.planner.decide.stabilise import is_heard, written
from penstock.planner.decide.state import PlannerState
from penstock.planner.targets.base import TargetState

REAPPLY_INTERVALS = 2
"""Chosen: a recorded decision older than this many intervals is not carried out after a restart; the load it
was made for is gone."""


class PlannerCore:
    """One planner's rules of what happens next; holds no state."""

    __slots__ = ("settings",)

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings

    def step(self, state: CoreState, event: Event, now_s: float) -> tuple[CoreState, tuple[Effect, ...]]:
        """Return what follows from one event, `Started` first, then an answer to the last effect that asks for one.

        Returns:
            The next state and the effects, to be carried out in order; exactly the last one asks for an answer.
        """
        step = _Step(self.settings, state, now_s)
        step.take(event)
        return step.state, tuple(step.effects)


class _Step:
    """One step in progress: its state and effects so far."""

    def __init__(self, settings: CoreSettings, state: CoreState, now_s: float) -> None:
        self.settings = settings
        self.config = settings.config
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def take(self, event: Event) -> None:
        match event:
            case TargetState():
                self._observed(event)
            case Pulled(pull):
                self._pulled(pull)
            case DecisionRecorded(asked, is_written):
                self._recorded(asked, is_written=is_written)
            case Scaled(error):
                self._scaled(error)
            case TargetUnavailable():
                self._set(observed=None, phase=PlannerPhase.TARGET_UNAVAILABLE)
                self._end_tick()
            case Started():
                self._started(event)

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _schedule(self, schedule: Schedule) -> None:
        self._set(schedule=schedule)

    def _emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    # -- start ----------------------------------------------------------------------------------------

    def _started(self, event: Started) -> None:
        history = event.history
        is_resumed = history is not None and self._resume(history, event.gone_s)
        state = self.state
        sequence = max(state.decided.sequence, event.first_sequence)
        memory = state.decided.memory or self.settings.memory
        self._set(decided=replace(state.decided, sequence=sequence, memory=memory))
        self._emit(BeginLedger(self._header(self.now_s, is_resumed=is_resumed)))
        self._emit(Log("planner started", {"resumed": is_resumed, "decisions": sequence}))
        if self.settings.memory and state.decided.memory:
            self._emit(Log("--memory not used: what the ledger remembers wins"))
        if state.actuation is not None or state.schedule.is_decidable:
            self._emit(ObserveAt(self.now_s))
            return
        # The tick that was due when the planner died, not one more right after its decision.
        schedule, due_s = state.schedule.advanced(self.now_s)
        self._schedule(schedule)
        self._emit(ObserveAt(due_s))

    def _resume(self, history: History, gone_s: float) -> bool:
        """Resume from the ledger; return whether the current interval continues.

        Of another timeline (another boot, node or time scale) only the state is kept, its times moved to this one;
        changes not known to be carried out are forgotten.
        """
        self._set(decided=history.state)
        by_s = 0.0
        if history.timeline == self.settings.timeline and history.newest_s <= self.now_s:
            if self._continue(history):
                return True
        else:
            by_s = self.now_s - gone_s - history.newest_s
            for change in history.pending:
                self._forget_asked(change.role)
        self._set(decided=resumed(self.state.decided, by_s, self.now_s))
        return False

    def _continue(self, history: History) -> bool:
        """Resume the current interval; False if it is long over and nothing is outstanding."""
        pending = history.pending
        actuation = Actuation(pending[0].decided_s, pending, None) if pending else None
        self._set(origin_s=history.origin_s, actuation=actuation, starts=history.starts)
        if history.blocked_s is not None:
            self._schedule(self.state.schedule.blocked(history.blocked_s))
        begun = history.schedule
        is_idle = self.state.schedule.blocked_s is None and actuation is None
        if is_idle and self.now_s >= begun.start_s + 2 * self.config.adjustment_interval_s:
            return False
        self._schedule(
            replace(
                self.state.schedule.begun(begun.start_s, self._interval_s()),
                tick=begun.tick,
                pulls=begun.pulls,
            )
        )
        return True

    # -- a tick ---------------------------------------------------------------------------------------

    def _observed(self, seen: TargetState) -> None:
        self._set(observed=seen, phase=PlannerPhase.ADJUSTING)
        if self.state.actuation is not None:
            self._next_change(self.state.actuation)
            return
        self._follow_starts(seen)
        heard = {role for role in seen.edited if is_heard(role, self.state.decided.of(role), self.config)}
        if heard:
            self._accept_edits(seen, heard)
        if self._is_adjusting(seen):
            self._next_roll_back()
            return
        self._set(phase=PlannerPhase.OBSERVING)
        if self.state.schedule.is_decidable:
            self._decide()
        else:
            self._emit(ReadMetrics())

    def _end_tick(self) -> None:
        schedule, due_s = self.state.schedule.after(self.now_s)
        self._schedule(schedule)
        self._emit(ObserveAt(due_s))

    def _pulled(self, pull: Pull) -> None:
        schedule = self.state.schedule.pulled(pull)
        self._schedule(schedule)
        self._emit(Append(records.pull_record(pull, schedule.tick)))
        if schedule.is_decidable:
            self._decide()
        else:
            self._end_tick()

    def _decide(self) -> None:
        state = self.state
        window = state.schedule.window
        made = decide(window, state.decided, self.config)
        position = self._position(state.schedule.next_start_s, state.starts)
        self._record(DecisionKind.ADJUSTMENT, made, position, window=window)

    def _record(
        self, kind: DecisionKind, made: tuple[Decision, PlannerState], position: Record, **inputs: Any
    ) -> None:
        record = records.decision_record(
            kind, position, config=self.config, before=self.state.decided, made=made, **inputs
        )
        self._emit(RecordDecision(kind, *made, position["starts"], record))

    # -- an adjustment in progress --------------------------------------------------------------------

    def _follow_starts(self, seen: TargetState) -> None:
        """Record the replicas that have become ready; those that have disappeared are left to be rolled back."""
        for role, pool in seen.pools.items():
            asked = self.state.decided.of(role).asked
            gone = max(0, asked - pool.replicas) if asked is not None else 0
            if asked is not None and not self.state.starts.get(role) and asked > pool.ready:
                # Asked for on another timeline: its deadline begins now.
                waiting = min(pool.starting, asked - pool.ready)
                self._set(starts=added(self.state.starts, role, waiting, self.now_s))
            for asked_s in finished(self.state.starts, role, pool.starting + gone):
                took_s = self.now_s - asked_s
                self._emit(Log("replica ready", {"role": role.value, "took_s": round(took_s, 1)}))
                self._set(
                    starts=without_oldest(self.state.starts, role),
                    startup_s={**self.state.startup_s, role: took_s},
                )
                times = {"at_s": self.now_s, "asked_s": asked_s, "took_s": took_s}
                self._emit(Append({"type": "started", "role": role.value, **times}))

    def _accept_edits(self, seen: TargetState, roles: Collection[Role]) -> None:
        """Keep another writer's numbers for an interval: forget the request, and start an interval."""
        for role in roles:
            decided = self.state.decided
            changed = written(decided.of(role), seen.writers.get(role) or "another writer")
            self._set(
                decided=replace(decided, roles={**decided.roles, role: changed}),
                starts={**self.state.starts, role: ()},
            )
        self._set(is_overdue=False, schedule=replace(self.state.schedule, blocked_s=None))
        keys = {"roles": sorted(roles)}
        self._emit(Log("replicas set by another writer: kept for an interval", keys))
        self._converge()

    def _is_adjusting(self, seen: TargetState) -> bool:
        """Return whether this tick neither pulls nor decides; take back what never becomes ready."""
        if self._plan_roll_backs(self._never_ready(seen)):
            return True
        if self.config.policy.waits_for_adjustments:
            return self._is_blocked(seen)
        return self._plan_roll_backs(self._gone(seen) or self._late(seen))

    def _is_blocked(self, seen: TargetState) -> bool:
        if not seen.is_adjusting:
            self._set(is_overdue=False)
        elif not self.state.is_overdue:
            schedule = self.state.schedule.blocked(self.now_s)
            self._schedule(schedule)
            waited_s = self.now_s - (schedule.blocked_s or 0.0)
            if waited_s <= self.settings.adjustment_deadline_s:
                return True
            if self._plan_roll_backs(self._not_ready(seen)):
                return True
            self._set(is_overdue=True)
            text = "adjustment never ended: planning goes on"
            self._emit(Log(text, {"waited_s": waited_s}, is_warning=True))
        if self.state.schedule.blocked_s is None:
            return False
        if not self._plan_roll_backs(self._gone(seen)):
            self._converge()
        return True

    def _converge(self) -> None:
        state = self.state
        blocked_s = state.schedule.blocked_s
        took_s = 0.0 if blocked_s is None else self.now_s - blocked_s
        if blocked_s is not None:
            keys = {"took_s": round(took_s, 1), "overdue": state.is_overdue}
            self._emit(Log("adjustment over", keys))
        state = replace(state, decided=replace(state.decided, interval_s=None))
        self._set(decided=state.decided)
        self._schedule(state.schedule.converged(self.now_s, self._interval_s()))
        how = {"at_s": self.now_s, "took_s": took_s, "overdue": state.is_overdue}
        position = self._position(self.now_s, state.starts)
        self._emit(Append({"type": "settled", **how, **position, "state": state.decided}))

    # -- scale-ups to roll back -----------------------------------------------------------------------

    def _never_ready(self, seen: TargetState) -> dict[Role, str]:
        return {role: why for role, why in seen.never_ready.items() if self._is_unready(role, seen)}

    def _gone(self, seen: TargetState) -> dict[Role, str]:
        """Return the roles with fewer replicas than requested: the backend gave one up or dropped it."""
        return {
            role: seen.failures.get(role, "the backend dropped it")
            for role, pool in seen.pools.items()
            if pool.replicas < (self.state.decided.of(role).asked or 0)
        }

    def _late(self, seen: TargetState) -> dict[Role, str]:
        """Return the roles whose oldest start has passed the deadline, in a mode that does not wait."""
        begun = {role: starts[0] for role, starts in self.state.starts.items() if starts}
        deadline_s = self.settings.adjustment_deadline_s
        late = {role for role, begun_s in begun.items() if self.now_s - begun_s > deadline_s}
        return {role: why for role, why in self._not_ready(seen).items() if role in late}

    def _not_ready(self, seen: TargetState) -> dict[Role, str]:
        why = f"not ready after {self.settings.adjustment_deadline_s:g} s"
        return {role: seen.failures.get(role, why) for role in seen.pools if self._is_unready(role, seen)}

    def _is_unready(self, role: Role, seen: TargetState) -> bool:
        asked = self.state.decided.of(role).asked
        return asked is not None and seen.pools[role].ready < asked

    def _plan_roll_backs(self, found: Mapping[Role, str]) -> bool:
        """Take on what this tick rolls back; return whether there is any."""
        if not self.settings.rolls_back:
            return False
        own = tuple((role, why) for role, why in found.items() if role not in self.config.external)
        self._set(roll_backs=own)
        return bool(own)

    def _next_roll_back(self) -> None:
        """Roll the next scale-up back, or end the tick; one that could not be recorded waits for an interval."""
        queue = self.state.roll_backs
        if not queue or self.now_s < self.state.roll_back_after_s:
            self._set(roll_backs=())
            self._end_tick()
            return
        (role, why), *rest = queue
        self._set(roll_backs=tuple(rest))
        pull = Pull(self.now_s, self._pools(), NO_WORKERS, None)
        made = roll_back(role, why, pull=pull, state=self.state.decided, config=self.config)
        position = self._position(self.now_s, without_oldest(self.state.starts, role))
        self._record(DecisionKind.ROLL_BACK, made, position, role=role, why=why, pull=pull)

    # -- from a decision to the backend ---------------------------------------------------------------

    def _recorded(self, asked: RecordDecision, *, is_written: bool) -> None:
        decision = asked.decision
        if not is_written:
            self._not_taken(asked)
            return
        desired = {role.role: role.desired for role in decision.roles}
        self._set(decided=asked.after, desired={**self.state.desired, **desired}, starts=asked.starts)
        for role in decision.changes:
            keys = {"decision_id": decision.id, "reason": role.reason.value, "what": role.sentence}
            self._emit(Log("decided", keys))
        self._emit(Notify(decision))
        self._next_change(Actuation(decision.at_s, records.changes_of(decision), asked.kind))

    def _not_taken(self, asked: RecordDecision) -> None:
        if asked.kind is DecisionKind.ADJUSTMENT:
            self._end_interval()
            return
        self._set(roll_back_after_s=asked.decision.at_s + self.config.adjustment_interval_s)
        self._next_roll_back()

    def _next_change(self, actuation: Actuation) -> None:
        while actuation.changes:
            change = actuation.changes[0]
            if actuation.kind is not None or self._is_still_desired(change):
                self._set(actuation=actuation)
                self._emit(Scale(change))
                return
            self._not_applied(change, Outcome.ABANDONED, "too old, or the pool has changed since")
            actuation = replace(actuation, changes=actuation.changes[1:])
        self._carried_out(actuation)

    def _scaled(self, error: str | None) -> None:
        actuation = self.state.actuation
        if actuation is None:
            raise AssertionError("an answer to a change that was not asked for")
        change = actuation.changes[0]
        if error is None:
            self._set(starts=records.after(self.state.starts, change))
            self._append_actuation(change, Outcome.APPLIED)
            self._count_in(change)
            actuation = replace(actuation, is_any_applied=True)
        else:
            keys = {"decision_id": change.decision_id, "error": error}
            self._emit(Log("decision not carried out", keys, is_warning=True))
            self._not_applied(change, Outcome.FAILED, error)
        self._next_change(replace(actuation, changes=actuation.changes[1:]))

    def _count_in(self, change: Change) -> None:
        """Let the rest of this tick see a scale-up that the backend accepted: the remaining changes must fit with it."""
        seen, added = self.state.observed, change.desired - change.current
        pool = seen.pools.get(change.role) if seen is not None else None
        if seen is None or pool is None or added <= 0 or pool.replicas == change.desired:
            return
        grown = replace(pool, starting=pool.starting + added)
        self._set(observed=replace(seen, pools={**seen.pools, change.role: grown}))

    def _not_applied(self, change: Change, outcome: Outcome, error: str) -> None:
        self._forget_asked(change.role)
        self._append_actuation(change, outcome, error)

    def _append_actuation(self, change: Change, outcome: Outcome, error: str = "") -> None:
        record = records.actuation_record(change, at_s=self.now_s, outcome=outcome, error=error)
        self._emit(Append(record))

    def _carried_out(self, actuation: Actuation) -> None:
        schedule = self.state.schedule
        self._set(actuation=None)
        if actuation.kind is DecisionKind.ROLL_BACK:
            self._schedule(schedule.rolled_back(actuation.decided_s, self._interval_s()))
            self._next_roll_back()
            return
        if actuation.is_any_applied:
            self._schedule(schedule.blocked(actuation.decided_s))
        if actuation.kind is DecisionKind.ADJUSTMENT:
            self._set(is_overdue=self.state.is_overdue and not actuation.is_any_applied)
            self._end_interval()
        else:
            self._end_tick()

    def _end_interval(self) -> None:
        schedule = self.state.schedule
        end_s = schedule.window.end_s
        self._schedule(schedule.begun(schedule.next_start_s, self._interval_s()))
        if schedule.blocked_s is None:
            self._emit(Checkpoint(self._header(end_s, is_resumed=False)))
        self._end_tick()

    def _is_still_desired(self, change: Change) -> bool:
        """Return whether a change that a killed process left is still to be carried out."""
        config, pools = self.config, self._pools()
        pool = pools.get(change.role)
        age_s = self.now_s - change.decided_s
        if (
            pool is None
            or change.role in config.external
            or age_s > REAPPLY_INTERVALS * config.adjustment_interval_s
        ):
            return False
        if pool.replicas == change.desired or change.desired < change.current:
            return pool.replicas in (change.desired, change.current)
        added = change.desired - change.current
        needed = existing_gpus(pools, config) + added * config.engine_gpus(change.role, pool.gpus)
        ceiling = config.max_gpu_budget
        return pool.replicas == change.current and (ceiling is None or needed <= ceiling)

    # -- what several of these need -------------------------------------------------------------------

    def _pools(self) -> Mapping[Role, PoolCounts]:
        return self.state.observed.pools if self.state.observed is not None else {}

    def _interval_s(self) -> float:
        """Return the simulated seconds until the next decision: what the last one requested, else the mode's."""
        asked_s = self.state.decided.interval_s
        return self.config.interval_s if asked_s is None else asked_s

    def _forget_asked(self, role: Role) -> None:
        self._set(decided=records.without_asked(self.state.decided, role))

    def _position(self, start_s: float, starts: Starts) -> Record:
        return records.position(self.settings.timeline, self.state.origin_s, start_s, starts)

    def _header(self, at_s: float, *, is_resumed: bool) -> Record:
        state = self.state
        return records.header_record(
            self._position(state.schedule.start_s, state.starts),
            at_s=at_s,
            state=state.decided,
            config=self.config,
            is_resumed=is_resumed,
        )
