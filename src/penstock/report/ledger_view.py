"""Turns a planner's ledger into what the report draws: samples, decisions and adjustments over time.

Pure except for `load_planner_run`, which reads the file. Times become seconds from the load run's zero,
or from the ledger's first record when there is no load run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.api import Role
from penstock.core.errors import LedgerError
from penstock.core.printable import printable
from penstock.planner.core.records import MALFORMED, Record
from penstock.planner.decide.budget import existing_gpus
from penstock.planner.decide.codec import config_from, pull_from
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.observation import Demand, PoolCounts, Pull
from penstock.planner.decision_steps import Forecast, ProfileReading, forecast_of, profile_reading
from penstock.planner.ledger import read_ledger

_SAME_CLOCK_S = 2.0
"""Chosen: real seconds by which two wall clocks of one host may seem to differ between two readings."""


@dataclass(frozen=True, slots=True)
class LoadOrigin:
    """The zero of a load run: on the host's simulated clock and on the wall.

    Attributes:
        model_s: Simulated seconds of the host's monotonic clock.
        unix_s: Real seconds since 1970.
        speed: Time scale: simulated seconds per real second.
        duration_s: Simulated seconds that the run lasted.
    """

    model_s: float
    unix_s: float
    speed: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class LedgerSample:
    """One pull.

    Attributes:
        at_s: Seconds from zero.
        pools: Replicas by role.
        gpus: GPUs that existing replicas hold, draining ones included.
        kv_mean: Mean KV usage fraction of the known workers; None when none is known.
        queue: Queued requests as they are compared: in all, or per ready prefill worker; None when unknown.
        demand: At the routers' frontends since the pull before; None when unknown.
    """

    at_s: float
    pools: Mapping[Role, PoolCounts]
    gpus: int
    kv_mean: float | None
    queue: float | None
    demand: Demand | None


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One role's part of a decision: what it had, what it wants, and why.

    Attributes:
        role: prefill, decode or aggregated.
        current: Ready + starting replicas.
        action: up, hold or down.
        mean: The interval's mean that was compared with the thresholds; None when it was unknown or not asked.
        forecast: Of what would arrive; None where the mode makes none.
        profile: What it took from the performance profile; None where the mode has none.
        outcome: applied, failed, abandoned; ``not asked`` for a hold or in no-operation mode; ``unknown``
            when the ledger ends before it.
    """

    role: Role
    current: int
    desired: int
    action: str
    reason: str
    sentence: str
    mean: float | None
    outcome: str
    forecast: Forecast | None = None
    profile: ProfileReading | None = None


@dataclass(frozen=True, slots=True)
class DecisionMark:
    """One decision.

    Attributes:
        id: The ledger's.
        at_s: Seconds from zero.
        kind: adjustment or withdrawal.
        no_operation: Recorded only.
        roles: In the order carried out.
        gpus_after: GPUs held plus what the decision adds.
    """

    id: str
    at_s: float
    kind: str
    no_operation: bool
    roles: tuple[RoleChange, ...]
    gpus_after: int

    @property
    def is_change(self) -> bool:
        """Whether any role was to be scaled."""
        return any(role.action != "hold" for role in self.roles)


@dataclass(frozen=True, slots=True)
class PlannerRun:
    """A planner's run as the report sees it.

    Attributes:
        config: The newest header's.
        adjusting: Spans (begin, end) in which replicas started or drained as the planner had asked.
        end_s: Time of the newest record.
        notes: What a reader should know: torn lines, another clock.
        start_ups_s: How long each replica that became ready had taken, seconds, in order of time.
        graph_file: Where the planner had its graph from; None where the ledger does not say.
    """

    config: DecideConfig
    samples: tuple[LedgerSample, ...]
    decisions: tuple[DecisionMark, ...]
    adjusting: tuple[tuple[float, float], ...]
    end_s: float
    notes: tuple[str, ...]
    start_ups_s: tuple[float, ...] = ()
    graph_file: Path | None = None


def load_planner_run(path: Path, *, origin: LoadOrigin | None) -> PlannerRun:
    """Read a ledger file, or the one in a folder.

    Raises:
        LedgerError: it cannot be read, or holds no run.
    """
    found = read_ledger(path)
    try:
        run = view_of(found.records, origin=origin)
    except MALFORMED as exc:
        raise LedgerError(f"{path}: a record lacks what its type promises: {exc!r}") from exc
    if run is None:
        raise LedgerError(f"{path}: holds no planner run; give the --log-dir of a planner that has started")
    return replace(run, notes=(*found.notes, *run.notes))


def view_of(records: Sequence[Record], *, origin: LoadOrigin | None) -> PlannerRun | None:
    """Return the newest timeline of a ledger, or None without a header.

    Raises:
        KeyError, TypeError, ValueError: a record lacks what its type promises.
    """
    current = _newest_timeline(records)
    if not current:
        return None
    header = [record for record in current if record["type"] == "header"][-1]
    config = config_from(header["config"])
    zero_s, notes = _zero(current, origin)
    samples = tuple(
        _sample(pull_from(record["pull"]), zero_s, config) for record in current if record["type"] == "pull"
    )
    is_blocking = config.policy.waits_for_adjustments
    outcomes = {(r["id"], r["role"]): str(r["outcome"]) for r in current if r["type"] == "actuation"}
    return PlannerRun(
        config=config,
        samples=samples,
        decisions=tuple(_decision(r, zero_s, outcomes) for r in current if r["type"] == "decision"),
        adjusting=_adjusting(current, zero_s) if is_blocking else _changing(samples),
        end_s=current[-1]["at_s"] - zero_s,
        notes=notes,
        start_ups_s=tuple(record["took_s"] for record in current if record["type"] == "started"),
        graph_file=None if header.get("graph_file") is None else Path(header["graph_file"]),
    )


def _newest_timeline(records: Sequence[Record]) -> list[Record]:
    current: list[Record] = []
    timeline: Any = None
    for record in records:
        if record["type"] == "header" and record["timeline"] != timeline:
            timeline = record["timeline"]
            current = []
        if timeline is not None:
            current.append(record)
    return current


def _zero(records: Sequence[Record], origin: LoadOrigin | None) -> tuple[float, tuple[str, ...]]:
    """Return the ledger's time of the load run's zero, by the shared clock or else by the wall's."""
    if origin is None:
        return float(records[0]["at_s"]), ()
    header = records[0]
    by_wall_s = header["at_s"] - (header["wall_s"] - origin.unix_s) * origin.speed
    if abs(by_wall_s - origin.model_s) <= _SAME_CLOCK_S * origin.speed:
        return origin.model_s, ()
    note = (
        "planner and load ran on different clocks, or at different speeds; their times are matched by the"
        " wall clock"
    )
    return by_wall_s, (note,)


def _sample(pull: Pull, zero_s: float, config: DecideConfig) -> LedgerSample:
    waiting = pull.queue.value if pull.queue is not None and pull.queue.is_known else None
    return LedgerSample(
        at_s=pull.at_s - zero_s,
        pools=pull.pools,
        gpus=existing_gpus(pull.pools, config),
        kv_mean=pull.kv.mean,
        queue=pull.queue_per_worker if config.queue_per_worker else waiting,
        demand=pull.demand,
    )


def _decision(record: Record, zero_s: float, outcomes: Mapping[tuple[str, str], str]) -> DecisionMark:
    plain = printable(record["decision"])
    steps = {
        role["role"]: [(step["name"], step["inputs"]) for step in role["steps"]] for role in plain["roles"]
    }
    roles = tuple(
        RoleChange(
            role=Role(role["role"]),
            current=role["current"],
            desired=role["desired"],
            action=role["action"],
            reason=role["reason"],
            sentence=role["sentence"],
            mean=next((inputs["mean"] for name, inputs in steps[role["role"]] if name == "signal"), None),
            outcome=_outcome(plain, role, outcomes),
            forecast=forecast_of(steps[role["role"]]),
            profile=profile_reading(steps[role["role"]]),
        )
        for role in plain["roles"]
    )
    return DecisionMark(
        id=plain["id"],
        at_s=plain["at_s"] - zero_s,
        kind=record["kind"],
        no_operation=plain["no_operation"],
        roles=roles,
        gpus_after=plain["gpus_after"],
    )


def _outcome(
    decision: Mapping[str, Any], role: Mapping[str, Any], outcomes: Mapping[tuple[str, str], str]
) -> str:
    if decision["no_operation"] or role["action"] == "hold":
        return "not asked"
    return printable(outcomes.get((decision["id"], role["role"]), "unknown"))


def _adjusting(records: Sequence[Record], zero_s: float) -> tuple[tuple[float, float], ...]:
    marks = [
        (record["at_s"] - zero_s, record["type"] == "actuation")
        for record in records
        if record["type"] == "settled" or (record["type"] == "actuation" and record["outcome"] == "applied")
    ]
    return _spans([*marks, (records[-1]["at_s"] - zero_s, False)])


def _changing(samples: Sequence[LedgerSample]) -> tuple[tuple[float, float], ...]:
    """Return the spans in which replicas start or drain, while the planner keeps running."""
    marks = [
        (sample.at_s, any(pool.starting or pool.draining for pool in sample.pools.values()))
        for sample in samples
    ]
    return _spans([*marks, *((sample.at_s, False) for sample in samples[-1:])])


def _spans(marks: Sequence[tuple[float, bool]]) -> tuple[tuple[float, float], ...]:
    """Return (begin, end) of what is on from a true mark to the next false one."""
    spans = []
    begin_s: float | None = None
    for at_s, is_on in marks:
        if is_on and begin_s is None:
            begin_s = at_s
        elif not is_on and begin_s is not None:
            spans.append((begin_s, max(begin_s, at_s)))
            begin_s = None
    return tuple(spans)
