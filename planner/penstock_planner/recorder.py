"""Writes the records that the planner's core requests to the ledger (the decision log); live and simulated planners share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.api import Role
from penstock.core.errors import LedgerError
from penstock.core.logs import get_logger
from penstock_planner.core.effects import Append, AppendPull, BeginLedger, Checkpoint, RecordDecision
from penstock_planner.core.records import DecisionKind, Record
from penstock_planner.decide.decision import Reason
from penstock_planner.ledger import Ledger

MAX_COUNTED_DECISIONS = 150
"""Number of equal decisions in a row (150) that are only counted instead of being written to the ledger.

Chosen: five minutes of mode adaptive. A restarted planner recomputes decisions that are not counted from the ledger's
metrics.
"""

log = get_logger(__name__)


class Recorder:
    """Writes one planner's records to its ledger, the decision log.

    Attributes:
        ledger: Ledger to which the records are written.
    """

    def __init__(self, ledger: Ledger, about: Mapping[str, Any], *, wall_s: Callable[[], float]) -> None:
        """Create a recorder.

        Args:
            ledger: Ledger to write to.
            about: Facts about the planner, added to the ledger's header.
            wall_s: Clock that returns real seconds since 1970; each record carries its time.
        """
        self.ledger = ledger
        self._about = about
        self._wall_s = wall_s
        # The last recorded decision, and the number of failed writes by then: a replay would lack
        # metrics that were lost since.
        self._written: tuple[list[tuple[Role, int, Reason, str]], int] | None = None
        self._held = 0

    def write(self, effect: Append | AppendPull | BeginLedger | Checkpoint) -> None:
        """Write a record that the planner's core requests to the ledger (the decision log); if that fails, the record is lost.

        Args:
            effect: Request of the core, with the record.
        """
        match effect:
            case Append() | AppendPull():
                self.ledger.try_append({**effect.record, "wall_s": round(self._wall_s(), 3)})
            case BeginLedger(header):
                self.ledger.begin(self._header(header))
            case Checkpoint(header):
                if self.ledger.is_long:
                    self.ledger.rotate(self._header(header))
                    self._written = None

    def record(self, asked: RecordDecision) -> bool:
        """Write a decision durably to the ledger (the decision log); return whether that succeeded.

        A decision that changes nothing and equals the last written one is left out, since a replay of the ledger's
        metrics makes it again. Then True is returned, and the next decision record contains the number of decisions
        that were left out before it.

        Args:
            asked: Request of the planner's core, with the decision and its record.
        """
        decision = asked.decision
        says = [(role.role, role.desired, role.reason, role.rule) for role in decision.roles]
        written = self._written
        is_made_again = decision.is_hold and asked.kind is DecisionKind.ADJUSTMENT
        if is_made_again and self._held < MAX_COUNTED_DECISIONS and written == (says, self.ledger.errors):
            self._held += 1
            return True
        record = {**asked.record, "wall_s": self._wall_s(), "held": self._held}
        try:
            self.ledger.append(record, durable=True)
        except LedgerError as exc:
            log.error("decision not recorded, so not applied", decision_id=decision.id, error=str(exc))  # noqa: TRY400 - no bug of ours
            return False
        self._written, self._held = (says, self.ledger.errors), 0
        return True

    def _header(self, header: Record) -> Record:
        return {**header, "wall_s": self._wall_s(), **self._about}
