"""HorizontalPodAutoscalers on other metrics than `hpa`'s queue: the rate of uncached prompt tokens, and all requests there.

Decode is scaled by KV usage as `hpa` does, an aggregated role by both, the larger. Only the metric differs: tolerance,
stabilisation and rates are `hpa`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Pull, Window, unserved
from penstock_planner.decide.policies.baselines import hpa
from penstock_planner.decide.policies.drafting import drafted, proposed, waiting_requests
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, PolicyState

PEAK_SHARE = 0.4
"""Chosen from the 0.3 to 0.5 that engines with a TTFT target are run at: the share of a replica's peak tokens/s."""
REQUESTS = {Role.PREFILL: 2.0, Role.AGGREGATED: 8.0}
"""Running plus waiting requests of a replica: one that is computed and one that waits; as for the KPA."""
RATE_PERIODS = 4
"""Periods of 15 s: the query is a ``rate(...[1m])``."""

Recent = tuple[float, ...]
Metric = Callable[[Window, Role, Recent, DecideConfig], tuple[float | None, float, Recent]]
"""Returns the metric's total (None: unknown), its target per replica, and what is to be remembered."""


@dataclass(frozen=True, slots=True)
class RateParameters:
    """What a user would have measured: prompt tokens that one replica computes per second at its best, > 0."""

    prefill_tokens_per_s: float = 10_000.0


def token_rate(
    window: Window, _role: Role, recent: Recent, config: DecideConfig
) -> tuple[float | None, float, Recent]:
    """Return the uncached prompt tokens/s of the last minute."""
    demands = [pull.demand for pull in window.pulls if pull.demand is not None]
    period_s = sum(demand.period_s for demand in demands)
    if period_s:
        rate = sum(demand.uncached_tokens for demand in demands) / period_s
        recent = (*recent, rate)[-RATE_PERIODS:]
    mean = sum(recent) / len(recent) if recent else None
    return mean, PEAK_SHARE * config.parameters_as(RateParameters).prefill_tokens_per_s, recent


def requests_there(
    window: Window, role: Role, _recent: Recent, _config: DecideConfig
) -> tuple[float | None, float, Recent]:
    """Return the requests that run on the role's replicas or wait for one."""
    pull = window.pulls[-1]
    waiting = waiting_requests(pull, role)
    if waiting is None or pull.demand is None:
        return None, REQUESTS[role], ()
    running = pull.demand.in_flight.get(role, 0.0)
    return running + waiting + unserved(window.pulls, role), REQUESTS[role], ()


@dataclass(frozen=True, slots=True)
class VariantState(PolicyState):
    """What an HPA per role keeps between two decisions.

    Attributes:
        recommended: Recent recommendations, as in `hpa.HpaState`.
        recent: What the metric of each role keeps.
    """

    KEY: ClassVar[str] = "hpa-variant"

    recommended: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)
    recent: Mapping[Role, Recent] = field(default_factory=dict)


def scaled_by(metric: Metric, window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what an HPA per role asks for."""
    pull = window.pulls[-1]
    proposals, kept = [], VariantState.read(state.learned)
    recommended, recents = dict(kept.recommended), dict(kept.recent)
    for role, pool in pull.pools.items():
        recent = recents.get(role, ())
        asked: list[int | None] = []
        if role is not Role.PREFILL:
            asked.append(_by_kv(pull, role))
        if role is not Role.DECODE:
            total, target, recent = metric(window, role, recent, config)
            asked.append(None if total is None else hpa.external_desired(total, target, pool.replicas))
        desired = hpa.combined(asked, pool.replicas)
        if desired is not None:
            desired, recommended[role] = hpa.recommend(
                desired, pool.replicas, pull.at_s, recommended.get(role, ())
            )
        recents[role] = recent
        step = Step("hpa", {}, None, f"metrics ask for {asked}; stabilised {desired}")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state, VariantState(recommended, recents))


def _by_kv(pull: Pull, role: Role) -> int | None:
    pool = pull.pools[role]
    metric = hpa.PodMetric(pull.kv.total, pull.kv.fresh, pull.kv.unknown, pool.starting, hpa.KV_TARGET)
    return hpa.pods_desired(metric, pool.replicas)


RATE = PlannerPolicy(
    partial(scaled_by, token_rate),
    has_ledger=False,
    interval_s=hpa.SYNC_S,
    max_step=None,
    parameters=RateParameters,
)
RUNNING = PlannerPolicy(
    partial(scaled_by, requests_there), has_ledger=False, interval_s=hpa.SYNC_S, max_step=None
)
