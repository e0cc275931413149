"""What the calendar bounds: floors and ceilings of roles while an entry of the schedule holds, whatever the policy is.

Entries that hold at once add up: the largest floor, the smallest ceiling. A ceiling shrinks a role like a lowered budget, by draining.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.api import Role
from penstock.api.schedule import ScheduleEntry
from penstock.core.cron import Recurring


@dataclass(frozen=True, slots=True)
class ScheduledBounds:
    """One entry of the schedule.

    Attributes:
        period: When it holds, in the wall clock's time.
        floors, ceilings: Replicas by role, >= 0; absent: as at other times.
    """

    name: str
    period: Recurring
    floors: Mapping[Role, int] = field(default_factory=dict)
    ceilings: Mapping[Role, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: ScheduleEntry, gpus: Mapping[Role, int]) -> ScheduledBounds:
        """Return an entry of a graph whose replicas have this many ``gpus`` by role."""
        floors = {role: each.floor(gpus.get(role, 1)) for role, each in entry.bounds.items()}
        ceilings = {role: each.ceiling(gpus.get(role, 1)) for role, each in entry.bounds.items()}
        return cls(
            entry.name,
            entry.period,
            {role: count for role, count in floors.items() if count is not None},
            {role: count for role, count in ceilings.items() if count is not None},
        )

    def in_words(self, at_s: float) -> str:
        """Return the entry as people read it while it holds: ``office: prefill at least 3 until 2026-01-05 18:00 Europe/Berlin``."""
        parts = [f"{role.value} at least {count}" for role, count in self.floors.items()]
        parts += [f"{role.value} at most {count}" for role, count in self.ceilings.items()]
        return f"{self.name}: {', '.join(parts)} {self.period.ends_in_words(at_s)}".rstrip()


Schedule = Sequence[ScheduledBounds]


def in_force(schedule: Schedule, wall_s: float | None) -> tuple[ScheduledBounds, ...]:
    """Return the entries that hold at a time in real seconds since 1970; none where the time is not known."""
    return () if wall_s is None else tuple(each for each in schedule if each.period.is_on(wall_s))


def raised_floors(floors: Mapping[Role, int], held: Schedule) -> Mapping[Role, int]:
    """Return the fewest replicas by role while the entries hold."""
    for each in held:
        floors = {**floors, **{role: max(count, floors.get(role, 0)) for role, count in each.floors.items()}}
    return floors


def lowered_ceilings(ceilings: Mapping[Role, int], held: Schedule) -> Mapping[Role, int]:
    """Return the most replicas by role while the entries hold."""
    for each in held:
        least = {role: min(count, ceilings.get(role, count)) for role, count in each.ceilings.items()}
        ceilings = {**ceilings, **least}
    return ceilings
