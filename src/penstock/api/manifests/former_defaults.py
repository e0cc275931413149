"""Defaults that definitions before the present one stored in graphs, and that are valid no more. Pure.

Today's store next to none (`penstock.api.crd.absent_keys`), so that the table grows no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_PREEMPTION: Final = ("engine", "preemption")
_ALWAYS: Final = ((("planner", "sla"), "predictor", "holt-winters"),)
_WITHOUT_TIERS: Final = ((_PREEMPTION, "maxPerRequest", 3), (_PREEMPTION, "premiumReservedFraction", 0.3))


def without_former_defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored graph's specification without the values that nobody may have chosen and that are refused now.

    A user who wrote such a value gets today's default in its place: ``holt-winters`` is no predictor any more, and
    preemption's bounds do nothing where requests have no tiers.

    Args:
        spec: As stored; it is left as it is.
    """
    has_tiers = _section(spec, ("router", "tiers")).get("enabled", False)
    kept = dict(spec)
    for path, key, value in _ALWAYS if has_tiers else (*_ALWAYS, *_WITHOUT_TIERS):
        if _section(kept, path).get(key) == value:
            kept = _without(kept, (*path, key))
    return kept


def _section(spec: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    found: Any = spec
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _without(section: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in section.items() if key != first}
    return {**section, first: _without(section[first], tuple(rest))}
