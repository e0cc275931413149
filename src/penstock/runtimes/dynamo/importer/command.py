"""A container's command line becomes a program and its flags.

Understands ``command`` and ``args`` as Dynamo's examples write them: ``python3 -m dynamo.vllm`` split in
any way over both, and the same within the script of a ``sh -c`` (`penstock.runtimes.dynamo.importer.shell`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.runtimes.dynamo.importer.shell import ShellCommand, read_script

SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_TAKES_SCRIPT = re.compile(r"-[a-z]*c")


@dataclass(slots=True)
class Command:
    """What a container runs.

    Attributes:
        module: Python module, for example ``dynamo.vllm``; None for the image's own entry point.
        words: The arguments after it, as they stand.
        env: Variables that a shell sets for it.
        left_out: Parts of a shell's script that are not carried, each with the reason.
    """

    module: str | None
    words: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)

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

    def pop_values(self, name: str) -> list[str]:
        """Remove ``--name value value …``, up to the next flag; return the values."""
        if name not in self.words:
            return []
        start = self.words.index(name)
        end = start + 1
        while end < len(self.words) and not self.words[end].startswith("-"):
            end += 1
        values = self.words[start + 1 : end]
        del self.words[start:end]
        return values


SCRIPT_AT = 2
"""Index of the script in ``sh -c SCRIPT [NAME ARGUMENT …]``."""


def parse_command(words: list[str], variables: Mapping[str, str] | None = None) -> Command | None:
    """Return the module and flags of a container, or None if it runs something else.

    Flags alone, or nothing at all, belong to the image's own entry point: a `Command` without a module.

    Args:
        words: The container's command and arguments.
        variables: The container's variables with literal values, which its shell fills in.
    """
    is_script = bool(words) and words[0] in SHELLS
    found = _from_shell(words, variables or {}) if is_script else ShellCommand(words)
    if found is None:
        return None
    words = found.words
    if len(words) >= 3 and words[0].rpartition("/")[2].startswith("python") and words[1] == "-m":
        return Command(words[2], words[3:], found.env, found.left_out)
    if words and not words[0].startswith("-"):
        return None
    return Command(None, words, found.env, found.left_out)


def _from_shell(words: list[str], variables: Mapping[str, str]) -> ShellCommand | None:
    """Read ``sh -c SCRIPT [NAME ARGUMENT …]``."""
    if len(words) <= SCRIPT_AT or not _TAKES_SCRIPT.fullmatch(words[1]):
        return None
    return read_script(words[SCRIPT_AT], words[SCRIPT_AT + 2 :], variables)
