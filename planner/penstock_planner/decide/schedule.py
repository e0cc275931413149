"""Scheduled replica bounds: minimum and maximum replicas per role while a schedule entry is active. They apply to every policy.

If several entries are active at the same time, the largest minimum and the smallest maximum apply. A role above its
maximum is scaled down by draining, as after a lowered budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.api import Role
from penstock.api.schedule import ScheduleEntry
from penstock.core.cron import Recurring


@dataclass(frozen=True, slots=True)
class ScheduledBounds:
    """One entry of the schedule of replica bounds: minimums and maximums that apply at recurring times.

    Attributes:
        name: Name of the entry.
        period: Times at which the entry is active, by the wall clock.
        floors: Minimum replicas by role, >= 0. A role that is absent has no scheduled minimum.
        ceilings: Maximum replicas by role, >= 0. A role that is absent has no scheduled maximum.
    """

    name: str
    period: Recurring
    floors: Mapping[Role, int] = field(default_factory=dict)
    ceilings: Mapping[Role, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: ScheduleEntry, gpus: Mapping[Role, int]) -> ScheduledBounds:
        """Return an entry of a manifest's schedule, with its minimums and maximums in replicas.

        Args:
            entry: Entry of the manifest, whose bounds can be numbers of replicas or of GPUs.
            gpus: GPUs of one replica by role, used to convert GPUs into replicas; an absent role counts as 1.
        """
        floors = {role: each.floor(gpus.get(role, 1)) for role, each in entry.bounds.items()}
        ceilings = {role: each.ceiling(gpus.get(role, 1)) for role, each in entry.bounds.items()}
        return cls(
            entry.name,
            entry.period,
            {role: count for role, count in floors.items() if count is not None},
            {role: count for role, count in ceilings.items() if count is not None},
        )

    def in_words(self, at_s: float) -> str:
        """Return the schedule entry in words, for a Unix time at which it is active.

        Example: ``office: prefill at least 3 until 2026-01-05 18:00 Europe/Berlin``.

        Args:
            at_s: Unix time, real seconds since 1970.
        """
        parts = [f"{role.value} at least {count}" for role, count in self.floors.items()]
        parts += [f"{role.value} at most {count}" for role, count in self.ceilings.items()]
        return f"{self.name}: {', '.join(parts)} {self.period.ends_in_words(at_s)}".rstrip()


Schedule = Sequence[ScheduledBounds]
"""Entries of a schedule."""


def in_force(schedule: Schedule, wall_s: float | None) -> tuple[ScheduledBounds, ...]:
    """Return the entries of a schedule of replica bounds that are active at a Unix time; empty if the time is None (unknown)."""
    return () if wall_s is None else tuple(each for each in schedule if each.period.is_on(wall_s))


def raised_floors(floors: Mapping[Role, int], held: Schedule) -> Mapping[Role, int]:
    """Return the minimum replicas by role: the largest of ``floors`` and the minimums of all entries in ``held``.

    Args:
        floors: Configured minimum replicas by role.
        held: Schedule entries that are active now.
    """
    for each in held:
        floors = {**floors, **{role: max(count, floors.get(role, 0)) for role, count in each.floors.items()}}
    return floors


def lowered_ceilings(ceilings: Mapping[Role, int], held: Schedule) -> Mapping[Role, int]:
    """Return the maximum replicas by role: the smallest of ``ceilings`` and the maximums of all entries in ``held``.

    Args:
        ceilings: Configured maximum replicas by role.
        held: Schedule entries that are active now.
    """
    for each in held:
        least = {role: min(count, ceilings.get(role, count)) for role, count in each.ceilings.items()}
        ceilings = {**ceilings, **least}
    return ceilings
