"""Trial replicas: one replica more if requests are late for reasons that the model does not explain, kept only if it helps. Pure.

Every replica that a role gains while its requests are late without explanation is such a trial, whichever rule
requested it. After enough requests, the fraction of late ones shows whether the replica helped. If it did, the role
keeps it for `HOLDS_S` as long as the load stays; if the load falls to half, it keeps half of its replicas. If it did
not help, the role requests no trial for as long, and twice as long after each further trial that fails. Requests that
arrived while fewer replicas were ready are not counted, because they may have been late for lack of the replicas that
have become ready since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_planner.decide.adaptive.hindsight import ENOUGH, HOLDS_S
from penstock_planner.decide.adaptive.signals import CHANCE_SIGMAS, SPAN_S
from penstock_planner.decide.observation import PoolCounts

MAX_FAILED_TRIALS = 5
"""Number of failed trials after which the pause no longer doubles; it is then 16 hours."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """What one role served in one window.

    Attributes:
        dt_s: Length of the window in seconds, > 0.
        requests: Number of requests.
        late: Number of requests that were late for lack of this role, minus those that the model explains; can be
            negative. For the role that decodes, it includes requests late by ITL, which the model does not know at
            all.
        waits_s: Seconds that the oldest request at the frontend has waited at the end of the window.
    """

    dt_s: float
    requests: float
    late: float
    waits_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Record of a trial: one more replica for a role whose requests are late for reasons that the model does not explain.

    It shows whether such late requests occur, whether a trial is running, and whether the replica helped.

    Attributes:
        requests: Number of requests, decayed over `SPAN_S`. During a trial only those since its replica became ready.
        late: Number of late requests that the model does not explain, decayed alike.
        seen_s: Seconds in which those requests were served, decayed alike.
        lately: Number of requests, decayed alike, regardless of any trial.
        replicas: Number of replicas before the newest window; None before the first window.
        ready: Number of ready ones among them.
        ready_s: Seconds since a replica last became ready.
        tried: Number of replicas including the one on trial; 0 if there is no trial.
        before: Fraction of requests that were late without explanation before the trial.
        before_per_s: Arriving requests/s before the trial.
        outcome: Result of the trial; None if there is no result yet.
        helped_per_s: Arriving requests/s when the trial was found to help; 0 if unknown.
        failed_trials: Number of consecutive trials that did not help.
        age_s: Seconds since the trial began, or since its result.
        late_ago_s: Seconds since the last window with a late request that the model does not explain.
    """

    requests: float = 0.0
    late: float = 0.0
    seen_s: float = 0.0
    lately: float = 0.0
    replicas: int | None = None
    ready: int = 0
    ready_s: float = 0.0
    tried: int = 0
    before: float = 0.0
    before_per_s: float = 0.0
    outcome: bool | None = None
    helped_per_s: float = 0.0
    failed_trials: int = 0
    age_s: float = 0.0
    late_ago_s: float = 0.0

    @property
    def share(self) -> float:
        """Return the fraction of requests that are late for reasons that the model does not explain."""
        return max(0.0, self.late / self.requests) if self.requests > 0 else 0.0

    @property
    def floor(self) -> int:
        """Return the number of replicas that the role must keep because of a trial; 0 if there is none or it did not help.

        While a trial runs these are all its replicas. After it helped, they are those that the present load still
        needs.
        """
        if self.outcome is False:
            return 0
        if self.outcome is None or self.helped_per_s <= 0 or self.seen_s <= 0:
            return self.tried
        return math.ceil(self.tried * min(1.0, self.requests / self.seen_s / self.helped_per_s))

    @property
    def is_over(self) -> bool:
        """Whether the role can try another replica: no replica is on trial, and no trial failed recently."""
        return not self.tried or self.outcome is True

    @property
    def holds_s(self) -> float:
        """Return the seconds for which a trial runs at most, and for which its result is valid."""
        return float(HOLDS_S * 2 ** max(0, min(self.failed_trials, MAX_FAILED_TRIALS) - 1))

    def is_late(self, allowed: float) -> bool:
        """Return whether so large a number of requests is late without explanation that chance is not the cause.

        Always False with fewer than `ENOUGH` requests.

        Args:
            allowed: Fraction of requests that are allowed to be late.
        """
        expected = allowed * self.requests
        return self.requests >= ENOUGH and self.late > expected + CHANCE_SIGMAS * math.sqrt(expected)

    def followed(self, pool: PoolCounts, seen: Lateness, allowed: float) -> Trial:
        """Return the record after one window.

        Args:
            pool: Replica counts at the end of the window.
            seen: What the role served in the window.
            allowed: Fraction of requests that are allowed to be late.
        """
        known = self._aged(seen.dt_s)
        begins = self.replicas is not None and pool.replicas > self.replicas and known.is_over
        if begins and known.is_late(allowed):
            begun = replace(known, before=known.share, before_per_s=known.requests / known.seen_s)
            known = replace(with_reset_counts(begun), tried=pool.replicas, outcome=None, age_s=0.0)
        if known.outcome is not False and pool.replicas < known.floor:
            known = replace(known, tried=0, outcome=None)  # another rule or client removed the replica
        kept = math.exp(-seen.dt_s / SPAN_S)
        late_ago_s = 0.0 if seen.late > 0 else known.late_ago_s + seen.dt_s
        lately = known.lately * kept + seen.requests
        ready_s = 0.0 if pool.ready > known.ready else known.ready_s + seen.dt_s
        known = replace(
            known,
            replicas=pool.replicas,
            ready=pool.ready,
            ready_s=ready_s,
            lately=lately,
            late_ago_s=late_ago_s,
        )
        if known.outcome is not False and known.lately < ENOUGH:
            known = replace(known, tried=0, outcome=None)  # too few requests arrive for a result
        is_starting = known.tried and known.outcome is None and pool.ready < known.tried
        if is_starting or seen.waits_s >= ready_s:
            return with_reset_counts(known)
        known = replace(
            known,
            requests=known.requests * kept + seen.requests,
            late=known.late * kept + seen.late,
            seen_s=known.seen_s * kept + seen.dt_s,
        )
        return known.judged()

    def _aged(self, dt_s: float) -> Trial:
        """Return the record ``dt_s`` seconds later. After `holds_s`, a result is dropped, and so is a trial without one."""
        age_s = self.age_s + dt_s
        if self.tried and age_s > self.holds_s:
            return replace(self, tried=0, outcome=None, age_s=0.0)
        return replace(self, age_s=age_s)

    def judged(self) -> Trial:
        """Return the record with the trial's result, if enough requests have been served with the replica on trial.

        The replica helped if the unexplained late fraction has at least halved. If also the load has at least halved,
        there is no result, because the calm may be the reason: the trial ends as if it had not happened.
        """
        if not self.tried or self.outcome is not None or self.requests < ENOUGH:
            return self
        helped = 2.0 * self.share <= self.before
        if helped and 2.0 * self.requests < self.before_per_s * self.seen_s:
            return replace(self, tried=0, age_s=0.0)
        per_s = self.requests / self.seen_s if helped else 0.0
        return replace(
            self,
            outcome=helped,
            helped_per_s=per_s,
            failed_trials=0 if helped else self.failed_trials + 1,
            age_s=0.0,
        )


def with_reset_counts(known: Trial) -> Trial:
    """Return a copy of ``known`` in which the counts of served requests are 0, so that only requests from now on are counted.

    The replica counts and the trial itself are kept.
    """
    return replace(known, requests=0.0, late=0.0, seen_s=0.0)
