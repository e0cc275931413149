"""An engine's program: of the graph's Python environment, or to be found on PATH."""

from __future__ import annotations

import shutil
from pathlib import PurePath

from penstock.api import GraphSpec
from penstock.core.errors import InvalidSpecError, ManifestProblem


def program_of(spec: GraphSpec, name: str) -> str:
    """Return the program that starts an engine."""
    folder = spec.engine.python_environment
    return name if folder is None else str(PurePath(folder, "bin", name))


def check_program(spec: GraphSpec, name: str, has: str) -> None:
    """Refuse a program that is not there: its workers would end at their start.

    Args:
        spec: The graph.
        name: Of the program.
        has: What an environment has to have, and where one is had from.

    Raises:
        InvalidSpecError: there is no such program.
    """
    program = program_of(spec, name)
    if shutil.which(program) is None:
        message = f"{program} is not a program here; give the folder of an environment that has {has}"
        raise InvalidSpecError([ManifestProblem(path="spec.engine.pythonEnvironment", message=message)])
