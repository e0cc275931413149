"""Effects: the actions that the planner's core requests, and that its driver (the live loop or a simulator) carries out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.records import DecisionKind, Record, pull_record
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Pull


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Effect: write a decision durably to the ledger (the decision log) before it is carried out.

    A decision that could not be written is not carried out. The driver answers whether it was written.

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
    """Effect: end the tick, and observe the backend at a later time.

    The driver answers with the `TargetState`, or with None if the backend cannot be read.

    Attributes:
        at_s: Time at which to observe, in simulated seconds; immediately if it is past.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Effect: scrape the metrics of the replicas that were just observed. The driver answers with the `Pull`."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Effect: request a replica change of one role from the backend.

    The driver answers with the reason if the backend refused the change, or with None if it accepted it.

    Attributes:
        change: The change to request.
    """

    change: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return the change as a tuple of one, for code that also handles `Switch`."""
        return (self.change,)


@dataclass(frozen=True, slots=True)
class Switch:
    """Effect: request from the backend that workers of the shrinking role become workers of the growing role without a restart.

    The driver answers with the reason if the backend refused the switch, or with None if it accepted it.

    Attributes:
        giver: Change of the shrinking role.
        taker: Change of the growing role, by the same number of replicas.
    """

    giver: ReplicaChange
    taker: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return both changes, that of the shrinking role first."""
        return (self.giver, self.taker)


@dataclass(frozen=True, slots=True)
class Notify:
    """Effect: pass a recorded decision to the planner's observers, such as metrics and Kubernetes Events. It needs no answer.

    Attributes:
        decision: The decision.
    """

    decision: Decision


@dataclass(frozen=True, slots=True)
class Append:
    """Effect: write a record to the ledger (the decision log); it may be lost in a crash. It needs no answer.

    Attributes:
        record: The record.
    """

    record: Record


@dataclass(frozen=True, slots=True)
class AppendPull:
    """Effect: write a pull (metrics scrape) to the ledger; it may be lost in a crash. It needs no answer.

    The record is made only if the driver asks for it by `record`, because a simulation does not.

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
    """Effect: write the header of this run to the ledger (the decision log). It needs no answer.

    Attributes:
        header: Header record with the planner's state.
    """

    header: Record


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Effect: the planner's whole state is in ``header``, so that the driver may start a new ledger file with it. It needs no answer.

    Attributes:
        header: Header record with the state.
    """

    header: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Effect: log a constant text with variable keys. It needs no answer.

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
