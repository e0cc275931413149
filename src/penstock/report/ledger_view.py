"""Converts a planner's ledger (decision log) into the data that the report shows: metrics, decisions and adjustments over time.

Pure except for `load_planner_run`, which reads the file. Times are converted to seconds from the start of the load run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.api import Role
from penstock.core.errors import LedgerError
from penstock.core.printable import printable
from penstock_planner.core.records import MALFORMED, Record
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.config import DecideConfig, config_from
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.decision_steps import DemandForecast, ProfileReading, forecast_of, profile_reading
from penstock_planner.ledger import read_ledger
from penstock_planner.served_shares import ServedShares, served_of

_SAME_CLOCK_S = 2.0
"""Maximum difference, in real seconds, between two readings of one host's wall clock. Chosen."""


@dataclass(frozen=True, slots=True)
class LoadOrigin:
    """Start of a load run.

    Attributes:
        simulated_s: Time of the start on the host's monotonic clock, in simulated seconds.
        unix_s: Time of the start, real seconds since 1970.
        speed: Time factor, simulated seconds per real second.
    """

    simulated_s: float
    unix_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One role's part of a decision of the planner.

    Attributes:
        role: The role.
        current: Number of ready and starting replicas.
        desired: Number of replicas requested.
        action: ``up``, ``hold`` or ``down``.
        reason: Reason code of the planner, for machines.
        sentence: The planner's explanation, for people.
        mean: Mean, over the adjustment interval, of the signal that was compared with the thresholds; None if unknown, or if no signal was
            compared.
        outcome: ``applied``, ``failed`` or ``abandoned``; ``not asked`` for a hold or in no-operation mode; ``unknown`` if the ledger
            (decision log) ends before the outcome.
        forecast: Demand forecast; None if the planner's mode makes no forecast.
        profile: Values from the performance profile; None if the planner's mode uses no profile.
        shares: Observed and predicted fractions of requests on time; None if the planner's mode predicts no fraction, and for roles that
            requests do not reach first.
    """

    role: Role
    current: int
    desired: int
    action: str
    reason: str
    sentence: str
    mean: float | None
    outcome: str
    forecast: DemandForecast | None = None
    profile: ProfileReading | None = None
    shares: ServedShares | None = None


@dataclass(frozen=True, slots=True)
class DecisionMark:
    """One decision of the planner, from its ledger (decision log).

    Attributes:
        id: Id of the decision.
        at_s: Seconds from the start of the load run.
        roles: Each role's part of the decision, in the order in which these parts are carried out.
        gpus_after: GPUs held at the decision plus the GPUs of the replicas that the decision adds.
    """

    id: str
    at_s: float
    roles: tuple[RoleChange, ...]
    gpus_after: int

    @property
    def is_change(self) -> bool:
        """Whether the decision scales any role."""
        return any(role.action != "hold" for role in self.roles)


@dataclass(frozen=True, slots=True)
class PlannerRun:
    """A planner's run, from its ledger (decision log), as the report shows it. Times are simulated seconds from the start of the load run.

    Attributes:
        config: Configuration of the planner, from the newest header of the ledger.
        pulls: Metrics scrapes in order of time.
        decisions: Decisions in order of time.
        adjusting: Spans (start, end) in which replicas started or drained because of the planner's decisions.
        end_s: Time of the newest record of the ledger.
        notes: Sentences for the reader, for example about incomplete lines of the ledger.
        start_ups_s: Start-up time of each replica that became ready, seconds, in order of time.
        graph_file: Path of the graph's manifest; None if the ledger does not name it.
    """

    config: DecideConfig
    pulls: tuple[Pull, ...]
    decisions: tuple[DecisionMark, ...] = ()
    adjusting: tuple[tuple[float, float], ...] = ()
    end_s: float = 0.0
    notes: tuple[str, ...] = ()
    start_ups_s: tuple[float, ...] = ()
    graph_file: Path | None = None

    def gpu_steps(self) -> list[tuple[float, int]]:
        """Return (time, GPUs held from then on), in order of time.

        A planner that waits for its adjustments scrapes no metrics meanwhile. From a decision until the next scrape, the replicas that the
        decision adds count as holding their GPUs, and the replicas that it removes still hold theirs.
        """
        steps = [(pull.at_s, existing_gpus(pull.pools, self.config)) for pull in self.pulls]
        steps += [
            (mark.at_s, mark.gpus_after)
            for mark in self.decisions
            if any(role.outcome == "applied" for role in mark.roles)
        ]
        # A scrape and its decision have the same time; the sort is stable, so the decision comes second.
        return sorted(steps, key=lambda step: step[0])

    def floor_gpus(self) -> int:
        """Return the number of GPUs of the minimum replicas that the planner keeps (its floors), summed over all roles."""
        engines: dict[Role, int] = {}
        for pull in self.pulls:
            for role, pool in pull.pools.items():
                engines[role] = max(engines.get(role, 0), self.config.engine_gpus(role, pool.gpus))
        return sum(self.config.floor(role, gpus) * gpus for role, gpus in engines.items())

    def forecasts(self) -> Iterator[tuple[float, DemandForecast]]:
        """Yield (time of the decision, forecast), in order of time."""
        for mark in self.decisions:
            for part in mark.roles:
                if part.forecast is not None:
                    yield mark.at_s, part.forecast

    def shares(self) -> Iterator[tuple[float, ServedShares]]:
        """Yield (time of the decision, observed and predicted fractions on time), in order of time."""
        for mark in self.decisions:
            for part in mark.roles:
                if part.shares is not None:
                    yield mark.at_s, part.shares

    def readings(self) -> Iterator[tuple[float, Role, ProfileReading]]:
        """Yield (time of the decision, role, values from the profile), in order of time."""
        for mark in self.decisions:
            for part in mark.roles:
                if part.profile is not None:
                    yield mark.at_s, part.role, part.profile


def load_planner_run(path: Path, *, origin: LoadOrigin) -> PlannerRun:
    """Read a planner's ledger (decision log), and return its newest timeline: the planner's runs since the last restart of its clock.

    Args:
        path: Ledger file, or the folder that contains it.
        origin: Start of the load run, from which the result's times count.

    Raises:
        LedgerError: the ledger cannot be read, or holds no run.
    """
    found = read_ledger(path)
    try:
        run = view_of(found.records, origin=origin)
    except MALFORMED as exc:
        raise LedgerError(f"{path}: a record lacks what its type promises: {exc!r}") from exc
    if run is None:
        raise LedgerError(f"{path}: holds no planner run; give the --log-dir of a planner that has started")
    return replace(run, notes=(*found.notes, *run.notes))


def view_of(records: Sequence[Record], *, origin: LoadOrigin) -> PlannerRun | None:
    """Return the newest timeline of a ledger (decision log): the planner's runs since the last restart of its clock.

    Returns None if the ledger has no header.

    Args:
        records: Records in file order.
        origin: Start of the load run, from which the result's times count.

    Raises:
        KeyError, TypeError, ValueError: a record lacks a field of its type.
    """
    current = _newest_timeline(records)
    if not current:
        return None
    header = [record for record in current if record["type"] == "header"][-1]
    config = config_from(header["config"])
    zero_s, notes = _zero(current, origin)
    pulls = [from_plain(Pull, record["pull"]) for record in current if record["type"] == "pull"]
    pulls = [replace(pull, at_s=pull.at_s - zero_s) for pull in pulls]
    outcomes = {(r["id"], r["role"]): str(r["outcome"]) for r in current if r["type"] == "actuation"}
    return PlannerRun(
        config=config,
        pulls=tuple(pulls),
        decisions=tuple(
            _decision(r["decision"], zero_s, outcomes) for r in current if r["type"] == "decision"
        ),
        adjusting=_spans(
            _adjusting(current, zero_s) if config.policy.waits_for_adjustments else _changing(pulls)
        ),
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


def _zero(records: Sequence[Record], origin: LoadOrigin) -> tuple[float, tuple[str, ...]]:
    """Return the ledger's time at the start of the load run, by the shared monotonic clock or else by the wall clock."""
    header = records[0]
    by_wall_s = header["at_s"] - (header["wall_s"] - origin.unix_s) * origin.speed
    if abs(by_wall_s - origin.simulated_s) <= _SAME_CLOCK_S * origin.speed:
        return origin.simulated_s, ()
    note = (
        "planner and load ran on different clocks, or at different speeds; their times are matched by the"
        " wall clock"
    )
    return by_wall_s, (note,)


def _decision(
    recorded: Mapping[str, Any], zero_s: float, outcomes: Mapping[tuple[str, str], str]
) -> DecisionMark:
    plain = printable(recorded)
    roles = []
    for role in plain["roles"]:
        steps = [(step["name"], step["inputs"]) for step in role["steps"]]
        is_asked = not plain["no_operation"] and role["action"] != "hold"
        outcome = printable(outcomes.get((plain["id"], role["role"]), "unknown"))
        roles.append(
            RoleChange(
                role=Role(role["role"]),
                **{key: role[key] for key in ("current", "desired", "action", "reason", "sentence")},
                mean=next((inputs["mean"] for name, inputs in steps if name == "signal"), None),
                outcome=outcome if is_asked else "not asked",
                forecast=forecast_of(steps),
                profile=profile_reading(steps),
                shares=served_of(steps),
            )
        )
    return DecisionMark(plain["id"], plain["at_s"] - zero_s, tuple(roles), plain["gpus_after"])


def _adjusting(records: Sequence[Record], zero_s: float) -> Iterator[tuple[float, bool]]:
    """Yield (time, whether an adjustment is in progress) for a planner that waits for its adjustments."""
    for record in records:
        if record["type"] == "settled" or (record["type"] == "actuation" and record["outcome"] == "applied"):
            yield record["at_s"] - zero_s, record["type"] == "actuation"
    yield records[-1]["at_s"] - zero_s, False


def _changing(pulls: Sequence[Pull]) -> Iterator[tuple[float, bool]]:
    """Yield (time, whether replicas start or drain) for a planner that does not wait for its adjustments."""
    for pull in pulls:
        yield pull.at_s, any(pool.starting or pool.draining for pool in pull.pools.values())
    for pull in pulls[-1:]:
        yield pull.at_s, False


def _spans(marks: Iterator[tuple[float, bool]]) -> tuple[tuple[float, float], ...]:
    """Return the (start, end) spans from each true mark to the next false one."""
    spans = []
    begin_s: float | None = None
    for at_s, is_on in marks:
        if is_on and begin_s is None:
            begin_s = at_s
        elif not is_on and begin_s is not None:
            spans.append((begin_s, max(begin_s, at_s)))
            begin_s = None
    return tuple(spans)
