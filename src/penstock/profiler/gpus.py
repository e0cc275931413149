"""How many GPUs this machine has, by ``nvidia-smi``, which comes with every driver."""

from __future__ import annotations

import shutil
import subprocess

_TIMEOUT_S = 20.0
"""Real seconds. Chosen: a driver that wakes every GPU of a large node takes ten."""


def detect() -> int | None:
    """Return the number of GPUs; None: the program is not there, or does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run(  # noqa: S603 - found on PATH, without a shell
            [program, "--list-gpus"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None
