"""Learned state of mode ``sla``: lengths, variability, the profile's errors, and whether a change of the arrival rate is chance.

A trend that follows a rise quickly also follows chance: with Poisson arrivals of 3/s its prediction varies by 13%,
and a pool that follows it is too large for most of a swing. So the trend is used only if it differs from the mean of
some minutes by more than its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from penstock.api import Role
from penstock.performance.profile import PerformanceProfile
from penstock_planner.decide.capacity import queueing
from penstock_planner.decide.demand.observation import Demand, Pull, entry_role, kv_role
from penstock_planner.decide.demand.trend import TrendForecast
from penstock_planner.decide.state import PolicyState

PRIOR_S = 20.0
"""Weight of the unchanged profile against observations: as much as 20 seconds of computing or decoding that agreed with it.

Chosen: observations outweigh it within a minute."""

POISSON = 2.0
"""Variability (Ca2 + Cs2, see `queueing`) that is assumed before the first observation: that of Poisson arrivals,
exponential lengths."""

LENGTHS_TAU_S = 120.0
"""Time constant, 2 minutes, of the averages of prompt and answer lengths.

Chosen: as in mode adaptive, lengths change more slowly than arrivals."""

VARIABILITY_TAU_S = 300.0
"""Time constant, 5 minutes, of the average of the variability. Chosen: a variance needs more samples than a mean."""

VARIABILITY_LEAST, VARIABILITY_MOST = 0.25, 8.0
"""Minimum and maximum of the learned variability (Ca2 + Cs2, see `queueing`). Chosen: equal gaps do not stay equal, and
a larger variability is a change of the rate."""

RUNNING_TAU_S = 5.0
"""Time constant, 5 s, of the average number of requests in flight. Chosen: about the duration of an answer."""

FORGET_S = 120.0
"""Time constant, 2 minutes, of the corrections of the profile, counted in seconds of computing, of first tokens or of decoding.

Chosen. After this long an old observation weighs a third."""

FACTOR_MOST = 3.0
"""Maximum factor (3) by which a figure of the profile is corrected, upwards or downwards.

Chosen: beyond it, the profile is that of another engine."""

LIGHT = 0.8
"""Maximum utilisation of the workers (0.8) at which observed TTFT is used to correct the TTFT of the profile.

Chosen: above it the calculated wait is too inaccurate."""

STEADY_TAU_S = 120.0
"""Time constant, 2 minutes, of the mean arrival rate.

Chosen: three times that of the trend, so that the mean is steadier than the trend and known within some minutes."""

CHANCE_SIGMAS = 1.5
"""Number of standard errors (1.5) up to which the difference between the trend of arrivals and their mean counts as chance.

Chosen: chance rarely exceeds it, and a swing of minutes soon does."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction of one figure of a performance profile, such as the prefill time: the observed divided by the profiled duration.

    Both durations lose weight with a time constant of 2 minutes (`FORGET_S`), and start with 20 s each.

    Attributes:
        expected_s: Duration that the profile predicts, in seconds, decayed.
        observed_s: Observed duration, in seconds, decayed.
    """

    expected_s: float = PRIOR_S
    observed_s: float = PRIOR_S

    @property
    def factor(self) -> float:
        """Return the observed duration divided by the one that the performance profile predicts, from 1/3 to 3.

        Above 1 the engine is slower than its profile. The limits are from `FACTOR_MOST`.
        """
        return min(FACTOR_MOST, max(1.0 / FACTOR_MOST, self.observed_s / self.expected_s))

    def followed(self, observed_s: float, expected_s: float, forget_s: float) -> Correction:
        """Return the correction (observed duration divided by that of the performance profile) after one more observation.

        Args:
            observed_s: Observed duration, in seconds.
            expected_s: Duration by the profile, in seconds.
            forget_s: Simulated seconds since the previous observation; the longer, the less the earlier observations
                count.
        """
        kept = math.exp(-forget_s / FORGET_S)
        return Correction(self.expected_s * kept + expected_s, self.observed_s * kept + observed_s)


@dataclass(frozen=True, slots=True)
class SteadyRate:
    """Mean arrival rate over about the last 2 minutes (`STEADY_TAU_S`): ``requests / seen_s``, in requests/s.

    It is a plain mean from which no trend is extrapolated. Both values lose weight with a time constant of 2 minutes.

    Attributes:
        requests: Number of requests that arrived, decayed.
        seen_s: Observed seconds, decayed in the same way.
    """

    requests: float = 0.0
    seen_s: float = 0.0

    def followed(self, demand: Demand) -> SteadyRate:
        """Return the mean arrival rate after one more pull (metrics scrape).

        Args:
            demand: Requests at the frontend since the previous pull, of which the arrivals are counted.
        """
        kept = math.exp(-demand.period_s / STEADY_TAU_S)
        return SteadyRate(self.requests * kept + demand.arrivals, self.seen_s * kept + demand.period_s)

    def steadied(self, along: TrendForecast) -> TrendForecast:
        """Return the mean arrival rate as a constant forecast if the trend differs from it only by chance; else the trend.

        Args:
            along: Forecast of requests/s along the trend.
        """
        if self.seen_s <= 0:
            return along
        mean = self.requests / self.seen_s
        apart = max(abs(along.now - mean), abs(along.ahead - mean))
        if apart > CHANCE_SIGMAS * along.error:
            return along
        # Standard error of a Poisson rate; an exponential average is as accurate as a mean over twice its time constant.
        error = math.sqrt(mean / min(2.0 * STEADY_TAU_S, self.seen_s))
        return TrendForecast(mean, mean, min(error, along.error))


@dataclass(frozen=True, slots=True)
class SlaMemory(PolicyState):
    """Learned state of mode ``sla`` in addition to that of mode adaptive.

    The five sums lose weight with a time constant of 2 minutes. Their ratios are mean lengths: ``prompt_tokens /
    arrived`` of prompts, and ``output_tokens / answered`` of answers. A correction is the observed value divided by the
    value according to the performance profile.

    Attributes:
        arrived: Number of requests that arrived, decayed.
        prompt_tokens: Prompt tokens of those requests, cached ones included, decayed.
        uncached_tokens: Prompt tokens of those requests that must be computed, decayed.
        answered: Number of requests whose answer was completed, decayed.
        output_tokens: Output tokens of those answers, decayed.
        variability: Squared coefficients of variation of the gaps between arrivals and of the prompt lengths, added
            (Ca2 + Cs2), for the queueing formula; 2 for Poisson arrivals and exponential lengths.
        running: Average number of requests that are being decoded now.
        prefill: Correction of the profile's prefill time.
        ttft: Correction of the calculated TTFT, which is the wait in the queue plus the profile's prefill time
            multiplied by ``prefill``.
        itl: Correction of the profile's ITL.
        steady: Mean arrival rate over about the last 2 minutes, used as forecast unless a trend is significant.
    """

    KEY: ClassVar[str] = "sla"

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

    @property
    def isl(self) -> float | None:
        """Return the mean prompt length of about the last 2 minutes in tokens; None before any request was observed."""
        return self.prompt_tokens / self.arrived if self.arrived > 0 else None

    @property
    def uncached_isl(self) -> float | None:
        """Return the mean number of prompt tokens that must be computed per request; None before any request was observed."""
        return self.uncached_tokens / self.arrived if self.uncached_tokens > 0 else None

    @property
    def osl(self) -> float | None:
        """Return the mean length of an answer in tokens; None before any answer was completed."""
        return self.output_tokens / self.answered if self.output_tokens > 0 else None

    @property
    def context(self) -> float | None:
        """Return the mean number of tokens that a request holds in the KV cache while it is decoded.

        It is the prompt plus half of the answer. Returns None before any request was observed.
        """
        isl = self.isl
        return None if isl is None else isl + (self.osl or 0.0) / 2.0

    def service_s(self, profile: PerformanceProfile) -> float | None:
        """Return the seconds that a worker takes to prefill a prompt of mean length; None before any request was observed.

        It is the time according to the profile, multiplied by the learned factor of observed to profiled prefill time.

        Args:
            profile: Performance profile of the engine.
        """
        tokens = self.uncached_isl
        return None if tokens is None else tokens / profile.prefill.tokens_per_s(tokens) * self.prefill.factor

    def resumed(self, by_s: float, now_s: float) -> SlaMemory:
        """Return the learned state after a restart on another clock: unchanged, because it contains only durations.

        Args:
            by_s: Simulated seconds to add to times of the earlier clock; ignored.
            now_s: Present time, in simulated seconds; ignored.
        """
        del by_s, now_s  # all values are durations
        return self

    def for_other_graph(self) -> SlaMemory:
        """Return the learned state with which another graph of the same model can start.

        It keeps mean lengths, variability and corrections of the profile, and drops this graph's arrival rate and
        running requests.
        """
        return replace(self, running=0.0, steady=SteadyRate())

    def followed(self, pull: Pull, profile: PerformanceProfile, *, mean_rate: float) -> SlaMemory:
        """Return the learned state after one pull (metrics scrape). Parts for which the pull has no value stay unchanged.

        Args:
            pull: The metrics scrape.
            profile: Performance profile with which the observations are compared.
            mean_rate: Requests/s that were expected for the time of this pull; 0 if unknown. The deviation of the
                arrivals from it updates ``variability``.
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
    """Update the variability from the variance of the arriving tokens.

    The variance of the tokens that arrive in a time is the mean number of requests times the squared size times (Ca2
    + Cs2), if the requests are independent.
    """
    weight = 1.0 - math.exp(-demand.period_s / VARIABILITY_TAU_S)
    deviation = demand.uncached_tokens - expected
    seen = deviation * deviation / (expected * size)
    variability = memory.variability + weight * (min(seen, 10 * VARIABILITY_MOST) - memory.variability)
    return replace(memory, variability=min(VARIABILITY_MOST, max(VARIABILITY_LEAST, variability)))


def _prefilled(memory: SlaMemory, demand: Demand, profile: PerformanceProfile) -> SlaMemory:
    """Compare the worker-seconds of computing with the time that the profile gives for the computed tokens."""
    size = memory.uncached_isl
    if size is None:
        return memory
    observed_s = demand.prefilling_workers * demand.period_s
    expected_s = demand.prefilled_tokens / profile.prefill.tokens_per_s(size)
    return replace(memory, prefill=memory.prefill.followed(observed_s, expected_s, observed_s))


def _answering(memory: SlaMemory, pull: Pull, demand: Demand, profile: PerformanceProfile) -> SlaMemory:
    """Compare the observed gaps between tokens with the ITL of the profile at the number of requests being decoded."""
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
    """Compare the TTFT with the corrected prefill time plus the wait calculated from the utilisation, if that is low."""
    role, own_s = entry_role(pull.pools), memory.service_s(profile)
    pool = pull.pools.get(role)
    # Prompts that wait inside aggregated workers are not counted, so the TTFT there does not show the prefill time.
    if role is Role.AGGREGATED or not demand.ttft_count or own_s is None or pool is None or not pool.ready:
        return memory
    load = demand.prefilling_workers
    if load > LIGHT * pool.ready or demand.waiting:
        return memory
    wait_s = queueing.mean_wait_s(pool.ready, load, service_s=own_s, variability=memory.variability)
    ratio = demand.ttft_sum_s / demand.ttft_count / (own_s + wait_s)
    period_s = demand.period_s
    return replace(memory, ttft=memory.ttft.followed(ratio * period_s, period_s, period_s))
