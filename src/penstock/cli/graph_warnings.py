"""Says which settings of a valid graph do nothing here: they need a package that is not installed, or another planner mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import click
from pydantic.alias_generators import to_camel

from penstock.api import GraphDeployment
from penstock.api.planner import READ_IN_MODES, PlannerConfig, unread_keys
from penstock.core.errors import Problem
from penstock.runtimes.build import missing_extras
from penstock_planner.decide.config import ADAPTIVE_INTERVAL_S


def warnings_of(graphs: Iterable[GraphDeployment], file: Path, *, mode: str | None = None) -> list[Problem]:
    """Return the warnings about all graphs of a file, each with the file's name; ``mode`` overrides their planners'."""
    found: list[Problem] = []
    for graph in graphs:
        found += missing_extras(graph)
        found += _of_another_mode(graph.spec.planner, mode or graph.spec.planner.mode)
    return [replace(each, file=str(file)) for each in found]


def _of_another_mode(planner: PlannerConfig, mode: str) -> Iterator[Problem]:
    """Yield the given keys that a mode does not decide by."""
    for key in unread_keys(planner, mode):
        effect = "does not read it"
        if key == "adjustment_interval_seconds":
            if planner.adjustment_interval_seconds < ADAPTIVE_INTERVAL_S:
                continue
            effect = f"decides every {ADAPTIVE_INTERVAL_S:g} s all the same"
        modes = " or ".join(READ_IN_MODES[key])
        message = f"mode {mode} {effect}; remove it, or choose mode {modes}"
        yield Problem(f"spec.planner.{to_camel(key)}", message)


def print_warnings(found: Iterable[Problem]) -> None:
    """Write one line each to stderr."""
    for each in found:
        click.echo(f"warning: {each}", err=True)
