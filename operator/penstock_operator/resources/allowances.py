"""What the operator's owner lets podTemplates have beyond the restricted pod security standard.

Pure. One text says it everywhere: the chart makes it of ``podTemplates.allow``, the operator, `penstock validate` and
`penstock render` take it as ``--allow-pod-templates``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from penstock.core.errors import ConfigError

CHART_VALUE: Final = "podTemplates.allow"

SWITCHES: Final = ("everything", "hostIPC", "hostNetwork", "hostPID", "projectedTokens")
"""Keys that are on or off."""

LISTS: Final = ("capabilities", "hostPaths", "secrets", "serviceAccounts")
"""Keys that hold names, or patterns of names such as ``weights-*``."""

DEFAULT_SECRETS: Final = ("*",)
"""Any author of a graph may name its variables' Secrets, so that refusing volumes of them would keep out little."""


@dataclass(frozen=True, slots=True)
class Allowances:
    """Which podTemplates are taken.

    Attributes:
        switches: Of `SWITCHES`, those that are on.
        names: Patterns by key of `LISTS`; absent: none, of ``secrets`` all.
    """

    switches: frozenset[str] = frozenset()
    names: tuple[tuple[str, str], ...] = ()

    @property
    def everything(self) -> bool:
        """Whether nothing is refused."""
        return "everything" in self.switches

    def has(self, switch: str) -> bool:
        """Return whether a switch is on."""
        return self.everything or switch in self.switches

    def holds(self, key: str, name: str) -> bool:
        """Return whether a list holds a name."""
        patterns = [pattern for each, pattern in self.names if each == key]
        if key == "secrets" and not patterns:
            patterns = list(DEFAULT_SECRETS)
        return self.everything or any(fnmatchcase(name, pattern) for pattern in patterns)

    def with_profile(self, profile: Allowances) -> Allowances:
        """Return what these allow together; a profile that names Secrets takes away none of them."""
        has_secrets = any(key == "secrets" for key, _ in self.names)
        more = [each for each in profile.names if has_secrets or each[0] != "secrets"]
        return Allowances(self.switches | profile.switches, tuple(dict.fromkeys((*self.names, *more))))


NOTHING: Final = Allowances()


def allowances_of(text: str) -> Allowances:
    """Return what a text such as ``hostIPC,capabilities=IPC_LOCK,serviceAccounts=weights-*`` allows.

    ``secrets=`` allows no Secret.

    Raises:
        ConfigError: an entry is none of the known ones.
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
    """Return profiles by name, of a text such as ``rdma:hostIPC,capabilities=IPC_LOCK;cloud:projectedTokens``.

    Raises:
        ConfigError: a profile has no name, or allows something unknown.
    """
    found = {}
    for each in filter(None, text.split(";")):
        name, colon, entries = each.partition(":")
        if not (name and colon):
            raise ConfigError(f"{each!r}: write NAME:ENTRIES, several with semicolons between them")
        found[name] = allowances_of(entries)
    return found


def chart_entry(key: str, names: Iterable[str] = ()) -> str:
    """Return the chart's value that would allow names of a list, or turn a switch on."""
    value = f"[{', '.join(names)}]" if key in LISTS else "true"
    return f"{CHART_VALUE}.{key}: {value}"
