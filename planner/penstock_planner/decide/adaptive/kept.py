"""What keeps replicas that demand alone does not need, since when, and until when at most. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.cron import clock_at
from penstock_planner.decide.adaptive.hindsight import Growth, Hindsight
from penstock_planner.decide.adaptive.rules import Case
from penstock_planner.decide.adaptive.trial import Trial
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Kept
from penstock_planner.decide.observation import Pull


@dataclass(frozen=True, slots=True)
class Clock:
    """Names simulated times as people read them: by the wall clock where a pull knows it, else as a time from now.

    Attributes:
        now_s: Simulated seconds.
        wall_s: The same time in real seconds since 1970; None: unknown.
    """

    now_s: float
    wall_s: float | None
    speed: float
    time_zone: str

    @classmethod
    def of(cls, pull: Pull, config: DecideConfig) -> Clock:
        """Return the clock at a pull."""
        return cls(pull.at_s, pull.wall_s, config.speed, config.time_zone)

    def past(self, at_s: float) -> str:
        """Return "at 02:10", or "20 min ago"."""
        return self._shown(at_s, "at") or f"{_duration(self.now_s - at_s)} ago"

    def until(self, at_s: float) -> str:
        """Return "until 03:10", or "for 40 min"."""
        return self._shown(at_s, "until") or f"for {_duration(at_s - self.now_s)}"

    def _shown(self, at_s: float, word: str) -> str:
        if self.wall_s is None:
            return ""
        return f"{word} {clock_at(self.wall_s + (at_s - self.now_s) / self.speed, self.time_zone)}"


@dataclass(frozen=True, slots=True)
class KeptBy:
    """One rule that keeps replicas.

    Attributes:
        rule: Its name.
        why: In words, with when it began.
        ends: What else ends it, in words; empty: nothing does.
        since_s, until_s: As of `Kept`.
    """

    rule: str
    why: str
    ends: str = ""
    since_s: float | None = None
    until_s: float | None = None

    def in_words(self, needs: int, clock: Clock) -> str:
        """Return it as the sentence of a decision has it, after the number of replicas."""
        kept = "" if self.until_s is None else f"; kept {clock.until(self.until_s)}{self.ends}"
        return f"{self.why}{kept}; demand needs {needs}"

    def kept(self, needs: int) -> Kept:
        """Return it as the record has it."""
        return Kept(needs, self.since_s, self.until_s)


def kept_by(case: Case, clock: Clock) -> KeptBy | None:
    """Return what keeps the newest replica, the rule that does so longest; None: none of these rules does."""
    found = [] if case.hindsight is None else list(_by_hindsight(case, case.hindsight, clock))
    if case.trial is not None and case.pool.replicas <= case.trial.floor:
        found.append(_by_trial(case.trial, clock))
    return max(found, key=lambda each: math.inf if each.until_s is None else each.until_s, default=None)


def _by_trial(trial: Trial, clock: Clock) -> KeptBy:
    since_s = clock.now_s - trial.age_s
    until_s = since_s + trial.holds_s
    if trial.helped:
        return KeptBy("tried", f"a trial {clock.past(since_s)} helped", " or less load", since_s, until_s)
    why = f"a trial that began {clock.past(since_s)} is still being judged"
    return KeptBy("tried", why, " at most", since_s, until_s)


def _by_hindsight(case: Case, known: Hindsight, clock: Clock) -> Iterator[KeptBy]:
    workers, now_s = case.pool.replicas, clock.now_s
    place = min(workers, known.sizes) - 1
    idle_s = known.idle_s[place] if place >= 0 else 0.0
    since_s = now_s - idle_s
    if workers <= known.least:
        yield KeptBy("floor", f"its floor is {known.least}")
    elif workers <= known.floor_now:
        left_s = known.given_up_in_s
        until_s = None if left_s is None else now_s + max(0.0, left_s)
        why = f"the learnt floor is {known.floor_now}, last needed {clock.past(since_s)}"
        yield KeptBy("hindsight", why, " unless demand returns", since_s, until_s)
    elif not known.is_idle(workers, case.hold_s):
        is_patient = known.growth is Growth.PATIENT
        left_s = known.needed_s[place] if is_patient else case.hold_s - idle_s
        why = f"{workers} were needed {clock.past(since_s)}"
        yield KeptBy("idle", why, " unless demand returns", since_s, now_s + max(0.0, left_s))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
