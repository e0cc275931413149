"""llm-d's blueprint for prefill and decode: two KEDA triggers on Prometheus, scaled by an HPA with its defaults.

Prefill: prompt tokens in flight / peak tokens/s of one replica, against the TTFT target less the time that a prompt
takes by itself. Decode: sum of the KV usage against 0.8. A query without a result counts as 0, KEDA's default
(``ignoreNullValues``); as external metrics, both skip the HPA's rules for missing and unready pods.

Source: llm-d-autoscaling's guide for P/D, and KEDA 2.18's Prometheus scaler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Window
from penstock_planner.decide.policies.baselines import hpa
from penstock_planner.decide.policies.drafting import drafted, proposed
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, PolicyState

KV_TARGET = 0.8
"""Target of the KV usage per replica, a fraction: 0.8, as in llm-d's guide."""

LEAST_SHARE = 0.1
"""Chosen: where a prompt alone takes longer than the TTFT target, a tenth of the target is left for waiting."""


@dataclass(frozen=True, slots=True)
class KedaParameters:
    """Parameters that a user of KEDA (Kubernetes event-driven autoscaler) would have to measure.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that one replica computes per second at its best, > 0.
    """

    prefill_tokens_per_s: float = 10_000.0


@dataclass(frozen=True, slots=True)
class KedaState(PolicyState):
    """What KEDA's HPAs, and the queries of its triggers, keep between two decisions.

    Attributes:
        recommended: By role, the recommendations of the last 300 simulated seconds, oldest first, in one flat tuple:
            time, replicas, time, replicas, ... A recommendation is the number of replicas that KEDA's
            HorizontalPodAutoscaler (HPA) wanted at that time.
        prompt_tokens: Mean uncached tokens of the last prompts that arrived.
    """

    KEY: ClassVar[str] = "keda"

    recommended: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)
    prompt_tokens: float = 0.0


def prefill_threshold_s(ttft_slo_s: float, uncached_tokens: float, tokens_per_s: float) -> float:
    """Return the seconds of queued and running prefill work per replica above which KEDA's prefill trigger requests more replicas.

    It is the TTFT target minus the time that a prompt takes by itself, at least a tenth of the target (`LEAST_SHARE`).

    Example: TTFT 5 s, prompts of 8,000 tokens at 10,000 tokens/s: 4.2 s.

    Args:
        ttft_slo_s: TTFT target in seconds.
        uncached_tokens: Mean prompt tokens of a request that must be computed.
        tokens_per_s: Prompt tokens that one replica computes per second.
    """
    return max(ttft_slo_s - uncached_tokens / tokens_per_s, LEAST_SHARE * ttft_slo_s)


def keda(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return the number of replicas of each role that KEDA (Kubernetes event-driven autoscaler) would want with two triggers.

    The prefill trigger reads seconds of prefill work, the decode trigger KV usage. An aggregated role has both
    triggers, and the larger number of replicas counts.

    Args:
        window: Pulls (metrics scrapes) of the interval, at least one.
        state: State left by the last decision.
        config: Configuration with the TTFT target and `KedaParameters`.
    """
    pull = window.pulls[-1]
    settings = config.parameters_as(KedaParameters)
    demands = [each.demand for each in window.pulls if each.demand is not None]
    arrivals = sum(demand.arrivals for demand in demands)
    tokens = sum(demand.uncached_tokens for demand in demands)
    kept = KedaState.read(state.learned)
    prompt = tokens / arrivals if arrivals else kept.prompt_tokens
    proposals, recommended = [], dict(kept.recommended)
    for role, pool in pull.pools.items():
        asked: dict[str, int] = {}
        if role is not Role.DECODE:
            demand = pull.demand
            work = 0.0 if demand is None else demand.waiting_tokens + demand.in_flight_tokens
            threshold_s = prefill_threshold_s(config.ttft_slo_s, prompt, settings.prefill_tokens_per_s)
            work_s = work / settings.prefill_tokens_per_s
            asked["prefill_work"] = hpa.external_desired(work_s, threshold_s, pool.replicas)
        if role is not Role.PREFILL:
            asked["kv"] = hpa.external_desired(pull.kv.total, KV_TARGET, pool.replicas)
        desired, recommended[role] = hpa.recommend(
            max(asked.values()), pool.replicas, pull.at_s, recommended.get(role, ())
        )
        words = ", ".join(f"{name} asks for {number}" for name, number in asked.items())
        step = Step("keda", {**asked, "prompt_tokens": prompt}, None, f"{words}; stabilised {desired}")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state, KedaState(recommended, prompt))


POLICY = PlannerPolicy(
    keda, has_ledger=False, interval_s=hpa.SYNC_S, max_step=None, parameters=KedaParameters
)
