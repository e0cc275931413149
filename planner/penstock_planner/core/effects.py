"""Effects: the actions that the planner's core requests, and that its driver (the live loop or a simulator) carries out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.records import DecisionKind, Record, pull_record
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Pull


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Action that the driver (real-time loop or simulator) has to carry out: write a decision durably to the decision log.

    The decision log is called ledger.

    The planner's core requests the replica changes of the decision afterwards, but only if the decision was written.
    The driver answers True if it was written, else False.

    Attributes:
        kind: Whether the decision was made at the end of an interval or rolls back a scale-up.
        decision: The decision.
        record: Ledger record to write.
    """

    kind: DecisionKind
    decision: Decision
    record: Record


@dataclass(frozen=True, slots=True)
class ObserveAt:
    """Action that the driver (real-time loop or simulator) has to carry out: wait until a given time, then read the replicas.

    The present tick (metrics scrape) of the planner is over. The replicas are read from the backend, which is
    Kubernetes or local processes.

    The driver answers with the `TargetState` (replica counts and worker addresses), or with None if the backend cannot
    be read.

    Attributes:
        at_s: Time at which to observe, in simulated seconds; immediately if it is past.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Action that the driver (real-time loop or simulator) has to carry out: scrape the metrics of the observed replicas.

    They are the replicas that the driver has just read from the backend (Kubernetes or local processes).

    The driver answers with the scraped values as a `Pull`.
    """


@dataclass(frozen=True, slots=True)
class Scale:
    """Action that the driver (real-time loop or simulator) has to carry out: request a replica change of one role from the backend.

    The driver answers with the reason if the backend refused the change, or with None if it accepted it.

    Attributes:
        change: The change to request.
    """

    change: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return the role's replica change as a tuple of one, for code that also handles the two changes of a `Switch`."""
        return (self.change,)


@dataclass(frozen=True, slots=True)
class Switch:
    """Action that the driver (real-time loop or simulator) has to carry out: have workers change their role.

    Workers of the shrinking role become workers of the growing one, and the backend (Kubernetes or local processes)
    moves them without a restart.

    The driver answers with the reason if the backend refused the switch, or with None if it accepted it.

    Attributes:
        giver: Change of the shrinking role.
        taker: Change of the growing role, by the same number of replicas.
    """

    giver: ReplicaChange
    taker: ReplicaChange

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """Return the replica changes of both roles: (change of the shrinking role, change of the growing role)."""
        return (self.giver, self.taker)


@dataclass(frozen=True, slots=True)
class Notify:
    """Action that the planner's driver has to carry out: pass a recorded decision to the observers of the planner.

    Observers are, for example, metrics and the writer of Kubernetes Events.

    The driver is the real-time loop or a simulator; it gives no answer.

    Attributes:
        decision: The decision.
    """

    decision: Decision


@dataclass(frozen=True, slots=True)
class Append:
    """Action that the planner's driver has to carry out: write a record to the ledger (the decision log).

    The record may be lost in a crash. The driver is the real-time loop or a simulator; it gives no answer.

    Attributes:
        record: The record.
    """

    record: Record


@dataclass(frozen=True, slots=True)
class AppendPull:
    """Action that the planner's driver has to carry out: write a pull (metrics scrape) to the ledger (the decision log).

    The record may be lost in a crash. The driver is the real-time loop or a simulator; it gives no answer. The record
    is made only if the driver calls `record`, which a simulator does not.

    Attributes:
        pull: Pull to record.
        tick: Number of the tick within the interval, from 1.
    """

    pull: Pull
    tick: int

    @property
    def record(self) -> Record:
        """Return the record of the pull (metrics scrape) for the ledger (the decision log), as values by field name."""
        return pull_record(self.pull, self.tick)


@dataclass(frozen=True, slots=True)
class BeginLedger:
    """Action that the planner's driver has to carry out: write the header of this run to the ledger (the decision log).

    The driver is the real-time loop or a simulator; it gives no answer.

    Attributes:
        header: Header record with the planner's state.
    """

    header: Record


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Action that the planner's driver can carry out now: start a new file of the ledger (the decision log).

    The first record of the file is ``header``. A new file can start here because the header contains the planner's
    whole state at this time. The driver, which is the real-time loop or a simulator, does so if the present file is
    long; it gives no answer.

    Attributes:
        header: Header record with the state.
    """

    header: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Action that the planner's driver has to carry out: log a constant text with variable keys.

    The driver is the real-time loop or a simulator; it gives no answer.

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
