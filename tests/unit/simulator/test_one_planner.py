"""The live loop and the simulator drive one core: the same script gives the same decisions, changes and ticks."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from autoscaler_conformance.plant import Situation, performance_of, steady
from hypothesis import strategies as st

from penstock.api import Role
from penstock.core.errors import ClusterError
from penstock.simulator.planning import SimulatedObservation, VirtualPlanner
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Reason
from penstock_planner.decide.demand.observation import Demand, PoolCounts
from penstock_planner.decide.demand.reading import assess
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory, RoleMemory
from penstock_planner.ledger import Ledger, read_ledger
from penstock_planner.loop import PlannerLoop
from penstock_planner.observers import Observers
from penstock_planner.replay import replay
from penstock_planner.sources.base import Readings
from penstock_planner.targets.base import Endpoint, TargetState

D, P, A = Role.DECODE, Role.PREFILL, Role.AGGREGATED
PIECE_S = 40.0
PULL_S = 2.0
AWAY_S = 20.0
"""A process that starts two intervals after the last decision begins an interval; the simulator knows no such gap."""

DRAIN_S = 6.0
DEADLINE_S = 50.0
MAX_AGE_S = 10.0


@dataclass(frozen=True)
class _Script:
    """What happens; one value of a tuple holds for `PIECE_S`, None is unknown.

    The backend refuses every change, or cannot be read in a piece's first `AWAY_S`.
    """

    mode: Mode
    is_aggregated: bool
    kv: tuple[float | None, ...]
    queue: tuple[float, ...]
    demand: tuple[float | None, ...]
    is_refusing: tuple[bool, ...]
    is_away: tuple[bool, ...]
    restarts_s: tuple[float, ...]
    start_s: float
    never_ready: frozenset[Role]

    @property
    def length_s(self):
        return PIECE_S * len(self.kv)


@st.composite
def scripts(draw):
    """Return scripts of a few minutes."""
    pieces = draw(st.integers(3, 6))

    def row(*values):
        return tuple(draw(st.lists(st.sampled_from(values), min_size=pieces, max_size=pieces)))

    # Between two ticks, so that no tick is lost.
    restarts = draw(st.lists(st.integers(1, int(PIECE_S) * pieces - 1), max_size=4, unique=True))
    return _Script(
        mode=draw(st.sampled_from([Mode.LOAD, Mode.ADAPTIVE, Mode.SLA])),
        is_aggregated=draw(st.booleans()),
        kv=row(0.95, 0.95, 0.6, 0.1, None),
        queue=row(0.0, 0.3, 9.0),
        demand=row(None, 0.5, 8.0),
        is_refusing=row(False, False, True),
        is_away=row(False, False, False, True),
        restarts_s=tuple(sorted(at_s + 0.5 for at_s in restarts)),
        start_s=draw(st.sampled_from([3.0, 20.0])),
        never_ready=draw(st.sampled_from([frozenset(), frozenset({P}), frozenset({D, A})])),
    )


@dataclass
class _Backend:
    """Pools whose replicas start and drain, and their load, as functions of time; one for each driver."""

    script: _Script
    calls: list = field(default_factory=list)

    def __post_init__(self):
        roles = (A,) if self.script.is_aggregated else (P, D)
        self.ready_at_s = {role: [0.0] for role in roles}
        self.gone_at_s = {role: [] for role in roles}

    def value(self, values, now_s):
        return values[min(len(values) - 1, int(now_s / PIECE_S))]

    def is_away(self, now_s):
        return now_s % PIECE_S < AWAY_S and self.value(self.script.is_away, now_s)

    def pools(self, now_s):
        return {
            role: PoolCounts(
                ready=sum(at_s <= now_s for at_s in starts),
                starting=sum(at_s > now_s for at_s in starts),
                draining=sum(at_s > now_s for at_s in self.gone_at_s[role]),
                gpus=1,
            )
            for role, starts in self.ready_at_s.items()
        }

    def is_adjusting(self, now_s):
        return any(pool.starting or pool.draining for pool in self.pools(now_s).values())

    def scale(self, role, replicas, now_s):
        is_refused = self.value(self.script.is_refusing, now_s)
        self.calls.append((now_s, role, replicas, not is_refused))
        if is_refused:
            return "refused"
        starts = self.ready_at_s[role]
        takes_s = float("inf") if role in self.script.never_ready else self.script.start_s
        starts += [now_s + takes_s] * (replicas - len(starts))
        while len(starts) > replicas:
            last_s = max(starts)
            starts.remove(last_s)
            if last_s <= now_s:
                self.gone_at_s[role].append(now_s + DRAIN_S)
        return None

    def kv(self, now_s):
        role = A if self.script.is_aggregated else D
        value = self.value(self.script.kv, now_s)
        return {f"{role.value}-{index}": value for index in range(self.pools(now_s)[role].ready)}

    def waiting(self, now_s):
        return None if self.script.is_aggregated else self.value(self.script.queue, now_s)

    def demand(self, now_s):
        rps = self.value(self.script.demand, now_s)
        if rps is None:
            return None
        waiting = self.value(self.script.queue, now_s)
        return Demand(
            period_s=PULL_S,
            arrivals=rps,
            prompt_tokens=8000 * rps,
            uncached_tokens=8000 * rps,
            prefilled_tokens=8000 * min(rps, 2.0),
            waiting=waiting,
            waiting_tokens=8000 * waiting,
            oldest_wait_s=3.0 if waiting else None,
            prefilling_workers=1.0,
        )


@dataclass
class _LiveAdapters:
    """Clock, target, source and observer of one live loop on a backend."""

    backend: _Backend
    at_s: float = 0.0
    ticks: list = field(default_factory=list)
    decisions: list = field(default_factory=list)
    counts_demand: bool = True
    name: str = "simulator"

    def now_s(self):
        return self.at_s

    def wall_s(self):
        return self.at_s

    def to_simulated_s(self, real_s):
        return real_s

    async def observe(self):
        if self.backend.is_away(self.at_s):
            raise ClusterError("away")
        pools = self.backend.pools(self.at_s)
        endpoints = tuple(
            Endpoint(f"{role.value}-{index}", role, "http://127.0.0.1")
            for role, pool in pools.items()
            for index in range(pool.ready)
        )
        return TargetState(pools, self.backend.is_adjusting(self.at_s), endpoints)

    async def scale(self, role, replicas, *, decision_id):
        if self.backend.scale(role, replicas, self.at_s):
            raise ClusterError("refused")

    async def read(self, query):
        def reading(value, upper=None):
            return assess(value, age_s=0.0, max_age_s=query.max_age_s, source=self.name, upper=upper)

        kv = {name: reading(value, 1.0) for name, value in self.backend.kv(self.at_s).items()}
        return Readings(kv, reading(self.backend.waiting(self.at_s)), demand=self.backend.demand(self.at_s))

    def tick(self, view):
        self.ticks.append(view.at_s)

    def decided(self, decision, view):
        self.decisions.append(decision)

    async def run_until(self, end_s, config, folder):
        """Let one process plan until a time."""
        stop = asyncio.Event()

        async def sleep_until(at_s, stop):
            if at_s > end_s:
                stop.set()
            else:
                self.at_s = max(self.at_s, at_s)

        self.sleep_until = sleep_until
        ledger = Ledger(folder / "ledger.jsonl")
        settings = PlannerSettings(config, DEADLINE_S, "test@1", max_age_s=MAX_AGE_S, about={})
        loop = PlannerLoop(
            settings, target=self, source=self, ledger=ledger, time=self, observers=Observers([self])
        )
        await loop.run(stop)
        ledger.close()
        self.at_s = max(self.at_s, end_s)


def drive_live(script, config, folder):
    """Return what the live loop decides, asks for and when it ticks."""
    live = _LiveAdapters(_Backend(script))
    for end_s in (*script.restarts_s, script.length_s):
        asyncio.run(live.run_until(end_s, config, folder))
    return live.decisions, live.backend.calls, live.ticks


def drive_virtual(script, config):
    """Return what the virtual planner decides, asks for and when it ticks."""
    backend, ticks = _Backend(script), []
    decisions = []
    planner = VirtualPlanner(config, decisions.append, deadline_s=DEADLINE_S)
    restarts = list(script.restarts_s)
    while (now_s := planner.next_s) <= script.length_s:
        while restarts and restarts[0] < now_s:
            planner.restart(restarts.pop(0))
        ticks.append(now_s)
        if backend.is_away(now_s):
            planner.skip_tick(now_s)
            continue
        seen = SimulatedObservation(
            pools=backend.pools(now_s),
            is_adjusting=backend.is_adjusting(now_s),
            kv=backend.kv(now_s),
            waiting=backend.waiting(now_s),
            age_s=0.0,
            demand=backend.demand(now_s),
        )
        planner.tick(
            now_s,
            seen,
            lambda asked, at_s=now_s: backend.scale(asked.change.role, asked.change.desired, at_s),
        )
    return decisions, backend.calls, ticks


def driven(script):
    """Return what both drivers make of a script, after checking that they agree."""
    config = DecideConfig(
        mode=script.mode,
        max_gpu_budget=6,
        metric_pulling_interval_s=PULL_S,
        itl_slo_s=0.02,
        performance=performance_of(Situation({}, steady(1.0))),
    )
    with tempfile.TemporaryDirectory() as folder:
        live = drive_live(script, config, Path(folder))
        assert replay(read_ledger(Path(folder))).differences == ()
    virtual = drive_virtual(script, config)
    for of_live, of_virtual in zip(live, virtual, strict=True):
        assert of_live == of_virtual
    return virtual


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(scripts())
def test_both_drivers_decide_the_same(script):
    """Readings, refused changes, an absent backend, late replicas and restarts: equal decisions, calls and ticks."""
    driven(script)


def test_a_script_reaches_scale_ups_refusals_and_roll_backs():
    """The property compares more than holds: load for minutes, with a role that never becomes ready."""
    script = _Script(
        mode=Mode.LOAD,
        is_aggregated=False,
        kv=(0.95, 0.95, 0.95, 0.6, 0.1, 0.1, 0.1),
        queue=(9.0,) * 7,
        demand=(None,) * 7,
        is_refusing=(True, False, False, False, False, False, False),
        is_away=(False,) * 7,
        restarts_s=(35.5, 70.5),
        start_s=3.0,
        never_ready=frozenset({P}),
    )
    decisions, calls, _ = driven(script)
    reasons = {role.reason for decision in decisions for role in decision.roles}
    assert {Reason.ABOVE_THRESHOLD, Reason.NEVER_READY, Reason.WITHDRAWAL_BACKOFF} <= reasons
    assert {is_taken for _, _, _, is_taken in calls} == {True, False}


def test_a_virtual_planner_starts_from_what_another_had_learnt():
    """And hands on what it knows, which at its start is the same."""
    config = DecideConfig(mode=Mode.ADAPTIVE)
    memory = {"adaptive": AdaptiveMemory(roles={Role.PREFILL: RoleMemory(startups_s=(77.0,))})}
    planner = VirtualPlanner(config, [].append, memory=memory)
    assert planner.learnt(0.0) == memory
    assert VirtualPlanner(config, [].append).learnt(0.0) == {}
