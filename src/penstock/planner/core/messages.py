"""What the planner's core takes (events), and what it asks of its driver (effects)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.api import Role
from penstock.planner.core.records import Change, Deciding, Header, History, LedgerPosition, Record
from penstock.planner.decide.decision import Decision
from penstock.planner.decide.observation import PoolCounts, Pull


@dataclass(frozen=True, slots=True)
class Started:
    """The process has started.

    Attributes:
        history: What its ledger says; None without one.
        first_sequence: Decisions known to have been made, even if the ledger is lost; ids continue after them.
        gone_s: Simulated seconds since the ledger's newest record, by the wall clock; the only measure there is across
            timelines.
    """

    history: History | None = None
    first_sequence: int = 0
    gone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """The backend at a tick.

    Attributes:
        pools: Replicas by role, the router's excluded.
        is_adjusting: A requested replica is not ready yet, or one is draining; one that restarts after a crash is no
            adjustment.
        edited: Roles whose number of replicas was set by another writer since the last observation.
        writers: Who set each role's number of replicas last, where that is known.
        failures: The newest reason of a replica that was given up, by role.
        never_ready: Roles with a replica that counts as starting and will never become ready, and why.
    """

    pools: Mapping[Role, PoolCounts]
    is_adjusting: bool
    edited: frozenset[Role] = frozenset()
    writers: Mapping[Role, str] = field(default_factory=dict)
    failures: Mapping[Role, str] = field(default_factory=dict)
    never_ready: Mapping[Role, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetUnavailable:
    """The backend could not be read at a tick: nothing is pulled or decided."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The metrics that `ReadMetrics` requested."""

    pull: Pull


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Effect: write a decision to the disk before it is carried out. Answered by `DecisionRecorded`."""

    deciding: Deciding
    place: LedgerPosition


@dataclass(frozen=True, slots=True)
class DecisionRecorded:
    """What became of a decision's record.

    Attributes:
        asked: The effect that this answers.
        is_written: Whether the decision is on the disk; one that is not is not taken.
    """

    asked: RecordDecision
    is_written: bool


@dataclass(frozen=True, slots=True)
class Scaled:
    """What became of `Scale`.

    Attributes:
        error: Why the backend refused; None if it took the change.
    """

    error: str | None = None


Event = Started | Observed | TargetUnavailable | Pulled | DecisionRecorded | Scaled


@dataclass(frozen=True, slots=True)
class ObserveAt:
    """End the tick; observe the backend at ``at_s``, or now if that is past. Answered by `Observed` or `TargetUnavailable`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Read the metrics of the pools just observed. Answered by `Pulled`."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Ask the backend for a change. Answered by `Scaled`."""

    change: Change


@dataclass(frozen=True, slots=True)
class Notify:
    """Show observers a recorded decision."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record that may be lost."""

    record: Record


@dataclass(frozen=True, slots=True)
class BeginLedger:
    """Write the header of this run."""

    header: Header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Here the header alone holds the state of the planner: a long ledger may begin a new file with it."""

    header: Header


class LogLevel(StrEnum):
    """How much a log line matters."""

    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Log:
    """Log a constant text with its keys."""

    text: str
    keys: Mapping[str, object] = field(default_factory=dict)
    level: LogLevel = LogLevel.INFO


Effect = ObserveAt | ReadMetrics | RecordDecision | Scale | Notify | Append | BeginLedger | Checkpoint | Log
