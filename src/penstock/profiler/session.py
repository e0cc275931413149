"""Runs a plan: starts each engine in turn, measures what the journal lacks, and returns every point."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.core.http.client import ConnectionPool
from penstock.core.metric_names import VLLM_CACHE_CONFIG_INFO
from penstock.performance.sweep import Sweep
from penstock.profiler import points
from penstock.profiler.journal import Cache, Decode, EnginePoints, Journal, Prefill
from penstock.profiler.measure import Measurer, PointSource
from penstock.profiler.plan import PlannedEngine, ProfilePlan, Server
from penstock.profiler.points import Grid
from penstock.profiler.simulated import SimulatedMeasurer
from penstock.profiler.workers import running
from penstock.workload.exchange import Destination
from penstock.workload.probe import LagWatch, ServerPages, check_speed, find_model

_LATE = 0.1
"""Share of the shortest time measured that a process may run late. Chosen: what repeated measurements differ by."""
_ASSUMED = points.PREFILL_POINTS + points.CONTEXTS * points.BATCHES
"""Points of an engine whose KV cache is not known yet."""


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """How far a profile is.

    Attributes:
        finished: Points, those of earlier runs included.
        planned: Points of all engines as far as they are known.
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


async def run_profile(plan: ProfilePlan, on_step: Callable[[ProfileProgress], None]) -> Measured:
    """Measure what a plan's folder lacks, and return all of it.

    Raises:
        ConfigError: the folder holds points measured under other conditions, or nothing can be written there.
        PenstockError: an engine does not start, fails or lies; finished points are kept.
    """
    journal = Journal(plan.config.output_dir)
    for engine in plan.engines:
        journal.begin(engine.gpus, engine.name, engine.conditions)
    session = _Session(plan, journal, on_step)
    for engine in plan.engines:
        for server in engine.servers:
            await session.measure(engine, server)
    engines = tuple(
        replace(journal.engines[engine.gpus].sweep(engine.gpus), transfer=engine.transfer)
        for engine in plan.engines
    )
    return Measured(Sweep(engines, plan.model or session.model, plan.is_aggregated), tuple(session.doubts))


class _Session:
    def __init__(
        self, plan: ProfilePlan, journal: Journal, on_step: Callable[[ProfileProgress], None]
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._journal = journal
        self._on_step = on_step
        self.doubts: list[str] = []
        self.model = ""

    async def measure(self, engine: PlannedEngine, server: Server) -> None:
        """Measure what is missing of one server's phases; it is not started where nothing is."""
        if all(self._is_complete(engine.gpus, phase) for phase in server.phases):
            return
        if server.simulated is not None:
            for phase in server.phases:
                kv_tokens = server.simulated.engine.longest_tokens()
                await self._phase(engine, phase, SimulatedMeasurer(server.simulated), kv_tokens)
            return
        self._report(f"{engine.name}: starting")
        config = self._config
        async with self._running(engine, server) as url, AsyncExitStack() as stack:
            pool = ConnectionPool()
            stack.push_async_callback(pool.close)
            wanted = config.model if config.graph is None else config.graph.spec.served_name
            destination = Destination(url, wanted, timeout_s=config.timeout_s, api_key=config.api_key)
            destination = await find_model(pool, destination)
            await check_speed(pool, destination, speed=server.speed)
            self.model = destination.model or ""
            kv_tokens = config.kv_tokens or await _kv_tokens(pool, url)
            measurer = Measurer(pool, destination, speed=server.speed, seed=int.from_bytes(os.urandom(6)))
            await measurer.calibrate()
            for phase in server.phases:
                shortest_s = await self._phase(engine, phase, measurer, kv_tokens)
                self._check_lag(engine, phase, await _lag_s(pool, url), shortest_s)

    async def _phase(
        self, engine: PlannedEngine, phase: Role, source: PointSource, kv_tokens: float
    ) -> float:
        """Measure what is missing of a phase, and return the shortest time of all."""
        self._journal.keep(Cache(engine.gpus, phase, kv_tokens))
        measure = self._prefill if phase is Role.PREFILL else self._decode
        return await measure(engine, self._plan.grid(kv_tokens), source)

    async def _prefill(self, engine: PlannedEngine, grid: Grid, measurer: PointSource) -> float:
        """Measure the missing TTFTs, and return the shortest of all."""
        known = self._journal.engines[engine.gpus].prefill
        for tokens in grid.prompts:
            if tokens not in known:
                self._report(f"{engine.name}: TTFT of {tokens:,} prompt tokens")
                point = await measurer.prefill(tokens)
                self._journal.keep(Prefill(engine.gpus, tokens, point.prompt_tokens, point.ttft_s))
        return min(known[tokens].ttft_s for tokens in grid.prompts)

    async def _decode(self, engine: PlannedEngine, grid: Grid, measurer: PointSource) -> float:
        """Measure the missing batches and those that the target is refined by, and return the shortest ITL of all."""
        known = self._journal.engines[engine.gpus]
        for context, counts in grid.batches.items():
            missing = [count for count in counts if (context, count) not in known.decode]
            if missing:
                self._report(f"{engine.name}: warming {max(missing)} prompts of {context:,} tokens")
                await measurer.warm(context, max(missing))
            # Descending: what a batch writes then displaces prompts of none that follows.
            for count in sorted(missing, reverse=True):
                await self._batch(engine, context, count, measurer)
            if context == grid.target:
                while (refined := self._refinement(known, grid)) is not None:
                    await measurer.warm(context, refined)
                    await self._batch(engine, context, refined, measurer)
        rows = (known.row(context) for context in grid.batches)
        return min((point.itl_s for row in rows for point in row), default=float("inf"))

    async def _batch(self, engine: PlannedEngine, context: int, count: int, measurer: PointSource) -> None:
        self._report(f"{engine.name}: ITL of {count} requests of {context:,} tokens")
        point, doubts = await measurer.decode(context, count)
        self.doubts += [f"{engine.name}: {context:,} tokens x {count}: {doubt}" for doubt in doubts]
        figures = (None, None) if point is None else (point.itl_s, point.tokens_per_s)
        self._journal.keep(Decode(engine.gpus, context, count, *figures))

    def _refinement(self, known: EnginePoints, grid: Grid) -> int | None:
        """Return the next batch that the target is refined by; None: it is close enough."""
        count = points.refinement(known.row(grid.target), self._config.targets.itl_s)
        return None if (grid.target, count) in known.decode else count

    def _is_complete(self, gpus: int, phase: Role) -> bool:
        known = self._journal.engines[gpus]
        if phase not in known.kv_tokens:
            return False
        grid = self._plan.grid(known.kv_tokens[phase])
        if phase is Role.PREFILL:
            return known.prefill.keys() >= set(grid.prompts)
        batches = {(context, count) for context, counts in grid.batches.items() for count in counts}
        return known.decode.keys() >= batches and self._refinement(known, grid) is None

    def _report(self, doing: str) -> None:
        known = [self._journal.engines[engine.gpus] for engine in self._plan.engines]
        finished = sum(len(each.prefill) + len(each.decode) for each in known)
        planned = sum(
            self._plan.grid(each.kv_tokens[Role.DECODE]).count if Role.DECODE in each.kv_tokens else _ASSUMED
            for each in known
        )
        self._on_step(ProfileProgress(finished, max(finished, planned), doing))

    @asynccontextmanager
    async def _running(self, engine: PlannedEngine, server: Server) -> AsyncIterator[str]:
        if server.process is None:
            assert self._config.endpoint is not None  # noqa: S101 - the plan's
            yield self._config.endpoint.rstrip("/")
            return
        async with running(server.process, engine.gpus, self._config.output_dir, os.environ) as url:
            yield url

    def _check_lag(self, engine: PlannedEngine, phase: Role, lag_s: float, shortest_s: float) -> None:
        if lag_s > _LATE * shortest_s:
            self.doubts.append(
                f"{engine.name}: the engine ran up to {lag_s * 1000:.1f} ms late (p99, simulated) while {phase.value} was"
                f" measured, more than {_LATE:.0%} of its shortest time, {shortest_s * 1000:.1f} ms; quieten the machine,"
                " or lower --speed, and measure into another folder"
            )


async def _kv_tokens(pool: ConnectionPool, url: str) -> int:
    """Return the KV cache that an engine states on its metrics page, as vLLM does."""
    samples = await ServerPages(pool, url).samples(url, VLLM_CACHE_CONFIG_INFO)
    try:
        sizes = [int(each.labels["num_gpu_blocks"]) * int(each.labels["block_size"]) for each in samples]
    except (KeyError, ValueError):
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
