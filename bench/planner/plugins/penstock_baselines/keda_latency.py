"""What llm-d recommends now: KEDA triggers on latencies against their targets, scaled by an HPA with its defaults.

Prefill: P90 of the TTFT / its target. Decode: P90 of the ITL / its target, 50 ms where the graph has none. Aggregated: the larger of the
two. Each is the ratio of an external metric of type Value: the HPA multiplies the present replicas by it. A minute without a request has no
result, which counts as 0, KEDA's default (``ignoreNullValues``).

A pull has the sum and the number of its latencies, so that the P90 is that of the pulls' means over a minute, each by its requests: a
little below the requests' own.

Source: llm-d-autoscaling's guide, and KEDA 2.18's Prometheus scaler with ``metricType: Value``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Demand, Window
from penstock_planner.decide.policies.baselines import hpa
from penstock_planner.decide.policies.drafting import drafted, proposed
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, PolicyState

RANGE_S = 60.0
"""``rate(…[1m])``."""
ITL_TARGET_S = 0.05
"""Chosen: the ITL of the board's graphs."""
RANK = 0.9

Latencies = list[float]
"""Triples in a row: end of the pull, its mean latency in seconds, its requests."""


def latencies(window: Window, kept: Sequence[float], *, is_ttft: bool) -> Latencies:
    """Return the last minute's pulls that had any request, the window's included."""
    found = list(kept)
    for pull in window.pulls:
        if pull.demand is not None:
            total, number = _of(pull.demand, is_ttft=is_ttft)
            if number:
                found += [pull.at_s, total / number, number]
    rows = [found[place : place + 3] for place in range(0, len(found), 3)]
    return [value for row in rows if row[0] > window.end_s - RANGE_S for value in row]


def _of(demand: Demand, *, is_ttft: bool) -> tuple[float, float]:
    if is_ttft:
        return demand.ttft_sum_s, demand.ttft_count
    return demand.itl_sum_s, demand.itl_count


def p90_s(found: Sequence[float]) -> float:
    """Return the mean latency that nine tenths of the requests' pulls stay within; 0 without any.

    Example: 9 requests at 0.1 s and 1 at 5 s: 0.1 s; 8 and 2: 5 s.
    """
    rows = sorted((found[place + 1], found[place + 2]) for place in range(0, len(found), 3))
    left = RANK * sum(number for _, number in rows)
    for value, number in rows:
        left -= number
        if left <= 1e-9:
            return value
    return 0.0


@dataclass(frozen=True, slots=True)
class LatencyState(PolicyState):
    """What the triggers and HPAs keep between two decisions, by role.

    Attributes:
        recommended: Recent recommendations, as in `hpa.HpaState`.
        ttft: Latencies to first tokens, as `latencies` returns them.
        itl: Latencies between tokens, as `latencies` returns them.
    """

    KEY: ClassVar[str] = "keda-latency"

    recommended: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)
    ttft: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)
    itl: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)


def keda_latency(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what the triggers ask for."""
    pull = window.pulls[-1]
    proposals, kept = [], LatencyState.read(state.learned)
    recommended, ttfts, itls = dict(kept.recommended), dict(kept.ttft), dict(kept.itl)
    for role, pool in pull.pools.items():
        ttft = ttfts[role] = latencies(window, ttfts.get(role, ()), is_ttft=True)
        itl = itls[role] = latencies(window, itls.get(role, ()), is_ttft=False)
        ratios = {}
        if role is not Role.DECODE:
            ratios["ttft"] = p90_s(ttft) / config.ttft_slo_s
        if role is not Role.PREFILL:
            ratios["itl"] = p90_s(itl) / (config.itl_slo_s or ITL_TARGET_S)
        ratio = max(ratios.values())
        # The HPA's: desired = ceil(current x metric / target), within its tolerance the current number.
        asked = hpa.external_desired(ratio * pool.replicas, 1.0, pool.replicas)
        desired, recommended[role] = hpa.recommend(asked, pool.replicas, pull.at_s, recommended.get(role, ()))
        words = ", ".join(f"P90 {name} at {value:.2f} of its target" for name, value in ratios.items())
        step = Step("keda", dict(ratios), None, f"{words}; stabilised {desired}")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state, LatencyState(recommended, ttfts, itls))


POLICY = PlannerPolicy(keda_latency, has_ledger=False, interval_s=hpa.SYNC_S, max_step=None)
