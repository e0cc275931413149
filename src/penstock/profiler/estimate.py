"""What a plan would measure and how long it takes, before anything starts; a time only where timing is known. Pure."""

from __future__ import annotations

from typing import Any

from penstock.engine import profiles
from penstock.profiler import points
from penstock.profiler.measure import repeats
from penstock.profiler.plan import WARM_SPEEDUP, Candidate, PlannedEngine, ProfilePlan

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
        "notes": list(plan.notes),
        "expected_s": None if None in times else sum(times),
        "engines": engines,
    }


def _engine(plan: ProfilePlan, engine: PlannedEngine) -> dict[str, Any]:
    """Return what is measured of one engine; nothing where it must say first what its cache holds."""
    name = engine.candidate.profile if engine.candidate is not None else None
    kv_tokens = plan.config.kv_tokens
    if kv_tokens is None and name is not None:
        kv_tokens = profiles.load(name).kv_capacity_tokens
    prompts: list[int] = []
    batches: dict[int, list[int]] = {}
    if kv_tokens is not None:
        limits, targets = plan.limits(kv_tokens), plan.config.targets
        prompts = points.prompt_lengths(targets, limits)
        batches = {
            context: points.batch_sizes(points.most_in_flight(context, limits))
            for context in points.contexts(targets, limits)
        }
    expected_s = _simulated_s(engine.candidate, name, prompts, batches) if name and engine.candidate else None
    return {
        "gpus": engine.gpus,
        "name": engine.name,
        "conditions": engine.conditions,
        "prompt_tokens": prompts,
        "in_flight_by_context": {str(context): counts for context, counts in batches.items()},
        "expected_s": None if expected_s is None else round(expected_s),
    }


def _simulated_s(candidate: Candidate, name: str, prompts: list[int], batches: dict[int, list[int]]) -> float:
    latency = profiles.load(name).latency()
    ttfts_s = [latency.prefill.ttft_s(tokens) for tokens in prompts]
    prefill_s = sum(repeats(ttft_s) * ttft_s for ttft_s in ttfts_s)
    decode_s = 0.0
    for context, counts in batches.items():
        fixed_s = latency.prefill.ttft_s(0)
        decode_s += max(counts) * (latency.prefill.ttft_s(context) - fixed_s) / WARM_SPEEDUP
        decode_s += sum(
            points.OUTPUT_TOKENS * latency.decode.step_s(count, count * context) for count in counts
        )
    return 2 * _START_S + prefill_s / candidate.prefill.speed + decode_s / candidate.decode.speed
