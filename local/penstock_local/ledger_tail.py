"""The planner's newest decisions, as `penstock status` and the live table show them."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock_core.printable import printable
from penstock_local.line_follower import LineFollower
from penstock_planner.ledger import FILE_NAME

SHOWN_DECISIONS: Final = 8
"""Decisions kept for display. Chosen: four minutes at the default interval."""
_FIRST_READ_BYTES: Final = 512 * 1024
"""How far back a long ledger is read at first. Chosen: hundreds of pulls, so several decisions."""


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    """One role's part of a recorded decision.

    Attributes:
        id: The ledger's.
        at_s: Simulated seconds since the planner's first start.
        role: prefill, decode or aggregated.
        current: Replicas before.
        desired: Replicas after.
        reason: The rule that settled it.
        sentence: For people.
    """

    id: str
    at_s: float
    role: str
    current: int
    desired: int
    reason: str
    sentence: str


class LedgerTail:
    """Follows a planner's ledger without its lock."""

    __slots__ = ("_decisions", "_lines", "_origin_s")

    def __init__(self, folder: str | None) -> None:
        """Name the planner's folder; None while there is no planner."""
        self._lines = (
            None
            if folder is None
            else LineFollower(Path(folder) / FILE_NAME, first_read_bytes=_FIRST_READ_BYTES)
        )
        self._origin_s: float | None = None
        self._decisions: deque[DecisionStatus] = deque(maxlen=SHOWN_DECISIONS)

    def newest(self) -> tuple[DecisionStatus, ...]:
        """Return the newest decisions, oldest first; none while there is no ledger."""
        for line in () if self._lines is None else self._lines.new_lines():
            try:
                record = printable(json.loads(line))
            except ValueError:
                continue
            if isinstance(record, dict):
                self._take(record)
        return tuple(self._decisions)

    def _take(self, record: dict[str, Any]) -> None:
        if isinstance(record.get("origin_s"), int | float):
            self._origin_s = float(record["origin_s"])
        decision = record.get("decision")
        if record.get("type") != "decision" or not isinstance(decision, dict):
            return
        for role in decision.get("roles", ()):
            self._decisions.append(
                DecisionStatus(
                    id=str(decision.get("id", "")),
                    at_s=float(record.get("at_s", 0.0)) - (self._origin_s or 0.0),
                    role=str(role.get("role", "")),
                    current=int(role.get("current", 0)),
                    desired=int(role.get("desired", 0)),
                    reason=str(role.get("reason", "")),
                    sentence=str(role.get("sentence", "")),
                )
            )
