"""What a plan would measure and how long it takes, before anything starts; a time only where timing is known. Pure."""

from __future__ import annotations

from typing import Any

from penstock.engine import profiles
from penstock.profiler.measure import repeats
from penstock.profiler.plan import PREFILL_SPEED, WARM_SPEEDUP, PlannedEngine, ProfilePlan
from penstock.profiler.points import OUTPUT_TOKENS, Grid

_START_S = 4.0
"""Real seconds of starting and stopping one simulated worker. Chosen: half of it is Python's imports."""


def describe(plan: ProfilePlan) -> dict[str, Any]:
    """Return the plan as JSON; ``expected_s`` is real seconds, None where a real engine's times are to be found out.

    Raises:
        ConfigError: a request of the target's lengths does not fit.
    """
    engines = [_engine(plan, each) for each in plan.engines]
    times = [each["expected_s"] for each in engines]
    return {
        "dry_run": True,
        "note": plan.note,
        "expected_s": None if None in times else sum(times),
        "engines": engines,
    }


def _engine(plan: ProfilePlan, engine: PlannedEngine) -> dict[str, Any]:
    """Return what is measured of one engine; nothing where it must say first what its cache holds."""
    name = engine.profile
    kv_tokens = plan.config.kv_tokens
    if kv_tokens is None and name is not None:
        kv_tokens = profiles.load(name).kv_capacity_tokens
    grid = Grid([], {}, 0) if kv_tokens is None else plan.grid(kv_tokens)
    expected_s = None if name is None else _simulated_s(engine, name, grid)
    return {
        "gpus": engine.gpus,
        "name": engine.name,
        "conditions": engine.conditions,
        "prompt_tokens": grid.prompts,
        "in_flight_by_context": {str(context): counts for context, counts in grid.batches.items()},
        "expected_s": None if expected_s is None else round(expected_s),
    }


def _simulated_s(engine: PlannedEngine, name: str, grid: Grid) -> float:
    latency = profiles.load(name).latency()
    ttfts_s = [latency.prefill.ttft_s(tokens) for tokens in grid.prompts]
    prefill_s = sum(repeats(ttft_s) * ttft_s for ttft_s in ttfts_s)
    decode_s = 0.0
    for context, counts in grid.batches.items():
        fixed_s = latency.prefill.ttft_s(0)
        decode_s += max(counts) * (latency.prefill.ttft_s(context) - fixed_s) / WARM_SPEEDUP
        decode_s += sum(OUTPUT_TOKENS * latency.decode.step_s(count, count * context) for count in counts)
    return 2 * _START_S + prefill_s / PREFILL_SPEED + decode_s / engine.servers[-1].speed
