"""Explanations of why a role has more replicas than demand needs: since when, and until when at most. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.cron import clock_at
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Retention
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.objective.trial import Trial
from penstock_planner.decide.policies.adaptive.rules import Case


@dataclass(frozen=True, slots=True)
class Clock:
    """Formats simulated times for people: as wall-clock time if it is known, else relative to the present time.

    The wall-clock time is known if the newest metrics scrape has it.

    Attributes:
        now_s: Present time, in simulated seconds.
        wall_s: Present time as Unix time; None if unknown.
        speed: Simulated seconds per real second.
        time_zone: IANA name of the time zone to show.
    """

    now_s: float
    wall_s: float | None
    speed: float
    time_zone: str

    @classmethod
    def of(cls, pull: Pull, config: DecideConfig) -> Clock:
        """Return a clock whose present time is the time of a metrics scrape.

        Args:
            pull: The metrics scrape.
            config: Configuration with the time zone and the time factor (simulated seconds per real second).
        """
        return cls(pull.at_s, pull.wall_s, config.speed, config.time_zone)

    def past(self, at_s: float) -> str:
        """Return a past simulated time as "at 02:10", or as "20 min ago" if the wall clock is unknown.

        Args:
            at_s: The time, in simulated seconds.
        """
        return self._shown(at_s, "at") or f"{_duration(self.now_s - at_s)} ago"

    def until(self, at_s: float) -> str:
        """Return a future simulated time as "until 03:10", or as "for 40 min" if the wall clock is unknown.

        Args:
            at_s: The time, in simulated seconds.
        """
        return self._shown(at_s, "until") or f"for {_duration(at_s - self.now_s)}"

    def _shown(self, at_s: float, word: str) -> str:
        if self.wall_s is None:
            return ""
        return f"{word} {clock_at(self.wall_s + (at_s - self.now_s) / self.speed, self.time_zone)}"


@dataclass(frozen=True, slots=True)
class KeptBy:
    """Explanation by one rule of why a role keeps more replicas than demand needs. Times are simulated seconds.

    Attributes:
        rule: Name of the rule that keeps them.
        why: Reason in words, such as "5 were needed at 02:10".
        ends: Words after the end time in the sentence, such as " unless demand returns"; can be empty.
        since_s: Time at which the reason began; None if unknown.
        until_s: Latest time at which the reason ends if demand does not return; None if it has no end.
    """

    rule: str
    why: str
    ends: str = ""
    since_s: float | None = None
    until_s: float | None = None

    def in_words(self, needs: int, clock: Clock) -> str:
        """Return why a role keeps more replicas than demand needs, for the sentence of a decision.

        Example: "5 were needed at 02:10; kept until 03:10; demand needs 3".

        Args:
            needs: Number of replicas that demand alone needs.
            clock: Clock that formats the times.
        """
        kept = "" if self.until_s is None else f"; kept {clock.until(self.until_s)}{self.ends}"
        return f"{self.why}{kept}; demand needs {needs}"

    def kept(self, needs: int) -> Retention:
        """Return the explanation of why a role keeps more replicas than demand needs, in the form in which a decision records it.

        Args:
            needs: Number of replicas that demand alone needs.
        """
        return Retention(needs, self.since_s, self.until_s)


def kept_by(case: Case, clock: Clock) -> KeptBy | None:
    """Return why a role keeps one of its replicas although demand does not need that replica.

    The reason can be the configured minimum of replicas, the learned minimum (floor), the time for which an idle
    replica is kept, or a trial of whether one more replica reduces late requests. If several apply, the one that lasts
    longest is returned; None if none applies.

    Args:
        case: Input of the role's rules, such as replica counts and demand.
        clock: Clock that formats the times.
    """
    found = [] if case.hindsight is None else list(_by_hindsight(case, case.hindsight, clock))
    if case.trial is not None and case.pool.replicas <= case.trial.floor:
        found.append(_by_trial(case.trial, clock))
    return max(found, key=lambda each: math.inf if each.until_s is None else each.until_s, default=None)


def _by_trial(trial: Trial, clock: Clock) -> KeptBy:
    since_s = clock.now_s - trial.age_s
    until_s = since_s + trial.holds_s
    if trial.outcome:
        return KeptBy("tried", f"a trial {clock.past(since_s)} helped", " or less load", since_s, until_s)
    why = f"a trial that began {clock.past(since_s)} is still being judged"
    return KeptBy("tried", why, " at most", since_s, until_s)


def _by_hindsight(case: Case, known: Hindsight, clock: Clock) -> Iterator[KeptBy]:
    workers, now_s = case.pool.replicas, clock.now_s
    index = min(workers, known.sizes) - 1
    idle_s = known.idle_s[index] if index >= 0 else 0.0
    since_s = now_s - idle_s
    if workers <= known.least:
        yield KeptBy("floor", f"its floor is {known.least}")
    elif workers <= known.floor_now:
        left_s = known.given_up_in_s
        until_s = None if left_s is None else now_s + max(0.0, left_s)
        why = f"the learnt floor is {known.floor_now}, last needed {clock.past(since_s)}"
        yield KeptBy("hindsight", why, " unless demand returns", since_s, until_s)
    elif not known.is_idle(workers, case.hold_s):
        is_patient = known.growth is Growth.DELAYED
        left_s = known.needed_s[index] if is_patient else case.hold_s - idle_s
        why = f"{workers} were needed {clock.past(since_s)}"
        yield KeptBy("idle", why, " unless demand returns", since_s, now_s + max(0.0, left_s))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
