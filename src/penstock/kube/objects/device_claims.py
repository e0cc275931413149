"""What a ResourceClaimTemplate asks of device classes (DRA). Pure.

Source: resource.k8s.io/v1 and v1beta2 (``exactly``, ``firstAvailable``), v1beta1 (the request's own fields).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def claimed_devices(template: Mapping[str, Any], is_counted: Callable[[str], bool]) -> int | None:
    """Return how many devices of counted classes a claim of the template holds; None: unknown.

    That is so where all devices of a node are asked for, or one of several alternatives of different numbers.
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


def _count(asked: Mapping[str, Any], is_counted: Callable[[str], bool]) -> int | None:
    if asked.get("adminAccess") is True or not is_counted(str(asked.get("deviceClassName"))):
        return 0
    if asked.get("allocationMode", "ExactCount") != "ExactCount":
        return None
    count = asked.get("count", 1)
    return count if isinstance(count, int) and count > 0 else None


def _maps(value: object) -> Iterator[Mapping[str, Any]]:
    yield from (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else ()
