"""Reads what is literal in a shell's script: its words, and the variables that it assigns. Nothing is run or guessed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

NAME: Final = r"[A-Za-z_]\w*"
_PIECES = re.compile(
    rf"""(?P<space>\s+)
    |'(?P<single>[^']*)'
    |"(?P<double>(?:\\.|\$\([^()]*\)|[^"\\])*)"
    |\\(?P<escaped>.)
    |\$(?:\{{(?P<braced>{NAME})\}}|(?P<plain>{NAME}))
    |(?P<computed>\$\([^()]*\)|`[^`]*`|(?<![^\s=])~|[$`|&<>()])
    |(?P<text>~|[^\s'"\\$`|&<>()~]+)""",
    re.VERBOSE | re.DOTALL,
)
_IN_DOUBLE = re.compile(
    rf"""\\(?P<escaped>["\\$`])
    |\$(?:\{{(?P<braced>{NAME})\}}|(?P<plain>{NAME}))
    |(?P<computed>\$\([^()]*\)|`[^`]*`|[$`])
    |(?P<text>\\|[^\\$`]+)""",
    re.VERBOSE | re.DOTALL,
)
_LIST_END = re.compile(r"[\n;]")
_OPENS = re.compile(r"(?:if|for|while|until|case|select)\b|.*[({]$", re.DOTALL)
_CLOSES = re.compile(r"(?:fi|done|esac)\b|[)}]")
_REFERENCE = re.compile(rf"\$(?:\{{{NAME}\}}|{NAME})")
_NAME = re.compile(NAME)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a script, with its quotes removed and its known variables filled in.

    Attributes:
        is_computed: Only a shell knows it; ``text`` is then as written, without quotes.
        is_quoted: A part of it stood in quotes.
        is_reference: It holds Kubernetes' ``$(NAME)`` in place of a value that the cluster alone knows.
    """

    text: str
    is_computed: bool = False
    is_quoted: bool = False
    is_reference: bool = False


def split_words(text: str, variables: Mapping[str, str | None], *, splits: bool = True) -> list[Word]:
    """Return the words of a command.

    Args:
        text: Without line breaks that a shell would end it at.
        variables: Literal values; None: the cluster knows it.
        splits: Values without quotes are split at their spaces, as in a command; in an assignment they are not.

    Raises:
        ValueError: A quote is left open.
    """
    words: list[list[Word]] = [[]]
    at = 0
    while at < len(text):
        piece = _PIECES.match(text, at)
        if piece is None:
            raise ValueError("a quote is left open")
        at = piece.end()
        if piece["space"] is not None:
            words.append([])
            continue
        parts = list(_parts(piece, variables))
        if splits and (piece["braced"] or piece["plain"]) and not parts[0].is_computed:
            first, *others = re.split(r"\s+", parts[0].text)
            words[-1].append(replace(parts[0], text=first))
            words += ([Word(each)] for each in others)
        else:
            words[-1] += parts
    return [_joined(parts) for parts in words if any(part.text or part.is_quoted for part in parts)]


def _parts(piece: re.Match[str], variables: Mapping[str, str | None]) -> Iterator[Word]:
    """Yield what one piece stands for."""
    if piece["single"] is not None:
        yield Word(piece["single"], is_quoted=True)
    elif piece["double"] is not None:
        yield Word("", is_quoted=True)
        for each in _IN_DOUBLE.finditer(piece["double"]):
            yield _part(each, variables)
    else:
        yield _part(piece, variables)


def _part(piece: re.Match[str], variables: Mapping[str, str | None]) -> Word:
    name = piece["braced"] or piece["plain"]
    if name is None:
        literal = piece["text"] if piece["escaped"] is None else piece["escaped"]
        return Word(piece[0], is_computed=True) if literal is None else Word(literal)
    if name not in variables:
        return Word(piece[0], is_computed=True)
    value = variables[name]
    return Word(f"$({name})", is_reference=True) if value is None else Word(value)


def _joined(parts: list[Word]) -> Word:
    return Word(
        "".join(part.text for part in parts),
        is_computed=any(part.is_computed for part in parts),
        is_quoted=any(part.is_quoted for part in parts),
        is_reference=any(part.is_reference for part in parts),
    )


@dataclass(slots=True)
class Assigned:
    """What the statements of a script leave behind.

    Attributes:
        known: Literal values by name, the container's among them; None: the cluster knows it.
        exported: Those that the script exports to its commands.
        does_more: It does anything besides assigning literal values.
    """

    known: dict[str, str | None]
    exported: dict[str, str] = field(default_factory=dict)
    does_more: bool = False

    def forget(self, statement: str) -> None:
        """Count the variables that a statement names, and does not only refer to, as computed."""
        self.does_more = True
        for name in _NAME.findall(_REFERENCE.sub(" ", statement)):
            self.known.pop(name, None)
            self.exported.pop(name, None)

    def assign(self, statement: str) -> bool:
        """Take over what a statement assigns; return False if it does anything else, or assigns what a shell computes."""
        try:
            words = split_words(statement, self.known, splits=False)
        except ValueError:
            return False
        is_exported = words[0].text == "export"
        comment = next((at for at, word in enumerate(words) if word.text.startswith("#")), len(words))
        words = words[int(is_exported) : comment]
        found = {}
        for word in words:
            name, separator, value = word.text.partition("=")
            if word.is_computed or word.is_reference or not (separator and re.fullmatch(NAME, name)):
                return False
            found[name] = value
        self.known |= found
        again = {name: value for name, value in found.items() if name in self.exported}
        self.exported |= found if is_exported else again
        return bool(found)


def assigned(text: str, variables: Mapping[str, str | None]) -> Assigned:
    """Read the statements before a command.

    A name that is assigned within a condition, a loop or a function, or to what only a shell computes, is known no more.

    Args:
        text: The script up to the command.
        variables: What is known before; None: the cluster knows it.
    """
    result = Assigned(dict(variables))
    depth = 0
    lists = _LIST_END.split(text)
    for number, each in enumerate(lists, start=1):
        # What is before && in the command's own list has succeeded wherever the command runs.
        is_certain = True
        for part in each.split("&&"):
            statement = part.strip()
            if not statement or statement.startswith("#"):
                continue
            if is_certain and depth == 0 and result.assign(statement):
                continue
            result.forget(statement)
            is_certain = number == len(lists)
            depth = max(0, depth + bool(_OPENS.match(statement)) - bool(_CLOSES.match(statement)))
    return result
