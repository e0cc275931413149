"""How commands print: text of files and peers never reaches a terminal with control characters in it."""

from __future__ import annotations

from typing import Any

import click
import orjson

from penstock.core.printable import printable_json, printable_lines


def say(text: object, *, err: bool = False, nl: bool = True, head: str = "") -> None:
    """Print lines; ``head`` is the command's own and may be styled."""
    click.echo(head + printable_lines(str(text)), err=err, nl=nl)


def say_json(value: Any, *, is_indented: bool = True) -> None:
    """Print plain data as JSON, indented or as one line; text and bytes are JSON already."""
    if not isinstance(value, (str, bytes)):
        value = orjson.dumps(value, option=orjson.OPT_INDENT_2 if is_indented else None)
    text = value.decode() if isinstance(value, bytes) else value
    click.echo(printable_json(text), nl=not text.endswith("\n"))
