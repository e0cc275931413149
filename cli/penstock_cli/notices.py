"""Says which valid settings of a graph have no effect in this version; `validate` and `up` call it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from penstock_core.errors import Problem
from penstock_graph.models import GraphDeployment
from penstock_graph.notices import notices


def notices_of(graphs: Iterable[GraphDeployment], file: Path) -> list[Problem]:
    """Return the notices of all graphs of a file, each with the file's name."""
    return [replace(each, file=str(file)) for graph in graphs for each in notices(graph)]


def print_notices(found: Iterable[Problem]) -> None:
    """Write one line each to stderr."""
    for notice in found:
        click.echo(f"notice: {notice}", err=True)
