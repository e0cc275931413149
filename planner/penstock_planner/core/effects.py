"""Effects: the actions that the planner's core requests from its driver. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.records import DecisionKind, Record, pull_record
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Pull


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Write a decision durably to disk before it is carried out. A decision that could not be written is not carried out.

    The answer is whether it was written.

    Attributes:
        kind: Function that made the decision.
        decision: The decision.
        record: Ledger record to write.
    """

    kind: DecisionKind
    decision: Decision
    record: Record


@dataclass(frozen=True, slots=True)
class ObserveAt:
    """End the tick, and observe the backend later. The answer is the `TargetState`, or None if the backend cannot be read.

    Attributes:
        at_s: Time at which to observe, in simulated seconds; immediately if it is past.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Scrape the metrics of the replicas that were just observed. The answer is the `Pull`."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Request a replica change from the backend. The answer is the reason if it was refused, or None if it was accepted."""

    change: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return the change as a tuple, for code that also handles `Switch`."""
        return (self.change,)


@dataclass(frozen=True, slots=True)
class Switch:
    """Request from the backend that workers of the shrinking role become workers of the growing role.

    The answer is the reason if it was refused, or None if it was accepted.

    Attributes:
        giver: Change of the shrinking role.
        taker: Change of the growing role, by the same number.
    """

    giver: ReplicaChange
    taker: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return both changes."""
        return (self.giver, self.taker)


@dataclass(frozen=True, slots=True)
class Notify:
    """Pass a recorded decision to the planner's observers, such as metrics and Events."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record to the ledger, without need to be durable."""

    record: Record


@dataclass(frozen=True, slots=True)
class AppendPull:
    """Write a pull to the ledger, without need to be durable.

    Its record is made only if the driver asks for it, because a simulation does not.

    Attributes:
        pull: Pull to record.
        tick: Number of the tick within the interval, from 1.
    """

    pull: Pull
    tick: int

    @property
    def record(self) -> Record:
        """Return the ledger record of the pull."""
        return pull_record(self.pull, self.tick)


@dataclass(frozen=True, slots=True)
class BeginLedger:
    """Write the header of this run to the ledger."""

    header: Record


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Point at which the planner's whole state is in ``header``, so that the driver can start a new ledger file with it.

    Attributes:
        header: Header record with the state.
    """

    header: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Log a constant text with variable keys.

    Attributes:
        text: The message.
        keys: Structured fields of the message.
        is_warning: Whether to log it as a warning instead of as information.
    """

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
"""All effects. ObserveAt, ReadMetrics, RecordDecision, Scale and Switch need an answer; the others do not."""
