"""Plain data (JSON's types) to and from the decision's dataclasses; ledger, replay and `decide FILE` share it.

Numbers survive unchanged: JSON writes the shortest text that reads back as the same float. What reads raises `KeyError`,
`TypeError` or `ValueError` where the data is none of its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from penstock.api import Predictor, Role
from penstock.performance.profile import profile_from
from penstock.planner.decide.config import BaselineSettings, DecideConfig
from penstock.planner.decide.observation import Demand, PoolCounts, Pull, Window, WorkerSummary
from penstock.planner.decide.reading import Quality, Reading
from penstock.planner.decide.state import PlannerState, RoleState


def to_plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, enums as their values, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def to_short(value: Any) -> Any:
    """Return what `to_plain` returns, without the fields that have their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: to_short(each) for f, each in pairs if each != f.default}
    if isinstance(value, Mapping):
        return {key: to_short(item) for key, item in value.items()}
    return value


def config_from(plain: Mapping[str, Any]) -> DecideConfig:
    """Return the configuration that `to_plain` wrote; absent keys take their default."""
    fields = dict(plain)
    for name in ("min_replicas", "max_replicas"):
        if name in fields:
            fields[name] = {Role(role): int(count) for role, count in fields[name].items()}
    fields["external"] = tuple(Role(role) for role in fields.get("external", ()))
    fields["predictor"] = Predictor(fields.get("predictor", Predictor.TREND))
    if fields.get("performance") is not None:
        fields["performance"] = profile_from(fields["performance"])
    known = {each.name for each in dataclasses.fields(BaselineSettings)}
    baseline = {key: value for key, value in fields.get("baseline", {}).items() if key in known}
    baseline["schedule"] = {
        Role(role): tuple((float(at_s), int(replicas)) for at_s, replicas in sizes)
        for role, sizes in baseline.get("schedule", {}).items()
    }
    fields["baseline"] = BaselineSettings(**baseline)
    # A ledger from before there were modes was decided by the document's rule on the queue per worker.
    fields.setdefault("queue_per_worker", "mode" not in fields)
    return DecideConfig(**fields)


def state_from(plain: Mapping[str, Any]) -> PlannerState:
    """Return the state that `to_plain` wrote; absent keys take their default."""
    roles = {Role(role): RoleState(**fields) for role, fields in plain.get("roles", {}).items()}
    return PlannerState(
        int(plain.get("sequence", 0)), roles, dict(plain.get("memory", {})), plain.get("interval_s")
    )


def _reading_from(plain: Mapping[str, Any]) -> Reading:
    """Return the reading that `to_plain` wrote."""
    return Reading(**{**plain, "quality": Quality(plain["quality"])})


def pull_from(plain: Mapping[str, Any]) -> Pull:
    """Return the pull that `to_plain` wrote."""
    queue, demand, waiting = plain.get("queue"), plain.get("demand"), plain.get("worker_waiting")
    return Pull(
        at_s=plain["at_s"],
        pools={Role(role): PoolCounts(**counts) for role, counts in plain["pools"].items()},
        kv=WorkerSummary(**plain["kv"]),
        queue=None if queue is None else _reading_from(queue),
        demand=None if demand is None else demand_from(demand),
        worker_waiting=None if waiting is None else WorkerSummary(**waiting),
    )


def demand_from(plain: Mapping[str, Any]) -> Demand:
    """Return the demand that `to_plain` wrote; absent keys take their default."""
    by_role = {
        key: {Role(role): count for role, count in plain.get(key, {}).items()}
        for key in ("in_flight", "turned_away")
    }
    return Demand(**{**plain, **by_role})


def window_from(plain: Mapping[str, Any]) -> Window:
    """Return the window that `to_plain` wrote."""
    return Window(plain["start_s"], plain["end_s"], tuple(pull_from(pull) for pull in plain["pulls"]))
