"""Demand learned by quarter of an hour of the week, and how far to trust it. Pure.

Two records predict the demand (arriving requests/s) of a time: the demand at the same time yesterday, and at the same
time of the same weekday. At the start of every quarter of an hour each record predicts its demand, and the prediction
is compared with the observed demand. Let x be a predicted jump and y the observed one, both measured from the demand at
that start. A "jump" is the difference between a slot's demand and the demand when the slot began. A record is trusted
while its squared errors are smaller than those of the prediction "as now",

    sum((y - x)^2) < sum(y^2), that is confidence = sum(x y) / sum(x x) > 1/2.

Half of a jump that did not occur, of the size in question, is added to the sums. So the first predicted jump is not
trusted, and the second is. A holiday costs only its first quarter of an hour, because demand that recently fell short
of its prediction reduces the next prediction by the same fraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.cron import quarter_of_week
from penstock_planner.decide.demand.trend import SPAN_S

SLOTS = 672
"""Number of quarters of an hour in a week. Most timetables use full quarters."""

SLOT_S = 900.0
"""Seconds of one slot, a quarter of an hour."""

DAY_SLOTS = 96
"""Number of slots in a day."""

HALF = 0.5
"""Chosen: weight of new values compared with old ones, and weight of assumed observations.

The newest week has this weight in its slot, so that a shift in time is learned after two weeks. The demand of
recent slots, predicted and observed, decays by this factor per slot. This fraction of a slot with demand as
predicted, and of a jump that did not occur, is assumed in addition to the observations: a jump that occurred once is
trusted, and after one that did not occur, two are needed."""

SCORE_KEPT = math.exp(-1.0 / SLOTS)
"""Factor per slot by which the record of right and wrong predictions decays: it is averaged over a week."""

BELIEVED_FROM = 0.5
"""Confidence of a record (0.5) above which it is trusted: its errors are then smaller than if the present demand is
assumed to stay."""

_LEAST = 1e-4
"""Smallest recorded demand in requests/s. Larger values are recorded in steps of an eighth of a doubling, as two
hexadecimal digits."""

_UNKNOWN = "00"
_NOTHING = 1
_MOST = 255


@dataclass(frozen=True, slots=True)
class WeekRecord:
    """How well one of two predictions has done: demand as at the same time yesterday, or as at the same time last week.

    Demand is in requests/s, a slot is a quarter of an hour, and a jump is the difference between a slot's demand and
    the demand when the slot began. The sums of jumps are over all slots, and lose weight with a time constant of a
    week. ``sum_xy / sum_xx`` is about the fraction of the predicted jumps that occurred, and so the confidence in the
    record.

    Attributes:
        predicted: Predicted demand of the present slot; None if unknown.
        expected: Sum of the recorded demand of the last slots, halved at each slot. If the observed demand of these
            slots is lower, predictions are reduced in proportion.
        sum_xx: Sum of the squares of the predicted jumps.
        sum_xy: Sum of the products of each predicted jump and the observed one.
    """

    predicted: float | None = None
    expected: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def confidence(self, scale: float) -> float:
        """Return the confidence in the record, >= 0: about the fraction of the predicted jumps of demand that occurred.

        The confidence is 0 before any prediction.

        Args:
            scale: Size of the jump that is predicted now, in requests/s. To be careful, half of a jump of this size
                that did not occur is counted in addition to the observed ones.
        """
        against = self.sum_xx + HALF * scale * scale
        return max(0.0, self.sum_xy / against) if against else 0.0

    def ended(self, said: float | None, before: float | None, observed: float) -> WeekRecord:
        """Return the record after a slot (a quarter of an hour), updated with how well the demand of this slot was predicted.

        Args:
            said: Demand that the record held for this slot from an earlier day, in requests/s; None if unknown.
            before: Demand when the slot began, in requests/s; None if unknown.
            observed: Observed demand of this slot, in requests/s.
        """
        after = replace(self, expected=HALF * self.expected + (said or 0.0))
        if self.predicted is None or before is None:
            return after
        jump = self.predicted - before
        return replace(
            after,
            sum_xx=self.sum_xx * SCORE_KEPT + jump * jump,
            sum_xy=self.sum_xy * SCORE_KEPT + jump * (observed - before),
        )

    def due(self, known: float | None, observed: float) -> float | None:
        """Return the predicted demand of a slot (a quarter of an hour) in requests/s.

        It is the recorded demand, reduced if recent slots had less demand than recorded.

        Args:
            known: Recorded demand of the slot on an earlier day, in requests/s. If it is None (unknown), the result is
                None.
            observed: Sum of the observed demand of the last slots, the older halved once for each newer slot;
                requests/s.
        """
        if known is None:
            return None
        assumed = HALF * known
        against = self.expected + assumed
        return known * min(1.0, (observed + assumed) / against) if against else known


@dataclass(frozen=True, slots=True)
class WeekForecast:
    """Forecast of demand, as learned by time of the week from two records: of yesterday, and of the same weekday.

    Attributes:
        rate: Largest forecast demand in requests/s. 0 if that is not above the present demand, or if neither record has
            predicted well enough.
        confidence: Fraction of the predicted jumps in demand that occurred, for the record that predicted better.
    """

    rate: float = 0.0
    confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Week:
    """Learned demand by quarter of an hour ("slot") of the week, from Monday 0:00 on, by the wall clock of a time zone.

    Demand is in requests/s. Durations are simulated seconds. A slot is observed in parts of 5 minutes (`SPAN_S`), of
    which the one with the largest demand counts, because demand that begins within a slot needs as many workers as
    demand that fills it.

    Attributes:
        slots: Recorded demand of all 672 slots, two hexadecimal digits each; empty before the first slot was recorded.
        slot: Index of the present slot in the week, from 0; None before the first pull (metrics scrape) with a known
            wall clock time.
        seen_s: Seconds of the present slot that were observed.
        peak: Largest demand of the finished parts of the present slot.
        part_s: Seconds of the unfinished part that have been observed.
        arrivals: Number of requests that have arrived in the unfinished part.
        newest: Demand of the last finished part; None if unknown.
        before: Demand of the last part before the present slot; None if unknown.
        observed: Sum of the observed demand of the last slots, halved at each slot, to be compared with the recorded
            demand of the same slots.
        day: Record that predicts from the same time yesterday.
        week: Record that predicts from the same time of the same weekday.
    """

    slots: str = ""
    slot: int | None = None
    seen_s: float = 0.0
    peak: float = 0.0
    part_s: float = 0.0
    arrivals: float = 0.0
    newest: float | None = None
    before: float | None = None
    observed: float = 0.0
    day: WeekRecord = WeekRecord()
    week: WeekRecord = WeekRecord()

    def at(self, slot: int) -> float | None:
        """Return the recorded demand of a quarter of an hour of the week in requests/s; None if none was recorded.

        Args:
            slot: Index of the quarter of an hour in the week, from 0 (Monday 0:00) to 671.
        """
        digits = self.slots[2 * slot : 2 * slot + 2]
        return None if digits in {"", _UNKNOWN} else _rate(int(digits, 16))

    def followed(self, arrivals: float, dt_s: float, wall_s: float, time_zone: str) -> Week:
        """Return the learned demand by time of the week after one pull (metrics scrape).

        Args:
            arrivals: Number of requests that arrived.
            dt_s: Simulated seconds that the pull covers.
            wall_s: Unix time at the end of the pull.
            time_zone: IANA name of the time zone whose weeks are recorded.
        """
        slot = quarter_of_week(wall_s, time_zone)
        known = self if slot == self.slot else self._begun(slot)
        known = replace(
            known,
            seen_s=known.seen_s + dt_s,
            part_s=known.part_s + dt_s,
            arrivals=known.arrivals + arrivals,
        )
        return known.part_ended() if known.part_s >= SPAN_S else known

    def recalled(self, ahead_s: float, wall_s: float, time_zone: str) -> WeekForecast:
        """Return the largest demand forecast until ``ahead_s`` seconds from now, as learned by time of the week.

        There are two records: the same time yesterday, and the same time of the same weekday. The record whose
        predictions were better is used. The forecast is 0 if it is not above the present demand, or if neither record
        has predicted well enough.

        Args:
            ahead_s: Length of the forecast from now on, in simulated seconds.
            wall_s: Present Unix time.
            time_zone: IANA name of the time zone whose weeks are recorded.
        """
        first, last = quarter_of_week(wall_s, time_zone), quarter_of_week(wall_s + ahead_s, time_zone)
        places = [(first + number) % SLOTS for number in range((last - first) % SLOTS + 1)]
        predicted = [
            (record, due)
            for record, back in ((self.week, 0), (self.day, DAY_SLOTS))
            if (due := self.due(record, back, places)) is not None
        ]
        now = self.newest or 0.0
        scale = max((due for _, due in predicted), default=0.0)
        confidences = [(record.confidence(max(scale, now)), due) for record, due in predicted]
        confidence, due = max(confidences, key=lambda each: each[0], default=(0.0, 0.0))
        return WeekForecast(due if confidence > BELIEVED_FROM and due > now else 0.0, confidence)

    def for_other_graph(self) -> Week:
        """Return the learned demand with which another graph starts: none, because its traffic differs."""
        return Week()

    def due(self, record: WeekRecord, back: int, places: Sequence[int]) -> float | None:
        """Return the largest demand that a record predicts for some slots (quarters of an hour), in requests/s.

        Returns None if the demand of all these slots is unknown.

        Args:
            record: Record that predicts.
            back: Number of slots before each slot at which the recorded demand is looked up: 0 for the record of the
                weekday, 96 (a day) for the record of the previous day.
            places: Indexes of the slots in the week.
        """
        found = (record.due(self.at((slot - back) % SLOTS), self.observed) for slot in places)
        return max((each for each in found if each is not None), default=None)

    def part_ended(self) -> Week:
        """Return the learned demand after a part of the present quarter of an hour has ended and the next part has started.

        A part is 5 minutes (`SPAN_S`) long.
        """
        rate = self.arrivals / self.part_s
        return replace(self, part_s=0.0, arrivals=0.0, newest=rate, peak=max(self.peak, rate))

    def _begun(self, slot: int) -> Week:
        """Return the state at the start of slot ``slot``. The previous slot is recorded if at least half of it was observed."""
        known = self.part_ended() if self.part_s >= SPAN_S / 2 else self
        if known.slot is None or known.seen_s < SLOT_S / 2 or slot != (known.slot + 1) % SLOTS:
            day, week = replace(known.day, expected=0.0), replace(known.week, expected=0.0)
            known = replace(known, newest=None, observed=0.0, day=day, week=week)
        else:
            known = known.recorded(known.slot)
        day, week = (
            replace(record, predicted=known.due(record, back, (slot,)))
            for record, back in ((known.day, DAY_SLOTS), (known.week, 0))
        )
        return replace(
            known,
            slot=slot,
            seen_s=0.0,
            peak=0.0,
            part_s=0.0,
            arrivals=0.0,
            before=known.newest,
            day=day,
            week=week,
        )

    def recorded(self, slot: int) -> Week:
        """Return the learned demand after the present slot (quarter of an hour) has ended, with the demand of this slot recorded.

        The demand is also compared with the predictions for the slot, so that the confidence in them is updated.

        Args:
            slot: Index of the slot that has ended in the week.
        """
        observed, old = self.peak, self.at(slot)
        slots = self.slots or _UNKNOWN * SLOTS
        digits = _digits(observed if old is None else old + HALF * (observed - old))
        return replace(
            self,
            slots=slots[: 2 * slot] + digits + slots[2 * slot + 2 :],
            observed=HALF * self.observed + observed,
            day=self.day.ended(self.at((slot - DAY_SLOTS) % SLOTS), self.before, observed),
            week=self.week.ended(old, self.before, observed),
        )


def _digits(rate: float) -> str:
    if rate < _LEAST:
        return f"{_NOTHING:02x}"
    return f"{min(_MOST, _NOTHING + 1 + round(8 * math.log2(rate / _LEAST))):02x}"


def _rate(number: int) -> float:
    return 0.0 if number <= _NOTHING else float(_LEAST * 2.0 ** ((number - _NOTHING - 1) / 8))
