"""Privileges beyond the restricted pod security standard that the operator's owner allows podTemplates to use.

Pure. One text format is used everywhere: the chart builds it from ``podTemplates.allow``; the operator, `penstock
validate` and `penstock render` take it as ``--allow-pod-templates``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from penstock.core.errors import ConfigError

CHART_VALUE: Final = "podTemplates.allow"

SWITCHES: Final = ("everything", "hostIPC", "hostNetwork", "hostPID", "projectedTokens")
"""Privileges that are either allowed or not."""

LISTS: Final = ("capabilities", "hostPaths", "secrets", "serviceAccounts")
"""Privileges that are allowed by name, or by a pattern of names such as ``weights-*``."""

DEFAULT_SECRETS: Final = ("*",)
"""Secrets that volumes can use by default: all. Any author of a graph can use all Secrets of its namespace in
environment variables, so refusing volumes of Secrets would protect little."""


@dataclass(frozen=True, slots=True)
class Allowances:
    """Privileges that podTemplates are allowed to use.

    Attributes:
        switches: Allowed privileges out of `SWITCHES`, such as ``hostNetwork``.
        names: Pairs of a key of `LISTS`, such as ``secrets`` or ``hostPaths``, and an allowed name or pattern. A key
            without a pair allows nothing, except that ``secrets`` without a pair allows all Secrets.
    """

    switches: frozenset[str] = frozenset()
    names: tuple[tuple[str, str], ...] = ()

    @property
    def everything(self) -> bool:
        """Whether podTemplates are allowed to use every privilege."""
        return "everything" in self.switches

    def has(self, switch: str) -> bool:
        """Return whether the privilege ``switch``, such as ``hostNetwork``, is allowed; False for an unknown one unless all are allowed."""
        return self.everything or switch in self.switches

    def holds(self, key: str, name: str) -> bool:
        """Return whether ``name`` is allowed for ``key``, which is ``capabilities``, ``hostPaths``, ``secrets`` or ``serviceAccounts``."""
        patterns = [pattern for each, pattern in self.names if each == key]
        if key == "secrets" and not patterns:
            patterns = list(DEFAULT_SECRETS)
        return self.everything or any(fnmatchcase(name, pattern) for pattern in patterns)

    def with_profile(self, profile: Allowances) -> Allowances:
        """Return the union of these privileges and those of a profile, the additional privileges that a namespace names by its label.

        The Secrets in the profile are added only if these allowances name Secrets too; otherwise all Secrets remain
        allowed.
        """
        has_secrets = any(key == "secrets" for key, _ in self.names)
        more = [each for each in profile.names if has_secrets or each[0] != "secrets"]
        return Allowances(self.switches | profile.switches, tuple(dict.fromkeys((*self.names, *more))))


NOTHING: Final = Allowances()
"""Allowances without any privilege beyond the standard; Secrets are allowed."""


def allowances_of(text: str) -> Allowances:
    """Parse the privileges that podTemplates are allowed to use from a text such as ``hostIPC,capabilities=IPC_LOCK,serviceAccounts=weights-*``.

    An empty text allows no privilege. ``secrets=`` allows no Secret.

    Raises:
        ConfigError: An entry is not one of the known ones.
    """
    switches, names = set(), []
    for entry in filter(None, (each.strip() for each in text.split(","))):
        key, equals, pattern = entry.partition("=")
        if equals and key in LISTS:
            names.append((key, pattern))
        elif not equals and key in SWITCHES:
            switches.add(key)
        else:
            raise ConfigError(
                f"{entry!r}: write one of {', '.join(SWITCHES)}, or one of {', '.join(LISTS)} with =NAME; "
                "several with commas between them"
            )
    return Allowances(frozenset(switches), tuple(names))


def profiles_of(text: str) -> dict[str, Allowances]:
    """Parse profiles (privileges of podTemplates, by profile name) from a text such as ``rdma:hostIPC,capabilities=IPC_LOCK;cloud:projectedTokens``.

    Raises:
        ConfigError: A profile has no name, or contains an unknown entry.
    """
    found = {}
    for each in filter(None, text.split(";")):
        name, colon, entries = each.partition(":")
        if not (name and colon):
            raise ConfigError(f"{each!r}: write NAME:ENTRIES, several with semicolons between them")
        found[name] = allowances_of(entries)
    return found


def chart_entry(key: str, names: Iterable[str] = ()) -> str:
    """Return the Helm value that would allow a privilege for podTemplates, as text for messages.

    Args:
        key: The privilege, such as ``hostNetwork`` or ``secrets``.
        names: For a privilege with a list, the names to allow, such as those of Secrets.
    """
    value = f"[{', '.join(names)}]" if key in LISTS else "true"
    return f"{CHART_VALUE}.{key}: {value}"
