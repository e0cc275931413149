"""What one rule of one role found, for the decision and for its record."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.decide.decision import Reason, Step


@dataclass(frozen=True, slots=True)
class RoleFinding:
    """What one rule found.

    Attributes:
        applies: The rule asks for the change.
        reason: For the decision, if it applies.
        detail: In words and numbers.
        step: For the record.
    """

    applies: bool
    reason: Reason
    detail: str
    step: Step


def finding(reason: Reason, detail: str, step: Step) -> RoleFinding:
    """Return a finding that applies if its step says that the role grows or shrinks."""
    return RoleFinding(step.outcome in {"grow", "shrink"}, reason, detail, step)


def grows(applies: bool) -> str:  # noqa: FBT001 - a word for a truth
    """Return the outcome of a rule for growing."""
    return "grow" if applies else "pass"
