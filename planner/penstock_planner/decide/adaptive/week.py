"""What the week has taught: demand by quarter of an hour, and whether to believe it. Pure.

Two records say what is due at a time: the same time yesterday, and the same weekday's. Each is held against
demand as it is: at the beginning of every quarter it says what is due in it. For jumps x that it told and y
that came, both from demand as it was, it is believed while its own squared errors have been less than those
of "as now",

    sum((y - x)^2) < sum(y^2), that is belief = sum(x y) / sum(x x) > 1/2,

with half a jump that did not come assumed alongside those seen, of the size in question: the first jump is not
believed, the second is. A holiday costs its first quarter of an hour: what did not come as told takes its
share off what is told next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.cron import quarter_of_week
from penstock_planner.decide.adaptive.signals import SPAN_S

SLOTS = 672
"""Quarters of an hour of a week: most timetables begin at one."""

SLOT_S = 900.0

DAY_SLOTS = 96

HALF = 0.5
"""Chosen: what is new weighs as much as what was before. The newest week has this share of its slot, so that
a shift is known after two; of what was told lately and did not come this much is forgotten each slot, and this
much of a slot that came as told is assumed; this much of a jump that did not come is assumed, so that one that
came once is believed, and after one that did not come two have to."""

SCORE_KEPT = math.exp(-1.0 / SLOTS)
"""What was told right or wrong is averaged over a week, as it is the week that is told of."""

BELIEVED_FROM = 0.5
"""Above it the errors are less than those of demand as it is."""

_LEAST = 1e-4
"""Requests/s from which on a slot's demand is recorded, in steps of an eighth of a doubling: two digits each."""

_UNKNOWN = "00"
_NOTHING = 1
_MOST = 255


@dataclass(frozen=True, slots=True)
class WeekRecord:
    """How one record of the week has predicted; sums over slots, decayed over a week, of requests/s.

    Attributes:
        told: What is due in the present slot; None: not known.
        expected: What it said of the last slots, decayed within an hour.
        told_squares: Of the jumps that were told.
        together: Of told jumps times those that came.
    """

    told: float | None = None
    expected: float = 0.0
    told_squares: float = 0.0
    together: float = 0.0

    def belief(self, scale: float) -> float:
        """Return the share of a told jump that came, >= 0; ``scale``: of the demand in question, requests/s."""
        against = self.told_squares + HALF * scale * scale
        return max(0.0, self.together / against) if against else 0.0

    def ended(self, said: float | None, before: float | None, came: float) -> WeekRecord:
        """Return it after a slot of ``came`` requests/s that began with ``before``, of which it ``said`` something on record."""
        after = replace(self, expected=HALF * self.expected + (said or 0.0))
        if self.told is None or before is None:
            return after
        told = self.told - before
        return replace(
            after,
            told_squares=self.told_squares * SCORE_KEPT + told * told,
            together=self.together * SCORE_KEPT + told * (came - before),
        )

    def due(self, known: float | None, came: float) -> float | None:
        """Return what it says of a slot with this demand on record, less what has lately not come as it said."""
        if known is None:
            return None
        assumed = HALF * known
        against = self.expected + assumed
        return known * min(1.0, (came + assumed) / against) if against else known


@dataclass(frozen=True, slots=True)
class Recalled:
    """What the week's record expects.

    Attributes:
        rate: Most requests/s that are due, where that is more than there are and believed; else 0.
        belief: Share of told jumps that came; of the record that is believed more.
    """

    rate: float = 0.0
    belief: float = 0.0


@dataclass(frozen=True, slots=True)
class Week:
    """Requests/s by quarter of an hour of the week, from Monday 0:00 on.

    Attributes:
        slots: Two hexadecimal digits each; empty before the first.
        place: Of the present slot; None before the first pull whose time is known.
        seen_s: Of it.
        peak: Most of its parts' requests/s, of `SPAN_S` each, as what begins within a slot needs its workers
            as long as what fills it.
        part_s, arrivals: Length of the present part, and its requests.
        newest: Requests/s of the part before; None: unknown.
        before: The same when the slot began.
        came: Of the last slots what came, decayed within an hour.
        day: The time yesterday, as a record.
        week: The weekday's.
    """

    slots: str = ""
    place: int | None = None
    seen_s: float = 0.0
    peak: float = 0.0
    part_s: float = 0.0
    arrivals: float = 0.0
    newest: float | None = None
    before: float | None = None
    came: float = 0.0
    day: WeekRecord = WeekRecord()
    week: WeekRecord = WeekRecord()

    def at(self, place: int) -> float | None:
        """Return the demand on record of a slot, requests/s; None: not known."""
        digits = self.slots[2 * place : 2 * place + 2]
        return None if digits in {"", _UNKNOWN} else _rate(int(digits, 16))

    def followed(self, arrivals: float, dt_s: float, wall_s: float, time_zone: str) -> Week:
        """Return it after one pull that covers ``dt_s`` and ends at ``wall_s``."""
        place = quarter_of_week(wall_s, time_zone)
        known = self if place == self.place else self._begun(place)
        known = replace(
            known,
            seen_s=known.seen_s + dt_s,
            part_s=known.part_s + dt_s,
            arrivals=known.arrivals + arrivals,
        )
        return known.part_ended() if known.part_s >= SPAN_S else known

    def recalled(self, ahead_s: float, wall_s: float, time_zone: str) -> Recalled:
        """Return what is due at most from ``wall_s`` until ``ahead_s`` later, by the record that is believed more."""
        first, last = quarter_of_week(wall_s, time_zone), quarter_of_week(wall_s + ahead_s, time_zone)
        places = [(first + number) % SLOTS for number in range((last - first) % SLOTS + 1)]
        told = [
            (record, due)
            for record, back in ((self.week, 0), (self.day, DAY_SLOTS))
            if (due := self.due(record, back, places)) is not None
        ]
        now = self.newest or 0.0
        scale = max((due for _, due in told), default=0.0)
        beliefs = [(record.belief(max(scale, now)), due) for record, due in told]
        belief, due = max(beliefs, key=lambda each: each[0], default=(0.0, 0.0))
        return Recalled(due if belief > BELIEVED_FROM and due > now else 0.0, belief)

    def carried(self) -> Week:
        """Return what another graph starts from: nothing, as its traffic is another."""
        return Week()

    def due(self, record: WeekRecord, back: int, places: Sequence[int]) -> float | None:
        """Return the most that a record, which looks ``back`` this many slots, says of some slots; None: nothing."""
        found = (record.due(self.at((place - back) % SLOTS), self.came) for place in places)
        return max((each for each in found if each is not None), default=None)

    def part_ended(self) -> Week:
        """Return it with the present part ended, and the next one begun."""
        rate = self.arrivals / self.part_s
        return replace(self, part_s=0.0, arrivals=0.0, newest=rate, peak=max(self.peak, rate))

    def _begun(self, place: int) -> Week:
        """Return it at the beginning of a slot; the one before is recorded if most of it was seen."""
        known = self.part_ended() if self.part_s >= SPAN_S / 2 else self
        if known.place is None or known.seen_s < SLOT_S / 2 or place != (known.place + 1) % SLOTS:
            day, week = replace(known.day, expected=0.0), replace(known.week, expected=0.0)
            known = replace(known, newest=None, came=0.0, day=day, week=week)
        else:
            known = known.recorded(known.place)
        day, week = (
            replace(record, told=known.due(record, back, (place,)))
            for record, back in ((known.day, DAY_SLOTS), (known.week, 0))
        )
        return replace(
            known,
            place=place,
            seen_s=0.0,
            peak=0.0,
            part_s=0.0,
            arrivals=0.0,
            before=known.newest,
            day=day,
            week=week,
        )

    def recorded(self, place: int) -> Week:
        """Return it with the present slot's demand on record and held against what was told."""
        came, old = self.peak, self.at(place)
        slots = self.slots or _UNKNOWN * SLOTS
        digits = _digits(came if old is None else old + HALF * (came - old))
        return replace(
            self,
            slots=slots[: 2 * place] + digits + slots[2 * place + 2 :],
            came=HALF * self.came + came,
            day=self.day.ended(self.at((place - DAY_SLOTS) % SLOTS), self.before, came),
            week=self.week.ended(old, self.before, came),
        )


def _digits(rate: float) -> str:
    if rate < _LEAST:
        return f"{_NOTHING:02x}"
    return f"{min(_MOST, _NOTHING + 1 + round(8 * math.log2(rate / _LEAST))):02x}"


def _rate(number: int) -> float:
    return 0.0 if number <= _NOTHING else float(_LEAST * 2.0 ** ((number - _NOTHING - 1) / 8))
