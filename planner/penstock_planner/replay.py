"""Recomputes a ledger's decisions: exactly, to verify it, or with other settings, to show what would differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError

from penstock.api import Role
from penstock.core.errors import ConfigError, LedgerError
from penstock.performance.profile import PerformanceProfile
from penstock_planner.core.changes import ChangeOutcome, recorded_changes, without_pending_scale_up
from penstock_planner.core.records import MALFORMED, DecisionKind, Record
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.config import config_from
from penstock_planner.decide.decision import Decision, Step
from penstock_planner.decide.demand.observation import Pull, Window
from penstock_planner.decide.pipeline import decide, roll_back
from penstock_planner.decide.state import PlannerState, learned_by
from penstock_planner.ledger import LedgerFile
from penstock_planner.options import SETTINGS, TARGETS, PlannerOptions

SETTABLE: Mapping[str, tuple[str, ...]] = {
    **{
        name.replace("_", "-"): (setting.decides,)
        for name, setting in SETTINGS.items()
        if setting.decides and name not in {"mode", "no_operation"}
    },
    **{name.replace("_", "-"): found for name, found in TARGETS.items()},
    "decode-engine-num-gpu": ("decode_gpus",),
    "prefill-engine-num-gpu": ("prefill_gpus",),
}
"""Options that `what_if` can change, with the fields of the decision's configuration that they fill."""


OnRecord = Callable[[int], None]
"""Callback that receives the number of each record, from 1, before the record is processed."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A recorded decision that differs from its recomputation.

    Attributes:
        line: Line number in the ledger (the planner's decision log).
        id: Id of the decision.
        what: Part that differs: ``decision``; ``state`` (the state after the decision); or ``chain`` (the state before
            the decision is not the state after the previous record).
        recorded, recomputed: The two values of that part, as plain data.
    """

    line: int
    id: str
    what: str
    recorded: Any
    recomputed: Any


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay: which recorded decisions differ from their recomputation.

    Attributes:
        decisions: Number of recomputed decisions, roll-backs of scale-ups included.
        differences: Differences in the order of the records.
        notes: Sentences for people about records that were left out because they cannot be read; empty if there are
            none.
    """

    decisions: int
    differences: tuple[ReplayDifference, ...]
    notes: tuple[str, ...]


def replay(ledger: LedgerFile, on_record: OnRecord = lambda _number: None) -> ReplayResult:
    """Recompute every decision from its recorded input, and return the differences from the recorded decisions.

    Args:
        ledger: Ledger (decision log) to verify.
        on_record: Callback that receives the number of each record, from 1, before the record is replayed.

    Raises:
        LedgerError: a decision record lacks its inputs; the message gives the line.
    """
    differences: list[ReplayDifference] = []
    decisions = 0
    chain = _Chain()
    performance: PerformanceProfile | None = None
    for done, (line, record) in enumerate(zip(ledger.lines, ledger.records, strict=True), 1):
        on_record(done)
        try:
            broken = chain.follow(record)
            if record["type"] == "header":
                performance = config_from(record["config"]).performance
            if record["type"] != "decision":
                continue
            decisions += 1
            decision, after = recompute(record, performance)
            name = record["decision"]["id"]
            pairs = [
                ("decision", _decided(from_plain(Decision, record["decision"])), _decided(decision)),
                (
                    "state",
                    _plain(from_plain(PlannerState, record["state"]), record["config"]),
                    to_plain(after),
                ),
                *(
                    [("chain", _plain(from_plain(PlannerState, record["before"]), record["config"]), broken)]
                    if broken is not None
                    else []
                ),
            ]
        except MALFORMED as exc:
            raise LedgerError(
                f"line {line}: incomplete {record['type']} record ({exc!r}); it cannot be replayed"
            ) from exc
        differences += [
            ReplayDifference(line, name, what, recorded, made)
            for what, recorded, made in pairs
            if _bits(recorded) != _bits(made)
        ]
    return ReplayResult(decisions, tuple(differences), ledger.notes)


def _decided(decision: Decision) -> Any:
    """Return a decision without its explanations, whose wording can change between versions; reasons and numbers are kept.

    Explanations are the sentences of the roles, the names of the rules (which older ledgers lack), and everything after the first ``:`` or
    ``;`` of a step's outcome.
    """
    return to_plain(
        replace(
            decision,
            roles=tuple(
                replace(
                    role,
                    sentence="",
                    rule="",
                    retained_because=None,
                    steps=tuple(map(_without_explanation, role.steps)),
                )
                for role in decision.roles
            ),
        )
    )


def _without_explanation(step: Step) -> Step:
    return replace(step, outcome=re.split("[:;]", step.outcome, maxsplit=1)[0])


def _plain(state: PlannerState, config: Mapping[str, Any]) -> Any:
    """Return a state as plain data in which the learned state has the keys of this version; missing keys have their defaults."""
    kinds = config_from(config).policy.states
    known = learned_by(*(each.read(state.learned) for each in kinds if each.KEY in state.learned))
    return to_plain(replace(state, learned={**state.learned, **known}))


def what_if(
    ledger: LedgerFile, changes: Mapping[str, Any], on_record: OnRecord = lambda _number: None
) -> tuple[int, list[tuple[Record, Decision]]]:
    """Return the number of recorded decisions, and the decisions that would differ with other settings.

    Roll-backs of scale-ups are not included. Each decision is recomputed from its recorded metrics and state. The
    result therefore tells what the planner would have decided at that time, not how the load would have developed after
    another decision.

    Args:
        ledger: Ledger (the planner's decision log) to read.
        changes: Other settings: values by field name of `DecideConfig`, as `settings` returns them.
        on_record: Callback that receives the number of each record, from 1, before it is processed.

    Returns:
        The number of decisions, and for each that differs its record and the new decision.
    """
    different: list[tuple[Record, Decision]] = []
    total = 0
    performance: PerformanceProfile | None = None
    for done, record in enumerate(ledger.records, 1):
        on_record(done)
        if record["type"] == "header":
            performance = config_from(record["config"]).performance
        if record["type"] != "decision" or record["kind"] != DecisionKind.ADJUSTMENT:
            continue
        total += 1
        decision, _ = recompute(record, performance, **changes)
        before = [(r["role"], r["action"], r["reason"]) for r in record["decision"]["roles"]]
        after = [(r.role.value, r.action.value, r.reason.value) for r in decision.roles]
        if sorted(before) != sorted(after):
            different.append((record, decision))
    return total, different


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return settings of the planner, by field name of `DecideConfig`, from ``key=value`` texts with option names as keys.

    Raises:
        ConfigError: a text is not ``key=value``, its key cannot be changed, or its value is out of bounds.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key not in SETTABLE:
            raise ConfigError(f"--set {pair}: expected KEY=VALUE with KEY one of {', '.join(SETTABLE)}")
        try:
            options = PlannerOptions.model_validate({key: value})
        except ValidationError as exc:
            raise ConfigError(f"--set {pair}: {exc.errors()[0]['msg'].lower()}; correct the value") from exc
        found |= dict.fromkeys(SETTABLE[key], getattr(options, key.replace("-", "_")))
    return found


def recompute(
    record: Record, performance: PerformanceProfile | None, **changes: Any
) -> tuple[Decision, PlannerState]:
    """Recompute a decision from the inputs that its record contains; return it and the planner's state after it.

    Args:
        record: The decision record.
        performance: Performance profile from the last header before the record; None in modes without one.
        changes: Values that replace fields of the recorded `DecideConfig`.
    """
    config = replace(config_from(record["config"]), performance=performance, **changes)
    before = from_plain(PlannerState, record["before"])
    if record["kind"] == DecisionKind.ROLL_BACK:
        pull = from_plain(Pull, record["pull"])
        return roll_back(Role(record["role"]), record["why"], pull=pull, state=before, config=config)
    return decide(from_plain(Window, record["window"]), before, config)


class _Chain:
    """Tracks the planner's state through the records."""

    def __init__(self) -> None:
        self._state: PlannerState | None = None
        self._waiting: set[tuple[str, Role]] = set()

    def follow(self, record: Record) -> Any:
        """Process a record; return the state that is expected before a decision record, and None for other records."""
        expected = None
        if record["type"] == "decision" and self._state is not None:
            expected = _plain(self._state, record["config"])
        if record["type"] == "actuation":
            change = (record["id"], Role(record["role"]))
            if (
                record["outcome"] != ChangeOutcome.APPLIED
                and change in self._waiting
                and self._state is not None
            ):
                self._state = without_pending_scale_up(self._state, change[1])
            self._waiting.discard(change)
        elif "state" in record:
            self._state = from_plain(PlannerState, record["state"])
            if record["type"] == "decision":
                self._waiting = {(c.decision_id, c.role) for c in recorded_changes(record["decision"])}
        return expected


def _bits(plain: Any) -> bytes:
    return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)
