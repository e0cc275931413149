"""What the supervisor can do for one name: `plan` chooses an action, the supervisor carries it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One step for the entry or process ``name``."""

    name: str


class Start(Action):
    """Start a process for the entry."""


class MarkReady(Action):
    """The process answers: write ``ready``."""


class BeginDrain(Action):
    """Ask the router to send nothing new, and begin to watch what is in flight."""


class Terminate(Action):
    """Send SIGTERM."""


class Retire(Action):
    """The process is gone for good: take the entry out (the base entry becomes ``stopped``)."""


class Forget(Action):
    """Drop what is remembered about a name that is in the file no more."""


@dataclass(frozen=True)
class ReasonedAction(Action):
    """A step with its reason, for people."""

    reason: str


class MarkUnready(ReasonedAction):
    """The process runs and cannot serve: write ``starting``, so that the router sends nothing there."""


class Abandon(ReasonedAction):
    """Write ``failed`` and free the GPUs."""


class Kill(ReasonedAction):
    """Send SIGKILL to the process and its group; the reason becomes the cause of its exit."""


@dataclass(frozen=True)
class RestartLater(ReasonedAction):
    """Write the reason and start again at ``at_s``, after so many failures in a row."""

    at_s: float
    failures: int
