"""The planner's latency model, and its correction by what was really served: the real fleet is simulated like a shadow fleet. Pure.

The latency model is the simulation of shadow fleets (see `shadow_fleets`): it calculates which requests would be late, that
is, over the TTFT target, with a given number of workers. It calculates this for the real fleet, too. If more requests
were late in fact, every simulated worker is assumed to do a smaller fraction of its throughput from then on; if fewer
were late, a larger one. So the predictions for all fleets follow what was served by the real one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock_planner.decide.capacity.observed import SHARES
from penstock_planner.decide.demand.load import ASSUMED_REQUESTS, MEMORY_S
from penstock_planner.decide.objective.shadow_fleets import WAIT_S, PulledLoad, served_by

SHARE_LEAST = 0.5
"""Minimum fraction (0.5) of its measured throughput that a worker of a simulated fleet is assumed to do.

The loads of the scoreboard (the planner's benchmark) go down to 0.67. If more requests are late than half of the
throughput explains, there is another cause, and more workers would not help."""


@dataclass(frozen=True, slots=True)
class WindowComparison:
    """Requests of one decision interval as they were really served, and as the planner's latency model predicts for the real fleet.

    The latency model simulates how many requests the workers of a fleet serve over the TTFT target.

    Attributes:
        requests: Number of first tokens plus requests rejected or timed out.
        late: Number of requests among ``requests`` that were late: over the TTFT target, rejected or timed out.
        arrivals: Number of requests that arrived in the interval.
        predicted_late: Number of those arrivals that the latency model predicts to be late, including those that are
            late with any number of workers.
    """

    requests: float = 0.0
    late: float = 0.0
    arrivals: float = 0.0
    predicted_late: float = 0.0

    @property
    def inputs(self) -> dict[str, float]:
        """Return the four numbers of this comparison by field name, so that the decision's record of the rule can contain them."""
        return {
            "requests": self.requests,
            "late": self.late,
            "arrivals": self.arrivals,
            "predicted_late": self.predicted_late,
        }


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Comparison of the late requests that the planner's latency model predicts with the requests that really were late.

    The latency model simulates the workers of the real fleet. Late means over the TTFT target, rejected or timed out.
    The counts ``requests``, ``late``, ``arrived`` and ``predicted_late`` lose weight with a time constant of half an
    hour (`WAIT_S`); the counts that begin with ``calm`` with one of 6 hours (`MEMORY_S`). All times are durations in
    simulated seconds.

    Attributes:
        share: Fraction (0 to 1) of its measured throughput that the latency model assumes for a worker. It is lowered
            while more requests are late than predicted, and raised while fewer are. None as long as the default of the
            role applies.
        backlog_s: Work that the simulation of the real fleet has left to do now, in seconds of one worker.
        requests: Number of first tokens sent plus requests rejected or timed out.
        late: Number of requests among ``requests`` that were late.
        arrived: Number of requests that arrived.
        predicted_late: Number of those arrivals that the latency model predicts to be late, including those that are
            late with any number of workers.
        calm_s: Seconds for which the real fleet has been calm, that is, at each metrics scrape no request waited in
            routers or workers, and a worker was idle; 0 if it is not calm.
        calm_requests: Number of first tokens sent after the fleet had been calm for longer than the TTFT target.
            ``calm_late / calm_requests`` is about the fraction of requests that are late with any number of workers.
        calm_late: Number of the first tokens in ``calm_requests`` that were late although no request waited, and so
            would be late with any number of workers.
        unexplained: Number of late requests in the newest decision interval minus the number that the latency model
            predicts; negative if fewer were late than predicted.
        newest: Comparison of the newest decision interval.
    """

    share: float | None = None
    backlog_s: float = 0.0
    requests: float = 0.0
    late: float = 0.0
    arrived: float = 0.0
    predicted_late: float = 0.0
    calm_s: float = 0.0
    calm_requests: float = 0.0
    calm_late: float = 0.0
    unexplained: float = 0.0
    newest: WindowComparison = WindowComparison()

    def share_of(self, role: Role) -> float:
        """Return the fraction of its measured throughput that the latency model assumes for a worker of the role.

        The fraction is learned by comparing predicted with real late requests; before the first comparison, the default
        of the role is returned (`SHARES`).
        """
        return SHARES.get(role, 1.0) if self.share is None else self.share

    @property
    def in_time(self) -> float | None:
        """Return the observed fraction of requests in about the last half hour that met the TTFT target; None if there were none."""
        return 1.0 - self.late / self.requests if self.requests > 0 else None

    @property
    def predicted_in_time(self) -> float | None:
        """Return the fraction of requests in about the last half hour that the latency model predicts to meet the TTFT target.

        The latency model of the planner simulates how many requests the workers serve late. The prediction is for the
        replicas that were really there. Returns None if nothing arrived.
        """
        return max(0.0, 1.0 - self.predicted_late / self.arrived) if self.arrived > 0 else None

    @property
    def _always(self) -> float:
        return self.calm_late / (self.calm_requests + ASSUMED_REQUESTS)

    def followed(
        self,
        load: PulledLoad,
        role: Role,
        *,
        ready: int,
        first: float,
        late: float,
        late_alone: float | None,
        is_entry_late: bool,
        slo_s: float,
        usual_requests: float,
    ) -> ModelComparison:
        """Return a copy of this comparison of predicted and real late requests, after one more decision interval.

        A request is late if it misses the TTFT target. The latency model, which predicts the late requests, assumes that a
        worker is as fast as its measured throughput times ``share`` (a fraction, 0 to 1). In the copy, ``share`` is lower
        if more requests were late than predicted, and higher if fewer were. It stays the same if the role is not the cause
        of the late requests (``is_entry_late`` is False).

        Args:
            load: Load of the interval, whose computing times were calculated with the ``share`` before this call.
            role: Role that requests reach first.
            ready: Number of ready workers of that role.
            first: Number of requests whose first token was sent, plus requests rejected or timed out.
            late: Number of those requests that were late: over the TTFT target, rejected or timed out.
            late_alone: Number of those late requests whose prefill alone took longer than the target, so that they are
                late with any number of workers; None if unknown.
            is_entry_late: Whether the late requests lacked workers of this role, as far as is known. False if they
                waited for workers of another role.
            slo_s: TTFT target, in seconds.
            usual_requests: Number of requests that usually arrive in half an hour, > 0. ``share`` changes by the number
                of late requests that were not predicted, divided by this number.
        """
        left_s, predicted_late = served_by(ready, self.backlog_s, load)
        kept, calm_kept = (math.exp(-load.dt_s / tau_s) for tau_s in (WAIT_S, MEMORY_S))
        # After the system has been calm for the TTFT target, each request that waited before has its first token, or
        # would be late with any number of workers. While requests wait inside workers for another role, they are late
        # for lack of that role, and more workers of that role would help.
        waits = load.served_at_once_by is None or not is_entry_late
        calm_s = 0.0 if waits else self.calm_s + load.dt_s
        is_calm = calm_s > slo_s
        share = self.share_of(role)
        # The requests that no fleet would have served on time are known in calm, and at other times if the times since
        # dispatch are known. Otherwise only their usual fraction is known.
        seen = late if is_calm else late_alone
        wrong = late - (self._always * first if seen is None else seen) - predicted_late
        predicted_late += self._always * load.arrivals if seen is None else seen
        if is_entry_late and not is_calm:
            share = min(1.0, max(SHARE_LEAST, share - wrong / usual_requests))
        return replace(
            self,
            share=share,
            backlog_s=left_s,
            requests=self.requests * kept + first,
            late=self.late * kept + late,
            arrived=self.arrived * kept + load.arrivals,
            predicted_late=self.predicted_late * kept + predicted_late,
            calm_s=calm_s,
            calm_requests=self.calm_requests * calm_kept + (first if is_calm else 0.0),
            calm_late=self.calm_late * calm_kept + (late if is_calm else 0.0),
            unexplained=wrong,
            newest=WindowComparison(first, late, load.arrivals, predicted_late),
        )

    def in_words(self) -> str:
        """Return the observed and the predicted fraction of requests that met the TTFT target, in words.

        Empty if either is unknown.
        """
        served, predicted = self.in_time, self.predicted_in_time
        if served is None or predicted is None:
            return ""
        return f"; observed: {served:.1%} of the last {self.requests:.0f} requests on time (model {predicted:.1%})"

    def for_other_graph(self) -> ModelComparison:
        """Return the state with which another graph of the same model starts: all counts are reset.

        Only ``share`` is kept: the fraction of the measured throughput that a simulated worker is assumed to do.
        """
        return ModelComparison(share=self.share)
