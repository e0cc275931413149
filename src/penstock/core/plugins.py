"""Parts that installed distributions register by entry point, by group and name. Reads what is installed, no clock or socket."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from penstock.core.errors import ConfigError

ROUTING_POLICIES: Final = "penstock.routing_policies"
"""Group of the router's policies; each entry names a class or a function, see `penstock.router.policy.registry`."""


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return a group's entry points by name, sorted; read once in a process.

    Raises:
        ConfigError: two distributions register one name.
    """
    found: dict[str, EntryPoint] = {}
    for each in sorted(entry_points(group=group), key=lambda each: each.name):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            raise ConfigError(
                f"{group}: {each.name!r} is registered as {other.value} and as {each.value}; uninstall one of them"
            )
    return found


def load(group: str, name: str, *, kind: str) -> Any:
    """Import and return what a group has under a name.

    Args:
        group: Of entry points.
        name: One of the group's.
        kind: What the group holds, for the message.

    Raises:
        ConfigError: nothing is registered under the name, or it cannot be imported; the message lists the names.
    """
    known = registered(group)
    if name not in known:
        raise ConfigError(
            f"{kind} {name!r}: choose from {', '.join(known)}, or install the package that registers it"
        )
    try:
        return known[name].load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{kind} {name!r}: {known[name].value} cannot be imported: {exc}") from exc
