"""One rule of a CustomResourceDefinition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of ``x-kubernetes-validations``.

    Attributes:
        rule: CEL that is true for a valid object; ``self`` is the part that the rule stands at.
        message: CEL that gives the message; the values that it names are the object's.
        short: What is said if the message cannot be computed.
        field: Path below the part to blame, such as ``.maxGpuBudget``; empty: the part itself.
    """

    rule: str
    message: str
    short: str
    field: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Return the entry as the CustomResourceDefinition holds it."""
        entry = {"rule": self.rule, "message": self.short, "messageExpression": self.message}
        return {**entry, "fieldPath": self.field} if self.field else entry
