"""Finds what other distributions add, by entry point.

A distribution names its object in its metadata; nothing is imported before somebody asks for that one name.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from penstock.core.errors import ConfigError


@cache
def plugin(group: str, name: str) -> Any | None:
    """Return the object that a distribution registered under ``name``; None: no distribution did.

    Args:
        group: Such as ``penstock.runtimes``.
        name: As a manifest spells it.

    Raises:
        ConfigError: it is registered and cannot be imported.
    """
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as exc:
            raise ConfigError(
                f"{group}: {name} is registered as {point.value}, which cannot be imported: {exc}; "
                "install its distribution again"
            ) from exc
    return None


def plugin_names(group: str) -> tuple[str, ...]:
    """Return every name registered in a group, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))
