"""A container's command line becomes a program and its flags.

Understands ``command`` and ``args`` as Dynamo's examples write them: ``python3 -m dynamo.vllm`` split in
any way over both, and the same within the script of a ``sh -c``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_CONTINUED = re.compile(r"\\\n\s*")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_SUBSTITUTION = r"\$\((?:[^()]|\([^()]*\))*\)"
_TOKEN = re.compile(
    rf"""(?P<redirect>\d*>&\d|&>>?\s*\S+|\d*[<>]+\s*[^\s;|&]*)
    |(?P<end>[;\n|&]+)
    |(?P<text>'[^']*'|"(?:\\.|[^"\\])*"|\\.|{_SUBSTITUTION}|`[^`]*`|(?:(?!\d+[<>])[^;\n|&<>'"\\$`])+|.)""",
    re.DOTALL | re.VERBOSE,
)
"""Quoted parts and substitutions are text; what ends a statement, and where its output goes, stands outside them."""
_JOINED_OUTPUT = re.compile(r"\d*>&\d")
_ASSIGNED = r"(?:[A-Za-z_]\w*=\S*\s+)*"
_STARTS_DYNAMO = re.compile(
    rf"^(?:exec\s+)?{_ASSIGNED}\S*python3?(?:\.\d+)?\s+-m\s+['\"]?dynamo\.(?:vllm|mocker|frontend|planner)\b"
)
_EXPORT = "export "
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARGUMENTS = re.compile(r"'[^']*'|(\"\$[@*]\"|\$[@*])")
_COMPUTED = re.compile(
    rf"""'[^']*'|\\.|(?P<computed>{_SUBSTITUTION}|`[^`]*`|\$\{{(?P<braced>[A-Za-z_]\w*)\}}|\$(?P<plain>[A-Za-z_]\w*)
    |\$\{{[^}}]*\}}|\$[#?$!\d-])""",
    re.DOTALL | re.VERBOSE,
)
"""A quoted part, in which nothing is filled in, or a value that the shell computes, with a variable's name as group."""
CONNECTOR_FLAG = "--kv-transfer-config"
_MARK = "\ue000"
"""Encloses a place's number in a word while the words are split; a character of no script, for private use."""
_PLACE = re.compile(f"{_MARK}(\\d+){_MARK}")

NOT_RUN = "stands beside the command in its script, and is not run; put it into the image"
NOT_COMPUTED = "is computed by the container's shell; write its value"
NO_CONNECTOR = (
    "is computed by the container's shell, so the worker starts without this KV connector, and what it adds, such as"
    " LMCache, is off; write the JSON itself after the flag, into the worker's args"
)


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


def read_script(script: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Command | None:
    """Return the command that starts Dynamo, or the only one; None if there is no such command, or several.

    Args:
        script: After ``sh -c``.
        arguments: What stands for ``$@`` in it.
        variables: The container's variables with literal values.
    """
    text = _COMMENT.sub("", _CONTINUED.sub(" ", script)).replace(_MARK, "")
    statements, dropped = _statements(text)
    starting = [each for each in statements if _STARTS_DYNAMO.match(each)] or statements
    if len(starting) != 1:
        return None
    others = [each for each in statements if each is not starting[0]]
    stated = _assignments(others)
    words = _words(starting[0], arguments, {**variables, **stated})
    if words is None:
        return None
    command = _assigned(words[1:] if words[:1] == ["exec"] else words)
    exported = _assignments([each for each in others if each.startswith(_EXPORT)])
    command.env.update({key: each for key, each in exported.items() if key not in command.env})
    rest = [each for each in (*others, *dropped) if not _has_no_effect_here(each, stated)]
    if rest:
        command.left_out.append(("; ".join(rest), NOT_RUN))
    return _without_computed(command)


def _statements(text: str) -> tuple[list[str], list[str]]:
    """Return the statements of a script, and the redirections, which are in none of them."""
    statements, redirections, current = [], [], ""
    for token in _TOKEN.finditer(text):
        if token["redirect"] is not None:
            redirections.append(token["redirect"].strip())
        elif token["end"] is not None:
            statements.append(current.strip())
            current = ""
        else:
            current += token["text"]
    statements.append(current.strip())
    return [each for each in statements if each], redirections


def _assignments(statements: Sequence[str]) -> dict[str, str]:
    """Return the variables that statements set to literal values."""
    found: dict[str, str] = {}
    for each in statements:
        words = _split(each.removeprefix(_EXPORT).strip()) or []
        assignments = [_ASSIGNMENT.fullmatch(word) for word in words]
        if not re.search(r"[$`]", each):
            found |= {match[1]: match[2] for match in assignments if match and all(assignments)}
    return found


def _has_no_effect_here(statement: str, stated: Mapping[str, str]) -> bool:
    """Say whether a statement is a shell's own option, joins outputs, or sets only variables whose values are known."""
    if _JOINED_OUTPUT.fullmatch(statement):
        return True
    words = _split(statement.removeprefix(_EXPORT).strip()) or [statement]
    if words[0] == "set":
        return True
    names = [match[1] if (match := _ASSIGNMENT.fullmatch(word)) else None for word in words]
    return all(name in stated for name in names)


def _words(statement: str, arguments: Sequence[str], variables: Mapping[str, str]) -> list[str] | None:
    """Return the words of a statement; what a shell computes stays in them as its own text, marked."""
    joined = " ".join(shlex.quote(each) for each in arguments)
    line = _ARGUMENTS.sub(lambda found: joined if found[1] else found[0], statement)
    values: list[str] = []

    def place(found: re.Match[str]) -> str:
        if found["computed"] is None:
            return found[0]
        known = variables.get(found["braced"] or found["plain"] or "")
        values.append(f"{_MARK}{found[0]}" if known is None else known)
        return f"{_MARK}{len(values) - 1}{_MARK}"

    split = _split(_COMPUTED.sub(place, line))
    if split is None:
        return None
    return [_PLACE.sub(lambda found: values[int(found[1])], word) for word in split]


def _split(text: str) -> list[str] | None:
    try:
        return shlex.split(text)
    except ValueError:
        return None


def _assigned(words: list[str]) -> Command:
    """Take the variables off that stand before a command."""
    env: dict[str, str] = {}
    at = 0
    while at < len(words) and (match := _ASSIGNMENT.fullmatch(words[at])):
        env[match[1]] = match[2]
        at += 1
    return Command(None, words[at:], env)


def _without_computed(command: Command) -> Command:
    """Drop flags, and variables, whose values only a shell can compute."""
    kept: list[str] = []
    left_out = list(command.left_out)
    for word in command.words:
        if _MARK not in word:
            kept.append(word)
            continue
        shown = word.replace(_MARK, "")
        if not word.startswith("-") and kept and kept[-1].startswith("--"):
            shown = f"{kept.pop()} {shown}"
        left_out.append((shown, NO_CONNECTOR if shown.startswith(CONNECTOR_FLAG) else NOT_COMPUTED))
    env = {key: value for key, value in command.env.items() if _MARK not in value}
    left_out += [
        (f"{key}={value}".replace(_MARK, ""), NOT_COMPUTED)
        for key, value in command.env.items()
        if _MARK in value
    ]
    return Command(None, kept, env, left_out)


SCRIPT_AT = 2
"""Index of the script in ``sh -c SCRIPT [NAME ARGUMENT …]``."""


def parse_command(words: list[str], variables: Mapping[str, str] | None = None) -> Command | None:
    """Return the module and flags of a container, or None if it runs something else.

    Flags alone, or nothing at all, belong to the image's own entry point: a `Command` without a module.

    Args:
        words: The container's command and arguments.
        variables: The container's variables with literal values, which its shell fills in.
    """
    found: Command | None = Command(None, words)
    if words and words[0] in SHELLS:
        if len(words) <= SCRIPT_AT or not _TAKES_SCRIPT.fullmatch(words[1]):
            return None
        found = read_script(words[SCRIPT_AT], words[SCRIPT_AT + 2 :], variables or {})
    if found is None:
        return None
    words = found.words
    if len(words) >= 3 and words[0].rpartition("/")[2].startswith("python") and words[1] == "-m":
        return replace(found, module=words[2], words=words[3:])
    return None if words and not words[0].startswith("-") else found
