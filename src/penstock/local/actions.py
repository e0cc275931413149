"""What the supervisor can do for one name: `plan` chooses an action, the supervisor carries it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for the entry."""

    name: str


@dataclass(frozen=True, slots=True)
class MarkReady:
    """The process answers: write ``ready``."""

    name: str


@dataclass(frozen=True, slots=True)
class MarkUnready:
    """The process runs and cannot serve: write ``starting`` with the reason, so that the router sends nothing there."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestartLater:
    """Write the reason and start again at ``at_s``."""

    name: str
    at_s: float
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Write ``failed`` with the reason and free the GPUs."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Ask the router to send nothing new, and begin to watch what is in flight."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the process and its group; ``reason`` becomes the cause of its exit."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The process is gone for good: take the entry out (the base entry becomes ``stopped``)."""

    name: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop what is remembered about a name that is in the file no more."""

    name: str


Action = (
    Start | MarkReady | MarkUnready | RestartLater | Abandon | BeginDrain | Terminate | Kill | Retire | Forget
)
