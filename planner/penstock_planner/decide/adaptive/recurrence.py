"""When more than the least floor is asked for: the period after which it came again, if there is one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOT_S = 30.0
"""Chosen: fine enough for a burst of a minute, a fourth of a start-up of two."""

SLOTS_MOST = 1440
"""Chosen: twelve hours; four of a period's turns are known after twelve hours of one of three."""

TURNS_LEAST = 3
"""Chosen: a period is believed once it has been seen for this many turns."""

AGREES_LEAST = 0.8
"""Chosen: of what was asked for so much came a period after the same was asked for, within a slot, and of that so much came
again."""

FALLS_TO = 0.5
"""Chosen: demand that is there for over half of the time has no period that would save much."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """When more than the least floor was asked for.

    Attributes:
        asked: One bit a slot, the newest lowest, in hexadecimal.
        slots: So many are known.
        slot_s: For how long the present slot has lasted.
        is_asked: More was asked for in it.
        period: In slots; 0: nothing comes again.
        due_s: For how long more has been due within a start-up, by the period; 0: it is not.
    """

    asked: str = "0"
    slots: int = 0
    slot_s: float = 0.0
    is_asked: bool = False
    period: int = 0
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
        is_asked_now, period = self.is_asked or is_asked, self.period
        if slot_s >= SLOT_S:
            while slot_s >= SLOT_S:
                bits = (bits << 1 | is_asked_now) & ((1 << SLOTS_MOST) - 1)
                slots, slot_s = min(slots + 1, SLOTS_MOST), slot_s - SLOT_S
                is_asked_now = is_asked and slot_s > 0
            period = period_of(bits, slots)
        due_s = self.due_s + dt_s if _is_due(bits, period, startup_s) else 0.0
        return Recurrence(f"{bits:x}", slots, slot_s, is_asked_now, period, due_s)


def period_of(asked: int, slots: int) -> int:
    """Return the shortest period that agrees with what was asked for, in slots; 0: none does.

    What lasts agrees with itself a moment later: only what comes after less agreement is a period.
    """
    near = _near(asked)
    best, most, has_fallen = 0, -1, False
    for period in range(2, slots // TURNS_LEAST + 1):
        all_since = (1 << (slots - period)) - 1
        came, expected = asked & all_since, (asked >> period) & all_since
        if not came or not expected:
            continue
        recall = (came & (near >> period)).bit_count() / came.bit_count()
        precision = (expected & near).bit_count() / expected.bit_count()
        agrees = min(recall, precision)
        has_fallen = has_fallen or agrees < FALLS_TO
        if has_fallen and agrees >= AGREES_LEAST:
            # Its neighbours agree within a slot, too: the one that agrees best to the slot.
            together = (came & expected).bit_count()
            if together > most:
                best, most = period, together
        elif best:
            break
    return best


def _is_due(asked: int, period: int, startup_s: float) -> bool:
    """Return whether more was asked for a period or two before any time from now to a start-up from now."""
    near, ahead = _near(asked), math.ceil(startup_s / SLOT_S)
    window = (1 << (ahead + 1)) - 1
    return bool(period) and any(
        (near >> shift if shift >= 0 else near << -shift) & window
        for shift in (turns * period - 1 - ahead for turns in (1, 2))
    )


def _near(asked: int) -> int:
    """Return the slots in which, or next to which, more was asked for."""
    return asked | asked << 1 | asked >> 1
