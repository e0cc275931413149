"""The planner's loop: observe, pull, decide, record, act; blocked while an adjustment is under way.

All times are modelled seconds. Every step is recorded before it has an effect, so that a killed planner
continues as if it had not been killed: `resume` and `history` say how.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from penstock_core.errors import PenstockError
from penstock_core.lag import LagTracker
from penstock_core.logs import get_logger
from penstock_graph.models import Role
from penstock_planner import records
from penstock_planner.actuation import TARGET_TIMEOUT_S, Actuation
from penstock_planner.adjustment import Adjustment
from penstock_planner.decide.budget import existing_gpus
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Observation, Window, kv_role, summarise
from penstock_planner.decide.pipeline import decide
from penstock_planner.ledger import Ledger, Record
from penstock_planner.records import Deciding
from penstock_planner.resume import resume
from penstock_planner.sources.base import Query, Readings, Source
from penstock_planner.standing import LoopSettings, Standing, counts
from penstock_planner.targets.base import Target, TargetState
from penstock_planner.timing import Time
from penstock_planner.view import Audience, Phase, View

__all__ = ["LoopSettings", "PlannerLoop"]

LAG_TICKS = 300
"""Chosen: five minutes of pulls; a percentile is asked for at every tick."""

log = get_logger(__name__)


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
        self._config = settings.config
        self._max_age_s = settings.max_age_s
        self._about = settings.about
        self._first_sequence = settings.first_sequence
        self._target = target
        self._source = source
        self._ledger = ledger
        self._time = time
        self._audience = audience
        self.lag = LagTracker(LAG_TICKS)
        now_s = time.now_s()
        self._standing = Standing.blank(settings, now_s)
        self._actuation = Actuation(
            self._standing, target=target, ledger=ledger, time=time, announce=self._announce
        )
        self._adjustment = Adjustment(self._standing, actuation=self._actuation, ledger=ledger, time=time)
        self._due_s = now_s
        self._is_blind = False
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
        standing = self._standing
        if standing.pending:
            await self._actuation.carry_out_pending(observed)
            return Phase.ADJUSTING
        if await self._adjustment.is_under_way(observed):
            return Phase.ADJUSTING
        if not standing.is_decidable():
            await self._pull(observed)
        if standing.is_decidable():
            await self._adjust()
        return Phase.OBSERVING

    def _plan_next(self) -> None:
        standing, now_s = self._standing, self._time.now_s()
        if standing.blocked_s is not None:
            grid = standing.grid_from(standing.blocked_s)
            self._due_s = grid.start_s + grid.slot_after(0, now_s) * grid.pull_s
            if self._due_s <= now_s:
                self._due_s += grid.pull_s
            return
        standing.slot = standing.grid.slot_after(standing.slot, now_s)
        self._due_s = standing.grid.at_s(standing.slot)

    def _resume(self) -> None:
        now_s = self._time.now_s()
        standing = self._standing
        standing.begin(now_s)
        resumed = resume(standing, self._ledger, now_s)
        newest = max(standing.state.sequence, self._first_sequence)
        standing.state = replace(standing.state, sequence=newest)
        self._ledger.begin(self._header(now_s, resumed=resumed))
        log.info("planner started", resumed=resumed, decisions=standing.state.sequence)
        if standing.pending or standing.is_decidable():
            self._due_s = now_s
        elif standing.blocked_s is not None:
            # The look that was due when the planner died, not one more right after its decision.
            grid = standing.grid_from(standing.blocked_s)
            self._due_s = grid.start_s + grid.slot_after(0, now_s) * grid.pull_s
        else:
            self._plan_next()

    def _header(self, now_s: float, *, resumed: bool) -> Record:
        standing = self._standing
        return records.header(
            standing.place(standing.grid.start_s),
            at_s=now_s,
            wall_s=self._time.wall_s(),
            resumed=resumed,
            config=self._config,
            state=standing.state,
            **self._about,
        )

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
        query = Query(observed.endpoints, self._max_age_s)
        self._readings = await self._source.read(query)
        pools = counts(observed)
        queue = self._readings.queue if Role.PREFILL in pools else None
        kv = self._readings.kv if kv_role(pools) in pools else {}
        pull = summarise(Observation(self._time.now_s(), pools, kv, queue))
        self._standing.pulls.append(pull)
        self._ledger.try_append(records.pull(pull, self._standing.slot))

    async def _adjust(self) -> None:
        standing = self._standing
        end_s = standing.pulls[-1].at_s
        window = Window(standing.grid.start_s, end_s, tuple(standing.pulls))
        decision, after = decide(window, standing.state, self._config)
        deciding = Deciding("adjustment", self._config, standing.state, after, decision, window=window)
        next_start_s = standing.grid.next_start_s(end_s)
        if self._actuation.record(deciding, next_start_s) and await self._actuation.carry_out(decision):
            standing.blocked_s = end_s
            standing.overdue = False
        standing.begin(next_start_s)
        if self._ledger.is_long and standing.blocked_s is None:
            # Nothing is under way: the header alone says where the planner stands.
            self._ledger.rotate(self._header(end_s, resumed=False))

    def _announce(self, decision: Decision) -> None:
        self._audience.decided(decision, self._view(Phase.OBSERVING))

    def _view(self, phase: Phase) -> View:
        standing = self._standing
        pools = self._observed.pools if self._observed is not None else {}
        seen = counts(self._observed) if self._observed is not None else {}
        is_adjusting = standing.blocked_s is not None
        now_s = self._time.now_s()
        return View(
            at_s=now_s,
            origin_s=standing.origin_s,
            wall_s=self._time.wall_s(),
            phase=phase,
            pools=pools,
            desired={role: standing.desired.get(role, pool.replicas) for role, pool in seen.items()},
            gpus=existing_gpus(seen, self._config),
            max_gpu_budget=self._config.max_gpu_budget,
            pull=standing.pulls[-1] if self._readings is not None and standing.pulls else None,
            latency=self._readings.latency if self._readings is not None else {},
            next_decision_s=None if is_adjusting else standing.grid.start_s + standing.grid.adjust_s,
            lag_p99_s=self.lag.p99_s(),
            ledger_errors=self._ledger.errors,
            overdue=standing.overdue,
        )
