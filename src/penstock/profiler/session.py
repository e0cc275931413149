"""Runs a plan: starts each engine in turn, measures what the journal lacks, and returns every point."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.core.errors import ConfigError, ObservationError, SaturatedError, UpstreamError
from penstock.core.exposition import parse_samples
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.metric_names import VLLM_CACHE_CONFIG_INFO
from penstock.performance.sweep import Sweep
from penstock.profiler import points
from penstock.profiler.journal import Journal
from penstock.profiler.measure import Measurer
from penstock.profiler.plan import PlannedEngine, ProfilePlan, WorkerSetup
from penstock.profiler.points import Phase
from penstock.profiler.workers import running
from penstock.workload.exchange import SendSettings
from penstock.workload.probe import LagWatch, check_speed, find_model

_PAGE = Timeouts(connect_s=5.0, first_byte_s=10.0, idle_s=10.0, total_s=15.0)
_LATE = 0.1
"""Share of the shortest time measured that a process may run late. Chosen: what repeated measurements differ by."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far a profile is.

    Attributes:
        finished: Points.
        planned: Known points of all engines; refinements are added to them.
        doing: What is measured now.
    """

    finished: int
    planned: int
    doing: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run brought.

    Attributes:
        sweep: Every point, of earlier runs too.
        doubts: What makes points less certain, as text.
    """

    sweep: Sweep
    doubts: tuple[str, ...]


async def run_profile(plan: ProfilePlan, on_step: Callable[[Step], None]) -> Measured:
    """Measure what a plan's folder lacks, and return all of it.

    Raises:
        ConfigError: the folder holds points measured under other conditions, or nothing can be written there.
        PenstockError: an engine does not start, fails or lies; finished points are kept.
    """
    journal = Journal(plan.config.output_dir)
    try:
        for engine in plan.engines:
            journal.begin(engine.gpus, engine.name, engine.conditions)
        session = _Session(plan, journal, on_step)
        for engine in plan.engines:
            await session.measure(engine)
        engines = tuple(journal.engine_sweep(engine.gpus) for engine in plan.engines)
        model = plan.model or session.model
        return Measured(Sweep(engines, model, plan.is_aggregated), tuple(session.doubts))
    finally:
        journal.close()


class _Session:
    def __init__(self, plan: ProfilePlan, journal: Journal, on_step: Callable[[Step], None]) -> None:
        self._plan = plan
        self._journal = journal
        self._on_step = on_step
        self._finished = 0
        self._planned: dict[tuple[int, Phase], int] = {}
        self.doubts: list[str] = []
        self.model = ""

    async def measure(self, engine: PlannedEngine) -> None:
        for setup, phases in engine.servers:
            if all(self._is_complete(engine.gpus, phase) for phase in phases):
                continue
            self._report(f"{engine.name}: starting")
            async with self._server(engine, setup) as url:
                await self._measure_server(engine, url, self._speed(setup), phases)

    async def _measure_server(
        self, engine: PlannedEngine, url: str, speed: float, phases: Sequence[Phase]
    ) -> None:
        config, pool = self._plan.config, ConnectionPool()
        try:
            wanted = config.model
            if config.graph is not None:
                wanted = config.graph.spec.served_name
            self.model = await find_model(pool, url, model=wanted, api_key=config.api_key)
            await check_speed(pool, url, speed=speed)
            kv_tokens = config.kv_tokens or await _kv_tokens(pool, url)
            sending = SendSettings(url, self.model, timeout_s=config.timeout_s, api_key=config.api_key)
            measurer = Measurer(sending, speed=speed, seed=int.from_bytes(os.urandom(6)))
            try:
                await measurer.calibrate()
                for phase in phases:
                    self._journal.set_kv_tokens(engine.gpus, phase, kv_tokens)
                    shortest_s = await self._phase(engine, phase, measurer)
                    self._check_lag(engine, phase, await _lag_s(pool, url), shortest_s)
            finally:
                await measurer.close()
        finally:
            await pool.close()

    async def _phase(self, engine: PlannedEngine, phase: Phase, measurer: Measurer) -> float:
        self._count(engine.gpus, phase)
        if phase is Phase.PREFILL:
            return await self._prefill(engine, measurer)
        return await self._decode(engine, measurer)

    async def _prefill(self, engine: PlannedEngine, measurer: Measurer) -> float:
        shortest_s = float("inf")
        for tokens in self._grid(engine.gpus, Phase.PREFILL).prompts:
            known = self._journal.prefill(engine.gpus, tokens)
            if known is None:
                self._report(f"{engine.name}: TTFT of {tokens:,} prompt tokens")
                known = await measurer.prefill(tokens)
                self._journal.set_prefill(engine.gpus, tokens, known)
            self._finished += 1
            shortest_s = min(shortest_s, known.ttft_s)
        return shortest_s

    async def _decode(self, engine: PlannedEngine, measurer: Measurer) -> float:
        grid = self._grid(engine.gpus, Phase.DECODE)
        for context, counts in grid.batches.items():
            await self._row(engine, context, counts, measurer)
            if context == grid.target:
                await self._refine(engine, context, measurer)
        rows = [self._journal.row(engine.gpus, context) for context in grid.batches]
        return min((point.itl_s for row in rows for point in row), default=float("inf"))

    async def _row(
        self, engine: PlannedEngine, context: int, counts: Sequence[int], measurer: Measurer
    ) -> None:
        missing = [count for count in counts if not self._journal.has_decode(engine.gpus, context, count)]
        self._finished += len(counts) - len(missing)
        if missing:
            self._report(f"{engine.name}: warming {max(missing)} prompts of {context:,} tokens")
            await measurer.warm(context, max(missing))
        # Descending: what a batch writes then displaces prompts of none that follows.
        for count in sorted(missing, reverse=True):
            await self._batch(engine, context, count, measurer)

    async def _refine(self, engine: PlannedEngine, context: int, measurer: Measurer) -> None:
        for refined in range(points.MAX_REFINEMENTS):
            row = self._journal.row(engine.gpus, context)
            count = points.refinement(row, self._plan.config.targets.itl_s)
            if count is None or self._journal.has_decode(engine.gpus, context, count):
                return
            if refined == 0:
                await measurer.warm(context, count)
            self._planned[engine.gpus, Phase.DECODE] += 1
            await self._batch(engine, context, count, measurer)

    async def _batch(self, engine: PlannedEngine, context: int, count: int, measurer: Measurer) -> None:
        self._report(f"{engine.name}: ITL of {count} requests of {context:,} tokens")
        batch = await measurer.decode(context, count)
        self.doubts += [f"{engine.name}: {context:,} tokens x {count}: {doubt}" for doubt in batch.doubts]
        self._journal.set_decode(engine.gpus, context, count, batch.point)
        self._finished += 1

    def _is_complete(self, gpus: int, phase: Phase) -> bool:
        if self._journal.kv_tokens(gpus, phase) is None:
            return False
        grid = self._grid(gpus, phase)
        if phase is Phase.PREFILL:
            return all(self._journal.prefill(gpus, tokens) is not None for tokens in grid.prompts)
        wanted = [(context, count) for context, counts in grid.batches.items() for count in counts]
        refined = points.refinement(self._journal.row(gpus, grid.target), self._plan.config.targets.itl_s)
        wanted += [] if refined is None else [(grid.target, refined)]
        return all(self._journal.has_decode(gpus, *each) for each in wanted)

    def _grid(self, gpus: int, phase: Phase) -> points.Grid:
        return self._plan.grid(self._journal.kv_tokens(gpus, phase) or 0)

    def _count(self, gpus: int, phase: Phase) -> None:
        grid = self._grid(gpus, phase)
        counts = (len(each) for each in grid.batches.values())
        self._planned[gpus, phase] = len(grid.prompts) if phase is Phase.PREFILL else sum(counts)

    def _report(self, doing: str) -> None:
        known = self._planned.values()
        assumed = points.PREFILL_POINTS + points.CONTEXTS * points.BATCHES
        started = {gpus for gpus, _ in self._planned}
        rest = sum(assumed for engine in self._plan.engines if engine.gpus not in started)
        self._on_step(Step(self._finished, sum(known) + rest, doing))

    def _speed(self, setup: WorkerSetup | None) -> float:
        return setup.speed if setup is not None else self._plan.config.speed or 1.0

    @asynccontextmanager
    async def _server(self, engine: PlannedEngine, setup: WorkerSetup | None) -> AsyncIterator[str]:
        if setup is None:
            assert self._plan.config.endpoint is not None  # noqa: S101 - the plan's
            yield self._plan.config.endpoint.rstrip("/")
            return
        async with running(setup, engine.gpus, self._plan.config.output_dir, os.environ) as url:
            yield url

    def _check_lag(self, engine: PlannedEngine, phase: Phase, lag_s: float, shortest_s: float) -> None:
        if lag_s > _LATE * shortest_s:
            self.doubts.append(
                f"{engine.name}: the engine ran up to {lag_s * 1000:.1f} ms late (p99, simulated) while {phase.value} was"
                f" measured, more than {_LATE:.0%} of its shortest time, {shortest_s * 1000:.1f} ms; quieten the machine,"
                " or lower --speed, and measure into another folder"
            )


async def _kv_tokens(pool: ConnectionPool, url: str) -> int:
    """Return the KV cache that an engine states on its metrics page, as vLLM does."""
    try:
        page = await pool.request("GET", f"{url}/metrics", timeouts=_PAGE)
        samples = parse_samples(page.body.decode("utf-8", "replace"), [VLLM_CACHE_CONFIG_INFO])
        sizes = [int(each.labels["num_gpu_blocks"]) * int(each.labels["block_size"]) for each in samples]
    except (UpstreamError, SaturatedError, ObservationError, KeyError, ValueError):
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"--kv-tokens: {url}/metrics does not say how many tokens the engine's cache holds"
            f" ({VLLM_CACHE_CONFIG_INFO}); give the number, from the engine's log"
        )
    return sum(sizes)


async def _lag_s(pool: ConnectionPool, url: str) -> float:
    watch = LagWatch(pool, url)
    await watch.poll()
    return max((each.p99_s for each in watch.worst), default=0.0)
