"""A container's command line becomes a program and its flags.

Understands ``command`` and ``args`` as Dynamo's examples write them: ``python3 -m dynamo.vllm`` split in
any way over both, and the same within the script of a ``sh -c``, whose literal assignments count like the container's variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock_dynamo.importer.shell import NAME, Word, assigned, split_words

_JOINED = re.compile(r"\\\n\s*|\s\d*>&\d")
"""Lines that continue, and outputs that are joined."""
_COMMAND = re.compile(
    r"""(?:^|(?<=[;&|{]))[ \t]*(?:exec[ ])?(?P<env>(?:[A-Za-z_]\w*=\S*[ ])*)
    \S*python3?(?:\.\d+)?[ ]-m[ ]+(?P<module>dynamo\.(?:vllm|sglang|trtllm|mocker|frontend|planner)\b\S*)
    (?P<words>(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\)|[^\n|&;<>])*)""",
    re.MULTILINE | re.VERBOSE,
)
"""The statement of a script that starts Dynamo, up to what ends it or says where its output goes."""
_REFERENCE = re.compile(rf"\$\(({NAME})\)")
"""A variable in a container's arguments, which Kubernetes fills in."""
CONNECTOR_FLAG = "--kv-transfer-config"

NOT_RUN = "starts Dynamo in a script; what else the script does is not run: put it into the image"
NOT_COMPUTED = "is computed by the container's shell; write its value"
NO_CONNECTOR = (
    "is computed by the container's shell, so the worker starts without this KV connector, and what it adds, such as"
    " LMCache, is off; write the JSON itself after the flag, into the worker's args"
)

SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_TAKES_SCRIPT = re.compile(r"-[a-z]*c")
SCRIPT_AT = 2
"""Index of the script in ``sh -c SCRIPT [NAME ARGUMENT …]``."""


@dataclass(slots=True)
class Command:
    """What a container runs.

    Attributes:
        module: Python module, for example ``dynamo.vllm``; None for the image's own entry point.
        words: The arguments after it, unchanged.
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
        flags = [at for at, word in enumerate(self.words) if word.startswith("-")]
        start = next((at for at in flags if self.words[at].partition("=")[0] == name), len(self.words))
        end = next((at for at in flags if at > start), len(self.words))
        found = self.words[start:end]
        del self.words[start:end]
        return [value for word in found for value in word.removeprefix(name).removeprefix("=").split()]


def parse_command(words: list[str], variables: Mapping[str, str | None] | None = None) -> Command | None:
    """Return the module and flags of a container's command and arguments, or None if it runs something else.

    Flags alone, or nothing at all, belong to the image's own entry point: a `Command` without a module.

    Args:
        words: Command and arguments.
        variables: Of the container. Literal values are filled in, as Kubernetes and the container's shell do; None: the
            value is known in the cluster alone, so a reference becomes Kubernetes' own, ``$(NAME)``.
    """
    known = variables or {}
    if words and words[0] in SHELLS:
        has_script = len(words) > SCRIPT_AT and _TAKES_SCRIPT.fullmatch(words[1])
        return _read_script(words[SCRIPT_AT], words[SCRIPT_AT + 2 :], known) if has_script else None
    words = [_REFERENCE.sub(lambda name: known.get(name[1]) or name[0], word) for word in words]
    if len(words) >= 3 and words[0].rpartition("/")[2].startswith("python") and words[1] == "-m":
        return Command(words[2], words[3:])
    return None if words and not words[0].startswith("-") else Command(None, words)


def _read_script(
    script: str, arguments: Sequence[str], variables: Mapping[str, str | None]
) -> Command | None:
    """Return the one command that starts Dynamo; None if there is no such command, or several."""
    text = _JOINED.sub(" ", script).replace('"$@"', shlex.join(arguments))
    found = list(_COMMAND.finditer(text))
    if len(found) != 1:
        return None
    (start,) = found
    before = assigned(text[: start.start()], variables)
    try:
        words = split_words(start["words"], before.known)
        env = split_words(start["env"], before.known, splits=False)
    except ValueError:  # a quote that is left open
        return None
    command = Command(start["module"], env=before.exported)
    if before.does_more or text[start.end() :].strip():
        command.left_out.append((script, NOT_RUN))
    for word in words:
        _add_word(command, word)
    for word in env:
        name, _, value = word.text.partition("=")
        if word.is_computed or word.is_reference:
            command.left_out.append((word.text, NOT_COMPUTED))
        else:
            command.env[name] = value
    return command


def _add_word(command: Command, word: Word) -> None:
    has_flag = (
        not word.text.startswith("-")
        and bool(command.words)
        and command.words[-1].startswith("--")
        and "=" not in command.words[-1]
    )
    # Without quotes and a flag before it, it may be several words, or none.
    is_one = word.is_quoted or has_flag or not word.is_reference
    if is_one and not word.is_computed:
        command.words.append(word.text)
        return
    shown = f"{command.words.pop()} {word.text}" if has_flag else word.text
    command.left_out.append((shown, NO_CONNECTOR if shown.startswith(CONNECTOR_FLAG) else NOT_COMPUTED))
