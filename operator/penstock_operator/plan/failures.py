"""What of a graph cannot be done, as a condition says it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Failure(NamedTuple):
    """What of a graph cannot be done: one word such as ``MissingCRD``, and what to do about it."""

    reason: str
    message: str


def worst_failure(found: Iterable[Failure | None]) -> Failure | None:
    """Return failures, gravest first, as one: its reason, and every message; None: there are none."""
    kept = [each for each in found if each is not None]
    return Failure(kept[0].reason, "; ".join(each.message for each in kept)) if kept else None
