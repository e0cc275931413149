"""Prints what one decision costs: `decide()` over an interval of 30 pulls in every mode, and summarising one pull.

Run: python bench/planner_decide.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.api import Role
from penstock.engine.profiles.performance import EngineSpeed, performance_of
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, summarise
from penstock_planner.decide.demand.reading import assess
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.policy import policy_names, policy_of
from penstock_planner.decide.state import PlannerState

ROUNDS = 300
HOUR_S = 3600
BUDGET_US = 200.0
"""Of mode ``load``."""
ANY_MODE_BUDGET_US = 5000.0
"""Of every mode, with 100 workers."""


def observed(at_s: float, workers: int) -> Callable[[], Pull]:
    """Return what sums up one pull of half prefill and half decode workers, all fresh."""
    half = workers // 2
    return partial(
        summarise,
        at_s,
        {Role.PREFILL: PoolCounts(half, gpus=1), Role.DECODE: PoolCounts(half, gpus=1)},
        kv={
            f"llama_decode_{i}": assess(
                0.5 + i / workers, age_s=0.4, max_age_s=10, source="router", upper=1.0
            )
            for i in range(half)
        },
        queue=assess(1000.0 + at_s, age_s=0.4, max_age_s=10, source="router"),
        demand=Demand(
            1.0, arrivals=50, prompt_tokens=4e5, uncached_tokens=4e5, prefilled_tokens=4e5, waiting=1000.0
        ),
    )


def cpu_us(call: Callable[[], object]) -> float:
    """Return the CPU time of one call in microseconds."""
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start) / 1000


def median_us(call: Callable[[], object]) -> float:
    """Return the median CPU time of one call in microseconds."""
    return statistics.median(cpu_us(call) for _ in range(ROUNDS))


def hour_us(config: DecideConfig) -> list[float]:
    """Return what each decision of an hour costs, one every 2 s as mode adaptive takes them, each from the state before it."""
    state, samples = PlannerState(), []
    for number in range(HOUR_S // 2):
        start_s = 2.0 * number
        pulls = tuple(observed(start_s + each, 100)() for each in (1.0, 2.0))
        window = Window(start_s, start_s + 2.0, pulls)
        taken: list[PlannerState] = []
        samples.append(cpu_us(lambda: taken.append(decide(window, state, config)[1])))  # noqa: B023 - called here
        state = taken[0]
    return samples


def main() -> None:
    """Print one line per fleet size."""
    print(f"{'workers':>8} {'decide us':>10} {'summarise us':>13}   (decide budget {BUDGET_US:g} us)")
    config = DecideConfig(max_gpu_budget=None)
    for workers in (2, 8, 100, 1000):
        pulls = [observed(float(i), workers) for i in range(1, 31)]
        window = Window(0.0, 30.0, tuple(pull() for pull in pulls))
        decide_us = median_us(lambda window=window: decide(window, PlannerState(), config))
        summarise_us = median_us(pulls[0])
        print(f"{workers:>8} {decide_us:>10.1f} {summarise_us:>13.1f}")
    print(
        f"\n{'mode, 100 workers':>18} {'decide us':>10} {'an hour: median':>16} {'p99':>9}   (budget {ANY_MODE_BUDGET_US:g} us)"
    )
    pulls = [observed(float(i), 100) for i in range(1, 31)]
    window = Window(0.0, 30.0, tuple(pull() for pull in pulls))
    for mode in policy_names():
        if policy_of(mode).needs_profile and mode != Mode.SLA:
            continue
        chosen = config.in_mode(mode)
        if mode == Mode.SLA:
            engine = EngineSpeed("a100-llama-8b-bf16-tp1")
            chosen = replace(chosen, itl_slo_s=0.05, performance=performance_of(engine, engine))
        _, state = decide(window, PlannerState(), chosen)
        decide_us = median_us(lambda state=state, chosen=chosen: decide(window, state, chosen))
        hour = hour_us(chosen)
        p99_us = statistics.quantiles(hour, n=100)[98]
        print(f"{mode:>18} {decide_us:>10.1f} {statistics.median(hour):>16.1f} {p99_us:>9.1f}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
