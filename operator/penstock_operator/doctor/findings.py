"""What `check` concludes and `penstock doctor` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is; the words are a contract of ``--json``."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: problem: something does not work; unknown: it could not be looked at.
        subject: What it is about, such as ``graph serving/llama`` or ``API server``.
        message: One sentence without a full stop.
        remedy: What to do, a command where there is one; empty if nothing is to be done.
    """

    severity: Severity
    subject: str
    message: str
    remedy: str = ""


def ok(subject: str, message: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(Severity.OK, subject, message)


def warning(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding that may become a problem."""
    return Finding(Severity.WARNING, subject, message, remedy)


def problem(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(Severity.PROBLEM, subject, message, remedy)


def unknown(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of something that could not be looked at."""
    return Finding(Severity.UNKNOWN, subject, message, remedy)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether no problem was found."""
    return all(each.severity is not Severity.PROBLEM for each in findings)


def counts(findings: Iterable[Finding]) -> dict[Severity, int]:
    """Return how many findings of each severity there are, all four named."""
    found = list(findings)
    return {severity: sum(each.severity is severity for each in found) for severity in Severity}
