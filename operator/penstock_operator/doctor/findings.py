"""Findings that `check` returns and `penstock doctor` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Severity of a finding; the values are a public interface of ``--json``.

    Attributes:
        OK: Everything is as it should be.
        WARNING: Something may become a problem.
        PROBLEM: Something does not work.
        UNKNOWN: The check could not be made.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        severity: Severity; PROBLEM means that something does not work, UNKNOWN that it could not be checked.
        subject: Object of the check, such as ``graph serving/llama`` or ``API server``.
        message: One sentence without a full stop.
        remedy: Action to take, with a command if possible; empty if none is needed.
    """

    severity: Severity
    subject: str
    message: str
    remedy: str = ""


def ok(subject: str, message: str) -> Finding:
    """Return a finding of `penstock doctor` with severity OK, which needs no remedy.

    Args:
        subject: Object of the check, such as ``graph serving/llama``.
        message: One sentence without a full stop.
    """
    return Finding(Severity.OK, subject, message)


def warning(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of `penstock doctor` with severity WARNING: something that may become a problem.

    Args:
        subject: Object of the check, such as ``graph serving/llama``.
        message: One sentence without a full stop.
        remedy: Action to take, with a command if possible.
    """
    return Finding(Severity.WARNING, subject, message, remedy)


def problem(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of `penstock doctor` with severity PROBLEM: something that does not work.

    Args:
        subject: Object of the check, such as ``graph serving/llama``.
        message: One sentence without a full stop.
        remedy: Action to take, with a command if possible.
    """
    return Finding(Severity.PROBLEM, subject, message, remedy)


def unknown(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of `penstock doctor` with severity UNKNOWN: something that could not be checked.

    Args:
        subject: Object of the check, such as ``graph serving/llama``.
        message: One sentence without a full stop.
        remedy: Action to take, with a command if possible.
    """
    return Finding(Severity.UNKNOWN, subject, message, remedy)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return whether no finding has severity PROBLEM; findings that could not be checked (UNKNOWN) do not count."""
    return all(each.severity is not Severity.PROBLEM for each in findings)


def counts(findings: Iterable[Finding]) -> dict[Severity, int]:
    """Return the number of findings by severity; all four severities are keys, with 0 if no finding has it."""
    found = list(findings)
    return {severity: sum(each.severity is severity for each in found) for severity in Severity}
