"""NVIDIA Dynamo 1.x's throughput loop: every 180 s, replicas for the predicted load from a profile.

Demand is the interval's requests, their prompt and answer lengths, predicted for the next interval; supply is what the
profile says that an engine does at the targets. Two factors correct the profile by what was observed: TTFT (at most 1:
queueing is not a reason to take an engine for a slow one) and ITL.

Its predictor here is ``constant``, one of the five that it offers: the next interval is as the last. The others fit
ARIMA, Kalman or Prophet models, of which 20 minutes give seven points.

Aggregated engines: Dynamo fits such an engine's own measurements. Here one that needs a/b seconds per request for its
prompt and for its answer serves 1 / (a + b) requests per second.

Source: the planner of ai-dynamo 1.0 to 1.6: ``_compute_replica_requirements``, ``_update_correction_factor``, its
interpolators, and the cap of eight replicas per decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.performance.profile import DecodeTable, PerformanceProfile
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Pull, Window
from penstock_planner.decide.policies.drafting import drafted, proposed
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState

INTERVAL_S = 180.0
"""``throughput_adjustment_interval``."""
MAX_CHANGE = 8
"""Most replicas of a role that one decision moves."""
DEFAULT_ITL_S = 0.05
"""Dynamo's default target, where the graph has none."""


@dataclass(frozen=True, slots=True)
class IntervalLoad:
    """Means of one interval.

    Attributes:
        requests_per_s: Arrivals, > 0.
        prompt_tokens, output_tokens: Of a request, > 0.
        ttft_s, itl_s: Observed, > 0.
    """

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    ttft_s: float
    itl_s: float

    @property
    def context(self) -> float:
        """Tokens that a request holds while it is decoded, on average."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def request_s(self) -> float:
        """How long a request takes from arrival to its last token."""
        return self.ttft_s + self.itl_s * self.output_tokens


def prefill_replicas(load: IntervalLoad, factor: float, tokens_per_s: float) -> int:
    """Return the prefill engines that the load asks for.

    Args:
        load: Predicted.
        factor: Observed TTFT / the profile's; what is above 1 counts as 1.
        tokens_per_s: Of one engine.

    Example: 500 requests of 3,000 tokens a minute on engines of 40,000 tokens/s: 25,000 / 40,000, so 1.
    """
    return math.ceil(load.requests_per_s * load.prompt_tokens * min(1.0, factor) / tokens_per_s - 1e-9)


def decode_replicas(load: IntervalLoad, tokens_per_s: float) -> int:
    """Return the decode engines that the load asks for; ``tokens_per_s`` is one engine's at the corrected ITL.

    Example: 500 requests of 150 tokens a minute on engines of 1,000 tokens/s: 1,250 / 1,000, so 2.
    """
    return math.ceil(load.requests_per_s * load.output_tokens / tokens_per_s - 1e-9)


def dynamo_throughput(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what the throughput loop asks for; an interval without a finished request changes nothing.

    Raises:
        ConfigError: no profile is given.
    """
    profile = config.performance
    if profile is None:
        raise ConfigError(
            "mode dynamo-throughput: it scales by a latency profile and none is given; simulate a graph whose --profile"
            " is one of the engine's, or choose another mode"
        )
    pull = window.pulls[-1]
    load = interval_load(window)
    proposals = []
    for role, pool in pull.pools.items():
        if load is None:
            step = Step("dynamo_throughput", {}, None, "no finished request in the interval")
            proposals.append(drafted(role, pull, None, step, config))
            continue
        wanted, inputs = _wanted(role, load, pull, profile, config)
        desired = max(pool.replicas - MAX_CHANGE, min(pool.replicas + MAX_CHANGE, wanted))
        step = Step("dynamo_throughput", inputs, None, f"asks for {wanted}")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state)


def interval_load(window: Window) -> IntervalLoad | None:
    """Return the interval's means; None where they are not all known, as before the first answer."""
    demands = [pull.demand for pull in window.pulls if pull.demand is not None]
    period_s = sum(demand.period_s for demand in demands)
    arrivals = sum(demand.arrivals for demand in demands)
    completed = sum(demand.completed for demand in demands)
    outputs = sum(demand.output_tokens for demand in demands)
    firsts, gaps = sum(demand.ttft_count for demand in demands), sum(demand.itl_count for demand in demands)
    if not (period_s and arrivals and completed and outputs and firsts and gaps):
        return None
    return IntervalLoad(
        arrivals / period_s,
        sum(demand.prompt_tokens for demand in demands) / arrivals,
        outputs / completed,
        sum(demand.ttft_sum_s for demand in demands) / firsts,
        sum(demand.itl_sum_s for demand in demands) / gaps,
    )


def _wanted(
    role: Role, load: IntervalLoad, pull: Pull, profile: PerformanceProfile, config: DecideConfig
) -> tuple[int, dict[str, float | None]]:
    prefill, decode = profile.prefill, profile.decode
    itl_s = config.itl_slo_s or DEFAULT_ITL_S
    inputs: dict[str, float | None] = {
        "requests_per_s": load.requests_per_s,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
    }
    ttft_factor = load.ttft_s / prefill.ttft_of(load.prompt_tokens)
    itl_factor = _itl_factor(load, pull, role, decode)
    prompt_rate = prefill.tokens_per_s(load.prompt_tokens)
    if role is Role.PREFILL:
        inputs |= {"ttft_factor": ttft_factor, "engine_tokens_per_s": prompt_rate}
        return prefill_replicas(load, ttft_factor, prompt_rate), inputs
    answer_rate = best_tokens_per_s(decode, itl_s / itl_factor, load.context)
    inputs |= {"itl_factor": itl_factor, "engine_tokens_per_s": answer_rate}
    if role is Role.DECODE:
        return decode_replicas(load, answer_rate), inputs
    request_s = load.prompt_tokens / prompt_rate + load.output_tokens / answer_rate
    return math.ceil(load.requests_per_s * request_s - 1e-9), inputs


def best_tokens_per_s(decode: DecodeTable, itl_s: float, context: float) -> float:
    """Return the throughput at the highest KV usage whose ITL is not a higher than the target.

    Where none is, that of the lowest usage: the loop does what it can.
    """
    row = decode.at_context(context)
    fitting = [rate for itl, rate in zip(row.itl_s, row.tokens_per_s, strict=True) if itl <= itl_s]
    return fitting[-1] if fitting else row.tokens_per_s[0]


def _itl_factor(load: IntervalLoad, pull: Pull, role: Role, decode: DecodeTable) -> float:
    """Return the observed ITL over what the profile says at the observed concurrency; 1 without a ready engine."""
    pool = pull.pools.get(Role.AGGREGATED if role is Role.AGGREGATED else Role.DECODE)
    if pool is None or not pool.ready:
        return 1.0
    concurrency = load.requests_per_s * load.request_s / pool.ready
    return load.itl_s / decode.itl_of(concurrency, load.context)


POLICY = PlannerPolicy(
    dynamo_throughput, needs_profile=True, has_ledger=False, interval_s=INTERVAL_S, max_step=None
)
