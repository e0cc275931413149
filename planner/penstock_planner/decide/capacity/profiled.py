"""The workers of a graph according to their performance profile, with its figures multiplied by learned correction factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from penstock.api import Predictor, Role
from penstock.performance.profile import DecodeRow, PerformanceProfile
from penstock_planner.decide.capacity import queueing
from penstock_planner.decide.capacity.corrections import SlaMemory
from penstock_planner.decide.capacity.decoding import LOAD_MOST, Decoding
from penstock_planner.decide.capacity.observed import OBSERVED
from penstock_planner.decide.capacity.worker_model import ItlView, Stabilization
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Step
from penstock_planner.decide.demand.load import KvLoad, Work
from penstock_planner.decide.demand.trend import TrendForecast

KV_SIGMAS = 1.1
"""Number of standard deviations of the requests in flight that are added when the KV load is calculated.

Chosen: the growing threshold (`Stabilization.kv_ahead`) leaves a sixth of the cache free, and together a cache of
forty requests is full one time in sixty. With 0.75 a gap in the metrics had bad effects (scoreboard,
fault-metrics-gap, seed 0: 92% on time instead of 99.9%)."""

ITL_AFTER = 0.95
"""Fraction of the ITL target that the ITL can reach after one worker is removed. Chosen so that a role does not grow
again right after shrinking."""


@dataclass(frozen=True, slots=True)
class ProfiledAnswers:
    """Answers expected to be decoded at the horizon, on workers whose throughput and latencies are in a performance profile.

    The horizon is the time when a replica requested now could be ready.

    Attributes:
        tokens_per_s: Output tokens/s expected to be decoded at the horizon, >= 0.
        running: Number of requests that are being decoded now, on all workers. At least as many are expected at the
            horizon.
        row: ITL and throughput of the profile by number of concurrent requests, for the mean context length.
        variability: Squared coefficients of variation of the gaps between arrivals and of the lengths, added (Ca2 +
            Cs2). The variance of the tokens in flight is this factor times the variance with Poisson arrivals of
            constant length.
        factor: Learned correction: observed ITL divided by the ITL of the profile.
        sigmas: Number of standard deviations of the requests in flight to add, so that the SLO's percentile of requests
            is covered.
        target_s: ITL target in seconds; infinite if there is none.
    """

    tokens_per_s: float
    running: float
    row: DecodeRow
    variability: float
    factor: float
    sigmas: float
    target_s: float

    @property
    def after_s(self) -> float:
        """Return the highest ITL, in seconds, that may be expected after removing one worker; with a higher one, none is removed.

        It is below the ITL target; infinite if there is no target.
        """
        return ITL_AFTER * self.target_s

    def concurrency(self, workers: int) -> float | None:
        """Return the mean number of requests in flight at each of ``workers`` workers; None if they cannot keep up."""
        expected = self.row.concurrency_at(self.tokens_per_s * self.factor / workers)
        return None if expected is None else max(expected, self.running / workers)

    def load_on(self, workers: int) -> float:
        """Return the KV usage summed over all workers (1.0 for a full one) if ``workers`` workers decode the expected answers.

        It is at most 2 (`LOAD_MOST`) for each worker. With 0 workers, returns the sum if workers decoded as fast as
        idle ones.
        """
        share = self.row.context / self.row.kv_tokens
        if workers < 1:
            return self.tokens_per_s * self.row.itl_s[0] * share
        each = self.concurrency(workers)
        if each is None:
            return workers * LOAD_MOST
        crowded = each + KV_SIGMAS * math.sqrt(each * self.variability / workers)
        return workers * min(LOAD_MOST, crowded * share)

    def itl_with(self, workers: int) -> float:
        """Return the expected ITL with ``workers`` workers, in seconds, at the SLO's percentile (such as the 99th) of concurrency.

        Concurrency is the number of requests in flight at a worker.

        Infinite if the workers cannot keep up. The formula is for requests in flight that are Poisson distributed, as
        they are with Poisson arrivals, and evenly spread over the workers.
        """
        each = self.concurrency(workers) if workers >= 1 else None
        if each is None:
            return math.inf
        crowded = each + self.sigmas * math.sqrt(each / workers)
        return self.row.itl_of(crowded) * self.factor


LATE_TIMES = 2.5
"""Factor on the allowed late fraction (2.5) at which a pool, the workers of one role, grows.

Chosen: more than 1 because a pool reaches it only at the peak of demand; the pool shrinks if one replica fewer would
keep the allowed fraction itself. With 2 and 2.5, aggregated-sine took 2.15 and 2.09 GPU-hours for 98.7 and 97.8% on
time with one seed, and 1.96 for 99.5 and 99.6% with another."""

AHEAD_SIGMAS = 0.0
"""Number of standard errors added to the demand forecast before a pool grows: none.

Chosen: the utilisations from the queueing formula already leave room for chance."""

RESTRAINT = Stabilization(sigmas=0.5, kv_ahead=0.85, kv=0.65)
"""KV usage for growing, and conditions for shrinking, of mode sla if the queueing formula is used.

Chosen: milder than those of mode adaptive, because the effect of one replica fewer is known from the profile."""

LATE_SHARE_MOST = 0.5
"""Maximum late fraction (0.5) at which a pool grows.

Chosen: even if the targets are for few requests only, at most half of the requests wait too long."""

BURSTY = 4.0
"""Maximum variability (4) of arrivals for which the queueing formula is used.

Chosen: arrivals with more than twice the variance of Poisson arrivals come in bursts, whose length no formula knows.
Then the simulated fleets and fractions of mode adaptive decide, with the throughput of the profile."""

LEAST_ARRIVED = 100.0
"""Minimum number of requests (100) for the queueing formula to be used. A minute of demand is enough, too
(`LEAST_OBSERVED_S`)."""
LEAST_OBSERVED_S = 60.0
"""Minimum seconds of demand (60) for the queueing formula to be used. 100 requests are enough, too (`LEAST_ARRIVED`).

Chosen: mean and variance of fewer prompts or less time are chance, and a formula that used them requested eleven
aggregated workers instead of seven. Before that, the simulated fleets and fractions of mode adaptive decide."""

LEAST_SEEN_S = 6.0
"""Minimum seconds for which arrivals must have been observed to give a rate: 6. Chosen."""

WAIT_LEAST = 0.5
"""Minimum fraction of the TTFT target (0.5) that is reserved for waiting.

Chosen: a prompt that alone needs more is late with almost any number of workers."""


@dataclass(frozen=True, slots=True)
class ProfiledWorkers:
    """Throughput and latencies of workers by a performance profile with learned corrections: a `WorkerModel`.

    A correction is a factor, the observed value divided by the value of the profile.

    Until enough requests were observed, throughput and limits are those of mode adaptive, learned from observations
    alone.

    Attributes:
        profile: Performance profile of the engine.
        learnt: Learned lengths, variability and correction factors.
        config: Configuration with the latency targets.
    """

    profile: PerformanceProfile
    learnt: SlaMemory
    config: DecideConfig

    @property
    def knows_waits(self) -> bool:
        """Whether a queueing formula calculates the fraction of requests that wait too long.

        The formula is used once enough arrivals were observed, unless requests arrive in bursts. Otherwise the methods
        of mode adaptive are used. Mode adaptive simulates fleets with different minimum numbers of replicas, and limits
        the utilisation to fixed fractions.
        """
        learnt = self.learnt
        is_known = learnt.arrived >= LEAST_ARRIVED or learnt.steady.seen_s >= LEAST_OBSERVED_S
        return is_known and learnt.variability <= BURSTY

    @property
    def uses_learned_floor(self) -> bool:
        """Whether a learned floor decides how many replicas to keep, which is so as long as no queueing formula is used.

        The floor is the minimum number of replicas that was cheapest in a simulation of fleets with different floors.
        """
        return not self.knows_waits

    @property
    def follows_trend(self) -> bool:
        """Whether demand is forecast along its slope; otherwise (with the predictor "constant") it is assumed to stay constant."""
        return self.config.predictor is not Predictor.CONSTANT

    @property
    def sigmas_ahead(self) -> float:
        """Return the number of standard errors that are added to the demand forecast before a role grows."""
        return AHEAD_SIGMAS if self.knows_waits else OBSERVED.sigmas_ahead

    @property
    def restraint(self) -> Stabilization:
        """Return the limits by which a pool (the workers of one role) grows or shrinks: KV usage fractions and a margin for errors.

        The margin is a number of standard errors that is added to the demand forecast before the pool shrinks.
        """
        return RESTRAINT if self.knows_waits else OBSERVED.restraint

    @property
    def service_s(self) -> float | None:
        """Return the seconds that a worker takes to prefill a prompt of mean length; None before any request was observed.

        It is the time according to the profile, multiplied by the learned factor of observed to profiled prefill time.
        """
        return self.learnt.service_s(self.profile)

    def tokens_per_s(self, work: Work) -> float | None:
        """Return the prompt tokens/s that one worker computes of prompts of mean length.

        It is the profile's throughput divided by the learned factor of observed to profiled prefill time. Returns None
        until arrivals have been observed for 6 s (`LEAST_SEEN_S`).

        Args:
            work: Observed prefill work; only the time for which it has been observed is used.
        """
        size, own_s = self.learnt.uncached_isl, self.service_s
        return None if size is None or own_s is None or work.rate.seen_s < LEAST_SEEN_S else size / own_s

    def arriving(self, along: TrendForecast) -> TrendForecast:
        """Return the forecast of requests/s to use.

        It is the forecast along the trend if this forecast differs from the mean rate of the last 2 minutes by more
        than chance, else the mean rate.

        Args:
            along: Forecast of requests/s along the trend.
        """
        return self.learnt.steady.steadied(along)

    def decoding(self, kv: KvLoad, tokens_per_s: float) -> Decoding:
        """Return the model of the KV usage of the answers that will be decoded, according to the performance profile.

        Before the first answer was completed, the model is that of mode adaptive: as much KV per prompt token as
        observed.

        Args:
            kv: Observed KV usage of the workers.
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed, so that their answers must
                be decoded.
        """
        return self.answers(tokens_per_s) or OBSERVED.decoding(kv, tokens_per_s)

    def itl(self, tokens_per_s: float) -> ItlView | None:
        """Return the expected ITL of the answers. None if there is no ITL target, or before the first answer was completed.

        Args:
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed, so that their answers must
                be decoded.
        """
        return None if self.config.itl_slo_s is None else self.answers(tokens_per_s)

    def busy_most(self, role: Role, workers: int) -> float:
        """Return the utilisation above which a pool (the workers of one role) grows, in (0, 1].

        Utilisation is the fraction of the pool's throughput that demand fills.

        At this utilisation 2.5 times (`LATE_TIMES`) as many prompts wait too long as the targets allow.

        Args:
            role: Role of the pool.
            workers: Number of workers of the pool.
        """
        if not self.knows_waits:
            return OBSERVED.busy_most(role, workers)
        return self._busy(role, workers, min(LATE_SHARE_MOST, LATE_TIMES * (1.0 - self.config.attainment)))

    def busy_after(self, role: Role, workers: int) -> float:
        """Return the maximum utilisation of the remaining workers with which one worker may be removed from a pool, in (0, 1].

        A pool is the workers of one role; utilisation is the fraction of their throughput that demand fills.

        At this utilisation as many prompts wait too long as the targets allow. It is at most the fixed fraction at
        which mode adaptive adds a worker, which matters for evenly spaced arrivals that hardly wait.

        Args:
            role: Role of the pool.
            workers: Number of workers that remain.
        """
        if not self.knows_waits:
            return OBSERVED.busy_after(role, workers)
        allowed = self._busy(role, workers, 1.0 - self.config.attainment)
        return min(allowed, OBSERVED.busy_most(role, workers))

    def _busy(self, role: Role, workers: int, late: float) -> float:
        own_s = self.service_s
        if own_s is None or workers < 1:
            return 1.0
        servers, _ = queueing.queue_of(role, workers, 0.0)
        load = queueing.max_load(
            servers,
            service_s=own_s,
            variability=self.learnt.variability,
            may_wait_s=self.may_wait_s(own_s),
            late=late,
        )
        return load / servers

    def may_wait_s(self, own_s: float) -> float:
        """Return the seconds for which a prompt may wait in a queue: the TTFT target minus the prompt's TTFT without waiting.

        It is at least half of the target (`WAIT_LEAST`). The TTFT without waiting is the prompt's computing time
        multiplied by the learned factor of observed to calculated TTFT.

        Args:
            own_s: Computing time of the prompt on one worker, in seconds.
        """
        target_s = self.config.ttft_slo_s
        return max(target_s - own_s * self.learnt.ttft.factor, WAIT_LEAST * target_s)

    def answers(self, tokens_per_s: float) -> ProfiledAnswers | None:
        """Return the decode load that follows if workers complete the prefill of ``tokens_per_s`` uncached prompt tokens/s.

        The result has the output tokens/s to decode, and the ITL and throughput of the performance profile with which
        workers decode them. Returns None before the first answer was completed.

        Args:
            tokens_per_s: Uncached prompt tokens/s whose prefill is expected to be completed.
        """
        learnt = self.learnt
        uncached, osl, context = learnt.uncached_isl, learnt.osl, learnt.context
        if uncached is None or osl is None or context is None:
            return None
        target_s = self.config.itl_slo_s
        return ProfiledAnswers(
            tokens_per_s=tokens_per_s / uncached * osl,
            running=learnt.running,
            row=self.profile.decode.at_context(context),
            factor=learnt.itl.factor,
            variability=learnt.variability,
            sigmas=NormalDist().inv_cdf(self.config.attainment),
            target_s=math.inf if target_s is None else target_s,
        )

    def step(self) -> Step:
        """Return a record, for the decision, of the values of the performance profile and of the learned corrections.

        Its outcome says whether prompts or contexts are outside the profile's range.
        """
        learnt, profile, config = self.learnt, self.profile, self.config
        prompts, contexts = profile.prefill.prompt_tokens, profile.decode.contexts
        prompt_s = self.service_s
        inputs = {
            "isl": learnt.isl,
            "uncached_isl": learnt.uncached_isl,
            "profile_isl_least": prompts[0],
            "profile_isl_most": prompts[-1],
            "osl": learnt.osl,
            "context": learnt.context,
            "profile_context_least": contexts[0],
            "profile_context_most": contexts[-1],
            "prefill_factor": learnt.prefill.factor,
            "ttft_factor": learnt.ttft.factor,
            "itl_factor": learnt.itl.factor,
            "variability": learnt.variability,
            "running": learnt.running,
            "prompt_s": prompt_s,
            "may_wait_s": None if prompt_s is None else self.may_wait_s(prompt_s),
            "ttft_target_s": config.ttft_slo_s,
            "itl_target_s": config.itl_slo_s,
            "attainment": config.attainment,
            "predictor": config.predictor.value,
        }
        outside = [
            f"{name} {value:.0f} is outside the profile's range of {points[0]:g} to {points[-1]:g}: "
            "its nearest end is used"
            for name, value, points in (
                ("uncached ISL", learnt.uncached_isl, prompts),
                ("context", learnt.context, contexts),
            )
            if value is not None and not points[0] <= value <= points[-1]
        ]
        return Step("profile", inputs, None, "; ".join(outside) or "within the profile")
