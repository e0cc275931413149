"""What a plan would measure and how long it takes, before anything starts; a time only where timing is known. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engine import profiles
from penstock.profiler import points
from penstock.profiler.candidates import WARM_SPEEDUP, Candidate
from penstock.profiler.measure import repeats
from penstock.profiler.plan import PlannedEngine, ProfilePlan

_START_S = 4.0
"""Real seconds of starting and stopping one simulated worker. Chosen: half of it is Python's imports."""


@dataclass(frozen=True, slots=True)
class EngineEstimate:
    """What is measured of one engine, as far as known before it starts.

    Attributes:
        prompts: Prompt lengths; empty: the engine must say first what its cache holds.
        batches: Requests in flight by context.
        expected_s: Real seconds; None: a real engine's times are what is to be found out.
    """

    engine: PlannedEngine
    prompts: tuple[int, ...]
    batches: dict[int, list[int]]
    expected_s: float | None


def estimates(plan: ProfilePlan) -> list[EngineEstimate]:
    """Return an estimate per engine.

    Raises:
        ConfigError: a request of the target's lengths does not fit.
    """
    return [_estimate(plan, engine) for engine in plan.engines]


def describe(plan: ProfilePlan) -> dict[str, Any]:
    """Return the plan as JSON."""
    found = estimates(plan)
    times = [each.expected_s for each in found]
    known = [each for each in times if each is not None]
    return {
        "dry_run": True,
        "notes": list(plan.notes),
        "expected_s": round(sum(known)) if len(known) == len(times) else None,
        "engines": [
            {
                "gpus": each.engine.gpus,
                "name": each.engine.name,
                "conditions": each.engine.conditions,
                "prompt_tokens": list(each.prompts),
                "in_flight_by_context": {str(context): counts for context, counts in each.batches.items()},
                "expected_s": None if each.expected_s is None else round(each.expected_s),
            }
            for each in found
        ],
    }


def _estimate(plan: ProfilePlan, engine: PlannedEngine) -> EngineEstimate:
    name = engine.candidate.profile if engine.candidate is not None else None
    kv_tokens = plan.config.kv_tokens
    if kv_tokens is None and name is not None:
        kv_tokens = profiles.load(name).kv_capacity_tokens
    if kv_tokens is None:
        return EngineEstimate(engine, (), {}, None)
    limits, targets = plan.limits(kv_tokens), plan.config.targets
    prompts = tuple(points.prompt_lengths(targets, limits))
    batches = {
        context: points.batch_sizes(points.most_in_flight(context, limits))
        for context in points.contexts(targets, limits)
    }
    expected_s = _simulated_s(engine.candidate, name, prompts, batches) if name and engine.candidate else None
    return EngineEstimate(engine, prompts, batches, expected_s)


def _simulated_s(
    candidate: Candidate, name: str, prompts: tuple[int, ...], batches: dict[int, list[int]]
) -> float:
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
