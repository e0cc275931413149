"""Every `penstock` command that the documentation shows is one that the program takes, with the options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from penstock.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("manifests/samples/*.yaml"))]
IN_BLOCK = re.compile(r"^#? *(penstock (?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
INLINE = re.compile(r"`(?:[^`\n]*&& )?(penstock [^`\n]+)`")


def documented() -> list[tuple[str, str]]:
    """Return page and command of each, pipes and lists of commands taken apart."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in (*IN_BLOCK.findall(text), *INLINE.findall(text)):
            for command in re.split(r"&&|\||;|, then ", line.replace("\\\n#", " ").replace("\\\n", " ")):
                if command.strip().startswith("penstock "):
                    found[page.name, command.strip()] = None
    return list(found)


COMMANDS = documented()


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=lambda value: " ".join(value.split()[:6]))
def test_a_documented_command_exists_with_its_options(page: str, text: str) -> None:
    """As written: a renamed flag, or a command that has moved, fails here and not at a reader."""
    words = [word for word in shlex.split(text, comments=True)[1:] if word not in {"…", "..."}]
    words = words[: words.index(">")] if ">" in words else words
    command: click.Command = cli
    context = click.Context(cli, info_name="penstock")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"{page}: no command {words[0]}"
        command, words = found, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    command.make_parser(context).parse_args([word for word in words if word != "--help"])


def test_the_pages_show_commands() -> None:
    """The search finds them: blocks, tables and the comments of samples."""
    assert len(COMMANDS) > 80
    assert ("profile.md", "penstock up profile/graph.yaml") in COMMANDS
