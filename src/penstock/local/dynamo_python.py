"""Whether a Python has NVIDIA's Dynamo; it is another one than Penstock's, since the two pin different packages."""

from __future__ import annotations

import subprocess
from typing import Final

from penstock.core.errors import InvalidSpecError, Problem

_IMPORT_S: Final = 30.0
"""Real seconds. Chosen: finding a module takes milliseconds, on a busy machine a second."""
_FIND: Final = "import sys, importlib.util as u; sys.exit(u.find_spec('dynamo.frontend') is None)"


def check_dynamo(python: str) -> None:
    """Refuse an interpreter without Dynamo, whose processes would end at their start.

    Args:
        python: The interpreter.

    Raises:
        InvalidSpecError: it is not there, or has no Dynamo; the message says how to install it.
    """
    try:
        found = subprocess.run([python, "-c", _FIND], capture_output=True, timeout=_IMPORT_S, check=False)  # noqa: S603 - the user's own interpreter
        why = "" if found.returncode == 0 else "has no package `dynamo`"
    except (OSError, subprocess.SubprocessError) as exc:
        why = f"cannot be run ({exc})"
    if why:
        raise InvalidSpecError(
            [
                Problem(
                    path="spec.engine.pythonEnvironment",
                    message=f"{python} {why}; run `make dynamo` and give the environment that it makes, "
                    ".venv-dynamo (docs/dynamo.md)",
                )
            ]
        )
