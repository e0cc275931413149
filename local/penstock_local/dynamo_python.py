"""Which Python has NVIDIA's Dynamo: it may not be Penstock's own, since the two pin different packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock_core.errors import ConfigError

VARIABLE: Final = "PENSTOCK_DYNAMO"
"""Names the virtual environment."""

_IMPORT_S: Final = 30.0
"""Real seconds. Chosen: finding a module takes milliseconds, on a busy machine a second."""
_FIND: Final = "import sys, importlib.util as u; sys.exit(u.find_spec('dynamo.frontend') is None)"


def find_dynamo(environment: Mapping[str, str]) -> str:
    """Return the interpreter of ``$PENSTOCK_DYNAMO``, or this one where that is not set.

    Args:
        environment: The caller's.

    Raises:
        ConfigError: it has no Dynamo; the message says how to install it.
    """
    folder = environment.get(VARIABLE)
    python = (
        sys.executable if folder is None else str(Path(folder).expanduser().absolute() / "bin" / "python")
    )
    if not _has_dynamo(python):
        place = "this Python" if folder is None else f"${VARIABLE}: {folder}"
        raise ConfigError(
            f"spec.runtime: dynamo, but {place} has no package `dynamo`; run `make dynamo` and set "
            f"{VARIABLE} to the environment that it makes (docs/dynamo.md)"
        )
    return python


def _has_dynamo(python: str) -> bool:
    try:
        found = subprocess.run([python, "-c", _FIND], capture_output=True, timeout=_IMPORT_S, check=False)  # noqa: S603 - the user's own interpreter
    except (OSError, subprocess.SubprocessError):
        return False
    return found.returncode == 0
