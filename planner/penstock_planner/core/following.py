"""Reconstruction of the planner's state from the records of its ledger (the decision log). Pure.

For consecutive decisions that change nothing, the ledger has only their number. They are made again from the recorded
pulls (metrics scrapes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.api import Role
from penstock_planner.core.changes import (
    ChangeOutcome,
    ReplicaChange,
    recorded_changes,
    without_pending_scale_up,
)
from penstock_planner.core.ledger_history import LedgerHistory
from penstock_planner.core.records import ANCHORS, DecisionKind, Record, anchor_position, decision_record
from penstock_planner.core.starts import Starts, starts_after, without_oldest
from penstock_planner.core.tick_schedule import TickSchedule
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.config import DecideConfig, config_from
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState


class LedgerFollower:
    """Reconstructs the planner's state by reading the records of its ledger (the decision log) in order.

    The first record must be an anchor: a record that contains the planner's whole state, such as a header.
    """

    def __init__(self, config: DecideConfig) -> None:
        """Create a follower; ``config`` is used for values that the records do not contain."""
        self._config = config
        self._schedule = TickSchedule.of(config, 0.0)
        self._state = PlannerState()
        self._starts: Starts = {}
        self._waiting: dict[Role, ReplicaChange] = {}
        self._anchor: Record = {}
        self._is_applied = False

    def follow(self, record: Record) -> Record | None:
        """Process one record of the ledger (the decision log), and return the record of a decision that the ledger left out.

        The planner can leave out a decision that changes nothing. If the record is a pull (metrics scrape) that
        completes an interval, and the decision for this interval changes nothing, the record of that decision is
        returned; otherwise None. The caller has to expect that the ledger nevertheless contains this decision as the
        next record, or that the planner stopped before it made the decision. Records before the first anchor (a record
        with the planner's whole state) are ignored.

        Raises:
            KeyError, TypeError, ValueError: The record lacks a value that its type requires.
        """
        match record["type"]:
            case "pull":
                return self._pulled(record)
            case "actuation":
                self._actuated(record)
            case "started":
                self._starts = without_oldest(self._starts, Role(record["role"]))
            case kind if kind in ANCHORS:
                self._stand(record)
        return None

    def history(self, newest: Record) -> LedgerHistory:
        """Return the planner's state when it wrote the record ``newest`` of its ledger (the decision log).

        An anchor (a record that contains the planner's whole state) must have been processed before.
        """
        anchor = self._anchor
        return LedgerHistory(
            state=self._state,
            timeline=anchor["timeline"],
            origin_s=anchor["origin_s"],
            newest_s=newest["at_s"],
            wall_s=newest.get("wall_s"),
            schedule=self._schedule,
            blocked_s=anchor["at_s"] if self._is_applied else None,
            starts=self._starts,
            pending=tuple(self._waiting.values()),
        )

    def _stand(self, record: Record) -> None:
        if "config" in record:
            config = config_from(record["config"])
            # A decision's record omits the performance profile, which is long.
            is_complete = record["type"] == "header"
            self._config = config if is_complete else replace(config, performance=self._config.performance)
        self._state = from_plain(PlannerState, record["state"])
        self._starts = {Role(role): tuple(begun) for role, begun in record.get("starts", {}).items()}
        before = self._schedule
        self._begin(record["start_s"])
        if record.get("resumed", False) and self._anchor:
            # The current interval continues, and changes that are not known to be carried out remain pending.
            pulls = tuple(pull for pull in before.pulls if pull.at_s > record["start_s"])
            self._schedule = replace(self._schedule, pulls=pulls, tick=before.tick if pulls else 0)
            return
        self._anchor, self._is_applied = record, False
        changes = recorded_changes(record["decision"]) if record["type"] == "decision" else ()
        self._waiting = {change.role: change for change in changes}

    def _begin(self, start_s: float) -> None:
        asked_s = self._state.interval_s
        interval_s = self._config.interval_s if asked_s is None else asked_s
        self._schedule = TickSchedule.of(self._config, start_s).next_interval(start_s, interval_s)

    def _actuated(self, record: Record) -> None:
        is_applied = record["outcome"] == ChangeOutcome.APPLIED
        self._is_applied = self._is_applied or is_applied
        change = self._waiting.pop(Role(record["role"]), None)
        if change is not None and is_applied:
            self._starts = starts_after(self._starts, change)
        elif change is not None:
            self._state = without_pending_scale_up(self._state, change.role)

    def _pulled(self, record: Record) -> Record | None:
        if not self._anchor:
            return None
        pull = from_plain(Pull, record["pull"])
        self._schedule = schedule = replace(self._schedule.pulled(pull), tick=record["slot"])
        if not schedule.is_decidable:
            return None
        made = decide(schedule.window, self._state, self._config)
        decision, state = made
        if not decision.is_hold:
            return None
        anchor, next_s = self._anchor, schedule.next_start_s
        held = decision_record(
            DecisionKind.ADJUSTMENT,
            anchor_position(anchor["timeline"], anchor["origin_s"], next_s, self._starts),
            config=self._config,
            before=self._state,
            made=made,
            window=schedule.window,
        )
        self._state = state
        self._begin(next_s)
        return {**held, "wall_s": record.get("wall_s", 0.0)}


def restore(records: Sequence[Record], config: DecideConfig) -> LedgerHistory | None:
    """Return the planner's state after the records of a ledger (the decision log); None if there are no records.

    Args:
        records: Records in file order. The first must be an anchor, a record with the planner's whole state, as in the
            result of `Ledger.tail`.
        config: Configuration for values that the records do not contain.

    Raises:
        KeyError, TypeError, ValueError: A record lacks a value that its type requires.
    """
    if not records:
        return None
    follower = LedgerFollower(config)
    for record in records:
        follower.follow(record)
    return follower.history(records[-1])
