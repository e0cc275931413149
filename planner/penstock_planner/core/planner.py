"""The planner's control flow, without I/O: it returns effects (actions that the driver has to carry out) and receives answers.

In each tick it observes the backend. Then it does the first of these that applies: carry out changes that a killed
process left; roll back scale-ups that never become ready; wait for the adjustment in progress; scrape metrics, and at
the interval's end decide. A decision is recorded before it is carried out, so that a planner that was killed
continues as if it had not been.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.api import Role
from penstock_planner.core.changes import ChangeOutcome, ReplicaChange, changes_of, without_pending_scale_up
from penstock_planner.core.effects import (
    Append,
    AppendPull,
    BeginLedger,
    Checkpoint,
    Effect,
    Log,
    Notify,
    ObserveAt,
    ReadMetrics,
    RecordDecision,
    Scale,
    Switch,
)
from penstock_planner.core.ledger_history import LearnedStateInfo, LedgerHistory
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.core.records import (
    DecisionKind,
    Record,
    actuation_record,
    anchor_position,
    decision_record,
    header_record,
)
from penstock_planner.core.starts import Starts, added, finished, starts_after, without_oldest
from penstock_planner.core.tick_schedule import TickSchedule
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.bounds.owner import after_foreign_write, write_has_effect
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import NO_WORKERS, PoolCounts, Pull
from penstock_planner.decide.pipeline import decide, roll_back
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.state import PlannerState, resumed
from penstock_planner.targets.base import TargetState

REAPPLY_INTERVALS = 2
"""Maximum age, in adjustment intervals, of a recorded decision that is still carried out after a restart: 2.

Chosen: the load for which an older decision was made is gone."""

Answer = TargetState | Pull | bool | str | None
"""Answer of the driver to an effect.

`ObserveAt`: the backend's state, or None if it could not be read. `ReadMetrics`: the pull (metrics scrape).
`RecordDecision`: whether it is written to disk. `Scale` and `Switch`: the reason if the backend refused the change, or
None if it accepted it."""


class PlannerCore:
    """Control flow and state of one planner, without I/O. Times are simulated seconds.

    `start` and `answer` return effects: actions that the driver (the real-time loop or a simulator) has to carry out.

    Attributes:
        settings: Settings of the planner; the driver can replace them between two answers.
        origin_s: Time at which the planner first started on the clock that ``settings.timeline`` names, so that a time
            minus ``origin_s`` is the time since that start.
        schedule: Adjustment interval in progress, with its pulls (metrics scrapes).
        decided: State left by the last decision.
        phase: Activity in the tick (metrics scrape) in progress, or in the last tick.
        startup_s: Seconds that the newest replica of each role took to become ready. A role is absent if none of its
            replicas has become ready since this process started.
        desired: Number of replicas desired by the last decision, by role; empty before the first decision.
        is_overdue: Whether the planner decides again although replicas are still starting or draining after the
            deadline for that.
        remembered: Description of the learned state that an earlier run left in the ledger (the decision log); None if
            the ledger held none.
    """

    def __init__(self, settings: PlannerSettings, now_s: float) -> None:
        self.settings = settings
        self.origin_s = now_s
        self.schedule = TickSchedule.of(settings.config, now_s)
        self.decided = PlannerState()
        self.phase = PlannerPhase.OBSERVING
        self.startup_s: Mapping[Role, float] = {}
        self.desired: Mapping[Role, int] = {}
        self.is_overdue = False
        self.remembered: LearnedStateInfo | None = None
        # Unix time minus simulated time at the newest pull; None if the configuration does not use the calendar.
        self._calendar_s: float | None = None
        self._now_s = now_s
        self._starts: Starts = {}
        self._pending: Sequence[ReplicaChange] = ()
        self._pools: Mapping[Role, PoolCounts] = {}
        # Earliest time of the next roll-back, after one that could not be recorded.
        self._roll_back_after_s = now_s
        self._effects: list[Effect] = []
        self._ticks: Generator[Effect, Any, None] = self._tick_by_tick(now_s)

    def start(
        self,
        now_s: float,
        history: LedgerHistory | None = None,
        *,
        gone_s: float = 0.0,
    ) -> tuple[Effect, ...]:
        """Start the planner and return the first effects: actions that the driver (real-time loop or simulator) has to carry out.

        The method `answer` returns the later effects.

        Args:
            now_s: Present time, in simulated seconds.
            history: State read from the ledger (the decision log); None if there is none.
            gone_s: Time since the ledger's newest record by the wall clock, converted to simulated seconds. Used to
                convert the times in ``history`` if they were measured on another clock than ``now_s``.
        """
        self._now_s, self._effects = now_s, []
        self._ticks = self._tick_by_tick(self._begin(history, gone_s))
        return (*self._effects, next(self._ticks))

    def answer(self, answer: Answer, now_s: float) -> tuple[Effect, ...]:
        """Return the next effects: actions that the driver (real-time loop or simulator) has to carry out.

        The driver must carry out the effects in order. The last effect, and no other, needs an answer, which is passed
        to the next call.

        Args:
            answer: Result of the last effect, as its class describes: the backend's state, a metrics scrape, whether a
                record was written, or the reason for which a change was refused; None if the effect gave no result.
            now_s: Present time in simulated seconds; never before that of the previous call.
        """
        self._now_s, self._effects = now_s, []
        asked = self._ticks.send(answer)
        return (*self._effects, asked)

    @property
    def _config(self) -> DecideConfig:
        return self.settings.config

    @property
    def _interval_s(self) -> float:
        """Return the simulated seconds until the next decision: as the last decision requested, else the interval of the mode."""
        asked_s = self.decided.interval_s
        return self._config.interval_s if asked_s is None else asked_s

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    # -- start ----------------------------------------------------------------------------------------

    def _begin(self, history: LedgerHistory | None, gone_s: float) -> float:
        """Resume from the ledger, and return the time of the first tick."""
        is_resumed = history is not None and self._resume(history, gone_s)
        said = [] if history is None else self._remember(history)
        remembered = self.decided.learned
        sequence = max(self.decided.sequence, self.settings.first_sequence)
        self.decided = replace(self.decided, sequence=sequence, learned=remembered or self.settings.memory)
        self._emit(BeginLedger(self._header(self._now_s, is_resumed=is_resumed)))
        self._effects += said
        self._emit(Log("planner started", {"resumed": is_resumed, "decisions": sequence}))
        if self.settings.memory and remembered:
            self._emit(Log("--memory not used: the ledger's memory takes precedence"))
        if self._pending or self.schedule.is_decidable:
            return self._now_s
        # Continue with the tick after the last one before the restart, rather than with one right after its decision.
        self.schedule, due_s = self.schedule.advanced(self._now_s)
        return due_s

    def _remember(self, history: LedgerHistory) -> list[Effect]:
        """Note the learned state of an earlier run, drop it if its identity differs, and return the messages to log."""
        known = AdaptiveMemory.read(self.decided.learned)
        if not known.seen_s:
            return []
        this = self._config.learning_identity
        is_taken = known.is_of(this)
        self.remembered = LearnedStateInfo(history.wall_s, known.learnt_from, known.seen_s, is_taken, this)
        if is_taken:
            return [Log("continuing with what was learnt", {"seen_s": round(known.seen_s)})]
        self.decided = replace(self.decided, learned={})
        origins = {"learnt_from": known.learnt_from, "this": this}
        return [Log("what was learnt does not match this graph: not used", origins, is_warning=True)]

    def _resume(self, history: LedgerHistory, gone_s: float) -> bool:
        """Resume from the ledger (the decision log); return whether the current interval continues.

        If the ledger's times are of another clock (another boot, node or time scale), only the state is used, with its
        times converted to the present clock. Changes that are not known to be carried out are dropped then.
        """
        self.decided = history.state
        by_s = 0.0
        if history.timeline == self.settings.timeline and history.newest_s <= self._now_s:
            if self._continue(history):
                return True
        else:
            by_s = self._now_s - gone_s - history.newest_s
            for change in history.pending:
                self._forget_asked(change.role)
        self.decided = resumed(self.decided, self._config.policy.states, by_s, self._now_s)
        return False

    def _continue(self, history: LedgerHistory) -> bool:
        """Resume the current interval; return False if it ended long ago and no change or adjustment is pending."""
        self.origin_s, self._pending, self._starts = history.origin_s, history.pending, history.starts
        if history.blocked_s is not None:
            self.schedule = self.schedule.blocked(history.blocked_s)
        begun = history.schedule
        is_idle = self.schedule.blocked_s is None and not self._pending
        if is_idle and self._now_s >= begun.start_s + 2 * self._config.adjustment_interval_s:
            return False
        self.schedule = replace(
            self.schedule.next_interval(begun.start_s, self._interval_s), tick=begun.tick, pulls=begun.pulls
        )
        return True

    # -- a tick ---------------------------------------------------------------------------------------

    def _tick_by_tick(self, due_s: float) -> Generator[Effect, Any, None]:
        while True:
            seen: TargetState | None = yield ObserveAt(due_s)
            if seen is None:
                self._pools, self.phase = {}, PlannerPhase.TARGET_UNAVAILABLE
            else:
                self._pools, self.phase = seen.pools, PlannerPhase.ADJUSTING
                granted = replace(self._config, grant=seen.grant, grant_note=seen.grant_note)
                if granted != self._config:
                    self.settings = replace(self.settings, config=granted)
                yield from self._tick(seen)
            self.schedule, due_s = self.schedule.after(self._now_s)

    def _tick(self, seen: TargetState) -> Generator[Effect, Any, None]:
        if self._pending:
            pending, self._pending = self._pending, ()
            if (yield from self._carry_out(pending, is_left=True)):
                self.schedule = self.schedule.blocked(pending[0].decided_s)
            return
        self._follow_starts(seen)
        heard = {role for role in seen.edited if write_has_effect(role, self.decided.of(role), self._config)}
        if heard:
            self._accept_edits(seen, heard)
        failed = self._to_roll_back(seen)
        if failed is not None:
            yield from self._roll_back(failed)
            return
        self.phase = PlannerPhase.OBSERVING
        if not self.schedule.is_decidable:
            pull: Pull = yield ReadMetrics()
            self.schedule = self.schedule.pulled(pull)
            self._calendar_s = None if pull.wall_s is None else pull.wall_s - pull.at_s
            self._emit(AppendPull(pull, self.schedule.tick))
        if self.schedule.is_decidable:
            yield from self._decide()

    def _decide(self) -> Generator[Effect, Any, None]:
        window = self.schedule.window
        made = decide(window, self.decided, self._config)
        position = self._position(self.schedule.next_start_s, self._starts)
        if (yield from self._record(DecisionKind.ADJUSTMENT, made, position, window=window)):
            is_applied = yield from self._carry_out(changes_of(made[0]))
            if is_applied:
                self.schedule = self.schedule.blocked(made[0].at_s)
            self.is_overdue = self.is_overdue and not is_applied
        self.schedule = self.schedule.next_interval(self.schedule.next_start_s, self._interval_s)
        if self.schedule.blocked_s is None:
            self._emit(Checkpoint(self._header(window.end_s, is_resumed=False)))

    # -- an adjustment in progress --------------------------------------------------------------------

    def _follow_starts(self, seen: TargetState) -> None:
        """Record the replicas that have become ready. Replicas that have disappeared remain, to be rolled back."""
        for role, pool in seen.pools.items():
            asked = self.decided.of(role).pending_replicas
            gone = max(0, asked - pool.replicas) if asked is not None else 0
            if asked is not None and not self._starts.get(role) and asked > pool.ready:
                # The replica was requested on another timeline, so its deadline is counted from now.
                waiting = min(pool.loading, asked - pool.ready)
                self._starts = added(self._starts, role, waiting, self._now_s)
            for asked_s in finished(self._starts, role, pool.loading + gone):
                took_s = self._now_s - asked_s
                self._emit(Log("replica ready", {"role": role.value, "took_s": round(took_s, 1)}))
                self._starts = without_oldest(self._starts, role)
                self.startup_s = {**self.startup_s, role: took_s}
                times = {"at_s": self._now_s, "asked_s": asked_s, "took_s": took_s}
                self._emit(Append({"type": "started", "role": role.value, **times}))

    def _accept_edits(self, seen: TargetState, roles: Collection[Role]) -> None:
        """Keep the replica counts that another client has set: drop the pending scale-up, and start a new interval."""
        for role in roles:
            changed = after_foreign_write(self.decided.of(role), seen.writers.get(role) or "another writer")
            self.decided = replace(self.decided, roles={**self.decided.roles, role: changed})
            self._starts = {**self._starts, role: ()}
        self.is_overdue = False
        self.schedule = replace(self.schedule, blocked_s=None)
        self._emit(Log("replicas set by another writer: kept for one interval", {"roles": sorted(roles)}))
        self._converge()

    def _to_roll_back(self, seen: TargetState) -> Mapping[Role, str] | None:
        """Return the scale-ups to roll back in this tick, with the reasons by role.

        None means that the tick continues with metrics and decisions. An empty mapping means that the tick ends,
        because an adjustment is in progress.
        """
        never = {role: why for role, why in seen.never_ready.items() if self._is_unready(role, seen)}
        if found := self._own(never):
            return found
        if self._config.policy.waits_for_adjustments:
            return self._while_blocked(seen)
        return self._own(self._gone(seen) or self._late(seen)) or None

    def _while_blocked(self, seen: TargetState) -> Mapping[Role, str] | None:
        if not seen.is_adjusting:
            self.is_overdue = False
        elif not self.is_overdue:
            self.schedule = self.schedule.blocked(self._now_s)
            waited_s = self._now_s - (self.schedule.blocked_s or 0.0)
            if waited_s <= self.settings.adjustment_deadline_s:
                return {}
            if found := self._own(self._not_ready(seen)):
                return found
            self.is_overdue = True
            text = "adjustment did not finish: planning continues"
            self._emit(Log(text, {"waited_s": waited_s}, is_warning=True))
        if self.schedule.blocked_s is None:
            return None
        found = self._own(self._gone(seen))
        if not found:
            self._converge()
        return found

    def _converge(self) -> None:
        blocked_s = self.schedule.blocked_s
        took_s = 0.0 if blocked_s is None else self._now_s - blocked_s
        if blocked_s is not None:
            self._emit(Log("adjustment over", {"took_s": round(took_s, 1), "overdue": self.is_overdue}))
        self.decided = replace(self.decided, interval_s=None)
        self.schedule = self.schedule.restarted(self._now_s, self._interval_s)
        how = {"at_s": self._now_s, "took_s": took_s, "overdue": self.is_overdue}
        position = self._position(self._now_s, self._starts)
        self._emit(Append({"type": "settled", **how, **position, "state": self.decided}))

    # -- scale-ups to roll back -----------------------------------------------------------------------

    def _gone(self, seen: TargetState) -> dict[Role, str]:
        """Return the roles with fewer replicas than were requested, with the reasons: the backend gave a replica up or removed it."""
        return {
            role: seen.failures.get(role, "the backend removed it")
            for role, pool in seen.pools.items()
            if pool.replicas < (self.decided.of(role).pending_replicas or 0)
        }

    def _late(self, seen: TargetState) -> dict[Role, str]:
        """Return the roles whose oldest start exceeds the deadline, with the reasons. Used in modes that do not wait for adjustments."""
        begun = {role: starts[0] for role, starts in self._starts.items() if starts}
        deadline_s = self.settings.adjustment_deadline_s
        late = {role for role, begun_s in begun.items() if self._now_s - begun_s > deadline_s}
        return {role: why for role, why in self._not_ready(seen).items() if role in late}

    def _not_ready(self, seen: TargetState) -> dict[Role, str]:
        why = f"not ready after {self.settings.adjustment_deadline_s:g} s"
        return {role: seen.failures.get(role, why) for role in seen.pools if self._is_unready(role, seen)}

    def _is_unready(self, role: Role, seen: TargetState) -> bool:
        asked = self.decided.of(role).pending_replicas
        return asked is not None and seen.pools[role].ready < asked

    def _own(self, found: Mapping[Role, str]) -> Mapping[Role, str]:
        if not self._config.policy.has_ledger:
            return {}
        return {role: why for role, why in found.items() if role not in self._config.external}

    def _roll_back(self, failed: Mapping[Role, str]) -> Generator[Effect, Any, None]:
        for role, why in failed.items():
            if self._now_s < self._roll_back_after_s:
                return
            wall_s = None if self._calendar_s is None else self._calendar_s + self._now_s
            pull = Pull(self._now_s, self._pools, NO_WORKERS, None, wall_s=wall_s)
            made = roll_back(role, why, pull=pull, state=self.decided, config=self._config)
            at_s = made[0].at_s
            position = self._position(self._now_s, without_oldest(self._starts, role))
            kind = DecisionKind.ROLL_BACK
            if (yield from self._record(kind, made, position, role=role, why=why, pull=pull)):
                yield from self._carry_out(changes_of(made[0]))
                # Start a new interval, blocked by the roll-back as an adjustment of its own.
                self.schedule = self.schedule.restarted(at_s, self._interval_s).blocked(at_s)
            else:
                self._roll_back_after_s = at_s + self._config.adjustment_interval_s

    # -- from a decision to the backend ---------------------------------------------------------------

    def _record(
        self, kind: DecisionKind, made: tuple[Decision, PlannerState], position: Record, **inputs: Any
    ) -> Generator[Effect, Any, bool]:
        """Record a decision; return whether it was written to disk and is therefore valid."""
        decision, after = made
        record = decision_record(
            kind, position, config=self._config, before=self.decided, made=made, **inputs
        )
        is_written: bool = yield RecordDecision(kind, decision, record)
        if not is_written:
            return False
        self.decided, self._starts = after, position["starts"]
        self.desired = {**self.desired, **{role.role: role.desired for role in decision.roles}}
        for role in decision.changes:
            keys = {"decision_id": decision.id, "reason": role.reason.value, "what": role.sentence}
            self._emit(Log("decided", keys))
        self._emit(Notify(decision))
        return True

    def _carry_out(
        self, changes: Sequence[ReplicaChange], *, is_left: bool = False
    ) -> Generator[Effect, Any, bool]:
        """Request changes from the backend; return whether it accepted any of them.

        If a killed process left the changes (``is_left``), only those that still fit the observed replicas are
        requested.
        """
        is_any_applied = False
        for asked in _requests(changes):
            together = asked.changes
            if is_left and not all(self._is_still_desired(each) for each in together):
                for each in together:
                    self._not_applied(
                        each, ChangeOutcome.ABANDONED, "too old, or the pool has changed since then"
                    )
                continue
            error: str | None = yield asked
            if error is not None:
                keys = {"decision_id": together[0].decision_id, "error": error}
                self._emit(Log("decision not applied", keys, is_warning=True))
                for each in together:
                    self._not_applied(each, ChangeOutcome.FAILED, error)
                continue
            is_any_applied = True
            for each in together:
                self._starts = starts_after(self._starts, each)
                self._append_actuation(each, ChangeOutcome.APPLIED)
                self._count_in(each)
        return is_any_applied

    def _count_in(self, change: ReplicaChange) -> None:
        """Add an accepted scale-up to this tick's replica counts, so that the remaining changes must fit the budget together with it."""
        pool, added = self._pools.get(change.role), change.desired - change.current
        if pool is not None and added > 0 and pool.replicas != change.desired:
            self._pools = {**self._pools, change.role: replace(pool, starting=pool.starting + added)}

    def _not_applied(self, change: ReplicaChange, outcome: ChangeOutcome, error: str) -> None:
        self._forget_asked(change.role)
        self._append_actuation(change, outcome, error)

    def _append_actuation(self, change: ReplicaChange, outcome: ChangeOutcome, error: str = "") -> None:
        self._emit(Append(actuation_record(change, at_s=self._now_s, outcome=outcome, error=error)))

    def _is_still_desired(self, change: ReplicaChange) -> bool:
        """Return whether a change that a killed process left must still be carried out."""
        config, pool = self._config, self._pools.get(change.role)
        age_s = self._now_s - change.decided_s
        if (
            pool is None
            or change.role in config.external
            or age_s > REAPPLY_INTERVALS * config.adjustment_interval_s
        ):
            return False
        if pool.replicas == change.desired or change.desired < change.current or change.is_switch:
            return pool.replicas in (change.desired, change.current)
        added = change.desired - change.current
        needed = existing_gpus(self._pools, config) + added * config.engine_gpus(change.role, pool.gpus)
        ceiling = config.within_pool.max_gpu_budget
        return pool.replicas == change.current and (ceiling is None or needed <= ceiling)

    def _forget_asked(self, role: Role) -> None:
        self.decided = without_pending_scale_up(self.decided, role)

    def _position(self, start_s: float, starts: Starts) -> Record:
        return anchor_position(self.settings.timeline, self.origin_s, start_s, starts)

    def _header(self, at_s: float, *, is_resumed: bool) -> Record:
        return header_record(
            self._position(self.schedule.start_s, self._starts),
            at_s=at_s,
            state=self.decided,
            config=self._config,
            is_resumed=is_resumed,
        ) | {"remembered": self.remembered}


def _requests(changes: Sequence[ReplicaChange]) -> list[Scale | Switch]:
    """Return the requests to the backend in order. The two sides of a role switch are one request."""
    sides = sorted((each for each in changes if each.is_switch), key=lambda each: each.desired - each.current)
    if len(sides) == 2:
        return [Switch(*sides)]
    # If a killed process left only one side of a switch recorded as pending, the backend already has both sides.
    return [Scale(change) for change in changes]
