"""Builders of pulls and a world in virtual time: a backend whose replicas start and drain, and a load."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from penstock.api import Role
from penstock.core.errors import ClusterError
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, summarise
from penstock_planner.decide.demand.reading import Reading, assess, missing
from penstock_planner.decide.state import Learned
from penstock_planner.ledger import Ledger, read_ledger
from penstock_planner.loop import PlannerLoop
from penstock_planner.observers import Observer, Observers, PlannerView
from penstock_planner.sources.base import Buckets, Query, Readings
from penstock_planner.targets.base import Endpoint, TargetState

sys.path.insert(0, str(Path(__file__).parent))


class _Make:
    """Pulls and windows from plain numbers; None is an unknown value."""

    @staticmethod
    def reading(value: float | None, *, upper: float | None = None) -> Reading:
        return assess(value, age_s=0.0, max_age_s=10.0, source="test", upper=upper)

    @classmethod
    def pull(
        cls,
        at_s: float = 30.0,
        *,
        kv: list[float | None] | None = None,
        queue: float | None = 0.3,
        decode: PoolCounts | None = None,
        prefill: PoolCounts | None = None,
        aggregated: PoolCounts | None = None,
    ) -> Pull:
        kv = [0.7] if kv is None else kv
        if aggregated is not None:
            pools = {Role.AGGREGATED: aggregated}
        else:
            pools = {
                Role.PREFILL: prefill or PoolCounts(1, gpus=1),
                Role.DECODE: decode or PoolCounts(len(kv), gpus=1),
            }
        readings = {f"w{i}": cls.reading(value, upper=1.0) for i, value in enumerate(kv)}
        waiting = None if aggregated is not None else cls.reading(queue)
        return summarise(at_s, pools, kv=readings, queue=waiting)

    @classmethod
    def window(cls, *pulls: Pull) -> Window:
        return Window(0.0, pulls[-1].at_s if pulls else 30.0, pulls)

    @classmethod
    def steady(cls, **load) -> Window:
        """One interval of 30 equal pulls."""
        return cls.window(*(cls.pull(float(second), **load) for second in range(1, 31)))


@pytest.fixture(scope="session", name="make")
def _make() -> type[_Make]:
    return _Make


@dataclass
class _VirtualTime:
    """Time that passes only by sleeping."""

    at_s: float = 1000.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1.7e9 + self.at_s

    def to_simulated_s(self, real_s: float) -> float:
        return real_s

    async def sleep_until(self, at_s: float, stop: asyncio.Event) -> None:
        self.at_s = max(self.at_s, at_s)


class Kill(BaseException):
    """The process dies here."""


@dataclass
class _Killer:
    """Dies at the n-th step it is told of; counts all steps."""

    at: int | None = None
    steps: int = 0
    labels: list[str] = field(default_factory=list)

    def step(self, label: str) -> None:
        self.steps += 1
        self.labels.append(label)
        if self.steps == self.at:
            raise Kill(label)


@dataclass
class _Backend:
    """Replicas that take time to start and to drain; survives the planner's death.

    Attributes:
        time: Shared with the loop.
        replicas: Wanted ready + starting by role.
        start_s: How long a new replica takes; by default 12 s.
        drain_s: How long one takes to leave.
        never_ready: Roles whose new replicas never come up.
        gives_up_s: After this long the backend gives such a replica up.
        calls: Every accepted scale call (role, replicas, id), repeats left out.
    """

    time: _VirtualTime
    killer: _Killer
    replicas: dict[Role, int] = field(default_factory=lambda: {Role.PREFILL: 1, Role.DECODE: 1})
    start_s: float = 12.0
    drain_s: float = 7.0
    gpus: int = 1
    never_ready: frozenset[Role] = frozenset()
    gives_up_s: float = float("inf")
    calls: list[tuple[Role, int, str]] = field(default_factory=list)
    fails: bool = False
    refuses: bool = False
    starting: dict[Role, list[float]] = field(default_factory=dict)
    draining: dict[Role, list[float]] = field(default_factory=dict)
    switching: dict[Role, list[float]] = field(default_factory=dict)
    failed: dict[Role, list[str]] = field(default_factory=dict)
    seen_gpus: list[int] = field(default_factory=list)

    def _pool(self, role: Role) -> PoolCounts:
        now_s = self.time.now_s()
        starting = self.starting.setdefault(role, [])
        if role in self.never_ready:
            for begun_s in [s for s in starting if now_s >= s + self.gives_up_s]:
                starting.remove(begun_s)
                self.replicas[role] -= 1
                self.failed.setdefault(role, []).append("exited with code 1 five times: no CUDA device")
        else:
            starting[:] = [s for s in starting if now_s < s + self.start_s]
        draining = self.draining.setdefault(role, [])
        draining[:] = [s for s in draining if now_s < s + self.drain_s]
        switching = self.switching.setdefault(role, [])
        switching[:] = [s for s in switching if now_s < s + self.drain_s]
        coming = len(starting) + len(switching)
        ready = self.replicas[role] - coming
        return PoolCounts(ready, coming, len(draining), self.gpus, len(switching))

    async def observe(self) -> TargetState:
        self.killer.step("observe")
        if self.fails:
            raise ClusterError("statefile: cannot be read")
        pools = {role: self._pool(role) for role in self.replicas}
        self.seen_gpus.append(sum((p.ready + p.starting + p.draining) * self.gpus for p in pools.values()))
        adjusting = any(pool.starting or pool.draining for pool in pools.values())
        endpoints = tuple(
            Endpoint(f"{role.value}_{index}", role, f"http://127.0.0.1:{index}")
            for role, pool in pools.items()
            for index in range(pool.ready)
        )
        failures = {role: failed[-1] for role, failed in self.failed.items()}
        return TargetState(pools, adjusting, endpoints, failures=failures)

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        self.killer.step("scale: before")
        if self.refuses:
            raise ClusterError("the arbiter does not answer")
        change = replicas - self.replicas[role]
        if change:
            self.calls.append((role, replicas, decision_id))
        for _ in range(change):
            self.starting.setdefault(role, []).append(self.time.now_s())
        for _ in range(-change):
            if self.starting.get(role):
                self.starting[role].pop()
            else:
                self.draining.setdefault(role, []).append(self.time.now_s())
        self.replicas[role] = replicas
        self.killer.step("scale: after")

    async def switch(
        self, giver: Role, taker: Role, *, replicas: Mapping[Role, int], decision_id: str
    ) -> None:
        self.killer.step("switch: before")
        if self.refuses:
            raise ClusterError("the arbiter does not answer")
        count = min(self.replicas[giver] - replicas[giver], replicas[taker] - self.replicas[taker])
        if count > 0:
            self.calls.append((taker, replicas[taker], decision_id))
            self.replicas[giver] -= count
            self.replicas[taker] += count
            self.switching.setdefault(taker, []).extend([self.time.now_s()] * count)
        self.killer.step("switch: after")


@dataclass
class _Load:
    """KV usage and prefill queue as functions of time and ready workers."""

    time: _VirtualTime
    killer: _Killer
    kv: Callable[[float, int], float | None] = lambda _now, _workers: 0.7
    queue: Callable[[float, int], float | None] = lambda _now, _workers: 0.3
    demand: Callable[[float], Demand | None] = lambda _now: None
    name: str = "load"

    async def read(self, query: Query) -> Readings:
        self.killer.step("read: before")
        now_s = self.time.now_s()
        workers = query.kv_workers
        readings = {
            w.name: assess(
                self.kv(now_s, len(workers)), age_s=0.0, max_age_s=query.max_age_s, source="load", upper=1.0
            )
            for w in workers
        }
        waiting = self.queue(now_s, len(query.prefill_workers))
        queue = (
            missing("no answer", source="load")
            if waiting is None
            else assess(waiting, age_s=0.0, max_age_s=query.max_age_s, source="load")
        )
        self.killer.step("read: after")
        return Readings(readings, queue, demand=self.demand(now_s))


@dataclass
class _Watcher:
    """Keeps what the loop shows."""

    views: list[PlannerView] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def tick(self, view: PlannerView) -> None:
        self.views.append(view)

    def decided(self, decision: Decision, view: PlannerView) -> None:
        self.decisions.append(decision)


class _World:
    """A backend, a load and a planner's folder; planners come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = _VirtualTime()
        self.killer = _Killer()
        self.backend = _Backend(self.time, self.killer)
        self.load = _Load(self.time, self.killer)
        self.watcher = _Watcher()
        self.config = DecideConfig()
        self.deadline_s = 600.0
        self.timeline = "test@1"
        self.rotate_bytes: int | None = None
        self.ledger = Ledger(folder / "ledger.jsonl")

    def planner(self, *, first_sequence: int = 0, memory: Learned | None = None) -> PlannerLoop:
        """Return a new planner process."""
        self.ledger.close()
        self.ledger = Ledger(self.folder / "ledger.jsonl", rotate_bytes=self.rotate_bytes)
        about = {"speed": 1.0, "served_model_name": "llama"}
        settings = PlannerSettings(
            self.config,
            self.deadline_s,
            self.timeline,
            memory=memory or {},
            max_age_s=10.0,
            about=about,
            first_sequence=first_sequence,
        )
        return PlannerLoop(
            settings,
            target=self.backend,
            source=self.load,
            ledger=self.ledger,
            time=self.time,
            observers=Observers([self.watcher]),
        )

    def records(self, kind: str) -> list[dict]:
        """Return the ledger's records of a type."""
        return [record for record in read_ledger(self.folder).records if record["type"] == kind]

    def watch(self, observer: Observer) -> None:
        """Show the loop to this observer only."""
        self.watcher.tick, self.watcher.decided = observer.tick, observer.decided

    def measure_latency(self, latency: Callable[[float], Mapping[str, Buckets]]) -> None:
        """Let the source read these histograms, by seconds since the start."""
        read = self.load.read

        async def with_latency(query):
            return replace(await read(query), latency=latency(self.time.at_s - 1000))

        self.load.read = with_latency

    def edit_at(self, at_s: float, role: Role, replicas: int) -> None:
        """Let somebody else set a role's replicas, at seconds since the start."""
        observe = self.backend.observe

        async def edited():
            if self.time.at_s != 1000 + at_s:
                return await observe()
            self.backend.replicas[role], self.backend.starting[role] = replicas, []
            return replace(await observe(), edited=frozenset({role}))

        self.backend.observe = edited

    async def run_until(self, at_s: float, planner: PlannerLoop | None = None) -> None:
        """Let one planner work until virtual time ``at_s`` after the start at 1000."""
        stop = asyncio.Event()
        world_time, end_s = self.time, 1000.0 + at_s
        sleep = world_time.sleep_until

        async def sleep_until(due_s: float, stopping: asyncio.Event) -> None:
            if due_s > end_s:
                stopping.set()
                return
            self.killer.step("sleep")
            await sleep(due_s, stopping)

        world_time.sleep_until = sleep_until  # type: ignore[method-assign]
        try:
            await (planner or self.planner()).run(stop)
        finally:
            del world_time.sleep_until
            self.ledger.close()


@pytest.fixture(name="world")
def _world(tmp_path) -> _World:
    made = _World(tmp_path)
    yield made
    made.ledger.close()


@pytest.fixture(name="new_world")
def _new_world(tmp_path_factory) -> Callable[[], _World]:
    return lambda: _World(tmp_path_factory.mktemp("world"))


@pytest.fixture(name="kill_type")
def _kill_type() -> type[Kill]:
    return Kill
