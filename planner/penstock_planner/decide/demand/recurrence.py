"""The period after which demand for more than the smallest floor returns, if there is one. Pure.

The smallest floor is the configured minimum number of replicas of a role, see `Hindsight.least`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_planner.decide.demand.trend import STARTUP_S

SLOT_S = STARTUP_S
"""Simulated seconds of one slot (30 s), the resolution in time. Shorter events cannot be prepared for."""

SLOTS_MOST = 1440
"""Number of slots that are remembered: twelve hours.

With them, four turns of a three-hour period are known after twelve hours."""

COMES_LEAST = 0.6
"""Chosen: minimum fraction of demand that must agree with a period for the period to be used: 0.6.

This fraction of the demand must return a period later (because one run in five is left out and some are too
early or late), this fraction of the demand must follow other demand by one to three periods, and a shorter shift must
agree less than this. Demand must also be predicted for at most this fraction of the time, because otherwise scaling
down between the predicted times saves little."""

CUT = 1
"""Tolerance in slots for demand with an exact period, which can be on either side of a slot's end."""

NEAR = 3
"""Chosen: tolerance in slots for demand with an inexact period.

Runs within two minutes of their time differ by up to eight slots, but one of three is near. Because this
tolerance also matches by chance, it is used only if it gives a shorter period than a tolerance of one slot."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Record of when a role's demand needed more than the smallest floor, and the period with which such demand returns.

    The smallest floor is the configured minimum number of replicas. A slot is half a minute (`SLOT_S`). All times are
    durations in simulated seconds.

    Attributes:
        asked: One bit per slot, newest in the lowest bit, as a hexadecimal number. A bit is 1 if demand needed more
            than the smallest floor in that slot.
        slots: Number of recorded slots, at most 1440 (twelve hours).
        slot_s: Seconds of the present slot that have passed.
        is_asked: Whether demand has needed more than the smallest floor in the present slot.
        period: Period in slots; 0 if none is known.
        near: Tolerance in slots by which demand can be earlier or later than the period says.
        due_s: Seconds for which the period has predicted such demand within a start-up time; 0 if the period does not
            predict it, or if no period is known.
    """

    asked: str = "0"
    slots: int = 0
    slot_s: float = 0.0
    is_asked: bool = False
    period: int = 0
    near: int = CUT
    due_s: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is known when demand needs more replicas than the configured minimum.

        True if such demand returns with a known period, or if there was no such demand in twelve hours.
        """
        return bool(self.period) or (self.slots == SLOTS_MOST and self.asked == "0")

    @property
    def is_between(self) -> bool:
        """Whether it is known that demand will not need more replicas than the configured minimum within a start-up time."""
        return self.is_known and not self.due_s

    def followed(self, dt_s: float, startup_s: float, *, is_asked: bool) -> Recurrence:
        """Return the record of when demand needed more replicas than the configured minimum, after one metrics scrape.

        Args:
            dt_s: Simulated seconds since the previous scrape.
            startup_s: Simulated seconds from requesting a replica until it is ready.
            is_asked: Whether demand needs more replicas than the configured minimum now.
        """
        bits, slots = int(self.asked, 16), self.slots
        slot_s = self.slot_s + min(dt_s, SLOTS_MOST * SLOT_S)
        is_asked_now, period, near = self.is_asked or is_asked, self.period, self.near
        if slot_s >= SLOT_S:
            while slot_s >= SLOT_S:
                bits = (bits << 1 | is_asked_now) & ((1 << SLOTS_MOST) - 1)
                slots, slot_s = min(slots + 1, SLOTS_MOST), slot_s - SLOT_S
                is_asked_now = is_asked and slot_s > 0
            period, near = period_of(bits, slots)
        due_s = self.due_s + dt_s if _is_due(bits, period, near, startup_s) else 0.0
        return Recurrence(f"{bits:x}", slots, slot_s, is_asked_now, period, near, due_s)


def period_of(asked: int, slots: int) -> tuple[int, int]:
    """Return the period after which high demand returned, and its tolerance, both in slots of half a minute.

    The period is 0 if there is none. High demand needs more replicas than the configured minimum.

    The tolerance is one slot or three. The period found with a tolerance of three slots is used if none is found with a
    tolerance of one, or if the one found with a tolerance of one is at least 1.5 times as long.

    Args:
        asked: One bit per slot, newest in the lowest bit; 1 if there was high demand in the slot.
        slots: Number of recorded slots.
    """
    exact, wide = (_period_within(near, asked, slots, _longest(near, slots)) for near in (CUT, NEAR))
    # Up to three slots before a period the shift agrees, too, so a result at the end of the range may be such a neighbour.
    is_wide = 0 < wide <= _longest(NEAR, slots) - NEAR and not 0 < exact < 1.5 * wide
    return (wide, NEAR) if is_wide else (exact, CUT)


def _longest(near: int, slots: int) -> int:
    """Return the longest period that this many slots can show.

    It must have been observed for three turns with a tolerance of one slot, or for seven with three: the larger the
    tolerance, the more often a period matches by chance.
    """
    return slots // (2 * near + 1)


def _period_within(near: int, asked: int, slots: int, most: int) -> int:
    """Return the shortest period, up to ``most``, with which demand returned within a tolerance of ``near`` slots; 0 if there is none.

    Demand that lasts also agrees with itself after a short shift. Therefore only a shift that comes after one with
    less agreement counts as a period. Of several neighbouring shifts that agree, the one that predicts demand for the
    shortest time is taken.
    """
    around = _near(asked, near)
    best, least, has_fallen = 0, 1.0, False
    for period in range(2, most + 1):
        all_since = (1 << (slots - period)) - 1
        came, before = asked & all_since, (asked >> period) & all_since
        if not came or not before:
            continue
        due = _due(around, period) & all_since
        again = (before & around).bit_count() / before.bit_count()
        share = due.bit_count() / (slots - period)
        has_fallen = has_fallen or again < COMES_LEAST
        comes = (came & due).bit_count() >= COMES_LEAST * came.bit_count()
        if has_fallen and comes and again >= COMES_LEAST and share <= COMES_LEAST:
            if share < least:
                best, least = period, share
        elif best:
            break
    return best


def _due(around: int, period: int) -> int:
    """Return the slots that are one, two or three periods after the given slots."""
    return around >> period | around >> 2 * period | around >> 3 * period


def _is_due(asked: int, period: int, near: int, startup_s: float) -> bool:
    """Return whether there was demand one to three periods before any time between now and a start-up time from now."""
    if not period:
        return False
    ahead = math.ceil(startup_s / SLOT_S)
    # The slots of the nearest future are in the lowest bits.
    to_come = _due(_near(asked, near) << ahead + 1, period)
    return bool(to_come & ((1 << (ahead + 1)) - 1))


def _near(asked: int, slots: int) -> int:
    """Return the slots with demand, and those at most ``slots`` slots away from one."""
    for _ in range(slots):
        asked |= asked << 1 | asked >> 1
    return asked
