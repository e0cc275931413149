"""The planner's loop: observe, pull, decide, record, act; blocked while an adjustment is under way.

All times are modelled seconds. Every step is recorded before it has an effect, so that a killed planner
continues as if it had not been killed: `history` says how.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from penstock_core.errors import LedgerError, PenstockError
from penstock_core.lag import LagTracker
from penstock_core.logs import get_logger
from penstock_graph.models import Role
from penstock_planner import records
from penstock_planner.decide.budget import existing_gpus
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import (
    KvSummary,
    Observation,
    PoolCounts,
    Pull,
    Window,
    kv_role,
    summarise,
)
from penstock_planner.decide.pipeline import decide, withdraw
from penstock_planner.decide.state import PlannerState
from penstock_planner.history import ANCHORS, Change, History, restore, without_asked
from penstock_planner.ledger import Ledger
from penstock_planner.records import Deciding, Place
from penstock_planner.sources.base import Query, Readings, Source
from penstock_planner.targets.base import Target, TargetState
from penstock_planner.timing import Grid, Time
from penstock_planner.view import Audience, Phase, View

TARGET_TIMEOUT_S = 30.0
"""Real seconds for one call of the backend. Chosen: beyond the local statefile's 5 s lock and a busy API server."""

REAPPLY_INTERVALS = 2
"""Chosen: a recorded decision older than this many intervals is not carried out after a restart; the load it
was made for is gone."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What one planner is set to.

    Attributes:
        config: Of the decision.
        max_age_s: Oldest fresh metric.
        adjustment_deadline_s: Longest wait for an adjustment before it is withdrawn or ignored.
        timeline: Names the clock: times of another timeline cannot be compared.
        about: For the ledger's header: namespace, environment, speed.
    """

    config: DecideConfig
    max_age_s: float
    adjustment_deadline_s: float
    timeline: str
    about: dict[str, str | float]


class PlannerLoop:
    """One planner of one graph."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        target: Target,
        source: Source,
        ledger: Ledger,
        time: Time,
        audience: Audience,
    ) -> None:
        self._settings = settings
        self._config = settings.config
        self._target = target
        self._source = source
        self._ledger = ledger
        self._time = time
        self._audience = audience
        self.lag = LagTracker()
        now_s = time.now_s()
        self._state = PlannerState()
        self._origin_s = now_s
        self._grid = self._grid_from(now_s)
        self._slot = 0
        self._due_s = now_s
        self._pulls: list[Pull] = []
        self._pending: tuple[Change, ...] = ()
        self._blocked_s: float | None = None
        self._overdue = False
        self._is_blind = False
        self._withdraw_after_s = now_s
        self._desired: dict[Role, int] = {}
        self._observed: TargetState | None = None
        self._readings: Readings | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Plan until ``stop`` is set."""
        self._resume()
        while not stop.is_set():
            await self._time.sleep_until(self._due_s, stop)
            if not stop.is_set():
                await self.tick()

    async def tick(self) -> None:
        """Do what is due now and set the next due time."""
        self.lag.record(self._time.now_s() - self._due_s)
        self._readings = None
        self._observed = await self._observe()
        phase = Phase.BLIND
        if self._observed is not None:
            phase = await self._work(self._observed)
        self._audience.tick(self._view(phase))
        self._plan_next()

    async def _work(self, observed: TargetState) -> Phase:
        if self._pending:
            await self._apply_pending(observed)
            return Phase.ADJUSTING
        if await self._is_blocked(observed):
            return Phase.ADJUSTING
        if not self._is_decidable():
            await self._pull(observed)
        if self._is_decidable():
            await self._adjust()
        return Phase.OBSERVING

    # ------------------------------------------------------------------ time

    def _grid_from(self, start_s: float) -> Grid:
        return Grid(start_s, self._config.metric_pulling_interval_s, self._config.adjustment_interval_s)

    def _begin(self, start_s: float) -> None:
        """Start an interval."""
        self._grid = self._grid_from(start_s)
        self._slot = 0
        self._pulls = []

    def _is_decidable(self) -> bool:
        return bool(self._pulls) and self._grid.is_over(self._pulls[-1].at_s)

    def _plan_next(self) -> None:
        now_s = self._time.now_s()
        if self._blocked_s is not None:
            grid = self._grid_from(self._blocked_s)
            self._due_s = grid.start_s + grid.slot_after(0, now_s) * grid.pull_s
            if self._due_s <= now_s:
                self._due_s += grid.pull_s
            return
        self._slot = self._grid.slot_after(self._slot, now_s)
        self._due_s = self._grid.at_s(self._slot)

    def _place(self, start_s: float) -> Place:
        return Place(self._settings.timeline, self._origin_s, start_s)

    # ------------------------------------------------------------------ restart

    def _resume(self) -> None:
        now_s = self._time.now_s()
        history = self._read_history()
        self._begin(now_s)
        resumed = False
        if history is not None:
            self._state = history.state
            resumed = history.timeline == self._settings.timeline and history.newest_s <= now_s
            if resumed:
                resumed = self._continue(history, now_s)
            else:
                for change in history.pending:
                    self._state = without_asked(self._state, change.role)
        self._ledger.begin(
            records.header(
                self._place(self._grid.start_s),
                at_s=now_s,
                wall_s=self._time.wall_s(),
                resumed=resumed,
                config=self._config,
                state=self._state,
                **self._settings.about,
            )
        )
        log.info("planner started", resumed=resumed, decisions=self._state.sequence)
        if self._pending or self._is_decidable():
            self._due_s = now_s
        elif self._blocked_s is not None:
            # The look that was due when the planner died, not one more right after its decision.
            grid = self._grid_from(self._blocked_s)
            self._due_s = grid.start_s + grid.slot_after(0, now_s) * grid.pull_s
        else:
            self._plan_next()

    def _read_history(self) -> History | None:
        try:
            return restore(self._ledger.tail(ANCHORS))
        except (LedgerError, KeyError, TypeError, ValueError) as exc:
            aside = self._ledger.set_aside()
            log.error("ledger cannot be read: starting a new one", error=str(exc), kept_as=str(aside))  # noqa: TRY400 - the message says it all
            return None

    def _continue(self, history: History, now_s: float) -> bool:
        """Take the interval under way up again; False if it is long over and nothing is outstanding."""
        self._origin_s = history.origin_s
        self._pending = history.pending
        self._blocked_s = history.blocked_s
        is_idle = self._blocked_s is None and not self._pending
        if is_idle and now_s >= history.start_s + 2 * self._config.adjustment_interval_s:
            return False
        self._grid = self._grid_from(history.start_s)
        self._slot = history.slot
        self._pulls = list(history.pulls)
        return True

    async def _apply_pending(self, observed: TargetState) -> None:
        """Carry out what was recorded but not acted on when the planner was killed."""
        decided_s = self._pending[0].decided_s
        applied = False
        for change in self._pending:
            if self._is_still_wanted(change, observed):
                applied = await self._carry_out(change) or applied
            else:
                self._settle_change(change, "abandoned", "too old, or the pool has changed since")
        self._pending = ()
        if applied:
            self._blocked_s = decided_s

    def _is_still_wanted(self, change: Change, observed: TargetState) -> bool:
        pool = observed.pools.get(change.role)
        age_s = self._time.now_s() - change.decided_s
        if pool is None or age_s > REAPPLY_INTERVALS * self._config.adjustment_interval_s:
            return False
        replicas = pool.ready + pool.starting
        if replicas == change.desired or change.desired < change.current:
            return replicas in (change.desired, change.current)
        pools = _counts(observed)
        needed = existing_gpus(pools, self._config) + self._config.engine_gpus(
            change.role, pool.gpus_per_replica
        )
        ceiling = self._config.max_gpu_budget
        return replicas == change.current and (ceiling is None or needed <= ceiling)

    # ------------------------------------------------------------------ adjustment under way

    async def _is_blocked(self, observed: TargetState) -> bool:
        """Tell whether pulls and decisions wait; take back what never becomes ready."""
        now_s = self._time.now_s()
        if not observed.adjusting:
            self._overdue = False
        elif not self._overdue:
            if self._blocked_s is None:
                self._blocked_s = now_s
            if now_s - self._blocked_s <= self._settings.adjustment_deadline_s:
                return True
            if await self._withdraw_where(observed, is_gone=False):
                return True
            self._overdue = True
            log.warning("adjustment never ended: planning goes on", waited_s=now_s - self._blocked_s)
        if self._blocked_s is None:
            return False
        if not await self._withdraw_where(observed, is_gone=True):
            self._settle(now_s)
        return True

    async def _withdraw_where(self, observed: TargetState, *, is_gone: bool) -> bool:
        """Withdraw outstanding scale-ups: those whose replica is gone, or all that are not ready.

        Returns:
            True if there are any; one that could not be recorded is tried again an interval later.
        """
        any_withdrawn = False
        for role, pool in observed.pools.items():
            asked = self._state.of(role).asked
            if asked is None or (pool.ready + pool.starting if is_gone else pool.ready) >= asked:
                continue
            waited = f"not ready after {self._settings.adjustment_deadline_s:g} s"
            any_withdrawn = True
            if self._time.now_s() < self._withdraw_after_s:
                continue
            why = pool.failed[-1] if pool.failed else "the backend dropped it" if is_gone else waited
            await self._withdraw(role, why, observed)
        return any_withdrawn

    async def _withdraw(self, role: Role, why: str, observed: TargetState) -> None:
        now_s = self._time.now_s()
        nothing = KvSummary(0.0, 0, 0, None, "", "")
        pull = Pull(now_s, _counts(observed), nothing, None)
        decision, after = withdraw(role, why, pull=pull, state=self._state, config=self._config)
        deciding = Deciding(
            "withdrawal", self._config, self._state, after, decision, role=role, why=why, pull=pull
        )
        if not self._record(deciding, now_s):
            self._withdraw_after_s = now_s + self._config.adjustment_interval_s
            return
        await self._carry_out_all(decision)
        self._blocked_s = now_s

    def _settle(self, now_s: float) -> None:
        took_s = now_s - (self._blocked_s if self._blocked_s is not None else now_s)
        self._blocked_s = None
        self._begin(now_s)
        place = self._place(now_s)
        self._ledger.try_append(
            records.settled(place, at_s=now_s, took_s=took_s, state=self._state, overdue=self._overdue)
        )
        log.info("adjustment over", took_s=round(took_s, 1), overdue=self._overdue)

    # ------------------------------------------------------------------ pull and decide

    async def _observe(self) -> TargetState | None:
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                observed = await self._target.observe()
        except (PenstockError, TimeoutError) as exc:
            if not self._is_blind:
                log.warning("backend cannot be read: nothing is decided", error=str(exc) or "timed out")
            self._is_blind = True
            return None
        self._is_blind = False
        return replace(observed, pools={r: p for r, p in observed.pools.items() if r is not Role.ROUTER})

    async def _pull(self, observed: TargetState) -> None:
        query = Query(observed.endpoints, self._settings.max_age_s)
        self._readings = await self._source.read(query)
        pools = _counts(observed)
        queue = self._readings.queue if Role.PREFILL in pools else None
        kv = self._readings.kv if kv_role(pools) in pools else {}
        pull = summarise(Observation(self._time.now_s(), pools, kv, queue))
        self._pulls.append(pull)
        self._ledger.try_append(records.pull(pull, self._slot))

    async def _adjust(self) -> None:
        end_s = self._pulls[-1].at_s
        window = Window(self._grid.start_s, end_s, tuple(self._pulls))
        decision, after = decide(window, self._state, self._config)
        deciding = Deciding("adjustment", self._config, self._state, after, decision, window=window)
        next_start_s = self._grid.next_start_s(end_s)
        if self._record(deciding, next_start_s) and await self._carry_out_all(decision):
            self._blocked_s = end_s
            self._overdue = False
        self._begin(next_start_s)

    def _record(self, deciding: Deciding, start_s: float) -> bool:
        """Write a decision down and make its state the planner's; False when it could not be written."""
        decision = deciding.decision
        record = records.decision(deciding, self._place(start_s), wall_s=self._time.wall_s())
        try:
            self._ledger.append(record, durable=True)
        except LedgerError as exc:
            log.error("decision not recorded, so not taken", decision_id=decision.id, error=str(exc))  # noqa: TRY400 - no bug of ours
            return False
        self._state = deciding.after
        for role in decision.roles:
            self._desired[role.role] = role.desired
        for role in decision.changes:
            log.info("decided", decision_id=decision.id, reason=role.reason.value, what=role.sentence)
        self._audience.decided(decision, self._view(Phase.OBSERVING))
        return True

    async def _carry_out_all(self, decision: Decision) -> bool:
        """Ask the target for every change; True if it took any."""
        applied = False
        for role in decision.changes:
            change = Change(decision.id, role.role, role.current, role.desired, decision.at_s)
            applied = await self._carry_out(change) or applied
        return applied

    async def _carry_out(self, change: Change) -> bool:
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                await self._target.scale(change.role, change.desired, decision_id=change.decision_id)
        except (PenstockError, TimeoutError) as exc:
            error = str(exc) or f"no answer in {TARGET_TIMEOUT_S:g} s"
            log.warning("decision not carried out", decision_id=change.decision_id, error=error)
            self._settle_change(change, "failed", error)
            return False
        self._ledger.try_append(records.actuation(change, at_s=self._time.now_s(), outcome="applied"))
        return True

    def _settle_change(self, change: Change, outcome: str, error: str) -> None:
        """Write down that a change was not carried out; nothing is outstanding then."""
        self._state = without_asked(self._state, change.role)
        now_s = self._time.now_s()
        self._ledger.try_append(records.actuation(change, at_s=now_s, outcome=outcome, error=error))

    # ------------------------------------------------------------------ view

    def _view(self, phase: Phase) -> View:
        pools = self._observed.pools if self._observed is not None else {}
        counts = _counts(self._observed) if self._observed is not None else {}
        is_adjusting = self._blocked_s is not None
        now_s = self._time.now_s()
        return View(
            at_s=now_s,
            origin_s=self._origin_s,
            wall_s=self._time.wall_s(),
            phase=phase,
            pools=pools,
            desired={role: self._desired.get(role, pool.replicas) for role, pool in counts.items()},
            gpus=existing_gpus(counts, self._config),
            max_gpu_budget=self._config.max_gpu_budget,
            pull=self._pulls[-1] if self._readings is not None and self._pulls else None,
            latency=self._readings.latency if self._readings is not None else {},
            next_decision_s=None if is_adjusting else self._grid.start_s + self._grid.adjust_s,
            lag_p99_s=self.lag.p99_s(),
            ledger_errors=self._ledger.errors,
            overdue=self._overdue,
        )


def _counts(observed: TargetState) -> dict[Role, PoolCounts]:
    return {
        role: PoolCounts(pool.ready, pool.starting, pool.draining, pool.gpus_per_replica)
        for role, pool in observed.pools.items()
    }
