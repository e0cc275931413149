"""What mode ``sla`` learns from each pull: lengths, variability, how far the profile is off, and whether arrivals change or only chance does.

A trend that follows a rise within its slope's time follows chance as well: Poisson arrivals of 3/s swing its prediction by 13%, and a
pool that follows them is too large for most of a swing. So it counts only where it differs from the mean of some minutes by more than its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.performance.profile import PerformanceProfile
from penstock_planner.decide.adaptive.signals import TrendForecast
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.decision import Memory
from penstock_planner.decide.observation import Demand, Pull, entry_role, kv_role
from penstock_planner.decide.sla import queueing

PRIOR_S = 20.0
"""Chosen: the profile counts as much as this many seconds of computing or answering that agreed with it; observations
outweigh it within a minute."""

POISSON = 2.0
"""Ca2 + Cs2 of Poisson arrivals and exponential lengths: assumed before the first observation."""

LENGTHS_TAU_S = 120.0
"""Chosen: as in mode adaptive, lengths change more slowly than arrivals."""

VARIABILITY_TAU_S = 300.0
"""Chosen: a variance needs more samples than a mean."""

VARIABILITY_LEAST, VARIABILITY_MOST = 0.25, 8.0
"""Chosen: equal gaps never stay equal, and what varies more than this is a change of the rate."""

RUNNING_TAU_S = 5.0
"""Chosen: requests in flight over the time of an answer or so."""

FORGET_S = 120.0
"""Chosen: seconds of computing, of first tokens or of answering, after which an observation weighs a third."""

FACTOR_MOST = 3.0
"""Chosen: beyond three times as fast or as slow, a profile is of another engine."""

LIGHT = 0.8
"""Chosen: above this utilisation a modelled wait says too little to correct a TTFT by."""

STEADY_TAU_S = 120.0
"""Chosen: three times the trend's, so that the mean is steadier than the trend, and known within some minutes."""

CHANCE_SIGMAS = 1.5
"""Chosen: chance rarely exceeds it, and a swing of minutes soon does."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Seconds by the profile and seconds seen, both decayed alike."""

    expected_s: float = PRIOR_S
    observed_s: float = PRIOR_S

    @property
    def factor(self) -> float:
        """Return observed over expected, within `FACTOR_MOST` either way; above 1 the engine is slower than its profile."""
        return min(FACTOR_MOST, max(1.0 / FACTOR_MOST, self.observed_s / self.expected_s))

    def followed(self, observed_s: float, expected_s: float, forget_s: float) -> Correction:
        """Return it with one more observation, which weighs like ``forget_s`` seconds."""
        kept = math.exp(-forget_s / FORGET_S)
        return Correction(self.expected_s * kept + expected_s, self.observed_s * kept + observed_s)


@dataclass(frozen=True, slots=True)
class SteadyRate:
    """Arrivals over the last minutes, without a slope: requests and seconds, decayed alike."""

    requests: float = 0.0
    seen_s: float = 0.0

    def followed(self, demand: Demand) -> SteadyRate:
        """Return the rate after a pull's arrivals."""
        kept = math.exp(-demand.period_s / STEADY_TAU_S)
        return SteadyRate(self.requests * kept + demand.arrivals, self.seen_s * kept + demand.period_s)

    def steadied(self, along: TrendForecast) -> TrendForecast:
        """Return the mean where the trend, now and ahead, is within chance of it; else the trend."""
        if self.seen_s <= 0:
            return along
        mean = self.requests / self.seen_s
        apart = max(abs(along.now - mean), abs(along.ahead - mean))
        if apart > CHANCE_SIGMAS * along.error:
            return along
        # The span that an exponential average weighs is twice its constant; arrivals as random as Poisson's.
        error = math.sqrt(mean / min(2.0 * STEADY_TAU_S, self.seen_s))
        return TrendForecast(mean, mean, min(error, along.error))


@dataclass(frozen=True, slots=True)
class SlaMemory:
    """Lengths, variability and corrections, which mode ``sla`` remembers in addition to adaptive's memory.

    Attributes:
        arrived: Requests, decayed over minutes.
        prompt_tokens: Of them, cached ones included, decayed alike.
        variability: Ca2 + Cs2 of arrivals and their tokens together.
    """

    arrived: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    answered: float = 0.0
    output_tokens: float = 0.0
    variability: float = POISSON
    running: float = 0.0
    prefill: Correction = Correction()
    ttft: Correction = Correction()
    itl: Correction = Correction()
    steady: SteadyRate = SteadyRate()

    @classmethod
    def read(cls, memory: Memory) -> SlaMemory:
        """Return a state's memory as a decision left it or a ledger gives it back; a blank one where it has none.

        Raises:
            AttributeError, TypeError, ValueError: the data is not such a memory.
        """
        known = memory.get("sla", {})
        return known if isinstance(known, cls) else from_plain(cls, known, skips_unknown=True)

    @property
    def isl(self) -> float | None:
        """Return the mean prompt, tokens; None before the first."""
        return self.prompt_tokens / self.arrived if self.arrived > 0 else None

    @property
    def uncached_isl(self) -> float | None:
        """Return the mean of a prompt that must be computed, tokens; None before the first."""
        return self.uncached_tokens / self.arrived if self.uncached_tokens > 0 else None

    @property
    def osl(self) -> float | None:
        """Return the mean answer, tokens; None before the first."""
        return self.output_tokens / self.answered if self.output_tokens > 0 else None

    @property
    def context(self) -> float | None:
        """Return the tokens that a request holds while it is answered, on average; None before the first arrival."""
        isl = self.isl
        return None if isl is None else isl + (self.osl or 0.0) / 2.0

    def service_s(self, profile: PerformanceProfile) -> float | None:
        """Return the corrected time that a worker computes at the mean prompt; None before the first."""
        tokens = self.uncached_isl
        return None if tokens is None else tokens / profile.prefill.tokens_per_s(tokens) * self.prefill.factor

    def resumed(self, by_s: float, now_s: float) -> SlaMemory:
        """Return the memory on a clock that shows ``by_s`` more; no time is after ``now_s``."""
        del by_s, now_s  # it remembers durations alone
        return self

    def carried(self) -> SlaMemory:
        """Return what another graph of the same model starts from: lengths and corrections, not this traffic."""
        return replace(self, running=0.0, steady=SteadyRate())

    def followed(self, pull: Pull, profile: PerformanceProfile, *, mean_rate: float) -> SlaMemory:
        """Return the memory after one pull; what the pull does not know leaves its part as it was.

        ``mean_rate`` is the requests/s expected to arrive, before the pull; 0: not known.
        """
        demand = pull.demand
        if demand is None:
            return self
        memory = _sized(self, demand)
        if self.uncached_isl is not None and mean_rate > 0:
            expected = mean_rate * self.uncached_isl * demand.period_s
            memory = _varied(memory, demand, expected, self.uncached_isl)
        memory = _prefilled(memory, demand, profile)
        memory = _answering(memory, pull, demand, profile)
        return _first_tokens(memory, pull, demand, profile)


def _sized(memory: SlaMemory, demand: Demand) -> SlaMemory:
    kept = math.exp(-demand.period_s / LENGTHS_TAU_S)
    return replace(
        memory,
        arrived=memory.arrived * kept + demand.arrivals,
        prompt_tokens=memory.prompt_tokens * kept + demand.prompt_tokens,
        uncached_tokens=memory.uncached_tokens * kept + demand.uncached_tokens,
        answered=memory.answered * kept + demand.completed,
        output_tokens=memory.output_tokens * kept + demand.output_tokens,
        steady=memory.steady.followed(demand),
    )


def _varied(memory: SlaMemory, demand: Demand, expected: float, size: float) -> SlaMemory:
    """Follow the variance of the tokens that arrive, over what one mean prompt at a time would have.

    The variance of the tokens of a time is its mean number of requests times size squared times (Ca2 + Cs2), where the
    requests do not depend on each other.
    """
    weight = 1.0 - math.exp(-demand.period_s / VARIABILITY_TAU_S)
    deviation = demand.uncached_tokens - expected
    seen = deviation * deviation / (expected * size)
    variability = memory.variability + weight * (min(seen, 10 * VARIABILITY_MOST) - memory.variability)
    return replace(memory, variability=min(VARIABILITY_MOST, max(VARIABILITY_LEAST, variability)))


def _prefilled(memory: SlaMemory, demand: Demand, profile: PerformanceProfile) -> SlaMemory:
    """Compare the worker-seconds of computing with what the profile takes for the tokens that were computed."""
    size = memory.uncached_isl
    if size is None:
        return memory
    observed_s = demand.prefilling_workers * demand.period_s
    expected_s = demand.prefilled_tokens / profile.prefill.tokens_per_s(size)
    return replace(memory, prefill=memory.prefill.followed(observed_s, expected_s, observed_s))


def _answering(memory: SlaMemory, pull: Pull, demand: Demand, profile: PerformanceProfile) -> SlaMemory:
    """Compare the gaps between tokens with what the profile has at the requests in flight."""
    role = kv_role(pull.pools)
    pool = pull.pools.get(role)
    if pool is None:
        return memory
    inside = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    running = max(0.0, demand.in_flight.get(role, 0.0) - inside)
    weight = 1.0 - math.exp(-demand.period_s / RUNNING_TAU_S)
    memory = replace(memory, running=memory.running + weight * (running - memory.running))
    if not (demand.itl_count and pool.ready and memory.context):
        return memory
    itl_s = profile.decode.itl_of(max(1.0, running / pool.ready), memory.context)
    observed_s = demand.itl_sum_s / demand.itl_count * demand.period_s / itl_s
    return replace(memory, itl=memory.itl.followed(observed_s, demand.period_s, demand.period_s))


def _first_tokens(memory: SlaMemory, pull: Pull, demand: Demand, profile: PerformanceProfile) -> SlaMemory:
    """Compare TTFT with the corrected time of a prompt and the wait that the utilisation implies, where that is light."""
    role, own_s = entry_role(pull.pools), memory.service_s(profile)
    pool = pull.pools.get(role)
    # The prompts that wait inside aggregated workers are not counted, so TTFT does not show a prompt's own time.
    if role is Role.AGGREGATED or not demand.ttft_count or own_s is None or pool is None or not pool.ready:
        return memory
    load = demand.prefilling_workers
    if load > LIGHT * pool.ready or demand.waiting:
        return memory
    wait_s = queueing.mean_wait_s(pool.ready, load, service_s=own_s, variability=memory.variability)
    ratio = demand.ttft_sum_s / demand.ttft_count / (own_s + wait_s)
    period_s = demand.period_s
    return replace(memory, ttft=memory.ttft.followed(ratio * period_s, period_s, period_s))
