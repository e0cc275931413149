"""Finds what installed distributions add, by entry point; nothing is imported before one name is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.core.errors import ConfigError


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return a group's entry points by name, as installed when the process first asks.

    Args:
        group: Such as ``penstock.runtimes``.

    Raises:
        ConfigError: two distributions register different objects under one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group)):
        first = found.setdefault(point.name, point)
        if first.value != point.value:
            raise ConfigError(
                f"{group}: {point.name} is registered as {first.value} and as {point.value}; uninstall one of the two"
            )
    return found


def load(group: str, name: str, *, kind: str) -> Any:
    """Return the object that a distribution registered.

    Args:
        group: Such as ``penstock.runtimes``.
        name: As a manifest spells it.
        kind: What the group holds, for messages.

    Raises:
        ConfigError: no distribution did, or the object cannot be imported.
    """
    known = registered(group)
    if name not in known:
        listed = ", ".join(known) or "none; install penstock again"
        raise ConfigError(
            f"{kind} {name} is not installed; there is {listed}; install the package that adds it"
        )
    try:
        return known[name].load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"{kind} {name} is registered as {known[name].value}, which cannot be imported: {exc}; install its package again"
        ) from exc
