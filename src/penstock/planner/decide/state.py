"""What one decision leaves for the next; small, so that the ledger can hold it before and after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.api import Role

Plain = None | bool | int | float | str | Sequence["Plain"] | Mapping[str, "Plain"]
"""What JSON can hold, so that the ledger keeps it without knowing the mode."""

Memory = Mapping[str, Plain]
"""A mode's memory, by its own names. Sequences are tuples when built and lists when read back."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """Memory of one role.

    Attributes:
        seen: Ready replicas at the last decision; None before the first.
        grace: Intervals left in which decode (or aggregated) is not scaled down.
        asked: Replicas of the last scale-up that has not become ready yet; None when none is outstanding.
        withdrawals: Scale-ups in a row that never became ready.
        failed: Replicas that the last of them asked for; None when so many were ready since.
        backoff: Intervals left in which the role is not scaled up after a withdrawal.
        writer: Who else set the role's replicas last; empty if there was none lately.
        owed: GPUs that another role gives up are reserved for this one, which grows once they are free.
    """

    seen: int | None = None
    grace: int = 0
    asked: int | None = None
    withdrawals: int = 0
    failed: int | None = None
    backoff: int = 0
    owed: bool = False
    writer: str = ""
    foreign_writes: int = 0
    since_write: int = 0


@dataclass(frozen=True, slots=True)
class PlannerState:
    """Memory of the planner.

    Attributes:
        sequence: Decisions and withdrawals so far; the next id is made of it.
        memory: What the mode remembers besides; each mode reads and writes its own keys.
        interval_s: Simulated seconds until the next decision; None: the mode's interval.
    """

    sequence: int = 0
    roles: Mapping[Role, RoleState] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    interval_s: float | None = None

    def of(self, role: Role) -> RoleState:
        """Return the role's memory, a blank one if there is none."""
        return self.roles.get(role, _BLANK)


_BLANK = RoleState()
