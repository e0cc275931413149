"""Drives the planner's core in real time: clock, backend, metrics, ledger and observers. It makes no decisions itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace

from penstock.api import Role
from penstock.core.clock import LagTracker, SimulatedClock
from penstock.core.errors import LedgerError, PenstockError
from penstock.core.logs import get_logger
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
from penstock_planner.core.following import restore
from penstock_planner.core.ledger_history import LedgerHistory
from penstock_planner.core.planner import Answer, PlannerCore
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.bounds.owner import owner
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, kv_role, summarise
from penstock_planner.decide.schedule import in_force
from penstock_planner.ledger import Ledger
from penstock_planner.observers import Observers, PlannerView
from penstock_planner.recorder import Recorder
from penstock_planner.sources.base import (
    DISPATCHED_TTFT,
    ITL,
    TTFT,
    Buckets,
    Query,
    Readings,
    ReadingSource,
    gained,
    later_than,
)
from penstock_planner.targets.base import Target, TargetState

LAG_TICKS = 300
"""Number of newest ticks (300) whose lateness gives the lag percentile. Chosen: five minutes of ticks."""

TARGET_TIMEOUT_S = 30.0
"""Timeout for one call of the backend, real seconds.

Chosen: above the local statefile's lock timeout of 5 s, and enough for a busy API server.
"""

log = get_logger(__name__)


class PlannerClock:
    """The host's clock, scaled by the time factor (simulated seconds per real second)."""

    __slots__ = ("_clock",)

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        """Return the current simulated time in seconds; it has no fixed origin, so that only differences have a meaning."""
        return self._clock.now_s()

    def wall_s(self) -> float:
        """Return the current time in real seconds since 1970."""
        return time.time()

    def to_simulated_s(self, real_s: float) -> float:
        """Convert a duration from real to simulated seconds."""
        return self._clock.to_simulated_s(real_s)

    async def sleep_until(self, at_s: float, stop: asyncio.Event) -> None:
        """Wait until the time ``at_s`` (simulated seconds) is reached, or until ``stop`` is set.

        Returns after one event-loop cycle if the time has passed.
        """
        real_s = self._clock.to_real_s(at_s - self._clock.now_s())
        if real_s <= 0:
            # Even a loop that is late must let the other tasks of the event loop run.

            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), real_s)


class PlannerLoop:
    """The planner of one graph: carries out in real time the actions that the planner's core, which has no I/O, requests.

    Attributes:
        lag: Record of how long after their planned times the last ticks (metrics scrapes) began, in simulated seconds.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        *,
        target: Target,
        source: ReadingSource,
        ledger: Ledger,
        time: PlannerClock,
        observers: Observers,
    ) -> None:
        """Create a planner; `run` starts it.

        Args:
            settings: Settings of the planner.
            target: Backend that runs the workers.
            source: Source of metrics.
            ledger: Ledger of the planner.
            time: Clock of the planner.
            observers: Observers of ticks and decisions.
        """
        self._settings = settings
        self._target = target
        self._source = source
        self._recorder = Recorder(ledger, settings.about, wall_s=time.wall_s)
        self._time = time
        self._observers = observers
        self.lag = LagTracker(LAG_TICKS)
        self._core = PlannerCore(settings, time.now_s())
        self._observed: TargetState | None = None
        self._is_target_unavailable = False
        self._readings: Readings | None = None
        self._pulled: Pull | None = None
        self._counted: dict[str, Buckets] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Scrape metrics, decide and scale the graph until ``stop`` is set.

        Continues from the ledger (decision log) if it holds records of an earlier run.
        """
        history = self._read_history()
        effects = self._core.start(
            self._time.now_s(),
            history,
            gone_s=self._gone_s(history),
        )
        due_s = await self._advance(effects)
        while not stop.is_set():
            await self._time.sleep_until(due_s, stop)
            if not stop.is_set():
                self.lag.record(self._time.now_s() - due_s)
                due_s = await self._advance(self._core.answer(await self._observe(), self._time.now_s()))
                self._observers.tick(self._view())

    async def _advance(self, effects: tuple[Effect, ...]) -> float:
        """Carry out effects until the tick ends; return the time of the next tick."""
        while True:
            answer: Answer
            for effect in effects[:-1]:
                self._carry_out(effect)
            match effects[-1]:
                case ObserveAt(at_s):
                    return at_s
                case ReadMetrics():
                    answer = await self._pull()
                case RecordDecision() as asked:
                    answer = self._recorder.record(asked)
                case Scale(change):
                    answer = await self._asked(
                        self._target.scale(change.role, change.desired, decision_id=change.decision_id)
                    )
                case Switch(giver, taker):
                    replicas = {each.role: each.desired for each in (giver, taker)}
                    answer = await self._asked(
                        self._target.switch(
                            giver.role, taker.role, replicas=replicas, decision_id=giver.decision_id
                        )
                    )
                case _ as last:
                    raise AssertionError(f"{last}: asks for no answer")
            effects = self._core.answer(answer, self._time.now_s())

    def _carry_out(self, effect: Effect) -> None:
        """Carry out an effect that needs no answer."""
        match effect:
            case Append() | AppendPull() | BeginLedger() | Checkpoint():
                self._recorder.write(effect)
            case Notify(decision):
                self._observers.decided(decision, self._view())
            case Log(text, keys, is_warning):
                (log.warning if is_warning else log.info)(text, **keys)
            case _:
                raise AssertionError(f"{effect}: asks for an answer")

    # -- ledger ---------------------------------------------------------------------------------------

    def _read_history(self) -> LedgerHistory | None:
        try:
            return restore(self._recorder.ledger.tail(), self._settings.config)
        except (LedgerError, KeyError, TypeError, ValueError) as exc:
            aside = self._recorder.ledger.set_aside()
            log.error("ledger cannot be read: starting a new one", error=str(exc), kept_as=str(aside))  # noqa: TRY400 - the message is complete
            return None

    def _gone_s(self, history: LedgerHistory | None) -> float:
        """Return the simulated seconds since the newest record; 0 if unknown or if the wall clock was set back."""
        if history is None or history.wall_s is None:
            return 0.0
        return max(0.0, self._time.to_simulated_s(self._time.wall_s() - history.wall_s))

    # -- backend and metrics --------------------------------------------------------------------------

    async def _observe(self) -> TargetState | None:
        self._readings = self._observed = self._pulled = None
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                self._observed = await self._target.observe()
        except (PenstockError, TimeoutError) as exc:
            if not self._is_target_unavailable:
                log.warning("backend cannot be read: no decisions are made", error=str(exc) or "timed out")
            self._is_target_unavailable = True
            return None
        self._is_target_unavailable = False
        return self._observed

    @property
    def _pools(self) -> Mapping[Role, PoolCounts]:
        return self._observed.pools if self._observed is not None else {}

    async def _pull(self) -> Pull:
        endpoints = self._observed.endpoints if self._observed is not None else ()
        self._readings = readings = await self._source.read(Query(endpoints, self._settings.max_age_s))
        pools = self._pools
        has_kv = kv_role(pools) in pools
        pulled = summarise(
            self._time.now_s(),
            pools,
            kv=readings.kv if has_kv else {},
            queue=readings.queue if Role.PREFILL in pools else None,
            demand=self._with_late(readings),
            worker_waiting=readings.worker_waiting if has_kv else None,
        )
        wall_s = round(self._time.wall_s()) if self._settings.config.reads_calendar else None
        watched = None if self._observed is None else self._observed.watched
        self._pulled = pulled = replace(pulled, wall_s=wall_s, watched=watched)
        return pulled

    def _with_late(self, readings: Readings) -> Demand | None:
        """Return the demand with two more counts: first tokens and gaps that were late since the previous scrape that had histograms."""
        config, demand = self._settings.config, readings.demand
        if demand is None:
            return None
        late: dict[str, float | None] = {}
        slos_s = {TTFT: config.ttft_slo_s, DISPATCHED_TTFT: config.ttft_slo_s, ITL: config.itl_slo_s}
        for name, slo_s in slos_s.items():
            buckets, before = readings.latency.get(name, ()), self._counted.get(name, ())
            if buckets and slo_s is not None:
                self._counted[name] = buckets
                late[name] = round(later_than(gained(before, buckets), slo_s), 3) if before else None
        return replace(
            demand,
            ttft_late=late.get(TTFT),
            dispatched_late=late.get(DISPATCHED_TTFT),
            itl_late=late.get(ITL),
        )

    async def _asked(self, request: Awaitable[None]) -> str | None:
        """Request a change from the backend; return the reason if it was refused, None if it was accepted."""
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                await request
        except (PenstockError, TimeoutError) as exc:
            return str(exc) or f"no answer within {TARGET_TIMEOUT_S:g} s"
        return None

    # -- observers ------------------------------------------------------------------------------------

    def _view(self) -> PlannerView:
        current, config = self._core, self._settings.config
        schedule, pools, observed = current.schedule, self._pools, self._observed
        wall_s = self._time.wall_s()
        return PlannerView(
            at_s=self._time.now_s(),
            origin_s=current.origin_s,
            wall_s=wall_s,
            phase=current.phase,
            pools=pools,
            desired={role: current.desired.get(role, pool.replicas) for role, pool in pools.items()},
            gpus=existing_gpus(pools, config),
            max_gpu_budget=current.settings.config.within_pool.max_gpu_budget,
            pull=self._pulled,
            latency=self._readings.latency if self._readings is not None else {},
            next_decision_s=None if schedule.blocked_s is not None else schedule.end_s,
            lag_p99_s=self.lag.p99_s(),
            ledger_errors=self._recorder.ledger.errors,
            overdue=current.is_overdue,
            startup_s=dict(current.startup_s),
            other_writers=self._other_writers(),
            failures=observed.failures if observed is not None else {},
            ledger_problem=self._recorder.ledger.problem,
            failed_sources=self._readings.gone if self._readings is not None else {},
            remembered=current.remembered,
            scheduled=tuple(each.in_words(wall_s) for each in in_force(config.schedule, wall_s)),
            memory=current.decided.learned,
            grant=None if observed is None else observed.grant,
            guaranteed=None if observed is None else observed.guaranteed,
        )

    def _other_writers(self) -> dict[Role, str]:
        """Return the name of the other writer by role, for roles whose replicas another writer sets."""
        writers = self._observed.writers if self._observed is not None else {}
        config, decided = self._settings.config, self._core.decided
        named = {role: owner(role, decided.of(role), config, writers) for role in self._pools}
        return {role: writer for role, writer in named.items() if writer}
