"""A container's command line becomes a program and its flags.

Understands ``command`` and ``args`` as Dynamo's examples write them: ``python3 -m dynamo.vllm`` split in
any way over both, and the same in one ``sh -c`` string that is a single command: over several lines joined by
backslashes, and with variables whose values the container states.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_SHELL_SYNTAX = re.compile(r"[;&|<>`$\n]")
_SINGLE_QUOTED = re.compile(r"'[^']*'")
"""Taken as it stands by a shell."""
_CONTINUED = re.compile(r"\\\n\s*")
_VARIABLE = re.compile(r"'[^']*'|\$\{?([A-Za-z_]\w*)\}?")
"""A quoted part, in which nothing is filled in, or a variable with its name as the group."""


@dataclass(slots=True)
class Command:
    """What a container runs.

    Attributes:
        module: Python module, for example ``dynamo.vllm``; None for the image's own entry point.
        words: The arguments after it, as they stand.
    """

    module: str | None
    words: list[str] = field(default_factory=list)

    def pop_flag(self, *names: str) -> bool:
        """Remove a flag without a value; return whether it was there."""
        found = any(name in self.words for name in names)
        self.words = [word for word in self.words if word not in names]
        return found

    def pop_value(self, *names: str) -> str | None:
        """Remove ``--name value`` and ``--name=value``; return the last value, or None."""
        value = None
        kept: list[str] = []
        words = iter(self.words)
        for word in words:
            name, separator, inline = word.partition("=")
            if name not in names:
                kept.append(word)
            elif separator:
                value = inline
            else:
                value = next(words, None)
        self.words = kept
        return value


def parse_command(
    command: list[str], args: list[str], variables: Mapping[str, str] | None = None
) -> Command | None:
    """Return the module and flags of a container, or None if it runs something else.

    Flags alone, or nothing at all, belong to the image's own entry point: a `Command` without a module.

    Args:
        command: The container's.
        args: The container's.
        variables: The container's variables with literal values, which its shell fills in.
    """
    words: list[str] | None = [*command, *args]
    if words and words[0] in _SHELLS:
        words = _from_shell(words, variables or {})
    if words is None:
        return None
    if len(words) >= 3 and words[0].rpartition("/")[2].startswith("python") and words[1] == "-m":
        return Command(module=words[2], words=words[3:])
    if words and not words[0].startswith("-"):
        return None
    return Command(module=None, words=words)


def _from_shell(words: list[str], variables: Mapping[str, str]) -> list[str] | None:
    if len(words) != 3 or words[1] not in {"-c", "-lc"}:
        return None
    line = _CONTINUED.sub(" ", words[2]).strip()
    line = _VARIABLE.sub(lambda found: _filled(found, variables), line)
    if _SHELL_SYNTAX.search(_SINGLE_QUOTED.sub("", line)):
        return None
    try:
        split = shlex.split(line)
    except ValueError:
        return None
    return split[1:] if split[:1] == ["exec"] else split


def _filled(found: re.Match[str], variables: Mapping[str, str]) -> str:
    value = variables.get(found[1]) if found[1] else None
    return found[0] if value is None else shlex.quote(value)
