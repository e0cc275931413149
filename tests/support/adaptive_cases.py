"""Cases of the adaptive mode's rules, in which nothing is known but what a test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.api import Role
from penstock_planner.decide.capacity.observed import ObservedWorkers
from penstock_planner.decide.demand.load import WorkView
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.demand.trend import TrendForecast
from penstock_planner.decide.policies.adaptive.rules import Case


def work_of(rate: float, **changes: Any) -> WorkView:
    """Return a steady demand of uncached tokens/s, and workers that each compute 10,000."""
    steady = TrendForecast(rate, rate, 0.0)
    base = WorkView(
        tokens_per_s=10_000.0, rate=steady, level=steady, far_rate=rate, backlog_tokens=0.0, sizes=(100.0,)
    )
    return replace(base, **changes)


def case_of(role: Role, replicas: int, **changes: Any) -> Case:
    """Return a case of that many replicas, all ready."""
    base = Case(
        role=role,
        pool=PoolCounts(replicas, gpus=1),
        slo_s=5.0,
        horizon_s=7.0,
        hold_s=60.0,
        arrivals_s=(),
        work=None,
        kv=None,
        itl=None,
        oldest_wait_s=None,
        rejected=0.0,
        workers=ObservedWorkers(),
    )
    return replace(base, **changes)
