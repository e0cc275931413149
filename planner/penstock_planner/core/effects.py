"""What the planner's core asks of its driver. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.records import DecisionKind, Record, pull_record
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Pull


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Write a decision to the disk before it is carried out; one that is not there is not taken."""

    kind: DecisionKind
    decision: Decision
    record: Record


@dataclass(frozen=True, slots=True)
class ObserveAt:
    """End the tick; observe the backend at ``at_s``, or now if that is past."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Read the metrics of the pools just observed."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Ask the backend for a change."""

    change: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return what it is made of."""
        return (self.change,)


@dataclass(frozen=True, slots=True)
class Switch:
    """Ask the backend to turn workers of the role that shrinks into workers of the one that grows, as one change."""

    giver: ReplicaChange
    taker: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return what it is made of."""
        return (self.giver, self.taker)


@dataclass(frozen=True, slots=True)
class Notify:
    """Show observers a recorded decision."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record that may be lost."""

    record: Record


@dataclass(frozen=True, slots=True)
class AppendPull:
    """Write a pull that may be lost; its record is made when it is asked for, as a simulation does not."""

    pull: Pull
    tick: int

    @property
    def record(self) -> Record:
        """Return what to write."""
        return pull_record(self.pull, self.tick)


@dataclass(frozen=True, slots=True)
class BeginLedger:
    """Write the header of this run."""

    header: Record


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Here the header alone holds the state of the planner: a long ledger may begin a new file with it."""

    header: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Log a constant text with its keys."""

    text: str
    keys: Mapping[str, object] = field(default_factory=dict)
    is_warning: bool = False


Effect = (
    ObserveAt
    | ReadMetrics
    | RecordDecision
    | Scale
    | Switch
    | Notify
    | Append
    | AppendPull
    | BeginLedger
    | Checkpoint
    | Log
)
