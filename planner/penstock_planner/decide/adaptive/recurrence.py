"""When more than the least floor is asked for: the period after which it came again, if there is one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_planner.decide.adaptive.signals import STARTUP_S

SLOT_S = STARTUP_S
"""What is shorter cannot be prepared for."""

SLOTS_MOST = 1440
"""Bound: twelve hours; four of a period's turns are known after twelve hours of one of three."""

COMES_LEAST = 0.6
"""Chosen: of what was asked for this much came again a period later, as one run in five is left out and some
come too late or early; this much came one to three periods after the same; and after a shorter time less did.
What is due for longer than that saves little."""

CUT = 1
"""Slots by which what comes again to the second may be early or late: it is on either side of a slot's end."""

NEAR = 3
"""Chosen: slots by which what comes again may be early or late. Runs within two minutes of their time differ
by up to eight slots, but one of three is near; by chance three slots are taken only where they make the
period shorter than one does."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """When more than the least floor was asked for.

    Attributes:
        asked: One bit a slot, the newest lowest, in hexadecimal.
        slots: Number of slots known.
        slot_s: For how long the present slot has lasted.
        is_asked: More was asked for in it.
        period: In slots; 0: nothing comes again.
        near: By how many slots it may be early or late.
        due_s: For how long more has been due within a start-up, by the period; 0: it is not.
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
        """Whether it is known when more is asked for: by a period, or because nothing ever was."""
        return bool(self.period) or (self.slots == SLOTS_MOST and self.asked == "0")

    @property
    def is_between(self) -> bool:
        """Whether it is known that no more is due."""
        return self.is_known and not self.due_s

    def followed(self, dt_s: float, startup_s: float, *, is_asked: bool) -> Recurrence:
        """Return what is known after one pull of ``dt_s``; ``startup_s`` is from asked for to ready."""
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
    """Return the period after which what was asked for came again, and by how much of it early or late, in slots; 0: none does.

    What comes within three slots is taken where nothing comes within one, or after two or more of such periods only.
    """
    exact, wide = (_period_within(near, asked, slots, _longest(near, slots)) for near in (CUT, NEAR))
    # Up to three slots before it a period agrees, too: one at the end of what is searched may be such a neighbour.
    is_wide = 0 < wide <= _longest(NEAR, slots) - NEAR and not 0 < exact < 1.5 * wide
    return (wide, NEAR) if is_wide else (exact, CUT)


def _longest(near: int, slots: int) -> int:
    """Return the longest period that this many slots can tell.

    It was seen for as many turns as slots are near, three or seven: the more are, the more often chance is.
    """
    return slots // (2 * near + 1)


def _period_within(near: int, asked: int, slots: int, most: int) -> int:
    """Return the shortest period, up to ``most``, with which what was asked for comes within ``near`` slots; 0: none.

    What lasts agrees with itself a moment later: only what comes after less agreement is a period. Of its
    neighbours, which agree as well, it is the one that has the least due.
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
    """Return the slots that are one, two or three periods after others."""
    return around >> period | around >> 2 * period | around >> 3 * period


def _is_due(asked: int, period: int, near: int, startup_s: float) -> bool:
    """Return whether more was asked for one to three periods before any time from now to a start-up from now."""
    if not period:
        return False
    ahead = math.ceil(startup_s / SLOT_S)
    # The newest slots to come are the lowest.
    to_come = _due(_near(asked, near) << ahead + 1, period)
    return bool(to_come & ((1 << (ahead + 1)) - 1))


def _near(asked: int, slots: int) -> int:
    """Return the slots in which, or at most this many slots from which, more was asked for."""
    for _ in range(slots):
        asked |= asked << 1 | asked >> 1
    return asked
