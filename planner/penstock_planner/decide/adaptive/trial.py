"""One replica more where requests are late and the model sees no reason: asked for, watched, and believed or not. Pure.

Every replica that a role gains while it serves late for no known reason is such a trial, whichever rule asked for it. After
enough requests the share that is late says whether the replica helped. If it did, the role keeps it for `HOLDS_S`, as long as the
load stays: of a load that falls to a half, it keeps half of its replicas. If it did not, the role asks for no more for as long, and
twice as long after each further trial that fails. Requests that came to a smaller fleet say nothing of this one: the workers that
have become ready since may have been what they lacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_planner.decide.adaptive.hindsight import ENOUGH, HOLDS_S
from penstock_planner.decide.adaptive.signals import CHANCE_SIGMAS, SPAN_S
from penstock_planner.decide.observation import PoolCounts

VAIN_MOST = 5
"""Bound: after this many that did not help, 32 hours, the pause gets no longer."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """What one role served in one window.

    Attributes:
        dt_s: Its length, > 0.
        first: Requests.
        late: Those of them that were late for lack of this role, beyond what the model says; may be below 0.
            For the role that decodes, those late by ITL as well, of which the model knows nothing.
        waits_s: How long a request waits at its end, at the frontend.
    """

    dt_s: float
    first: float
    late: float
    waits_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Records whether one replica more helps a role whose requests are late for no reason that the model knows.

    Attributes:
        first: Requests, decayed over `SPAN_S`; since the replica on trial is ready, while one is.
        late: Late ones that the model does not explain, decayed alike.
        seen_s: Seconds of them, decayed alike.
        lately: Requests, decayed alike, whatever is on trial.
        replicas: Before the newest window; None before the first.
        ready: Of them.
        ready_s: Since one became ready.
        tried: Replicas with the one on trial; 0: none is.
        before: Share that was late before it.
        before_per_s: Requests/s that came then.
        helped: What was found; None: not yet.
        helped_per_s: Requests/s that came when it was found to help; 0: unknown.
        vain: Trials in a row that did not help.
        age_s: Since the trial began, or since its result.
        late_ago_s: Since the last window with a late request that the model does not explain.
    """

    first: float = 0.0
    late: float = 0.0
    seen_s: float = 0.0
    lately: float = 0.0
    replicas: int | None = None
    ready: int = 0
    ready_s: float = 0.0
    tried: int = 0
    before: float = 0.0
    before_per_s: float = 0.0
    helped: bool | None = None
    helped_per_s: float = 0.0
    vain: int = 0
    age_s: float = 0.0
    late_ago_s: float = 0.0

    @property
    def share(self) -> float:
        """Return the share that is late for no reason that the model knows."""
        return max(0.0, self.late / self.first) if self.first > 0 else 0.0

    @property
    def floor(self) -> int:
        """Return how many replicas the role keeps: all while a trial runs, those that the load still needs after it helped."""
        if self.helped is False:
            return 0
        if self.helped is None or self.helped_per_s <= 0 or self.seen_s <= 0:
            return self.tried
        return math.ceil(self.tried * min(1.0, self.first / self.seen_s / self.helped_per_s))

    @property
    def is_over(self) -> bool:
        """Whether the role may ask for another: none is on trial, and none failed so recently."""
        return not self.tried or self.helped is True

    @property
    def holds_s(self) -> float:
        """Return for how long a trial runs at most, and for how long what it found is believed."""
        return float(HOLDS_S * 2 ** max(0, min(self.vain, VAIN_MOST) - 1))

    def is_late(self, allowed: float) -> bool:
        """Return whether this many are late that chance does not explain it, where a share may be."""
        expected = allowed * self.first
        return self.first >= ENOUGH and self.late > expected + CHANCE_SIGMAS * math.sqrt(expected)

    def followed(self, pool: PoolCounts, seen: Lateness, allowed: float) -> Trial:
        """Return it after one window with ``pool`` at its end; a share of ``allowed`` may be late."""
        known = self._aged(seen.dt_s)
        begins = self.replicas is not None and pool.replicas > self.replicas and known.is_over
        if begins and known.is_late(allowed):
            begun = replace(known, before=known.share, before_per_s=known.first / known.seen_s)
            known = replace(blank(begun), tried=pool.replicas, helped=None, age_s=0.0)
        if known.helped is not False and pool.replicas < known.floor:
            known = replace(known, tried=0, helped=None)  # rolled back, or taken by someone else
        kept = math.exp(-seen.dt_s / SPAN_S)
        late_ago_s = 0.0 if seen.late > 0 else known.late_ago_s + seen.dt_s
        lately = known.lately * kept + seen.first
        ready_s = 0.0 if pool.ready > known.ready else known.ready_s + seen.dt_s
        known = replace(
            known,
            replicas=pool.replicas,
            ready=pool.ready,
            ready_s=ready_s,
            lately=lately,
            late_ago_s=late_ago_s,
        )
        if known.helped is not False and known.lately < ENOUGH:
            known = replace(known, tried=0, helped=None)  # too few come to tell
        is_starting = known.tried and known.helped is None and pool.ready < known.tried
        if is_starting or seen.waits_s >= ready_s:
            return blank(known)
        known = replace(
            known,
            first=known.first * kept + seen.first,
            late=known.late * kept + seen.late,
            seen_s=known.seen_s * kept + seen.dt_s,
        )
        return known.judged()

    def _aged(self, dt_s: float) -> Trial:
        """Return it this much later; what was found is forgotten after its time, a trial of which nothing comes as well."""
        age_s = self.age_s + dt_s
        if self.tried and age_s > self.holds_s:
            return replace(self, tried=0, helped=None, age_s=0.0)
        return replace(self, age_s=age_s)

    def judged(self) -> Trial:
        """Return it with what was found, once enough requests have been served with the replica on trial.

        It helped where most of the share that was late is in time, unless most of the requests came no more:
        of such calm nothing is known, and the replica goes as if it had not been tried.
        """
        if not self.tried or self.helped is not None or self.first < ENOUGH:
            return self
        helped = 2.0 * self.share <= self.before
        if helped and 2.0 * self.first < self.before_per_s * self.seen_s:
            return replace(self, tried=0, age_s=0.0)
        per_s = self.first / self.seen_s if helped else 0.0
        return replace(
            self, helped=helped, helped_per_s=per_s, vain=0 if helped else self.vain + 1, age_s=0.0
        )


def blank(known: Trial) -> Trial:
    """Return it as if no request had been served yet."""
    return replace(known, first=0.0, late=0.0, seen_s=0.0)
