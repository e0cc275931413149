"""The workers of a graph by their profile, corrected by what is observed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from penstock_api import Predictor, Role
from penstock_performance.profile import PerformanceProfile
from penstock_planner.decide.adaptive.gaps import GapsView
from penstock_planner.decide.adaptive.kv import Decoding
from penstock_planner.decide.adaptive.memory import KvLoad, Work
from penstock_planner.decide.adaptive.workers import ObservedWorkers, Restraint
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.sla import learning, queueing
from penstock_planner.decide.sla.answers import ProfiledAnswers
from penstock_planner.decide.sla.expected_rate import TREND, ExpectedRate
from penstock_planner.decide.sla.memory import SlaMemory

KEPT = 0.9
"""Chosen: share of the load that one worker fewer could bear by the targets which demand may fill before a worker goes,
so that growing and shrinking do not meet."""

AHEAD_SIGMAS = 0.0
"""Chosen: the shares that demand may fill leave room for chance as it is."""

RESTRAINT = Restraint(sigmas=0.5, peak=0.8, late=1.0, kv=0.65, kv_peak=0.6, hold_down_most_s=600.0)
"""Chosen: milder than adaptive's, because what one fewer can do is known and need not be tried."""

OBSERVED = ObservedWorkers()

BURSTY = 4.0
"""Chosen: arrivals of more than twice the variance of Poisson's come in bursts, of which no formula knows the length: then
shadow fleets and adaptive's shares decide, on the profile's throughput."""

LEAST_SEEN_S = 6.0
"""Chosen: arrivals of fewer seconds say nothing of their rate."""

WAIT_LEAST = 0.5
"""Chosen: share of the TTFT target that is left for waiting at least; a prompt that needs more by itself is late in
almost any fleet."""


@dataclass(frozen=True, slots=True)
class ProfiledWorkers:
    """Implements `penstock_planner.decide.adaptive.workers.Workers`.

    Attributes:
        profile: Of one engine that prefills and one that decodes.
        learnt: What was observed so far.
        config: Targets.
        expected: Requests/s to expect.
    """

    profile: PerformanceProfile
    learnt: SlaMemory
    config: DecideConfig
    expected: ExpectedRate = TREND

    @property
    def is_bursty(self) -> bool:
        """Whether requests come in bursts."""
        return self.learnt.variability > BURSTY

    @property
    def has_shadows(self) -> bool:
        """Whether the queueing formula does not say how late requests are."""
        return self.is_bursty

    @property
    def follows_trend(self) -> bool:
        """Whether demand is not taken to stay; a fitted predictor that fails leaves it to the trend."""
        return self.config.predictor is not Predictor.CONSTANT

    @property
    def sigmas_ahead(self) -> float:
        """Return the chosen number."""
        return OBSERVED.sigmas_ahead if self.is_bursty else AHEAD_SIGMAS

    @property
    def restraint(self) -> Restraint:
        """Return what the queue and the profile do not say themselves."""
        return OBSERVED.restraint if self.is_bursty else RESTRAINT

    def tokens_per_s(self, work: Work) -> float | None:
        """Return the profile's throughput at the mean prompt, corrected; None before the first arrival."""
        size, own_s = self.learnt.uncached_isl, learning.service_s(self.learnt, self.profile)
        return None if size is None or own_s is None or work.rate.seen_s < LEAST_SEEN_S else size / own_s

    def arriving_per_s(self, ahead_s: float) -> float | None:
        """Return what a fitted predictor expects; None: the trend says."""
        return self.expected.per_s(ahead_s)

    def decoding(self, kv: KvLoad, tokens_per_s: float) -> Decoding:
        """Return the answers by the profile; before the first was complete, as mode adaptive has them."""
        return self.answers(tokens_per_s) or OBSERVED.decoding(kv, tokens_per_s)

    def gaps(self, tokens_per_s: float) -> GapsView | None:
        """Return the same answers; None without a target, and before the first answer was complete."""
        return None if self.config.itl_slo_s is None else self.answers(tokens_per_s)

    def busy_most(self, role: Role, workers: int) -> float:
        """Return the utilisation at which the wait still fits what is left of the TTFT target."""
        own_s = learning.service_s(self.learnt, self.profile)
        if own_s is None or workers < 1:
            return 1.0
        if self.is_bursty:
            return OBSERVED.busy_most(role, workers)
        # Requests wait in each aggregated worker, not in one queue before all of them.
        servers = 1 if role is Role.AGGREGATED else workers
        load = queueing.most_load(
            servers,
            service_s=own_s,
            variability=self.learnt.variability,
            may_wait_s=self.may_wait_s(own_s),
            late=1.0 - self.config.attainment,
        )
        return load / servers

    def busy_after(self, role: Role, workers: int) -> float:
        """Return `KEPT` of it."""
        if self.is_bursty:
            return OBSERVED.busy_after(role, workers)
        return KEPT * self.busy_most(role, workers)

    def may_wait_s(self, own_s: float) -> float:
        """Return what is left of the TTFT target after a prompt's own time."""
        target_s = self.config.ttft_slo_s
        return max(target_s - own_s * learning.factor(self.learnt.ttft), WAIT_LEAST * target_s)

    def answers(self, tokens_per_s: float) -> ProfiledAnswers | None:
        """Return the answers to prompts that end at so many uncached tokens/s; None before the first was complete."""
        learnt = self.learnt
        uncached, osl, context = learnt.uncached_isl, learnt.osl, learning.context_of(learnt)
        if uncached is None or osl is None or context is None:
            return None
        target_s = self.config.itl_slo_s
        return ProfiledAnswers(
            tokens_per_s=tokens_per_s / uncached * osl,
            running=learnt.running,
            row=self.profile.decode.at_context(context),
            factor=learning.factor(learnt.itl),
            variability=learnt.variability,
            sigmas=NormalDist().inv_cdf(self.config.attainment),
            target_s=math.inf if target_s is None else target_s,
        )
