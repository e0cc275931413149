"""The planner's newest decisions, as `penstock status` and the live table show them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.core.printable import printable
from penstock.planner.ledger import FILE_NAME


class LineFollower:
    """Gives each line once; a torn last line is given when it is whole."""

    __slots__ = ("_first_read_bytes", "_offset", "_path")

    def __init__(self, path: Path, *, first_read_bytes: int | None = None) -> None:
        """Name the file, which may come later.

        Args:
            path: The file.
            first_read_bytes: How far back the first read reaches, bytes; None reads from the beginning. The
                first line may then lack its beginning.
        """
        self._path = path
        self._first_read_bytes = first_read_bytes
        self._offset: int | None = None

    def new_lines(self) -> list[bytes]:
        """Return the lines that have become whole since the last call, without their line ends.

        A file that has shrunk is read as a new one; one that cannot be read has no lines.
        """
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if self._offset is None or self._offset > size:
                    back = size if self._first_read_bytes is None else self._first_read_bytes
                    self._offset = max(0, size - back)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


SHOWN_DECISIONS: Final = 8
"""Decisions kept for display. Chosen: what a terminal has room for below the processes."""
_FIRST_READ_BYTES: Final = 8 << 20
"""How far back a long ledger is read at first. Chosen: a thousand decisions, parsed within a tenth of a second."""
_PULL: Final = b'{"type":"pull"'
"""Begin of the records that say nothing here, nine of ten."""


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    """One role's part of a recorded decision.

    Attributes:
        at_s: Simulated seconds since the planner's first start.
    """

    id: str
    at_s: float
    role: str
    current: int
    desired: int
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class HeldDecisions:
    """Decisions since the newest change that changed nothing."""

    count: int
    at_s: float
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        """Return it in words."""
        sentences = "; ".join(self.sentences)
        return (
            f"decisions since without a change: {self.count:,}, the newest at {self.at_s:,.0f} s: {sentences}"
        )


class LedgerTail:
    """Follows a planner's ledger without its lock.

    Attributes:
        held: What followed the newest decision shown; None: nothing.
    """

    __slots__ = ("_decisions", "_lines", "_origin_s", "_with_unchanged", "held")

    def __init__(self, folder: str | None, *, with_unchanged: bool = False) -> None:
        """Name the planner's folder.

        Args:
            folder: None while there is no planner.
            with_unchanged: Keep decisions that changed nothing, too.
        """
        self._lines = (
            None
            if folder is None
            else LineFollower(Path(folder) / FILE_NAME, first_read_bytes=_FIRST_READ_BYTES)
        )
        self._with_unchanged = with_unchanged
        self._origin_s: float | None = None
        self._decisions: deque[DecisionStatus] = deque(maxlen=SHOWN_DECISIONS)
        self.held: HeldDecisions | None = None

    def newest(self) -> tuple[DecisionStatus, ...]:
        """Return the newest decisions, oldest first; none while there is no ledger."""
        for line in () if self._lines is None else self._lines.new_lines():
            if line.startswith(_PULL):
                continue
            try:
                record = printable(orjson.loads(line))
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
        at_s = float(record.get("at_s", 0.0)) - (self._origin_s or 0.0)
        roles = [_status(role, str(decision.get("id", "")), at_s) for role in decision.get("roles", ())]
        shown = [each for each in roles if self._with_unchanged or each.current != each.desired]
        self._decisions.extend(shown)
        if shown:
            self.held = None
        else:
            before = 0 if self.held is None else self.held.count
            counted = int(record.get("held", 0))
            self.held = HeldDecisions(before + counted + 1, at_s, tuple(each.sentence for each in roles))


def _status(role: Mapping[str, Any], decision_id: str, at_s: float) -> DecisionStatus:
    return DecisionStatus(
        id=decision_id,
        at_s=at_s,
        role=str(role.get("role", "")),
        current=int(role.get("current", 0)),
        desired=int(role.get("desired", 0)),
        reason=str(role.get("reason", "")),
        sentence=str(role.get("sentence", "")),
    )
