"""Says which settings of a valid graph need a package that is not installed here.

`validate` and `up` call it. Such a graph is valid, because it may run elsewhere; `up` refuses it if
a process could not start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from penstock_api import GraphDeployment
from penstock_core.errors import Problem
from penstock_runtimes.extras import needed_extras


def warnings_of(graphs: Iterable[GraphDeployment], file: Path) -> list[Problem]:
    """Return the warnings about all graphs of a file, each with the file's name."""
    found = [
        each for graph in graphs for each in (need.problem() for need in needed_extras(graph) if need.missing)
    ]
    return [replace(each, file=str(file)) for each in found]


def print_warnings(found: Iterable[Problem]) -> None:
    """Write one line each to stderr."""
    for each in found:
        click.echo(f"warning: {each}", err=True)
