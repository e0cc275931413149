"""Trial replicas: one replica more if requests are late for reasons that the planner's latency model does not explain. Pure.

The latency model of the planner simulates which requests are late for lack of workers (see `served`). Late means over
the TTFT target; for the role that decodes also over the ITL target. A replica on trial is kept only if it helps.

Every replica that a role gains while its requests are late without explanation is such a trial, whichever rule
requested it. After at least 100 requests (`ENOUGH`), the fraction of late ones shows whether the replica helped. If it
did, the role keeps it for an hour (`HOLDS_S`) as long as the load stays; if the load falls to half, it keeps half of
its replicas. If it did not help, the role requests no trial for an hour, and twice as long after each further trial
that fails. Requests that arrived while fewer replicas were ready are not counted, because they may have been late for
lack of the replicas that have become ready since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.demand.trend import CHANCE_SIGMAS, SPAN_S
from penstock_planner.decide.objective.shadow_fleets import ENOUGH, HOLDS_S

MAX_FAILED_TRIALS = 5
"""Number of consecutive failed trials from which the pause before the next trial no longer doubles; it is then 16
hours."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Requests that one role served in one decision interval, and how many of them were late beyond the planner's prediction.

    Attributes:
        dt_s: Length of the interval in seconds, > 0.
        requests: Number of requests whose first token was sent, or which were rejected or timed out.
        late: Number of requests that were late for lack of this role's workers, minus the number that the planner's
            latency model (a simulation of the workers) predicts; can be negative. Late means over the TTFT target. For
            the role that decodes, it also includes requests over the ITL target, which the latency model does not
            predict at all.
        waits_s: Seconds for which the oldest request at the frontend has waited at the end of the interval; 0 if none
            waits.
    """

    dt_s: float
    requests: float
    late: float
    waits_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Record of one role's trial: one more replica, to find out whether it reduces late requests that the planner did not predict.

    Late means over the TTFT target, or for the role that decodes also over the ITL target. The planner's latency model
    simulates the workers and predicts how many requests are late for lack of workers; "unexplained" late requests are
    the late requests beyond this number. The record shows whether there are unexplained late requests, whether a trial
    is running, and whether the replica on trial helped. "Decayed" counts lose weight with a time constant of 5 minutes
    (`SPAN_S`). All times are durations in simulated seconds.

    Attributes:
        requests: Number of served requests, decayed. During a trial only requests since the replica on trial became
            ready.
        late: Number of unexplained late requests among ``requests``, decayed; negative if fewer are late than
            predicted.
        seen_s: Seconds in which those requests were served, decayed.
        lately: Number of served requests, decayed; unlike ``requests``, it is not reset when a trial begins. A trial
            ends if it is below 100 (`ENOUGH`), because too few requests arrive for a result.
        replicas: Number of ready and starting replicas at the end of the newest interval; None before the first
            interval.
        ready: Number of ready replicas at the end of the newest interval.
        ready_s: Seconds since the number of ready replicas last rose.
        tried: Total replicas of the role with the one on trial, or with the one that helped; 0 if there is no trial.
        before: Fraction of requests that were late and unexplained before the trial began.
        before_per_s: Requests/s that were served before the trial began.
        outcome: Result of the trial: True if the replica helped, False if it did not, None if there is no result yet.
        helped_per_s: Requests/s that were served when the trial was found to help; 0 if unknown.
        failed_trials: Number of consecutive trials that did not help.
        age_s: Seconds since the trial began, or since its result if the trial has one.
        late_ago_s: Seconds since the end of the last interval with unexplained late requests.
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
        """Return the fraction of requests that were late beyond the number that the planner's latency model predicts.

        Late means over the TTFT target, or for the role that decodes also over the ITL target. Returns 0 without
        requests.
        """
        return max(0.0, self.late / self.requests) if self.requests > 0 else 0.0

    @property
    def floor(self) -> int:
        """Return the minimum number of replicas that the role keeps because of a trial; 0 if there is no trial or it did not help.

        A trial is one more replica, to find out whether it reduces late requests. While it runs, the minimum includes
        that replica. After it helped, the minimum is reduced in proportion if the load is lower than when it helped.
        """
        if self.outcome is False:
            return 0
        if self.outcome is None or self.helped_per_s <= 0 or self.seen_s <= 0:
            return self.tried
        return math.ceil(self.tried * min(1.0, self.requests / self.seen_s / self.helped_per_s))

    @property
    def is_over(self) -> bool:
        """Whether the role can add one replica on trial, to find out whether that reduces late requests.

        It can if no replica is on trial, and the last trial without success was long enough ago: 1 h, doubled for each
        consecutive trial after the first that did not help.
        """
        return not self.tried or self.outcome is True

    @property
    def holds_s(self) -> float:
        """Return the simulated seconds for which a trial of one more replica runs at most, and for which its result is valid.

        It is 1 h, doubled for each consecutive trial after the first that did not reduce late requests.
        """
        return float(HOLDS_S * 2 ** max(0, min(self.failed_trials, MAX_FAILED_TRIALS) - 1))

    def is_late(self, allowed: float) -> bool:
        """Return whether the late requests beyond the number that the planner predicted are significantly more than allowed.

        Late means over the TTFT target, or for the role that decodes also over the ITL target. The planner's latency
        model predicts how many requests are late for lack of workers. The excess is significant if it exceeds the
        allowed number by more than two standard errors (`CHANCE_SIGMAS`). Always False with fewer than 100 requests
        (`ENOUGH`).

        Args:
            allowed: Fraction of requests that are allowed to be late.
        """
        expected = allowed * self.requests
        return self.requests >= ENOUGH and self.late > expected + CHANCE_SIGMAS * math.sqrt(expected)

    def followed(self, pool: PoolCounts, seen: Lateness, allowed: float) -> Trial:
        """Return the record after one decision interval, in which a trial may have begun or ended.

        A trial is one more replica, to find out whether it reduces late requests that the planner did not predict. The
        record counts served and late requests, from which `judged` decides whether the replica helped.

        Args:
            pool: Replica counts of the role at the end of the interval.
            seen: Requests that the role served in the interval.
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
        """Return the record with the result of the trial, if at least 100 requests (`ENOUGH`) were served with the added replica.

        A trial is one more replica, to find out whether it reduces late requests.

        The replica helped if the fraction of requests that were late beyond the planner's prediction has at least
        halved. If the load has also at least halved, there is no result, because the lower load may be the reason: the
        trial ends as if it had not happened. Returns the record unchanged if no trial is running, or if the trial has a
        result already.
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
    """Return a copy of a role's trial record in which the counts of served and late requests and their time are 0.

    The result counts only from now on. The replica counts and the trial itself (one more replica, to find out whether
    it reduces late requests) are kept.
    """
    return replace(known, requests=0.0, late=0.0, seen_s=0.0)
