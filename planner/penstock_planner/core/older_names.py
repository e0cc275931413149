"""Names that ledgers and exports of older versions use for fields which have since been renamed. Pure.

Schema 1 of the ledger and version 3 of the export have the older names. They are replaced where a file is read, so that
an older ledger still explains, replays and resumes, and an older export can still be started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EACH: Final = "*"
"""Key of `_Names` for all entries of a map and all items of a list."""

_Names = Mapping[str, Any]
"""New name by old name, each with the names of what is inside, or with the values by their old values; None for no further change."""

_GROWTH: Final = {"prompt": "immediate", "patient": "delayed", "recurring": "scheduled"}
_FLEETS: Final[_Names] = {old: (new, None) for old, new in _GROWTH.items()}
_WEEK_RECORD: Final[_Names] = {
    "told": ("predicted", None),
    "told_squares": ("sum_xx", None),
    "together": ("sum_xy", None),
}
_TRIAL: Final[_Names] = {
    "helped": ("outcome", None),
    "vain": ("failed_trials", None),
    "first": ("requests", None),
}
_ADAPTIVE: Final[_Names] = {
    "work": ("work", {"shared": ("contended_fraction", None)}),
    "roles": ("roles", {EACH: ("", {"begun_s": ("start_times_s", None)})}),
    "hindsight": ("hindsight", {EACH: ("", {"growth": ("growth", _GROWTH), "fleets": ("fleets", _FLEETS)})}),
    "served": ("served", {"calm": ("calm_requests", None), "first": ("requests", None)}),
    "trials": ("trials", {EACH: ("", _TRIAL)}),
    "week": (
        "week",
        {
            "came": ("observed", None),
            "place": ("slot", None),
            "day": ("day", _WEEK_RECORD),
            "week": ("week", _WEEK_RECORD),
        },
    ),
}
_LEARNED: Final[_Names] = {"adaptive": ("adaptive", _ADAPTIVE)}
_ROLE_STATE: Final[_Names] = {
    "seen": ("last_ready", None),
    "asked": ("pending_replicas", None),
    "failed": ("failed_replicas", None),
    "owed": ("reserved", None),
    "withdrawals": ("failed_scale_ups", None),
}
_STATE: Final[_Names] = {
    "roles": ("roles", {EACH: ("", _ROLE_STATE)}),
    "memory": ("learned", _LEARNED),
}
_STEPS: Final[_Names] = {EACH: ("", {"name": ("name", {"door": "frontend_queue_unknown"})})}
_DECISION: Final[_Names] = {
    "roles": (
        "roles",
        {
            EACH: (
                "",
                {
                    "kept": ("retained_because", None),
                    "rule": ("rule", {"door": "frontend_queue_unknown"}),
                    "steps": ("steps", _STEPS),
                },
            )
        },
    )
}
_SUMMARY: Final[_Names] = {"why": ("unknown_reasons", None)}
_DEMAND: Final[_Names] = {"turned_away": ("unserved", None)}
_PULL: Final[_Names] = {
    "kv": ("kv", _SUMMARY),
    "worker_waiting": ("worker_waiting", _SUMMARY),
    "demand": ("demand", _DEMAND),
}
_RECORD: Final[_Names] = {
    "state": ("state", _STATE),
    "before": ("before", _STATE),
    "decision": ("decision", _DECISION),
    "config": ("config", {"learns_from": ("learning_identity", None)}),
    "pull": ("pull", _PULL),
    "window": ("window", {"pulls": ("pulls", {EACH: ("", _PULL)})}),
    "observations": ("observations", {EACH: ("", {"demand": ("demand", _DEMAND)})}),
}


def with_present_names(record: Any) -> Any:
    """Return plain data in which the fields that an older version of Penstock named differently have their present names.

    The argument is not changed. Returns an equal value if ``record`` contains no older names.

    Args:
        record: Record of a ledger (the planner's decision log), or content of a file for `penstock planner decide`, as
            dictionaries, lists and values.
    """
    return _renamed(record, _RECORD)


def learned_with_present_names(learned: Any) -> Any:
    """Return the planner's learned state with the field names of this version, as plain data; the argument is not changed.

    Args:
        learned: Learned state that this or an older version wrote, as plain data by the key of the policy that learned
            it.
    """
    return _renamed(learned, _LEARNED)


def _renamed(plain: Any, names: _Names | None) -> Any:
    """Return plain data with other keys, and with other values where ``names`` has texts; the argument is not changed."""
    if not names:
        return plain
    if isinstance(plain, str):
        new = names.get(plain, plain)
        return new if isinstance(new, str) else plain
    if isinstance(plain, list):
        inner = names.get(EACH, ("", None))[1]
        return [_renamed(each, inner) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if EACH in names:
        inner = names[EACH][1]
        return {key: _renamed(value, inner) for key, value in plain.items()}
    found = {}
    for key, value in plain.items():
        entry = names.get(key)
        if isinstance(entry, tuple):
            found[entry[0]] = _renamed(value, entry[1])
        else:
            found[key] = value
    return found
