"""A container's command line becomes a program and its flags.

Understands ``command`` and ``args`` as Dynamo's examples write them: ``python3 -m dynamo.vllm`` split in
any way over both, and the same in one ``sh -c`` string without shell syntax.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

_SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_SHELL_SYNTAX = re.compile(r"[;&|<>`$\n]")


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


def parse_command(command: list[str], args: list[str]) -> Command | None:
    """Return the module and flags of a container, or None if it runs something else.

    Flags alone, or nothing at all, belong to the image's own entry point: a `Command` without a module.
    """
    words: list[str] | None = [*command, *args]
    if words and words[0] in _SHELLS:
        words = _from_shell(words)
    if words is None:
        return None
    if len(words) >= 3 and words[0].rpartition("/")[2].startswith("python") and words[1] == "-m":
        return Command(module=words[2], words=words[3:])
    if words and not words[0].startswith("-"):
        return None
    return Command(module=None, words=words)


def _from_shell(words: list[str]) -> list[str] | None:
    if len(words) != 3 or words[1] not in {"-c", "-lc"} or _SHELL_SYNTAX.search(words[2]):
        return None
    try:
        split = shlex.split(words[2])
    except ValueError:
        return None
    return split[1:] if split[:1] == ["exec"] else split
