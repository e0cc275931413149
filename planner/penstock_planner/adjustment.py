"""An adjustment under way: pulls and decisions wait for it, what never becomes ready is withdrawn."""

from __future__ import annotations

from penstock_core.logs import get_logger
from penstock_graph.models import Role
from penstock_planner import records
from penstock_planner.actuation import Actuation
from penstock_planner.decide.observation import KvSummary, Pull
from penstock_planner.decide.pipeline import withdraw
from penstock_planner.history import without_asked
from penstock_planner.ledger import Ledger
from penstock_planner.records import Deciding
from penstock_planner.standing import Standing, counts
from penstock_planner.targets.base import TargetState
from penstock_planner.timing import Time

log = get_logger(__name__)


class Adjustment:
    """Watches replicas start and drain until the pools are as they were asked to be."""

    def __init__(self, standing: Standing, *, actuation: Actuation, ledger: Ledger, time: Time) -> None:
        self._standing = standing
        self._actuation = actuation
        self._ledger = ledger
        self._time = time
        self._withdraw_after_s = time.now_s()

    async def is_under_way(self, observed: TargetState) -> bool:
        """Tell whether pulls and decisions wait; take back what never becomes ready."""
        standing, now_s = self._standing, self._time.now_s()
        if observed.edited:
            self._accept_edits(observed, now_s)
        if not observed.adjusting:
            standing.overdue = False
        elif not standing.overdue:
            if standing.blocked_s is None:
                standing.blocked_s = now_s
            if now_s - standing.blocked_s <= standing.settings.adjustment_deadline_s:
                return True
            if await self._withdraw_where(observed, is_gone=False):
                return True
            standing.overdue = True
            log.warning("adjustment never ended: planning goes on", waited_s=now_s - standing.blocked_s)
        if standing.blocked_s is None:
            return False
        if not await self._withdraw_where(observed, is_gone=True):
            self._settle(now_s)
        return True

    def _accept_edits(self, observed: TargetState, now_s: float) -> None:
        """Let somebody else's numbers stand for an interval: forget what was asked, begin from nothing."""
        standing = self._standing
        for role in observed.edited:
            standing.state = without_asked(standing.state, role)
        standing.overdue = False
        standing.blocked_s = None
        log.info("replicas set by somebody else: kept for an interval", roles=sorted(observed.edited))
        self._settle(now_s)

    async def _withdraw_where(self, observed: TargetState, *, is_gone: bool) -> bool:
        """Withdraw outstanding scale-ups: those whose replica is gone, or all that are not ready.

        Returns:
            True if there are any; one that could not be recorded is tried again an interval later.
        """
        any_withdrawn = False
        for role, pool in observed.pools.items():
            asked = self._standing.state.of(role).asked
            if asked is None or (pool.ready + pool.starting if is_gone else pool.ready) >= asked:
                continue
            waited = f"not ready after {self._standing.settings.adjustment_deadline_s:g} s"
            any_withdrawn = True
            if self._time.now_s() < self._withdraw_after_s:
                continue
            why = pool.failed[-1] if pool.failed else "the backend dropped it" if is_gone else waited
            await self._withdraw(role, why, observed)
        return any_withdrawn

    async def _withdraw(self, role: Role, why: str, observed: TargetState) -> None:
        now_s = self._time.now_s()
        standing, config = self._standing, self._standing.settings.config
        nothing = KvSummary(0.0, 0, 0, None, "", "")
        pull = Pull(now_s, counts(observed), nothing, None)
        decision, after = withdraw(role, why, pull=pull, state=standing.state, config=config)
        deciding = Deciding(
            "withdrawal", config, standing.state, after, decision, role=role, why=why, pull=pull
        )
        if not self._actuation.record(deciding, now_s):
            self._withdraw_after_s = now_s + config.adjustment_interval_s
            return
        await self._actuation.carry_out(decision)
        standing.blocked_s = now_s

    def _settle(self, now_s: float) -> None:
        standing = self._standing
        took_s = 0.0 if standing.blocked_s is None else now_s - standing.blocked_s
        if standing.blocked_s is not None:
            log.info("adjustment over", took_s=round(took_s, 1), overdue=standing.overdue)
        standing.blocked_s = None
        standing.begin(now_s)
        self._ledger.try_append(
            records.settled(
                standing.place(now_s),
                at_s=now_s,
                took_s=took_s,
                state=standing.state,
                overdue=standing.overdue,
            )
        )
