"""Formats a ledger's decisions as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.core.printable import printable
from penstock_planner.core.records import Record
from penstock_planner.decide.config import config_from
from penstock_planner.decision_steps import forecast_of
from penstock_planner.ledger import LedgerFile

_LEAST_SHOWN: Final = 0.0001
_FIRST_GROUPED: Final = 1000.0
"""Numbers below `_LEAST_SHOWN` and from this one on would otherwise be printed with an exponent."""


@dataclass(frozen=True, slots=True)
class Span:
    """Wall-clock range in which decisions are shown.

    Attributes:
        since_s, until_s: Start and end of the range, real seconds since 1970, both inclusive.
    """

    since_s: float = -math.inf
    until_s: float = math.inf

    def holds(self, record: Record) -> bool:
        """Return whether a decision was recorded within the range of wall-clock times, both ends included.

        Args:
            record: Record of the decision.
        """
        return self.since_s <= float(record.get("wall_s", 0.0)) <= self.until_s


def span_of(ledger: LedgerFile, since: str | None, until: str | None) -> Span:
    """Return the wall-clock range between two times given as text; None leaves that end open.

    Times are written as ``02:00``, ``02:00:30`` or ``2026-01-05 02:00``. A start without a date is the last such time
    before the newest decision. An end without a date is the first such time after the start. Times without a time zone
    are in the planner's time zone. Returns an unlimited range if the ledger holds no decision.

    Args:
        ledger: Ledger (the planner's decision log) with the decisions.
        since: Start of the range; None for no limit.
        until: End of the range; None for no limit.

    Raises:
        ConfigError: a text is not a time, or the end is before the start.
    """
    decisions = [record for record in ledger.records if record["type"] == "decision"]
    if not decisions:
        return Span()
    newest = datetime.fromtimestamp(decisions[-1].get("wall_s", 0.0), _zone(decisions[-1]))
    begin = None if since is None else _wall_time("--since", since, newest, newest)
    first = newest if begin is None else begin + timedelta(days=1)
    end = None if until is None else _wall_time("--until", until, newest, first)
    if begin is not None and end is not None and end < begin:
        raise ConfigError(f"--until {until}: is before --since {since}; swap them")
    return Span(
        -math.inf if begin is None else begin.timestamp(), math.inf if end is None else end.timestamp()
    )


def _wall_time(flag: str, text: str, newest: datetime, latest: datetime) -> datetime:
    """Return the time in the zone of ``newest``; a time without a date is the last one that is not after ``latest``."""
    try:
        if ":" in text[:3]:
            found = datetime.combine(latest.date(), time.fromisoformat(text), newest.tzinfo)
            return found if found <= latest else found - timedelta(days=1)
        found = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(f"{flag} {text}: write a time such as 02:00 or 2026-01-05T02:00") from exc
    return found if found.tzinfo is not None else found.replace(tzinfo=newest.tzinfo)


def _zone(record: Record) -> ZoneInfo:
    return ZoneInfo(record.get("config", {}).get("time_zone", "UTC"))


def _clock(record: Record) -> str:
    """Return the wall-clock time of a decision for display; empty if the record has none."""
    wall_s = record.get("wall_s")
    return "" if wall_s is None else f" ({wall_clock(wall_s, _zone(record).key)})"


def wall_clock(wall_s: float, time_zone: str) -> str:
    """Return a wall-clock time for display, such as ``2026-11-29 02:10:05 UTC``.

    Args:
        wall_s: Real seconds since 1970.
        time_zone: IANA name of the time zone.
    """
    return f"{datetime.fromtimestamp(wall_s, ZoneInfo(time_zone)):%Y-%m-%d %H:%M:%S} {time_zone}"


def select(
    ledger: LedgerFile,
    *,
    last: int | None,
    decision_id: str | None,
    with_unchanged: bool = True,
    span: Span | None = None,
) -> list[Record]:
    """Return the chosen decision records of a ledger (the planner's decision log), oldest first.

    Each record has its ``actuations`` (outcomes of its replica changes) and its complete ``config``. A ledger stores
    the performance profile of mode sla only in headers; it is added to each record's ``config``.

    Args:
        ledger: The ledger, as read from its file.
        last: Maximum number of records, the newest ones; None returns all.
        decision_id: Id of the only record to return; None applies the other filters.
        with_unchanged: Whether decisions that change nothing are included. If not, and no decision changed anything,
            the newest decision is returned unless there is a ``span``.
        span: Wall-clock range of the decisions; None for all.

    Raises:
        ConfigError: the id is unknown.
    """
    outcomes: dict[str, list[Record]] = {}
    for record in ledger.records:
        if record["type"] == "actuation":
            outcomes.setdefault(record["id"], []).append(record)
    profiles: dict[str, Any] = {}
    profile: Any = None
    decisions = []
    for record in ledger.records:
        if record["type"] == "header":
            profile = record["config"].get("performance")
        elif record["type"] == "decision":
            decisions.append(record)
            profiles[record["decision"]["id"]] = profile
    if decision_id is not None:
        chosen = [record for record in decisions if record["decision"]["id"] == decision_id]
        if not chosen:
            known = [record["decision"]["id"] for record in decisions]
            there = f"{known[0]} to {known[-1]}" if known else "none"
            raise ConfigError(f"--id: no decision {decision_id!r}; the ledger holds {there}")
    else:
        within = decisions if span is None else [each for each in decisions if span.holds(each)]
        wanted = within if with_unchanged else [each for each in within if is_change(each)]
        found = wanted or (decisions[-1:] if span is None else [])
        chosen = found if last is None else found[-last:]
    return [
        {
            **record,
            "config": {**record["config"], "performance": profiles[record["decision"]["id"]]},
            "actuations": outcomes.get(record["decision"]["id"], []),
        }
        for record in chosen
    ]


def is_change(record: Record) -> bool:
    """Return whether a recorded decision changes the replica count of any role.

    Args:
        record: Record of the decision.
    """
    return any(role["current"] != role["desired"] for role in record["decision"]["roles"])


def _sequence(record: Record) -> int:
    return int(record["decision"]["id"].removeprefix("d"))


def since_last_change(ledger: LedgerFile) -> str:
    """Return a sentence about the decisions after the newest replica change: their number, and the reasons in the newest one.

    Returns an empty string if the newest decision is a change, or if there are no decisions.

    Args:
        ledger: Ledger (the planner's decision log) with the decisions.
    """
    decisions = [record for record in ledger.records if record["type"] == "decision"]
    if not decisions or is_change(newest := decisions[-1]):
        return ""
    changes = [record for record in decisions if is_change(record)]
    # Counted by their ids, since the ledger has no record of most decisions that change nothing.
    since = _sequence(changes[-1]) if changes else _sequence(decisions[0]) - 1
    count = _sequence(newest) - since
    sentences = "; ".join(role["sentence"] for role in newest["decision"]["roles"])
    at_s = newest["at_s"] - newest["origin_s"]
    return f"{count:,} decisions since then changed nothing; the newest at {at_s:,.0f} s{_clock(newest)}: {sentences}"


def in_words(record: Record) -> str:
    """Return a recorded decision, its reasons and its outcome as text of several lines for people.

    Args:
        record: Record of the decision, as returned by `select`.
    """
    record = printable(record)
    decision = record["decision"]
    budget = "no ceiling" if decision["max_gpu_budget"] is None else f"budget {decision['max_gpu_budget']}"
    elapsed_s = record["at_s"] - record["origin_s"]
    mode = ", no-operation" if decision["no_operation"] else ""
    pulls = f"{len(record['window']['pulls'])} pulls, " if "window" in record else ""
    lines = [
        f"{decision['id']}  {record['kind']} at {elapsed_s:.0f} s{_clock(record)}, {pulls}{_gpus(record)} ({budget}){mode}"
    ]
    lines += [f"  {line}" for line in (_grant(record), _demand(record), _supply(record)) if line]
    if not decision["roles"]:
        lines.append("  no observations")
    for role in decision["roles"]:
        rule = f"{role['rule']}: " if role.get("rule") else ""
        lines.append(f"  {role['sentence']}  [{rule}{role['reason']}]")
        forecast = forecast_of((step["name"], step["inputs"]) for step in role["steps"])
        if forecast is not None:
            lines.append(f"    forecast {forecast}")
        lines += [_step(step) for step in role["steps"]]
    for actuation in record.get("actuations", ()):
        error = f": {actuation['error']}" if actuation["error"] else ""
        lines.append(f"  {actuation['role']} to {actuation['replicas']}: {actuation['outcome']}{error}")
    return "\n".join(lines)


def _gpus(record: Record) -> str:
    """Return the GPUs in use before and after a decision, and those in use when all draining workers are gone."""
    decision = record["decision"]
    before, after = decision["gpus"], decision["gpus_after"]
    words = f"GPUs {before}" if before == after else f"GPUs {before} -> {after}"
    drained = _drained_gpus(record)
    return words if drained is None or drained >= after else f"{words}, {drained} once drained"


def _drained_gpus(record: Record) -> int | None:
    """Return the GPUs in use when no worker drains any more; None if the record has no replica counts."""
    pulls = record.get("window", {}).get("pulls") or [each for each in (record.get("pull"),) if each]
    if not pulls or not record.get("config"):
        return None
    config = config_from({key: value for key, value in record["config"].items() if key != "performance"})
    desired = {role["role"]: role["desired"] for role in record["decision"]["roles"]}
    return sum(
        int(desired.get(role, pool["ready"] + pool["starting"]))
        * config.engine_gpus(Role(role), pool.get("gpus", 0))
        for role, pool in pulls[-1]["pools"].items()
    )


def _grant(record: Record) -> str:
    """Return the grant of the GPU pool, and the graphs holding GPUs that this one lacks; empty if the graph is in no pool."""
    config = record.get("config", {})
    if config.get("grant") is None:
        return ""
    note = config.get("grant_note")
    return f"grant {config['grant']} GPUs" + (f", {note}" if note else "")


def _demand(record: Record) -> str:
    """Return the requests that reached the frontend in the interval, and those waiting at its end; empty if there is no window."""
    pulls = record.get("window", {}).get("pulls", ())
    known = [pull["demand"] for pull in pulls if pull.get("demand") is not None]
    if not pulls:
        return ""
    if not known:
        return "demand unknown: no router reported it"
    period_s = sum(each["period_s"] for each in known)
    rejected = sum(each["refused"] + each["timed_out"] for each in known)
    oldest_s = known[-1]["oldest_wait_s"]
    waiting = f"{known[-1]['waiting']:.0f} waiting" + (
        f", the oldest for {oldest_s:.1f} s" if oldest_s else ""
    )
    return (
        f"demand {sum(each['arrivals'] for each in known) / period_s:.3g} requests/s, "
        f"{sum(each['uncached_tokens'] for each in known) / period_s:,.0f} uncached tokens/s; "
        f"{rejected:.0f} rejected; {waiting}"
    )


def _supply(record: Record) -> str:
    """Return the replicas at the end of the interval, and for how long the starting ones have been starting."""
    pulls = record.get("window", {}).get("pulls", ())
    if not pulls:
        return ""
    words = []
    for role, pool in pulls[-1]["pools"].items():
        starts = record.get("starts", {}).get(role, ())
        ages = ", ".join(f"{record['at_s'] - asked_s:.0f} s" for asked_s in starts)
        starting = f", {pool['starting']} starting" + (f" for {ages}" if ages else "")
        draining = f", {pool['draining']} draining" if pool["draining"] else ""
        words.append(f"{role} {pool['ready']} ready{starting if pool['starting'] else ''}{draining}")
    return "supply " + "; ".join(words)


def _step(step: dict[str, Any]) -> str:
    inputs = " ".join(f"{key}={_input(key, value)}" for key, value in step["inputs"].items())
    threshold = "" if step["threshold"] is None else f" against {_number(step['threshold'])}"
    return f"    {step['name']:<12} {inputs}{threshold} => {_outcome(step)}"


_SHRINK_CHECKS = frozenset({"idle", "tried", "projected_work", "projected_kv", "itl_after"})


def _outcome(step: dict[str, Any]) -> str:
    """Return a step's outcome. For checks that all must agree before a role shrinks, the outcome is shown as a permission."""
    outcome: str = step["outcome"]
    return f"allows {outcome}" if outcome == "shrink" and step["name"] in _SHRINK_CHECKS else outcome


def _input(key: str, value: Any) -> str:
    """Return an input for display; the decayed request count is shown as a whole number."""
    is_count = key == "requests" and isinstance(value, float) and value >= 1
    return f"{value:,.0f}" if is_count else _number(value)


def _number(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_number(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_number, value)) + "]"
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < _LEAST_SHOWN:
        return "~0"
    return f"{value:,.0f}" if abs(value) >= _FIRST_GROUPED else f"{value:.4g}"
