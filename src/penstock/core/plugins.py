"""Finds plugins that installed Python packages register as entry points; none is imported before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.core.closest import did_you_mean
from penstock.core.errors import ConfigError


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, sorted. The result is cached at the first call.

    Raises:
        ConfigError: Two packages register different objects under one name.
    """
    found: dict[str, EntryPoint] = {}
    for each in sorted(entry_points(group=group), key=lambda each: each.name):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            raise ConfigError(
                f"{group}: {each.name!r} is registered as {other.value} and as {each.value}; uninstall one of them"
            )
    return found


def plugin(group: str, name: str) -> Any | None:
    """Return the object that an installed package registered in a group under ``name``; None if no package did.

    Raises:
        ConfigError: The object cannot be imported.
    """
    point = registered(group).get(name)
    if point is None:
        return None
    try:
        return point.load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"{group}: {name} is registered as {point.value}, which cannot be imported: {exc}; "
            "install its distribution again"
        ) from exc


def load(group: str, name: str, *, kind: str) -> Any:
    """Return the object that an installed package registered under ``name``.

    Args:
        group: Entry-point group of the installed packages' metadata.
        name: Name of the entry point.
        kind: Noun for what the group contains, for messages, such as ``policy``.

    Raises:
        ConfigError: No package registered the name, or the object cannot be imported.
    """
    found = plugin(group, name)
    if found is None:
        raise ConfigError(
            f"{kind} {name!r}: choose from {', '.join(registered(group)) or 'none'}, or install the package that "
            f"registers it{did_you_mean(name, registered(group))}"
        )
    return found
