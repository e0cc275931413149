"""Writes decisions down and then asks the backend for them; also for those a killed planner left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock_core.errors import LedgerError, PenstockError
from penstock_core.logs import get_logger
from penstock_planner import records
from penstock_planner.decide.budget import existing_gpus
from penstock_planner.decide.decision import Decision
from penstock_planner.history import Change, without_asked
from penstock_planner.ledger import Ledger
from penstock_planner.records import Deciding
from penstock_planner.standing import Standing, counts
from penstock_planner.targets.base import Target, TargetState
from penstock_planner.timing import Time

TARGET_TIMEOUT_S = 30.0
"""Real seconds for one call of the backend. Chosen: beyond the local statefile's 5 s lock and a busy API server."""

REAPPLY_INTERVALS = 2
"""Chosen: a recorded decision older than this many intervals is not carried out after a restart; the load it
was made for is gone."""

log = get_logger(__name__)


class Actuation:
    """The way from a decision to the backend: first the ledger, then the target."""

    def __init__(
        self,
        standing: Standing,
        *,
        target: Target,
        ledger: Ledger,
        time: Time,
        announce: Callable[[Decision], None],
    ) -> None:
        """Build it.

        Args:
            standing: Shared with the loop.
            target: Asked for replicas.
            ledger: Written before.
            time: For records.
            announce: Called with each recorded decision before it is carried out.
        """
        self._standing = standing
        self._target = target
        self._ledger = ledger
        self._time = time
        self._announce = announce

    def record(self, deciding: Deciding, start_s: float) -> bool:
        """Write a decision down and make its state the planner's; False when it could not be written."""
        decision = deciding.decision
        standing = self._standing
        record = records.decision(deciding, standing.place(start_s), wall_s=self._time.wall_s())
        try:
            self._ledger.append(record, durable=True)
        except LedgerError as exc:
            log.error("decision not recorded, so not taken", decision_id=decision.id, error=str(exc))  # noqa: TRY400 - no bug of ours
            return False
        standing.state = deciding.after
        for role in decision.roles:
            standing.desired[role.role] = role.desired
        for role in decision.changes:
            log.info("decided", decision_id=decision.id, reason=role.reason.value, what=role.sentence)
        self._announce(decision)
        return True

    async def carry_out(self, decision: Decision) -> bool:
        """Ask the target for every change; True if it took any."""
        applied = False
        for role in decision.changes:
            change = Change(decision.id, role.role, role.current, role.desired, decision.at_s)
            applied = await self._carry_out(change) or applied
        return applied

    async def carry_out_pending(self, observed: TargetState) -> None:
        """Carry out what was recorded but not acted on when the planner was killed."""
        standing = self._standing
        decided_s = standing.pending[0].decided_s
        applied = False
        for change in standing.pending:
            if self._is_still_wanted(change, observed):
                applied = await self._carry_out(change) or applied
            else:
                self._settle(change, "abandoned", "too old, or the pool has changed since")
        standing.pending = ()
        if applied:
            standing.blocked_s = decided_s

    def _is_still_wanted(self, change: Change, observed: TargetState) -> bool:
        config = self._standing.settings.config
        pool = observed.pools.get(change.role)
        age_s = self._time.now_s() - change.decided_s
        if pool is None or age_s > REAPPLY_INTERVALS * config.adjustment_interval_s:
            return False
        replicas = pool.ready + pool.starting
        if replicas == change.desired or change.desired < change.current:
            return replicas in (change.desired, change.current)
        pools = counts(observed)
        needed = existing_gpus(pools, config) + config.engine_gpus(change.role, pool.gpus_per_replica)
        ceiling = config.max_gpu_budget
        return replicas == change.current and (ceiling is None or needed <= ceiling)

    async def _carry_out(self, change: Change) -> bool:
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                await self._target.scale(change.role, change.desired, decision_id=change.decision_id)
        except (PenstockError, TimeoutError) as exc:
            error = str(exc) or f"no answer in {TARGET_TIMEOUT_S:g} s"
            log.warning("decision not carried out", decision_id=change.decision_id, error=error)
            self._settle(change, "failed", error)
            return False
        self._ledger.try_append(records.actuation(change, at_s=self._time.now_s(), outcome="applied"))
        return True

    def _settle(self, change: Change, outcome: str, error: str) -> None:
        """Write down that a change was not carried out; nothing is outstanding then."""
        self._standing.state = without_asked(self._standing.state, change.role)
        now_s = self._time.now_s()
        self._ledger.try_append(records.actuation(change, at_s=now_s, outcome=outcome, error=error))
