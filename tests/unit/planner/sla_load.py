"""An engine in figures, a load on it, and what mode sla decides under that load."""

from __future__ import annotations

from penstock.api import Role
from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Window, summarise
from penstock_planner.decide.demand.reading import assess
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState

SPEED = 10_000.0
"""Prompt tokens/s of one engine in these tests."""
KV_TOKENS = 100_000.0


def itl_s_of(batch):
    """Return the ITL of a batch: 10 ms + 0.5 ms per request."""
    return 0.010 + 0.0005 * batch


def profile_of(speed=1.0):
    """Return an engine of 10,000 prompt tokens/s and an ITL of 10 ms + 0.5 ms per request, times ``speed``."""
    usage = tuple(percent / 100 for percent in range(1, 101))
    contexts = (100.0, 1050.0, 20_000.0)
    batches = [[max(1.0, share * KV_TOKENS / context) for share in usage] for context in contexts]
    return PerformanceProfile(
        PrefillTable((100.0, 20_000.0), (100 / SPEED / speed, 20_000 / SPEED / speed)),
        DecodeTable(
            contexts,
            usage,
            tuple(tuple(itl_s_of(batch) / speed for batch in row) for row in batches),
            tuple(tuple(batch / itl_s_of(batch) * speed for batch in row) for row in batches),
            KV_TOKENS,
        ),
    )


FEW_POINTS = PerformanceProfile(
    PrefillTable((100.0, 100_000.0), (0.01, 10.0)),
    DecodeTable((8000.0,), (0.1, 1.0), ((0.01, 0.02),), ((100.0, 900.0),), 100_000.0),
)
"""The smallest profile of an engine of 10,000 prompt tokens/s."""

CONFIG = DecideConfig(
    mode=Mode.SLA,
    adjustment_interval_s=5.0,
    max_gpu_budget=64,
    ttft_slo_s=1.0,
    itl_slo_s=0.020,
    performance=profile_of(),
)


ADAPTIVE = DecideConfig(mode=Mode.ADAPTIVE, adjustment_interval_s=5.0, max_gpu_budget=8, ttft_slo_s=5.0)

SERVED = {
    "rate": 0.8,
    "isl": 2000.0,
    "prefilling_workers": 1.0,
    "prefilled_tokens": 1600.0,
    "ttft_sum_s": 0.4,
    "ttft_late": 0.0,
    "in_flight": {Role.PREFILL: 1.0, Role.DECODE: 4.0},
    "in_flight_tokens": 2000.0,
}
"""A load of which workers of 2,000 prompt tokens/s serve every request at once."""

NO_LOAD = {
    **SERVED,
    **dict.fromkeys(
        ("rate", "prefilling_workers", "prefilled_tokens", "ttft_sum_s", "in_flight_tokens"), 0.0
    ),
    "in_flight": {Role.PREFILL: 0.0, Role.DECODE: 0.0},
}
"""The same without a request."""


def pull_of(
    at_s, *, prefill=2, decode=2, rate=4.0, isl=1000.0, speed=1.0, itl_s=None, kv=0.1, inside=0.0, **demand
):
    """Return one second's pull: ``rate`` requests/s of ``isl`` and 100 tokens, served as the profile says."""
    busy = min(prefill, rate * isl / SPEED / speed)
    running = demand.pop("running", rate * 100 * 0.012)
    seen = Demand(
        **{
            "period_s": 1.0,
            "arrivals": rate,
            "prompt_tokens": rate * isl,
            "uncached_tokens": rate * isl,
            "prefilled_tokens": busy * SPEED * speed,
            "prefilling_workers": busy,
            "completed": rate,
            "output_tokens": rate * 100,
            "ttft_count": rate,
            "ttft_sum_s": rate * isl / SPEED / speed,
            "itl_count": rate * 100,
            "itl_sum_s": rate * 100 * (itl_s or itl_s_of(max(1.0, running / decode))),
            "in_flight": {Role.DECODE: running},
            **demand,
        }
    )
    usage = {f"d{i}": assess(kv, age_s=0, max_age_s=10, source="t", upper=1.0) for i in range(decode)}
    waits = {name: assess(inside, age_s=0, max_age_s=10, source="t") for name in usage}
    pools = {Role.PREFILL: PoolCounts(prefill, gpus=1), Role.DECODE: PoolCounts(decode, gpus=1)}
    queue = assess(seen.waiting, age_s=0, max_age_s=10, source="t")
    return summarise(at_s, pools, kv=usage, queue=queue, demand=seen, worker_waiting=waits)


def decided_after(seconds, state=None, *, start_s=0, config=CONFIG, pull=pull_of, **load):
    """Decide every 5 s under one load; return the last decision by role, and the state."""
    state = state or PlannerState()
    for end in range(start_s + 5, start_s + seconds + 1, 5):
        pulls = tuple(pull(float(s), **load) for s in range(end - 4, end + 1))
        decision, state = decide(Window(end - 5.0, float(end), pulls), state, config)
    return {role.role: role for role in decision.roles}, state


def step_of(decided, name):
    """Return a decided role's step."""
    return next(step for step in decided.steps if step.name == name)
