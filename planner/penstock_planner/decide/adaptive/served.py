"""The shadow fleets' model against what was served: the fleet that is really there is followed as one of them. Pure.

Its requests are late or not by the same fluid as those of any other fleet. Where more were late in fact than
the model says, every shadow worker is taken to do less of its throughput from then on, where fewer were,
more: what is predicted of all fleets follows what was served of this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock_planner.decide.adaptive.hindsight import WAIT_S, PulledLoad, served_by
from penstock_planner.decide.adaptive.observed import SHARES
from penstock_planner.decide.adaptive.signals import ASSUMED_REQUESTS, MEMORY_S

SHARE_LEAST = 0.5
"""Bound, below the 0.67 that the scoreboard's loads come down to: what makes more late than half of the
throughput explains has another cause, and more workers would not help."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One window's requests as they were served, and as the shadow of the real fleet serves them.

    Attributes:
        requests: First tokens, and requests turned away.
        late: Those of them that were late.
        arrivals: Requests that came.
        predicted_late: Those of them that the model has late, with those that are late in any fleet.
    """

    requests: float = 0.0
    late: float = 0.0
    arrivals: float = 0.0
    predicted_late: float = 0.0

    @property
    def inputs(self) -> dict[str, float]:
        """Return it as a step's inputs."""
        return {
            "requests": self.requests,
            "late": self.late,
            "arrivals": self.arrivals,
            "predicted_late": self.predicted_late,
        }


@dataclass(frozen=True, slots=True)
class Served:
    """What first tokens say of the model.

    Attributes:
        share: Of its throughput what a worker of a shadow fleet does; None: not corrected yet.
        backlog_s: Work that the shadow of the real fleet has left, in seconds of one worker.
        first: First tokens and requests turned away, decayed over `WAIT_S`.
        late: Those of them that were late, decayed alike.
        arrived: Arrivals, decayed alike.
        predicted_late: Those of them that the shadow of the real fleet served late, with those that are late in any
            fleet, decayed alike.
        calm_s: For how long nothing has waited, here or inside workers, and a worker has been idle at each pull.
        calm: First tokens that came when that was so for longer than a first token may take, decayed over `MEMORY_S`.
        calm_late: Those of them that were late all the same: no fleet would have them in time.
        unexplained: Requests of the newest window that were late beyond what the model says; below 0 where
            fewer were.
        newest: The newest window.
    """

    share: float | None = None
    backlog_s: float = 0.0
    first: float = 0.0
    late: float = 0.0
    arrived: float = 0.0
    predicted_late: float = 0.0
    calm_s: float = 0.0
    calm: float = 0.0
    calm_late: float = 0.0
    unexplained: float = 0.0
    newest: Compared = Compared()

    def share_of(self, role: Role) -> float:
        """Return the share of its throughput that a shadow worker of the role does."""
        return SHARES.get(role, 1.0) if self.share is None else self.share

    @property
    def in_time(self) -> float | None:
        """Return the share of the last half hour's requests that was in time; None without any."""
        return 1.0 - self.late / self.first if self.first > 0 else None

    @property
    def predicted_in_time(self) -> float | None:
        """Return the share that the model says of the fleet that was there; None without arrivals."""
        return max(0.0, 1.0 - self.predicted_late / self.arrived) if self.arrived > 0 else None

    @property
    def _always(self) -> float:
        return self.calm_late / (self.calm + ASSUMED_REQUESTS)

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
        usual: float,
    ) -> Served:
        """Return it after one window.

        Args:
            load: Of the window, its work as the present share has it.
            role: That requests reach first.
            ready: Its workers.
            first: First tokens, and requests turned away.
            late: Those of them that were late.
            late_alone: Of those, the ones late by their own prefill, so in any fleet; None: unknown.
            is_entry_late: They were so for lack of this role, as far as is known.
            slo_s: What a first token may take.
            usual: Requests of half an hour, > 0: so many that the model was wrong about, all the same way,
                move a shadow worker by all of its throughput.
        """
        left_s, predicted_late = served_by(ready, self.backlog_s, load)
        kept, calm_kept = (math.exp(-load.dt_s / tau_s) for tau_s in (WAIT_S, MEMORY_S))
        # Once it has been calm for a TTFT in time, who waited before has a first token, or would be late in any fleet.
        # While requests wait inside workers for another role, they are late for lack of that one, and more of it would help.
        waits = load.served_at_once_by is None or not is_entry_late
        calm_s = 0.0 if waits else self.calm_s + load.dt_s
        is_calm = calm_s > slo_s
        share = self.share_of(role)
        # Of calm it is seen which ones no fleet would have in time, and at other times where their dispatch is known; else
        # their usual share is all that is known.
        seen = late if is_calm else late_alone
        wrong = late - (self._always * first if seen is None else seen) - predicted_late
        predicted_late += self._always * load.arrivals if seen is None else seen
        if is_entry_late and not is_calm:
            share = min(1.0, max(SHARE_LEAST, share - wrong / usual))
        return replace(
            self,
            share=share,
            backlog_s=left_s,
            first=self.first * kept + first,
            late=self.late * kept + late,
            arrived=self.arrived * kept + load.arrivals,
            predicted_late=self.predicted_late * kept + predicted_late,
            calm_s=calm_s,
            calm=self.calm * calm_kept + (first if is_calm else 0.0),
            calm_late=self.calm_late * calm_kept + (late if is_calm else 0.0),
            unexplained=wrong,
            newest=Compared(first, late, load.arrivals, predicted_late),
        )

    def in_words(self) -> str:
        """Return what was served and what the model says of it; empty while nothing was served."""
        served, predicted = self.in_time, self.predicted_in_time
        if served is None or predicted is None:
            return ""
        return (
            f"; observed: {served:.1%} of the last {self.first:.0f} requests on time (model {predicted:.1%})"
        )

    def carried(self) -> Served:
        """Return what another graph starts from: how right the model is."""
        return Served(share=self.share)
