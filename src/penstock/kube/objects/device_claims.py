"""Counts the devices that a ResourceClaimTemplate requests (DRA). Pure.

Source: resource.k8s.io/v1 and v1beta2 (``exactly``, ``firstAvailable``), v1beta1 (fields of the request itself).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def claimed_devices(template: Mapping[str, Any], is_counted: Callable[[str], bool]) -> int | None:
    """Return the number of devices of counted classes that one claim of the template gets; None if it is unknown.

    It is unknown if the template requests all devices of a node, or alternatives with different numbers.

    Args:
        template: The ResourceClaimTemplate.
        is_counted: Returns whether devices of the class with this name are counted.
    """
    spec: Any = template
    for key in ("spec", "spec", "devices"):
        spec = spec.get(key) if isinstance(spec, Mapping) else None
    requests = spec.get("requests") if isinstance(spec, Mapping) else None
    counts = [_devices(each, is_counted) for each in _maps(requests)]
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None


def _devices(request: Mapping[str, Any], is_counted: Callable[[str], bool]) -> int | None:
    choices = list(_maps(request.get("firstAvailable"))) or [request.get("exactly") or request]
    counts = {_count(each, is_counted) for each in choices if isinstance(each, Mapping)}
    return counts.pop() if len(counts) == 1 else None


def _count(requested: Mapping[str, Any], is_counted: Callable[[str], bool]) -> int | None:
    if requested.get("adminAccess") is True or not is_counted(str(requested.get("deviceClassName"))):
        return 0
    if requested.get("allocationMode", "ExactCount") != "ExactCount":
        return None
    count = requested.get("count", 1)
    return count if isinstance(count, int) and count > 0 else None


def _maps(value: object) -> Iterator[Mapping[str, Any]]:
    yield from (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else ()
