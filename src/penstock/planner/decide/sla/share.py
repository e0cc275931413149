"""How a GPU budget that is too small goes to the roles: so that what each has of what it needs is as equal as can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.api import Role


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """What one role needs, and what bounds it.

    Attributes:
        role: prefill, decode or aggregated.
        needed: Replicas that hold the targets, >= 1.
        floor: Fewest that it may have, >= 1.
        most: Most that it may have; None: no such bound.
        gpus: Of one replica, >= 0.
    """

    role: Role
    needed: int
    floor: int
    most: int | None
    gpus: int

    @property
    def wanted(self) -> int:
        """Return the replicas that it would have without a budget."""
        reachable = self.needed if self.most is None else min(self.needed, self.most)
        return max(self.floor, reachable)


def gpus_of(needs: Sequence[RoleNeed], counts: Mapping[Role, int]) -> int:
    """Return the GPUs of so many replicas of each role."""
    return sum(each.gpus * counts[each.role] for each in needs)


def coverage(needs: Sequence[RoleNeed], counts: Mapping[Role, int]) -> float:
    """Return the least that a role has of what it needs, as a share; the ratio of the roles holds where all have as much."""
    return min(counts[each.role] / each.needed for each in needs)


def shared(needs: Sequence[RoleNeed], budget: int | None) -> dict[Role, int]:
    """Return the replicas of each role within the budget: what is wanted, or else the greatest `coverage`.

    From the floors on, each replica goes to the role that has least of what it needs, decode on equal terms, as long as
    one of it fits. Taking one away again would leave its role no better off than the one that has least now, so no other
    split covers more.

    Example: prefill needs 4 and decode 8, one GPU each, of 6: 2 and 4.

    Args:
        needs: One per role.
        budget: GPUs of all roles; None: no ceiling. Floors are kept even above it.
    """
    wanted = {each.role: each.wanted for each in needs}
    if budget is None or gpus_of(needs, wanted) <= budget:
        return wanted
    counts = {each.role: each.floor for each in needs}
    left = budget - gpus_of(needs, counts)
    while True:
        able = [each for each in needs if counts[each.role] < each.wanted and each.gpus <= left]
        if not able:
            return counts
        least = min(able, key=lambda each: (counts[each.role] / each.needed, each.role is Role.PREFILL))
        counts[least.role] += 1
        left -= least.gpus
